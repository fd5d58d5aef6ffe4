"""Decoder-only transformers as pure functions over plain parameter trees.

Array names end in their shape letters (``logits_BTV``, ``q_BTHC``):

    B rows           T query tokens     S cache slots     V vocabulary
    D model width    F MLP width        H query heads     K key/value heads
    C head width     G = H / K          L layers          N draft-tree nodes
    M members of a group of samples of one prompt         R rounds of a segment

Weights are stored [out, in], the layout of Hugging Face files: on every backend the contracted
dimension of a weight is its contiguous one, which is what makes few-row products fast on CPUs.
"""
