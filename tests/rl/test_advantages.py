"""Group-relative advantages: an independent implementation, and laws."""

import statistics

import numpy as np
import pytest

from tlt_jax.rl.advantages import group_advantages


def reference(rewards, groups, valid, normalize_std, eps=1e-6):
    """By dictionaries and the standard library."""
    members = {}
    for i, group in enumerate(groups):
        if valid[i]:
            members.setdefault(int(group), []).append(i)
    result = [0.0] * len(rewards)
    for indices in members.values():
        values = [float(rewards[i]) for i in indices]
        if len(set(values)) > 1:
            mean, std = statistics.fmean(values), statistics.stdev(values)
            for i in indices:
                result[i] = (float(rewards[i]) - mean) / (std + eps if normalize_std else 1.0)
    return result


def random_batch(seed, n=60):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.1, 1 / 3, 1.0], n) if seed % 2 else rng.normal(size=n)
    groups = rng.choice([-7, 3, 4, 10**12, 99, 100], n, p=[0.3, 0.3, 0.2, 0.15, 0.03, 0.02])
    valid = rng.random(n) < 0.8
    return np.where(valid, rewards, np.nan), groups, valid


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference(seed, normalize_std):
    rewards, groups, valid = random_batch(seed)
    got = group_advantages(rewards, groups, valid, normalize_std=normalize_std)
    np.testing.assert_allclose(
        got, reference(rewards, groups, valid, normalize_std), rtol=0, atol=1e-12
    )
    assert got.dtype == np.float64
    assert np.all(got[~valid] == 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_permutation_permutes_the_result_bit_for_bit(seed):
    rewards, groups, valid = random_batch(seed)
    order = np.random.default_rng(seed + 100).permutation(len(rewards))
    straight = group_advantages(rewards, groups, valid)
    shuffled = group_advantages(rewards[order], groups[order], valid[order])
    assert straight[order].tobytes() == shuffled.tobytes()


def test_other_groups_do_not_matter():
    rewards, groups, valid = random_batch(0)
    alone = groups == 3
    np.testing.assert_array_equal(
        group_advantages(rewards, groups, valid)[alone],
        group_advantages(rewards[alone], groups[alone], valid[alone]),
    )


def test_equal_rewards_lone_members_and_invalid_ones_give_exactly_zero():
    # 0.1 + 0.1 + 0.1 is not 0.3: a difference from the mean would not be exactly zero.
    rewards = np.array([0.1, 0.1, 0.1, 5.0, np.nan, 1.0, np.inf])
    groups = np.array([0, 0, 0, 1, 2, 2, 2])
    valid = np.array([True, True, True, True, False, True, False])
    assert group_advantages(rewards, groups, valid).tolist() == [0.0] * 7


def test_by_hand_with_the_sample_standard_deviation():
    got = group_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [True] * 4, eps=0.0)
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)


@pytest.mark.parametrize(
    "rewards, groups, valid, words",
    [
        ([1.0, np.nan], [0, 0], [True, True], "response 1 is marked valid"),
        ([1.0, 2.0], [0], [True, True], "one length"),
        ([1.0, 2.0], [0.0, 0.0], [True, True], "integers"),
        ([1.0, 2.0], [0, 0], [1, 1], "bool"),
    ],
)
def test_bad_input(rewards, groups, valid, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, groups, valid)
