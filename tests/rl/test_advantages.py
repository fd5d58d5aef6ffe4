"""Advantages: an independent implementation by dictionaries, and laws."""

import statistics

import numpy as np
import pytest

from tlt_jax.rl import advantages
from tlt_jax.rl.advantages import ESTIMATORS, batch_per_token, check, overlong_penalty


def normalized(values, tokens, eps=1e-6):
    """Values less the mean, over the std, of `tokens`; 0 where those are all equal."""
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    return [(v - mean) / (std + eps) for v in values]


def reference(name, rewards, groups, valid, lengths):
    """By dictionaries and the standard library."""
    members, result = {}, [0.0] * len(rewards)
    for i, group in enumerate(groups):
        if valid[i]:
            members.setdefault(int(group), []).append(i)
    kept = [i for i in range(len(rewards)) if valid[i]]
    if name == "batch":
        values = {i: float(rewards[i]) for i in kept}
    else:
        values = {}
        for indices in members.values():
            r = {i: float(rewards[i]) for i in indices}
            for i in indices:
                others = [r[j] for j in indices if j != i]
                if len(set(r.values())) < 2:
                    values[i] = 0.0
                elif name == "group":
                    values[i] = normalized([r[i]], list(r.values()))[0]
                elif name == "leave_one_out":
                    values[i] = r[i] - sum(others) / len(others)
                else:
                    values[i] = r[i] - statistics.fmean(r.values())
    if name.startswith("batch"):
        tokens = [values[i] for i in kept for _ in range(lengths[i])]
        values = dict(zip(kept, normalized([values[i] for i in kept], tokens)))
    for i in kept:
        result[i] = values[i]
    return result


def random_batch(seed, n=60):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.1, 1 / 3, 1.0], n) if seed % 2 else rng.normal(size=n)
    groups = rng.choice([-7, 3, 4, 10**12, 99, 100], n, p=[0.3, 0.3, 0.2, 0.15, 0.03, 0.02])
    valid = rng.random(n) < 0.8
    return np.where(valid, rewards, np.nan), groups, valid, rng.integers(1, 30, n)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference(seed, name):
    batch = random_batch(seed)
    got = ESTIMATORS[name](*batch)
    np.testing.assert_allclose(got, reference(name, *batch), rtol=0, atol=1e-12)
    assert got.dtype == np.float64
    assert np.all(got[~batch[2]] == 0)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(6))
def test_a_permutation_permutes_the_result_bit_for_bit(seed, name):
    batch = random_batch(seed)
    order = np.random.default_rng(seed + 100).permutation(len(batch[0]))
    straight = ESTIMATORS[name](*batch)
    shuffled = ESTIMATORS[name](*(x[order] for x in batch))
    assert straight[order].tobytes() == shuffled.tobytes()


@pytest.mark.parametrize("name", ["group", "group_mean", "leave_one_out"])
def test_other_groups_do_not_matter(name):
    batch = random_batch(0)
    alone = batch[1] == 3
    np.testing.assert_array_equal(
        ESTIMATORS[name](*batch)[alone], ESTIMATORS[name](*(x[alone] for x in batch))
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_lone_members_and_invalid_ones_give_exactly_zero(name):
    # 0.1 + 0.1 + 0.1 is not 0.3: a difference from the mean would not be exactly zero.
    rewards = np.array([0.1, 0.1, 0.1, 0.1, np.nan, 0.1, np.inf])
    groups = np.array([0, 0, 0, 1, 2, 2, 2])
    valid = np.array([True, True, True, True, False, True, False])
    lengths = np.array([1, 2, 3, 4, 5, 6, 7])
    assert ESTIMATORS[name](rewards, groups, valid, lengths).tolist() == [0.0] * 7
    if name in advantages.COMPARES_A_GROUP:
        rewards[[3, 5]] = 5.0, 1.0  # alone in their groups, so with nothing to compare
        assert ESTIMATORS[name](rewards, groups, valid, lengths).tolist() == [0.0] * 7
    else:
        rewards[[3, 5]] = 5.0, 1.0
        assert ESTIMATORS[name](rewards, groups, valid, lengths)[3] > 0


def test_by_hand():
    one_of_four = (
        np.array([1.0, 0, 0, 0]),
        np.zeros(4, int),
        np.ones(4, bool),
        np.array([3, 1, 1, 1]),
    )
    for name, want in {
        "group": [1.5, -0.5, -0.5, -0.5],
        "group_mean": [0.75, -0.25, -0.25, -0.25],
        "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3],
        # Six tokens, half of them with reward 1: mean 1/2, sample variance 6/4/5.
        "batch": np.array([0.5, -0.5, -0.5, -0.5]) / np.sqrt(0.3),
        # 0.75 and -0.25, three tokens each.
        "batch_baseline": np.array([0.5, -0.5, -0.5, -0.5]) / np.sqrt(0.3),
    }.items():
        np.testing.assert_allclose(ESTIMATORS[name](*one_of_four), want, rtol=1e-5)


def test_tokens_with_one_reward_per_response_are_the_batch_estimator():
    rewards, groups, valid, lengths = random_batch(0)
    tokens = batch_per_token([np.full(n, r) for r, n in zip(rewards, lengths)], valid)
    one = ESTIMATORS["batch"](rewards, groups, valid, lengths)
    for per_token, whole, n in zip(tokens, one, lengths):
        np.testing.assert_allclose(per_token, np.full(n, whole), rtol=0, atol=1e-12)


def test_overlong_penalty_by_hand():
    # Limit 10, buffer 4: free up to 6 tokens, then a quarter per token.
    got = overlong_penalty(np.array([1, 6, 7, 8, 9, 10]), 10, 4)
    assert got.tolist() == [0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(np.array([1, 10]), 10, 0).tolist() == [0, 0]


@pytest.mark.parametrize(
    "rewards, groups, valid, lengths, words",
    [
        ([1.0, np.nan], [0, 0], [True, True], [1, 1], "response 1 is marked valid"),
        ([1.0, 2.0], [0], [True, True], [1, 1], "one length"),
        ([1.0, 2.0], [0, 0], [True, True], [1], "one length"),
        ([1.0, 2.0], [0.0, 0.0], [True, True], [1, 1], "integers"),
        ([1.0, 2.0], [0, 0], [True, True], [1.0, 1.0], "integers"),
        ([1.0, 2.0], [0, 0], [1, 1], [1, 1], "bool"),
    ],
)
def test_bad_input(rewards, groups, valid, lengths, words):
    with pytest.raises(ValueError, match=words):
        check(rewards, groups, valid, lengths)
