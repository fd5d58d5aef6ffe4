"""GRPO against a plain NumPy version, with hand-made masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl.loss import grpo_loss

SETTINGS = dict(clip_low=0.2, clip_high=0.3, denominator=5.0)


def tokens(shape=(2, 4)):
    rng = np.random.default_rng(0)
    logp, old = (-rng.uniform(0.1, 3, shape).astype(np.float32) for _ in range(2))
    advantages = rng.normal(size=shape).astype(np.float32)
    mask = np.arange(8).reshape(shape) % 4 != 2
    return logp, old, advantages, mask


def by_hand(logp, old, advantages, mask):
    total = clipped = 0.0
    for l, o, a, m in zip(*(x.ravel() for x in (logp, old, advantages, mask))):
        if m:
            ratio = np.exp(l - o)
            held = min(max(ratio, 0.8), 1.3)
            total -= min(ratio * a, held * a) / 5.0
            clipped += (held * a < ratio * a) / 5.0
    return total, clipped


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_equals_the_loop_over_tokens(shape):
    arrays = tokens(shape)
    loss, metrics = grpo_loss(*arrays, **SETTINGS)
    want, clipped = by_hand(*arrays)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"], clipped, rtol=1e-6)
    assert clipped > 0  # or the clip was not tested


def test_without_old_log_probs_the_gradient_is_the_policy_gradient():
    logp, _, advantages, mask = tokens()
    loss, grad = jax.value_and_grad(lambda l: grpo_loss(l, None, advantages, mask, **SETTINGS)[0])(
        logp
    )
    np.testing.assert_allclose(loss, -np.sum(advantages * mask) / 5.0, rtol=1e-6)
    np.testing.assert_allclose(grad, -advantages * mask / 5.0, rtol=1e-6)


def test_clipped_tokens_take_no_gradient():
    # ratio e > 1.3 with A > 0, ratio 1/e < 0.8 with A < 0: held. The other signs: free.
    logp = jnp.array([1.0, -1.0, 1.0, -1.0])
    advantages = jnp.array([1.0, -1.0, -1.0, 1.0])
    grad = jax.grad(
        lambda l: grpo_loss(l, jnp.zeros(4), advantages, jnp.ones(4, bool), **SETTINGS)[0]
    )(logp)
    np.testing.assert_allclose(grad, [0, 0, np.e / 5, -np.exp(-1) / 5], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_places_may_hold_anything(bad):
    logp, old, advantages, mask = tokens()
    dirty = [np.where(mask, x, bad).astype(np.float32) for x in (logp, old, advantages)]

    def run(logp, old, advantages):
        return grpo_loss(logp, old, advantages, mask, **SETTINGS)[0]

    clean_loss, clean_grads = jax.value_and_grad(run, (0, 1, 2))(logp, old, advantages)
    loss, grads = jax.value_and_grad(run, (0, 1, 2))(*dirty)
    np.testing.assert_array_equal(loss, clean_loss)
    for grad, clean in zip(grads, clean_grads):
        np.testing.assert_array_equal(grad, clean)

    def multiplied(logp):  # the mask as a factor: what must not be written
        return jnp.sum(jnp.exp(logp - old) * advantages * mask.astype(np.float32))

    if bad != -np.inf:  # exp(-inf) is a clean zero
        assert not np.isfinite(multiplied(np.where(mask, logp, bad)))
