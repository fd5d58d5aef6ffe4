"""The noise that decides every sampled token: a function of who and where, never of how.

The token at position t of the response identified by `uid = (domain, draw, member)` is

    y_t = argmax_v( logits_t[v] / temperature + g_t[v] ),

an exact sample from softmax(logits / temperature) when g_t is a vector of independent standard
Gumbel variables. Here g_t depends on (run key, uid, t) alone: not on batch row, bucket, device,
drafter or strategy. So whatever decides the *order* of the computation cannot change the tokens.

Two stages: threefry turns (run key, uid, t) into a 64-bit seed; a counter hash of the token id,
keyed by that seed, fills the vocabulary axis. The hash costs 16 integer operations a token, can be
evaluated at any subset of ids, and is the only randomness in `spec/`. `reference_gumbel` is the
slow version with threefry throughout; tests hold the fast one to the same statistics.
"""

import jax
import jax.numpy as jnp

# Domains keep the draws of different uses apart, so that evaluating never changes training.
TRAIN, EVALUATE, GENERATE = 0, 1, 2


def row_keys(run_key: jax.Array, domain_B, draw_B, member_B) -> jax.Array:
    """The key of each response, [B, 2] uint32, from a typed run key and its uid."""

    def one(domain, draw, member):
        key = jax.random.fold_in(jax.random.fold_in(run_key, domain), draw)
        return jax.random.key_data(jax.random.fold_in(key, member))

    return jax.vmap(one)(domain_B, draw_B, member_B)


def seeds(row_key_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """The 64-bit seed of the noise at one position of each response, [B, 2] uint32."""

    def one(key, position):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(one)(row_key_B2, position_B)


def gumbel(seed_B2: jax.Array, ids: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Standard Gumbel noise [B, V] for token ids [V] (or [B, V]), in `dtype`.

    The uniform x = (h + 1/2) / 2^32 is small where the noise is large, and floats are densest near
    zero: the upper tail, which decides the argmax, reaches 22.9 without ties.
    """
    ids = (ids if ids.ndim == 2 else ids[None]).astype(jnp.uint32)
    h = _finalise(_finalise(ids ^ seed_B2[:, :1]) + seed_B2[:, 1:])
    return _gumbel_of_uniform((h.astype(dtype) + 0.5) * 2.0**-32)


def _gumbel_of_uniform(x: jax.Array) -> jax.Array:
    # Rounding may have taken x to 1, where the noise would be -inf.
    x = jnp.minimum(x, 1.0 - jnp.finfo(x.dtype).epsneg)
    return -jnp.log(-jnp.log1p(-x))


def _finalise(h: jax.Array) -> jax.Array:
    """A bijection of 32-bit words with near-ideal avalanche (lowbias32 of
    https://github.com/skeeto/hash-prospector)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def reference_gumbel(seed_B2: jax.Array, vocab_size: int, dtype=jnp.float32) -> jax.Array:
    """The same distribution from threefry at every id: slow; `gumbel` is tested against it."""

    def one(seed):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    return _gumbel_of_uniform((jax.vmap(one)(seed_B2).astype(dtype) + 0.5) * 2.0**-32)
