"""A decoder-only transformer as a Linen module over a plain parameter tree.

Modules declare parameters and wiring; the arithmetic is in `layers.py`. There are two layouts of
the same weights. *Stacked* (one array per weight with a leading layer axis, scanned) is what is
trained and saved: it compiles in a fraction of the time. *Unstacked* (a tuple of one dict per
layer, unrolled) is what decodes: a layer's slice of a stacked array would be copied at every step.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import layers, rope
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.kv_cache import KVCache

NORMAL = nn.initializers.normal(0.02)


@flax.struct.dataclass
class Output:
    hidden: jax.Array  # [B, T, D] after the final norm; `logits` turns it into scores
    kv: tuple | None  # unstacked: per layer (k, v), each [B, T, K, C]; stacked: None
    features: jax.Array | None  # [B, T, len(taps), D], None without taps


class Block(nn.Module):
    """One pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, cos_sin, mask_BTT, cached=None):
        c = self.config
        D, F, H, K, C = c.width, c.mlp_width, c.num_heads, c.num_kv_heads, c.head_dim
        normal, zeros, ones = (
            nn.initializers.normal(0.02),
            nn.initializers.zeros,
            nn.initializers.ones,
        )
        p = {
            "w_q": self.param("w_q", normal, (H, C, D)),
            "w_k": self.param("w_k", normal, (K, C, D)),
            "w_v": self.param("w_v", normal, (K, C, D)),
            "w_o": self.param("w_o", normal, (D, H, C)),
            "w_gate": self.param("w_gate", normal, (F, D)),
            "w_up": self.param("w_up", normal, (F, D)),
            "w_down": self.param("w_down", normal, (D, F)),
            "attn_norm": self.param("attn_norm", ones, (D,)),
            "mlp_norm": self.param("mlp_norm", ones, (D,)),
        }
        if c.qk_norm:
            p |= {n: self.param(n, ones, (C,)) for n in ("q_norm", "k_norm")}
        if c.qkv_bias:
            p |= {n: self.param(n, zeros, (h, C)) for n, h in (("b_q", H), ("b_k", K), ("b_v", K))}
        if c.o_bias:
            p["b_o"] = self.param("b_o", zeros, (D,))
        if c.mlp_bias:
            p |= {n: self.param(n, zeros, (F,)) for n in ("b_gate", "b_up")}
            p["b_down"] = self.param("b_down", zeros, (D,))

        with jax.named_scope("attention"):
            h_BTD = layers.rms_norm(x_BTD, p["attn_norm"], c.norm_eps)
            q, k, v = (
                layers.biased(layers.linear(h_BTD, p[f"w_{n}"]), p.get(f"b_{n}")) for n in "qkv"
            )
            if c.qk_norm:
                q = layers.rms_norm(q, p["q_norm"], c.norm_eps)
                k = layers.rms_norm(k, p["k_norm"], c.norm_eps)
            q, k = rope.rotate(q, cos_sin), rope.rotate(k, cos_sin)
            o_BTHC = layers.attention(q, k, v, mask_BTT, cached)
            B, T, _, _ = o_BTHC.shape
            out = layers.linear(o_BTHC.reshape(B, T, H * C), p["w_o"].reshape(D, H * C))
            x_BTD = x_BTD + layers.biased(out, p.get("b_o"))
        with jax.named_scope("mlp"):
            h_BTD = layers.rms_norm(x_BTD, p["mlp_norm"], c.norm_eps)
            return x_BTD + layers.gated_mlp(h_BTD, p), (k, v)


class Transformer(nn.Module):
    """Embedding, blocks, final norm. `stacked` names the layout of the parameters; `gather` is
    applied to those of a layer when their turn comes."""

    config: ModelConfig
    stacked: bool = True
    gather: Callable[[dict], dict] | None = None

    @nn.compact
    def __call__(self, tokens_BT, positions_BT, mask_BTT, cache: KVCache | None = None, taps=()):
        c = self.config
        vocab = (c.vocab_size, c.width)
        embed_VD = self.param("embed", NORMAL, vocab)
        if not c.tied:
            self.param("head", NORMAL, vocab)  # read by `logits`
        x_BTD = embed_VD[tokens_BT].astype(c.dtype)
        cos_sin = rope.tables(c.rope, c.head_dim, positions_BT, c.dtype)
        block = Block(c, parent=None)
        stack = self.param("layers", self._init_layers, block)
        seen = [x_BTD]

        def run(x_BTD, layer, cached):
            if self.gather is not None:
                layer = self.gather(layer)
            return block.apply({"params": layer}, x_BTD, cos_sin, mask_BTT, cached)

        if self.stacked:
            if cache is not None:
                raise ValueError("a cache needs unstacked layers; see unstack_layers")
            # Without `remat` the products of weights are kept for the backward pass and the rest,
            # attention scores and elementwise work, is computed again: on CPUs that takes no
            # longer than keeping everything, in less than half of the memory.
            save = jax.checkpoint_policies
            keep = save.nothing_saveable if c.remat else save.dots_with_no_batch_dims_saveable
            step = jax.checkpoint(run, policy=keep, prevent_cse=False, static_argnums=2)

            def body(x_BTD, layer):
                x_BTD, _ = step(x_BTD, layer, None)
                return x_BTD, x_BTD if taps else None

            x_BTD, after_LBTD = jax.lax.scan(body, x_BTD, stack)
            kv = None
            if taps:
                seen += [after_LBTD[i] for i in range(c.num_layers)]
        else:
            kv = []
            for i, layer in enumerate(stack):
                cached = None if cache is None else (cache.k[i], cache.v[i], cache.length)
                x_BTD, new = run(x_BTD, layer, cached)
                kv.append(new)
                seen.append(x_BTD)
            kv = tuple(kv)
        hidden = layers.rms_norm(
            x_BTD, self.param("norm", nn.initializers.ones, (c.width,)), c.norm_eps
        )
        seen[-1] = hidden
        features = jnp.stack([seen[i] for i in taps], axis=2) if taps else None
        return Output(hidden, kv, features)

    def _init_layers(self, key, block):
        c = self.config
        one = jnp.zeros((1, 1, c.width), c.dtype)
        cos_sin = rope.tables(c.rope, c.head_dim, jnp.zeros((1, 1), jnp.int32), c.dtype)
        mask = jnp.ones((1, 1, 1), bool)
        init = lambda k: block.init(k, one, cos_sin, mask)["params"]  # noqa: E731
        keys = jax.random.split(key, c.num_layers)
        return jax.vmap(init)(keys) if self.stacked else tuple(init(k) for k in keys)


@functools.partial(jax.jit, static_argnums=0)
def init(config: ModelConfig, key: jax.Array) -> dict:
    """Random parameters, stacked layout: normal(0.02) weights, zero biases, unit norms, float32
    (float64 when the model computes in it)."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = Transformer(config).init(key, tokens, tokens, jnp.ones((1, 1, 1), bool))["params"]
    dtype = jnp.promote_types(config.dtype, jnp.float32)
    return jax.tree.map(lambda x: x.astype(dtype), params)


def forward(
    config, params, tokens_BT, positions_BT, mask_BTT, cache=None, taps=(), gather=None
) -> Output:
    """Run the transformer on T new tokens per row.

    mask_BTT: boolean, which of the new tokens each sees (`layers.causal_mask`; an ancestor mask
    for draft trees). cache: the row's earlier tokens, read only; new keys and values come back in
    `Output.kv` for the caller to commit. taps: which hidden states to return as features, counted
    as Hugging Face counts `hidden_states`: 0 is the embedding, i the stream after block i, and
    `num_layers` the last one after the final norm. Both parameter layouts are taken. gather: a
    function of one layer's parameters, applied just before they are used, in the backward pass
    again: where they are split over devices it brings them together, one layer at a time.
    """
    model = Transformer(config, stacked=isinstance(params["layers"], dict), gather=gather)
    return model.apply({"params": params}, tokens_BT, positions_BT, mask_BTT, cache, taps)


def head(config: ModelConfig, params: dict) -> jax.Array:
    """The output matrix [V, D]; a tied head is the embedding."""
    return params["embed"] if config.tied else params["head"]


def logits(config: ModelConfig, params: dict, hidden: jax.Array) -> jax.Array:
    """Scores [..., V] of hidden states [..., D], float32 (float64 in tests)."""
    # Accumulated in float32: rounding scores to bfloat16 would tie the likeliest tokens.
    return layers.linear(hidden, head(config, params), jnp.promote_types(hidden.dtype, jnp.float32))


def unstack_layers(params: dict) -> dict:
    """Stacked parameters with their layers apart (copies the layers, shares the rest)."""
    L = params["layers"]["w_q"].shape[0]
    split = tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(L))
    return {**params, "layers": split}


@functools.partial(jax.jit, static_argnums=0)
def decode_layout(config: ModelConfig, params: dict) -> dict:
    """What rollouts read: layers apart, in the dtype of the arithmetic, sharing no memory with
    `params` (outputs of a program never do, unless arguments are donated)."""
    return jax.tree.map(lambda x: x.astype(config.dtype), unstack_layers(params))
