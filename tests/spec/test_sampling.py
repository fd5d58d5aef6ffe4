"""`sampling.sample` against numpy: sorts instead of thresholds, on ordinary and awkward logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import masked
from tlt_jax.spec import noise, sampling

V = 37
sample = jax.jit(sampling.sample)
keep_likely = jax.jit(sampling.keep_likely)
SETTINGS = [  # temperature, top_p, top_k: each row of a batch has its own
    (1.0, 1.0, 0),
    (0.7, 1.0, 0),
    (0.0, 1.0, 0),
    (1.0, 0.9, 0),
    (1.3, 0.5, 0),
    (1.0, 1.0, 5),
    (0.8, 0.9, 10),
    (1.0, 1e-6, 0),
    (1.0, 0.999, 36),
    (1.0, 1.0, 1),
    (2.0, 1.0, 1000),
    (0.0, 0.5, 3),
]


def ordinary(rng, rows):
    return rng.normal(0, 2, (rows, V))


def tied(rng, rows):
    """Few different values, so that thresholds fall on ties."""
    return rng.integers(-2, 3, (rows, V)).astype(float)


def flat(rng, rows):
    return np.zeros((rows, V))


def forbidden(rng, rows):
    """Most tokens at -inf, as a grammar would leave them."""
    logits = rng.normal(0, 2, (rows, V))
    logits[rng.random((rows, V)) < 0.7] = -np.inf
    logits[:, 11] = 0.5
    return logits


def huge(rng, rows):
    """Scores beyond the range of exp; log-probs stay finite."""
    return rng.normal(0, 1, (rows, V)) * 10.0 ** rng.integers(0, 30, (rows, 1))


def batch(settings):
    temperature, top_p, top_k = map(np.array, zip(*settings))
    return sampling.SamplingRows(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(top_p, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
    )


def seeds(rows):
    key_B2 = noise.row_keys(jax.random.key(0), *(jnp.arange(rows, dtype=jnp.uint32),) * 3)
    return noise.seeds(key_B2, jnp.arange(rows))


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("logits_of", (ordinary, tied, flat, forbidden, huge))
def test_sample_equals_sorting_in_numpy(logits_of):
    """Every setting in one batch, in two orders: tokens equal, log-probs renormalised."""
    rng = np.random.default_rng(3)
    settings = SETTINGS * 8
    logits_BV = logits_of(rng, len(settings))
    seed_B2 = seeds(len(settings))
    arrays = sample(jnp.asarray(logits_BV), seed_B2, batch(settings))
    token_B, log_prob_B = map(np.asarray, arrays)
    noise_BV = np.asarray(noise.gumbel(seed_B2, jnp.arange(V), jnp.float64))
    for b, (temperature, top_p, top_k) in enumerate(settings):
        scores = masked(logits_BV[b : b + 1] / np.float32(temperature or 1), top_p, top_k)[0]
        want = int(np.argmax(scores + noise_BV[b] * (temperature > 0)))
        assert token_B[b] == want, (b, settings[b])
        log_prob = scores[want] - np.max(scores) - np.log(np.sum(np.exp(scores - np.max(scores))))
        np.testing.assert_allclose(log_prob_B[b], log_prob, rtol=0, atol=1e-9)
    shifted = np.roll(np.arange(len(settings)), 5)  # other rows beside each
    rows = batch([settings[i] for i in shifted])
    again_B, _ = sample(jnp.asarray(logits_BV[shifted]), seed_B2[shifted], rows)
    np.testing.assert_array_equal(again_B, token_B[shifted])


@pytest.mark.parametrize("logits_of", (ordinary, tied, flat, forbidden))
def test_kept_sets_equal_sorting(logits_of):
    """Which scores survive; the neutral row keeps all of its bits."""
    logits_BV = logits_of(np.random.default_rng(4), len(SETTINGS) * 5)
    kept = np.asarray(keep_likely(jnp.asarray(logits_BV), batch(SETTINGS * 5)))
    for b, (_, top_p, top_k) in enumerate(SETTINGS * 5):
        np.testing.assert_array_equal(kept[b], masked(logits_BV[b : b + 1], top_p, top_k)[0])


def test_float32_masks_agree_away_from_rounding():
    """float32 sums may move a nucleus by one tied or borderline token, never more."""
    rng = np.random.default_rng(5)
    logits_BV = rng.normal(0, 3, (60, 5000)).astype(np.float32)
    rows = batch([(1.0, 0.9, 0), (1.0, 0.5, 100), (1.0, 0.99999, 0)] * 20)
    kept = np.isfinite(np.asarray(keep_likely(jnp.asarray(logits_BV), rows))).sum(1)
    for b in range(60):
        want = masked(logits_BV[b : b + 1].astype(float), float(rows.top_p[b]), int(rows.top_k[b]))
        want = np.isfinite(want).sum()
        assert abs(int(kept[b]) - int(want)) <= max(1, 0.01 * want)


def test_a_wrong_nucleus_is_noticed():
    """The set that stops before passing the mass differs from the reference on this data."""
    rng = np.random.default_rng(4)
    logits_BV = ordinary(rng, 20)
    kept = np.asarray(keep_likely(jnp.asarray(logits_BV), batch([(1.0, 0.9, 0)] * 20)))
    short = kept.copy()
    for row in short:
        row[np.argmin(np.where(np.isfinite(row), row, np.inf))] = -np.inf
    want = masked(logits_BV, 0.9, 0)
    assert np.array_equal(kept, want) and not np.array_equal(short, want)


@pytest.mark.parametrize("setting", ((1.0, 1.0, 0), (0.0, 1.0, 0), (1.0, 0.5, 0), (1.0, 1.0, 4)))
def test_nan_rows_give_no_token(setting):
    """All-NaN rows of either sign, and a single NaN, give V; other rows are untouched."""
    logits_BV = ordinary(np.random.default_rng(6), 5)
    clean, _ = sample(jnp.asarray(logits_BV), seeds(5), batch([setting] * 5))
    logits_BV[1], logits_BV[3] = np.nan, -np.nan
    logits_BV[4, 9] = np.nan
    token_B, _ = sample(jnp.asarray(logits_BV), seeds(5), batch([setting] * 5))
    assert token_B.tolist() == [int(clean[0]), V, int(clean[2]), V, V]


def test_one_negative_nan_is_not_masked_away():
    """x86 makes NaN with the sign bit set (0 * inf); top-k must not drop it and sample on."""
    logits_BV = ordinary(np.random.default_rng(6), 5)
    logits_BV[:, 9] = -np.nan
    token_B, _ = sample(jnp.asarray(logits_BV), seeds(5), batch([(1.0, 1.0, 4)] * 5))
    assert token_B.tolist() == [V] * 5


def test_zeros_of_both_signs_are_tied():
    scores_BV = jnp.asarray([[0.0, -0.0, -1.0, 0.0]])
    kept = np.isfinite(np.asarray(keep_likely(scores_BV, batch([(1.0, 1.0, 1)]))))
    assert kept.tolist() == [[True, True, False, True]]


def test_first_argmax_takes_the_first_of_ties():
    x_BV = jnp.asarray(
        [[1.0, 3, 3, 0], [2, 2, 2, 2], [-jnp.inf, -jnp.inf, 0, 0], [jnp.nan, 1, 2, 3]]
    )
    assert sampling.first_argmax(x_BV).tolist() == [1, 0, 2, 4]


def test_ordered_bits_order_like_the_floats():
    x = np.array([-np.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, np.inf], np.float32)
    assert np.all(np.diff(np.asarray(sampling._ordered_bits(jnp.asarray(x))).astype(np.int64)) > 0)
    wide = np.array([-np.inf, -1e300, -5e-324, 0.0, 5e-324, 1.0, 1e300, np.inf])
    bits = np.asarray(sampling._ordered_bits(jnp.asarray(wide)))
    assert np.all(bits[1:] > bits[:-1])
