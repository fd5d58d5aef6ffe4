"""The policy loss against loops over tokens in float64, with gradients by hand; and laws of the KL.

The loops know nothing of arrays, masks or JAX: a token is a tuple of numbers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl import loss
from tlt_jax.rl.loss import KL_ESTIMATORS, kl_loss, policy_loss, token_weights

PLAIN = dict(
    ratio="token",
    clip_low=0.2,
    clip_high=0.3,
    dual_clip=0.0,
    importance_cap=0.0,
    kl="k3",
    kl_coef=0,
)
# Three responses of 5, 1 and 3 tokens, padding between and after them.
SEQUENCES = np.array([0, 0, 9, 0, 0, 0, 1, 9, 2, 2, 2, 9])
MASK = SEQUENCES < 9
LENGTHS = np.array([5, 1, 3])


def arrays(aggregation="token_mean"):
    """Inputs of policy_loss, float64, clean where masked. Ratios run into every bound."""
    rng = np.random.default_rng(3)
    logp, old, rollout, reference = -rng.uniform(0.05, 2.5, (4, len(MASK)))
    advantages = np.array([1.0, 1, 0, 1, 1, 1, -2.0, 0, 0.5, -0.7, 0.3, 0])
    old[6], old[9] = logp[6] - 1.5, logp[9] + 1.0  # A < 0: ratios 4.5 and 0.37
    weights = token_weights(aggregation, LENGTHS, max_new_tokens=8)[SEQUENCES % 9 % 3]
    return {
        "logp_N": logp,
        "advantages_N": advantages,
        "weights_N": weights,
        "old_logp_N": old,
        "rollout_logp_N": rollout,
        "reference_logp_N": reference,
    }


def run(values, settings, sequences=SEQUENCES, mask=MASK):
    """policy_loss -> (loss, gradients by every float input, sums)."""
    floats = {k: jnp.asarray(v) for k, v in values.items() if v is not None}
    rest = {k: v for k, v in values.items() if v is None}

    def f(floats):
        return policy_loss(**floats, **rest, mask_N=mask, sequences_N=sequences, **settings)

    (value, sums), grads = jax.value_and_grad(f, has_aux=True)(floats)
    return value, grads, sums


def by_hand(values, settings):
    """Loss, d loss / d logp and counts by loops."""
    x = {k: v for k, v in values.items()}
    old = x["logp_N"] if x["old_logp_N"] is None else x["old_logp_N"]
    s = settings
    total, grads = 0.0, [0.0] * len(MASK)
    sums = dict.fromkeys(loss.SUMS, 0.0)
    for response in range(3):
        places = [i for i in range(len(MASK)) if SEQUENCES[i] == response]
        logratios = [float(x["logp_N"][i] - old[i]) for i in places]
        for i, logratio in zip(places, logratios):
            A, w = float(x["advantages_N"][i]), float(x["weights_N"][i])
            mean = sum(logratios) / len(logratios)
            r = math.exp(logratio if s["ratio"] == "token" else mean)
            gain, slope = r * A, r * A  # d r / d logp = r, both for the token and for GSPO-token
            if A > 0 and r > 1 + s["clip_high"]:
                gain, slope = (1 + s["clip_high"]) * A, 0.0
                sums["clipped_high"] += 1
            if A < 0 and r < 1 - s["clip_low"]:
                gain, slope = (1 - s["clip_low"]) * A, 0.0
                sums["clipped_low"] += 1
            if s["dual_clip"] and A < 0 and r > s["dual_clip"]:
                gain, slope = s["dual_clip"] * A, 0.0
                sums["clipped_dual"] += 1
            cost = cost_slope = 0.0
            d = float(x["logp_N"][i] - x["reference_logp_N"][i])
            sums["kl"] += math.exp(-d) + d - 1
            e = math.exp(logratio)
            if s["kl"] == "k1":
                cost, cost_slope = e * d, e * d + e
            if s["kl"] == "k2":
                cost, cost_slope = e * d * d / 2, e * d
            if s["kl"] == "k3":
                k3 = math.exp(-d) + d - 1
                cost, cost_slope = e * k3, e * k3 + e * (1 - math.exp(-d))
            c = 1.0
            if s["importance_cap"]:
                c = math.exp(float(old[i] - x["rollout_logp_N"][i]))
                sums["importance_capped"] += c > s["importance_cap"]
                c = min(c, s["importance_cap"])
            total += w * c * (-gain + s["kl_coef"] * cost)
            grads[i] = w * c * (-slope + s["kl_coef"] * cost_slope)
    return total, np.array(grads), sums


CASES = [
    dict(),
    dict(dual_clip=2.0),
    dict(importance_cap=1.5),
    dict(kl_coef=0.1, kl="k1"),
    dict(kl_coef=0.1, kl="k2"),
    dict(kl_coef=0.1, kl="k3", importance_cap=2.0, dual_clip=3.0),
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("ratio", loss.RATIOS)
@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_value_and_gradient_equal_the_loops(aggregation, ratio, settings):
    settings = PLAIN | {"ratio": ratio} | settings
    with jax.enable_x64(True):
        for old in (True, False):
            values = arrays(aggregation)
            if not old:
                values["old_logp_N"] = None
            value, grads, sums = run(values, settings)
            want, want_grads, want_sums = by_hand(values, settings)
            assert abs(value - want) <= 1e-12
            np.testing.assert_allclose(grads["logp_N"], want_grads, rtol=0, atol=1e-12)
            for name in loss.SUMS:
                assert abs(sums[name] - want_sums[name]) <= 1e-12, name


def test_the_cases_reach_every_bound():
    token = PLAIN | {"dual_clip": 2.0, "importance_cap": 1.5}
    assert min(by_hand(arrays(), token)[2].values()) > 0
    sequence = by_hand(arrays(), token | {"ratio": "sequence"})[2]
    assert sequence["clipped_high"] > 0


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_gradients_by_hand_are_those_of_the_values_by_hand(kl):
    """Central differences, where no constant weight hides part of the derivative."""
    settings = PLAIN | {"kl": kl, "kl_coef": 0.3, "importance_cap": 2.0}
    _, grads, _ = by_hand(arrays(), settings)
    for i in np.flatnonzero(MASK):
        moved = []
        for h in (1e-5, -1e-5):
            values = arrays()
            values["logp_N"][i] += h
            moved.append(by_hand(values, settings)[0])
        assert abs((moved[0] - moved[1]) / 2e-5 - grads[i]) <= 1e-9


def test_sequence_ratio_has_the_gradient_of_gspo():
    """Of min(s A, clip(s) A) per response, s differentiated as a whole."""
    with jax.enable_x64(True):
        values = arrays("sequence_mean")
        values["advantages_N"] = np.array([1.0, -2.0, 0.5])[SEQUENCES % 9 % 3]
        settings = PLAIN | {"ratio": "sequence", "clip_low": 0.9, "clip_high": 5.0}

        def gspo(logp):
            total = 0.0
            for response, A in enumerate([1.0, -2.0, 0.5]):
                places = SEQUENCES == response
                s = math.exp(np.mean(logp[places] - values["old_logp_N"][places]))
                total -= min(s * A, min(max(s, 0.1), 6.0) * A) / 3
            return total

        value, grads, sums = run(values, settings)
        assert abs(value - gspo(values["logp_N"])) <= 1e-12
        for i in np.flatnonzero(MASK):
            h = 1e-5 * (np.arange(len(MASK)) == i)
            slope = (gspo(values["logp_N"] + h) - gspo(values["logp_N"] - h)) / 2e-5
            assert abs(grads["logp_N"][i] - slope) <= 1e-9


def test_weights_by_hand():
    lengths = np.array([4, 1, 0])
    np.testing.assert_allclose(token_weights("token_mean", lengths, 8), [1 / 5] * 3)
    np.testing.assert_allclose(token_weights("sequence_mean", lengths, 8)[:2], [1 / 12, 1 / 3])
    np.testing.assert_allclose(token_weights("constant", lengths, 8), [1 / 24] * 3)
    assert all(np.isfinite(token_weights(a, lengths, 8)).all() for a in loss.AGGREGATIONS)


@pytest.mark.parametrize("ratio", loss.RATIOS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_masked_places_may_hold_anything(bad, ratio):
    settings = PLAIN | CASES[-1] | {"ratio": ratio}
    with jax.enable_x64(True):
        clean = arrays()
        dirty = {k: np.where(MASK, v, bad) for k, v in clean.items()}
        lost = np.where(MASK, SEQUENCES, 10**6)
        value, grads, sums = run(dirty, settings, sequences=lost)
        clean_value, clean_grads, clean_sums = run(clean, settings)
        assert value == clean_value and sums == clean_sums
        for name in clean:
            np.testing.assert_array_equal(grads[name], clean_grads[name])

        def multiplied(logp):  # the mask as a factor: what must not be written
            terms = jnp.exp(logp - clean["old_logp_N"]) * clean["advantages_N"]
            return jnp.sum(terms * MASK.astype(float))

        if bad != -np.inf:  # exp(-inf) is a clean zero
            assert not np.isfinite(multiplied(dirty["logp_N"]))


@pytest.mark.parametrize("ratio", loss.RATIOS)
def test_parts_add_up_to_the_whole_and_means_of_parts_do_not(ratio):
    settings = PLAIN | CASES[-1] | {"ratio": ratio}
    with jax.enable_x64(True):
        values = arrays()
        whole, _, _ = run(values, settings)
        cuts = [MASK & (SEQUENCES != 2), MASK & (SEQUENCES == 2)]
        parts = [run(values, settings, mask=mask)[0] for mask in cuts]
        assert abs(sum(parts) - whole) <= 1e-12
        mean = [part * 9 / mask.sum() for part, mask in zip(parts, cuts)]  # a mean of its own each
        assert abs(sum(mean) / 2 - whole) > 1e-3


# --- the KL, on a distribution over five tokens whose expectations can be enumerated ---

LOGITS = np.array([0.3, -1.0, 0.8, 0.1, -0.4])
REFERENCE = np.array([0.5, 0.1, 0.15, 0.05, 0.2])
OTHER = np.array([0.1, 0.3, 0.2, 0.25, 0.15])  # an old policy


def kl_gradient(logits):
    """d KL(pi || ref) / d logits, by hand: pi_v (log(pi_v / ref_v) - KL)."""
    p = np.exp(logits) / np.exp(logits).sum()
    d = np.log(p / REFERENCE)
    return p * (d - (p * d).sum())


def expected_gradient(term, old):
    """d/d logits of the mean over tokens drawn from `old` of term(logp, old_logp, ref_logp)."""

    def mean(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(old * term(logp, jnp.log(old), jnp.log(REFERENCE)))

    return jax.grad(mean)(jnp.asarray(LOGITS))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_expected_gradient_of_the_kl_in_the_loss(estimator, on_policy):
    with jax.enable_x64(True):
        old = np.exp(LOGITS) / np.exp(LOGITS).sum() if on_policy else OTHER
        got = expected_gradient(lambda *x: kl_loss(estimator, *x), old)
        np.testing.assert_allclose(got, kl_gradient(LOGITS), rtol=0, atol=1e-14)


def test_without_the_ratio_k1_forgets_the_reference_and_k3_is_another_gradient():
    with jax.enable_x64(True):
        policy = np.exp(LOGITS) / np.exp(LOGITS).sum()
        bare = {
            name: expected_gradient(lambda logp, old, ref, k=k: k(logp, ref), policy)
            for name, k in KL_ESTIMATORS.items()
        }
        np.testing.assert_allclose(bare["k1"], 0, atol=1e-14)
        np.testing.assert_allclose(bare["k2"], kl_gradient(LOGITS), atol=1e-14)
        assert np.abs(bare["k3"] - kl_gradient(LOGITS)).max() > 1e-2


def test_in_the_reward_only_k1_has_the_gradient_of_the_kl():
    with jax.enable_x64(True):
        policy = np.exp(LOGITS) / np.exp(LOGITS).sum()

        def as_reward(k):
            """Gradient of the loss with the advantage -k, every token weighed by how often it is
            drawn."""

            def f(logits):
                logp = jax.nn.log_softmax(logits)
                reward = -k(jax.lax.stop_gradient(logp), jnp.log(REFERENCE))
                return policy_loss(logp, reward, policy, np.ones(5, bool), **PLAIN)[0]

            return jax.grad(f)(jnp.asarray(LOGITS))

        np.testing.assert_allclose(as_reward(loss.k1), kl_gradient(LOGITS), atol=1e-14)
        for k in (loss.k2, loss.k3):
            assert np.abs(as_reward(k) - kl_gradient(LOGITS)).max() > 1e-2
