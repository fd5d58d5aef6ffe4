"""The state of a batch of rows being decoded, and how rows enter and leave it.

A row whose tokens are x_0 .. x_n holds x_0 .. x_{n-1} in the cache (`cache.length` = n) and x_n in
`token`. The next round feeds `token` at position n and samples x_{n+1}. A fresh row holds all of
its prompt but the last token, so its first sampled token comes from the same round as every other:
there is no second sampling path at prefill.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import kv_cache
from tlt_jax.models.config import ModelConfig
from tlt_jax.spec import noise
from tlt_jax.spec.sampling import SamplingRows


@flax.struct.dataclass
class DecodeState:
    cache: kv_cache.KVCache
    token: jax.Array  # [B] int32, the newest token, not yet in the cache
    limit: jax.Array  # [B] int32, most tokens the row may hold, prompt included
    key: jax.Array  # [B, 2] uint32, noise key of the response
    sampling: SamplingRows
    live: jax.Array  # [B] bool; other rows are computed and ignored


@flax.struct.dataclass
class NewRows:
    """Host arrays that describe the rows to admit; rows with `source` -1 keep what they hold."""

    source: jax.Array  # [B] int32, row of the prefix cache to start from
    token: jax.Array  # [B] int32, last prompt token
    limit: jax.Array  # [B] int32
    domain: jax.Array  # [B] int32
    draw: jax.Array  # [B] uint32
    member: jax.Array  # [B] int32
    sampling: SamplingRows


def empty(config: ModelConfig, rows: int, slots: int) -> DecodeState:
    """No live rows; neutral values everywhere."""
    zeros = jnp.zeros((rows,), jnp.int32)
    ones = jnp.ones((rows,), jnp.float32)
    return DecodeState(
        cache=kv_cache.empty(config, rows, slots),
        token=zeros,
        limit=zeros,
        key=jnp.zeros((rows, 2), jnp.uint32),
        sampling=SamplingRows(ones, ones, zeros),
        live=jnp.zeros((rows,), bool),
    )


def no_new_rows(rows: int) -> NewRows:
    """Host arrays that admit nothing, to be filled in."""

    def zeros(dtype=np.int32):
        return np.zeros(rows, dtype)

    ones = np.ones(rows, np.float32)
    return NewRows(
        source=zeros() - 1,
        token=zeros(),
        limit=zeros(),
        domain=zeros(),
        draw=zeros(np.uint32),
        member=zeros(),
        sampling=SamplingRows(ones, ones.copy(), zeros()),
    )


def admit(state: DecodeState, prefix: kv_cache.KVCache, new: NewRows, run_key) -> DecodeState:
    """Start new responses in the rows with a source: the prompt's cache is copied, not computed."""
    chosen = new.source >= 0
    key = noise.row_keys(run_key, new.domain, new.draw, new.member)

    def pick(fresh, old):
        return jnp.where(jnp.expand_dims(chosen, tuple(range(1, old.ndim))), fresh, old)

    return DecodeState(
        cache=kv_cache.fan_out(state.cache, prefix, new.source),
        token=pick(new.token, state.token),
        limit=pick(new.limit, state.limit),
        key=pick(key, state.key),
        sampling=jax.tree.map(pick, new.sampling, state.sampling),
        live=state.live | chosen,
    )


def take_rows(state: DecodeState, rows_N: jax.Array, slots: int) -> DecodeState:
    """The given rows with `slots` cache slots; an index equal to the number of rows makes a
    padding row."""
    rows = state.live.shape[0]
    keep = rows_N < rows
    safe = jnp.where(keep, rows_N, 0)
    rest = jax.tree.map(lambda x: x[safe], state.replace(cache=None))
    neutral = SamplingRows(jnp.float32(1), jnp.float32(1), jnp.int32(0))
    sampling = jax.tree.map(lambda x, n: jnp.where(keep, x, n), rest.sampling, neutral)
    cache = kv_cache.take_rows(state.cache, rows_N, slots)
    return rest.replace(cache=cache, sampling=sampling, live=rest.live & keep)
