"""From logits to a token: temperature, top-k, top-p, then the argmax under the shared noise."""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.spec import noise


@flax.struct.dataclass
class SamplingRows:
    """How each row samples. Neutral values (1, 1, 0) on padding rows."""

    temperature: jax.Array  # [B] float32; 0 takes the argmax of the logits
    top_p: jax.Array  # [B] float32 in (0, 1]; 1 keeps everything
    top_k: jax.Array  # [B] int32; 0 keeps everything


def sample(logits_BV: jax.Array, seed_B2: jax.Array, rows: SamplingRows) -> tuple:
    """One token per row and its log-probability: ([B] int32, [B] float32 or float64).

    The log-probability is taken from the very scores that were sampled: after temperature and
    after the top-k and top-p masks, renormalised. At temperature 0 it is that of temperature 1.
    A row of NaN logits gives the token V, which no vocabulary holds.
    """
    hot = rows.temperature > 0
    scale_B = jnp.where(hot, rows.temperature, 1.0).astype(logits_BV.dtype)
    scores_BV = logits_BV / scale_B[:, None]
    masks = (rows.top_p < 1) | (rows.top_k > 0)
    scores_BV = jax.lax.cond(jnp.any(masks), keep_likely, lambda s, _: s, scores_BV, rows)
    ids_V = jnp.arange(scores_BV.shape[1], dtype=jnp.uint32)
    noise_BV = noise.gumbel(seed_B2, ids_V, scores_BV.dtype)
    token_B = first_argmax(scores_BV + jnp.where(hot[:, None], noise_BV, 0))
    score_B = jnp.take_along_axis(scores_BV, token_B[:, None], axis=1, mode="clip")[:, 0]
    return token_B, score_B - jax.nn.logsumexp(scores_BV, axis=1)


def first_argmax(x_BV: jax.Array) -> jax.Array:
    """The first index of the maximum. Two plain reductions: the paired reduction behind
    `jnp.argmax` is not vectorised on CPUs (3 times slower at 32 x 49152)."""
    top = jnp.max(x_BV, axis=1, keepdims=True)
    size = x_BV.shape[1]
    ids = jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.min(jnp.where(x_BV == top, ids, size), axis=1)


def keep_likely(scores_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """-inf outside the top-k set, then outside the smallest set of mass top-p of what is left.

    Both thresholds are found by bisection over the ordered bit patterns of the scores, so nothing
    is sorted. Scores equal to the threshold are all kept, so that no result depends on their order.
    """
    size = scores_BV.shape[1]
    k_B = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)
    ones = jnp.ones_like(scores_BV)
    scores_BV = _mask_below(scores_BV, ones, k_B.astype(scores_BV.dtype))
    p_BV = jax.nn.softmax(scores_BV, axis=1)
    # top_p = 1 asks for all of the mass; a target of 0.999... after rounding must not drop any.
    mass_B = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf).astype(scores_BV.dtype)
    return _mask_below(scores_BV, p_BV, mass_B)


def _mask_below(scores_BV, weights_BV, target_B):
    """Keep the fewest highest scores whose weights sum to `target_B` (all, if they never do)."""
    order_BV = _ordered_bits(scores_BV)
    bits = order_BV.dtype.itemsize * 8
    one = jnp.ones((), order_BV.dtype)

    def set_bit(i, threshold_B):
        trial_B = threshold_B | (one << (bits - 1 - i).astype(order_BV.dtype))
        kept = jnp.where(order_BV >= trial_B[:, None], weights_BV, 0)
        return jnp.where(jnp.sum(kept, axis=1) >= target_B, trial_B, threshold_B)

    start_B = jnp.zeros(order_BV.shape[:1], order_BV.dtype)
    threshold_B = jax.lax.fori_loop(0, bits, set_bit, start_B)
    return jnp.where(order_BV >= threshold_B[:, None], scores_BV, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats: negatives have all bits flipped.

    The two zeros are equal, and any NaN is highest, so that it is kept and seen.
    """
    kind = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind)
    sign = jnp.ones((), kind) << (x.dtype.itemsize * 8 - 1)
    bits = jnp.where(bits == sign, 0, bits)
    bits = jnp.where(bits & sign != 0, ~bits, bits | sign)
    return jnp.where(jnp.isnan(x), ~jnp.zeros((), kind), bits)
