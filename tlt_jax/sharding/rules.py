"""Which axis of which array lies along which axis of the mesh: one table per layout.

A rule is a regular expression for the end of a path, such as "layers/w_q", and how an array there
is split. The optimizer's moments have the paths of their parameters behind a prefix of their own,
so the same rules hold for them.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tlt_jax.sharding.mesh import DATA, FSDP, TENSOR

Rules = Sequence[tuple[str, P]]

# Stacked layers [L, …] (`transformer.init`): the width is split over the data axes, so that every
# device holds a part of each layer; heads, mlp and vocabulary over tensor.
TRAINING: Rules = (
    (r"(embed|head)", P(TENSOR, DATA)),
    (r"layers/w_[qkv]", P(None, TENSOR, None, DATA)),
    (r"layers/w_o", P(None, DATA, TENSOR, None)),
    (r"layers/w_(gate|up)", P(None, TENSOR, DATA)),
    (r"layers/w_down", P(None, DATA, TENSOR)),
    (r"layers/b_[qkv]", P(None, TENSOR, None)),
    (r"layers/b_(gate|up)", P(None, TENSOR)),
    (r"layers/b_(o|down)", P(None, DATA)),
    (r"layers/(attn|mlp)_norm", P(None, DATA)),
    (r"layers/[qk]_norm", P()),
    (r"norm", P(DATA)),
    (r"(count|step)", P()),
)

# Layers apart (`transformer.decode_layout`): what a slice reads, whole but for tensor.
PUBLISHED: Rules = (
    (r"(embed|head)", P(TENSOR)),
    (r"layers/\d+/w_[qkv]", P(TENSOR)),
    (r"layers/\d+/w_o", P(None, TENSOR)),
    (r"layers/\d+/w_(gate|up)", P(TENSOR)),
    (r"layers/\d+/w_down", P(None, TENSOR)),
    (r"layers/\d+/b_([qkv]|gate|up)", P(TENSOR)),
    (r"layers/\d+/b_(o|down)", P()),
    (r"(layers/\d+/(attn|mlp|q|k)_)?norm", P()),
)

# A batch being decoded (`state.DecodeState`): rows over fsdp, key heads over tensor.
DECODE: Rules = (
    (r"cache/[kv]/\d+", P(FSDP, TENSOR)),
    (r"cache/length", P(FSDP)),
    (r"(token|limit|key|live|sampling/\w+)", P(FSDP)),
)

# Prefilled prompts (`kv_cache.KVCache`): few, and any number of them.
PREFIX: Rules = ((r"[kv]/\d+", P(None, TENSOR)), (r"length", P()))

WHOLE: Rules = ((r".*", P()),)  # on every device


def path_of(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(rules: Rules, path: str) -> P:
    """How the array at `path` is split. Raises ValueError where no rule tells."""
    for pattern, spec in rules:
        if re.search(rf"(^|/){pattern}$", path):
            return spec
    raise ValueError(
        f"no sharding rule matches {path!r}; add one to the tables in tlt_jax/sharding/rules.py"
    )


def shardings(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """The sharding of every array (or shape) of a tree by the rules."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, spec_of(rules, path_of(path))), tree
    )


def constrain(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """Have the compiler keep the arrays of a traced tree by the rules."""
    if mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(mesh, rules, tree))


def gathered(mesh: Mesh, layer: dict) -> dict:
    """One layer of training weights, taken out of its stack, as `PUBLISHED` has it: whole on every
    device but for tensor."""
    return constrain(mesh, PUBLISHED, {"layers": {"0": layer}})["layers"]["0"]


def whole(mesh: Mesh, tree: Any) -> Any:
    """Arrays by any sharding -> the same on every device, so that every process can read them."""
    if mesh.size == 1:
        return tree
    return _gather(mesh)(tree)


@functools.lru_cache
def _gather(mesh: Mesh):
    """One function per mesh: another would compile again."""
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def place(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """Arrays by the rules, from host arrays or arrays of this process alone; every process passes
    the same values. What lies there already is used as it is."""

    def put(x, sharding):
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = jax.device_get(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings(mesh, rules, tree))
