"""The cache against a dictionary of (row, slot): writes, fan-out, compaction, growth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import kv_cache
from tlt_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=5, width=4, mlp_width=4, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=2,
    max_context=96,
)  # fmt: skip
K, C, L = 2, 2, 2


def random_kv(rng, rows, tokens):
    shape = (rows, tokens, K, C)
    return tuple(tuple(jnp.asarray(rng.normal(size=shape), "float32") for _ in "kv") for _ in "LL")


def slots_of(cache):
    """Keys and values as [L, 2, B, S, K, C], out of their layouts."""
    keys = [np.asarray(k).transpose(0, 2, 4, 1, 3) for k in cache.k]
    keys = [k.reshape(k.shape[0], -1, K, C) for k in keys]
    values = [np.asarray(v).transpose(0, 2, 1, 3) for v in cache.v]
    return np.array([[k, v] for k, v in zip(keys, values)])


def garbage(rows, slots):
    """A cache of huge values, which nothing may read."""
    cache = kv_cache.empty(CONFIG, rows, slots)
    return jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, 1e30), cache)


def test_write_puts_tokens_at_their_slots_and_drops_the_rest():
    rng = np.random.default_rng(0)
    cache = garbage(3, 64)
    kv = random_kv(rng, 4, 3)
    rows = jnp.asarray([2, 0, 3, 1])  # 3 is no row
    slots = jnp.asarray([[0, 31, 32], [5, 64, 63], [1, 2, 3], [-1, 1000, 33]])
    want = slots_of(cache)
    for n, b in enumerate(rows.tolist()):
        for t, s in enumerate(slots[n].tolist()):
            if b < 3 and 0 <= s < 64:
                want[:, :, b, s] = np.array(kv)[:, :, n, t]
    got = kv_cache.write(cache, kv, rows, slots)
    np.testing.assert_array_equal(slots_of(got), want)
    np.testing.assert_array_equal(got.length, cache.length)


def test_from_prefix_equals_writing_slot_by_slot():
    kv = random_kv(np.random.default_rng(1), 2, 32)
    length = jnp.asarray([32, 7])
    got = kv_cache.from_prefix(kv, length)
    slots = jnp.broadcast_to(jnp.arange(32)[None], (2, 32))
    want = kv_cache.write(kv_cache.empty(CONFIG, 2, 32), kv, jnp.arange(2), slots)
    np.testing.assert_array_equal(slots_of(got), slots_of(want))
    assert got.length.tolist() == [32, 7] and got.slots == 32


def test_fan_out_copies_prefixes_into_chosen_rows_only():
    rng = np.random.default_rng(2)
    cache = kv_cache.write(
        garbage(4, 64), random_kv(rng, 4, 64), jnp.arange(4), jnp.tile(jnp.arange(64), (4, 1))
    ).replace(length=jnp.asarray([9, 50, 60, 1]))
    prefix = kv_cache.from_prefix(random_kv(rng, 2, 32), jnp.asarray([30, 3]))
    got = kv_cache.fan_out(cache, prefix, jnp.asarray([-1, 1, 0, 1]))
    assert got.length.tolist() == [9, 3, 30, 3]
    old, new, out = map(slots_of, (cache, prefix, got))
    np.testing.assert_array_equal(out[:, :, 0], old[:, :, 0])
    for b, source in ((1, 1), (2, 0), (3, 1)):
        np.testing.assert_array_equal(out[:, :, b, :32], new[:, :, source])


@pytest.mark.parametrize("slots", (32, 64, 96))
def test_take_rows_moves_grows_and_shrinks(slots):
    rng = np.random.default_rng(3)
    cache = kv_cache.write(
        garbage(3, 64), random_kv(rng, 3, 64), jnp.arange(3), jnp.tile(jnp.arange(64), (3, 1))
    ).replace(length=jnp.asarray([20, 32, 5]))
    got = kv_cache.take_rows(cache, jnp.asarray([2, 0, 3, 3, 2]), slots)
    assert got.length.tolist() == [5, 20, 0, 0, 5] and got.slots == slots
    kept = min(slots, 64)
    old, out = slots_of(cache), slots_of(got)
    for n, b in ((0, 2), (1, 0), (4, 2)):
        np.testing.assert_array_equal(out[:, :, n, :kept], old[:, :, b, :kept])


def test_slots_must_fill_tiles():
    with pytest.raises(ValueError, match="slots=40 must be a multiple of 32"):
        kv_cache.empty(CONFIG, 1, 40)
