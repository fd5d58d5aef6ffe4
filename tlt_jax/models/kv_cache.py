"""Keys and values of committed tokens: an ordinary pytree with a length per row.

One array per layer, because a layer's slice of a stacked array is copied before it is multiplied
on CPUs (EXPERIMENTS.md, "Decode primitives"). Slots at and past `length` hold garbage and
are masked, so rolling back is setting `length`.

Keys are kept in tiles of `TILE` slots, [B, K, S/TILE, C, TILE]: the scores of a tile then reduce
over a non-minor axis, which runs at memory speed on CPUs (1.5 to 2.3 times as fast as over
[B, K, S, C]; same place).
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models.config import ModelConfig

TILE = 32


@flax.struct.dataclass
class KVCache:
    k: tuple[jax.Array, ...]  # L x [B, K, S / TILE, C, TILE]
    v: tuple[jax.Array, ...]  # L x [B, K, S, C]
    length: jax.Array  # [B] int32, committed tokens of each row

    @property
    def slots(self) -> int:
        return self.v[0].shape[2]


def empty(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """A cache for `rows` rows of at most `slots` tokens (a multiple of TILE), nothing in it."""
    if slots % TILE:
        raise ValueError(f"cache slots={slots} must be a multiple of {TILE}")
    K, C, L = config.num_kv_heads, config.head_dim, config.num_layers
    k = tuple(jnp.zeros((rows, K, slots // TILE, C, TILE), config.dtype) for _ in range(L))
    v = tuple(jnp.zeros((rows, K, slots, C), config.dtype) for _ in range(L))
    return KVCache(k, v, jnp.zeros((rows,), jnp.int32))


def write(cache: KVCache, kv: tuple, rows_N: jax.Array, slots_NT: jax.Array) -> KVCache:
    """Put keys and values at (row, slot); a row or slot out of range is dropped.

    kv: per layer (k, v), each [N, T, K, C]; rows_N: which cache row each belongs to. Lengths are
    the caller's to set.
    """
    rows = rows_N[:, None]
    # Out-of-range slots must stay out of range after the split into (tile, place in tile).
    tile, place = slots_NT // TILE, slots_NT % TILE
    k = tuple(
        old.at[rows, :, tile, :, place].set(new, mode="drop", wrap_negative_indices=False)
        for old, (new, _) in zip(cache.k, kv)
    )
    v = tuple(
        old.at[rows, :, slots_NT].set(new, mode="drop", wrap_negative_indices=False)
        for old, (_, new) in zip(cache.v, kv)
    )
    return cache.replace(k=k, v=v)


def from_prefix(kv: tuple, length_B: jax.Array) -> KVCache:
    """A cache that holds just these keys and values (per layer, each [B, T, K, C]; T a multiple
    of TILE) in its first slots."""
    k, v = zip(*kv)
    B, T, K, C = k[0].shape
    tiles = lambda x: x.reshape(B, T // TILE, TILE, K, C).transpose(0, 3, 1, 4, 2)  # noqa: E731
    return KVCache(tuple(tiles(x) for x in k), tuple(x.transpose(0, 2, 1, 3) for x in v), length_B)


def fan_out(cache: KVCache, prefix: KVCache, source_B: jax.Array) -> KVCache:
    """Overwrite row b with the prefix's row `source_B[b]`; rows with a negative source keep theirs.

    The prefix may have fewer slots than the cache, never more.
    """
    chosen = source_B >= 0
    source_B = jnp.maximum(source_B, 0)

    def merge(old, new):
        n = new.shape[2]
        here = jnp.expand_dims(chosen, tuple(range(1, new.ndim)))
        first = jnp.where(here, new[source_B], jax.lax.slice_in_dim(old, 0, n, axis=2))
        return jax.lax.dynamic_update_slice_in_dim(old, first, 0, axis=2)

    return KVCache(
        tuple(merge(a, b) for a, b in zip(cache.k, prefix.k)),
        tuple(merge(a, b) for a, b in zip(cache.v, prefix.v)),
        jnp.where(chosen, prefix.length[source_B], cache.length),
    )


def take_rows(cache: KVCache, rows_N: jax.Array, slots: int) -> KVCache:
    """The given rows, in `slots` slots: compaction, growth and shrinking in one.

    Shrinking keeps the first `slots` slots; no kept row may be longer. A row index equal to the
    number of rows gives an arbitrary row of length 0.
    """
    keep = rows_N < cache.length.shape[0]
    rows_N = jnp.where(keep, rows_N, 0)

    def resize(x, axis, size):
        if size <= x.shape[axis]:
            return jax.lax.slice_in_dim(x, 0, size, axis=axis)[rows_N]
        pad = [(0, size - n if a == axis else 0) for a, n in enumerate(x.shape)]
        return jnp.pad(x[rows_N], pad)

    return KVCache(
        tuple(resize(k, 2, slots // TILE) for k in cache.k),
        tuple(resize(v, 2, slots) for v in cache.v),
        jnp.where(keep, cache.length[rows_N], 0),
    )
