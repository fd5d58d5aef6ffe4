"""Rotary embedding: what rotation must and must not change, and what each stretching does."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import rope
from tlt_jax.models.config import RopeConfig

C = 16
KINDS = {
    "none": RopeConfig(),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=512),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_context=512, attention_factor=1.25),
}


def rotated(config, x_THC, positions):
    at = jnp.asarray(positions, jnp.int32)[None]
    x_BTHC = jnp.asarray(x_THC, jnp.float32)[None]
    return np.asarray(rope.rotate(x_BTHC, rope.tables(config, C, at, jnp.float32)))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_the_distance_alone(kind):
    """And lengths are kept, up to yarn's attention factor."""
    config, rng = KINDS[kind], np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 3, C))
    scores = [
        np.sum(rotated(config, q, [a]) * rotated(config, k, [b]), axis=-1)
        for a, b in ((7, 3), (104, 100), (904, 900), (8, 3))
    ]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)
    np.testing.assert_allclose(scores[2], scores[0], atol=2e-3)
    assert np.abs(scores[3] - scores[0]).max() > 1e-2
    grown = config.attention_factor if kind == "yarn" else 1.0
    norms = np.linalg.norm(rotated(config, q, [55]), axis=-1) / np.linalg.norm(q, axis=-1)
    np.testing.assert_allclose(norms, grown, rtol=1e-5)


def test_pairs_are_half_a_head_apart():
    x = np.zeros((1, 1, C))
    x[0, 0, 2] = 1.0
    angle = 10_000.0 ** (-4 / C) * 5
    want = np.zeros(C)
    want[2], want[2 + C // 2] = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(rotated(RopeConfig(), x, [5])[0, 0], want, atol=1e-6)


def test_every_kind_stretches_between_none_and_linear():
    """Fast dimensions are kept by llama3 and yarn, slow ones divided by the factor."""
    for kind in ("linear", "llama3", "yarn"):
        config = KINDS[kind]
        plain = rope.frequencies(RopeConfig(theta=config.theta), C)
        ratio = plain / rope.frequencies(config, C)
        assert np.all(ratio >= 1 - 1e-12) and np.all(ratio <= config.factor + 1e-12)
        assert np.all(np.diff(ratio) >= -1e-12)
        assert abs(ratio[-1] - config.factor) < 1e-9
        assert ratio[0] == (config.factor if kind == "linear" else 1)


def test_unknown_kinds_and_missing_context_are_refused():
    with pytest.raises(ValueError, match="rope kind='dynamic' is not supported"):
        RopeConfig(kind="dynamic")
    with pytest.raises(ValueError, match="needs original_context > 0, got 0"):
        RopeConfig(kind="yarn", factor=2.0)
