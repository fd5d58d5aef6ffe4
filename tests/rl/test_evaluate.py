"""pass@k against the enumeration of all choices; what a rollout's rewards become."""

import itertools
import math
import types

import numpy as np
import pytest

from tlt_jax.rl import evaluate
from tlt_jax.rl.data import Example, PromptData
from tlt_jax.rl.evaluate import EvaluationConfig, pass_at_k
from tlt_jax.rl.rewards import Score


def enumerated(n, correct, k):
    """The share of all k-subsets of n samples, the first `correct` right, that hold a right one."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(min(subset) < correct for subset in subsets) / len(subsets)


def naive(n, correct, k):
    """1 - (1 - c/n)^k, the usual biased estimate: it draws with replacement."""
    return 1 - (1 - correct / n) ** k


CASES = [(n, c, k) for n in range(1, 9) for c in range(n + 1) for k in range(1, n + 1)]


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    got = [pass_at_k(*case) for case in CASES]
    np.testing.assert_allclose(got, [enumerated(*case) for case in CASES], atol=1e-14)
    wrong = [naive(*case) for case in CASES]
    assert np.max(np.abs(np.subtract(got, wrong))) > 0.1


def test_pass_at_k_is_unbiased_and_the_naive_estimate_is_not():
    """Averaged over n samples of success chance p, it is the chance that one of k succeeds."""
    n, k, p = 6, 3, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    true = 1 - (1 - p) ** k
    mean = sum(q * pass_at_k(n, c, k) for c, q in enumerate(chance))
    assert mean == pytest.approx(true, abs=1e-14)
    assert abs(sum(q * naive(n, c, k) for c, q in enumerate(chance)) - true) > 0.03


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    exact = 1 - math.comb(19_000, 5_000) / math.comb(20_000, 5_000)
    assert pass_at_k(20_000, 1_000, 5_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10_000, 9_000, 1_001) == 1.0


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_impossible_counts_are_refused(case):
    with pytest.raises(ValueError, match=r"needs 0 <= correct <= n and 1 <= k <= n"):
        pass_at_k(*case)


def rollout(*groups):
    graded = [
        types.SimpleNamespace(prompt=types.SimpleNamespace(draw=draw), score=score)
        for draw, scores in enumerate(groups)
        for score in scores
    ]
    return types.SimpleNamespace(graded=graded)


def ok(value):
    return Score(value, "ok", "")


def test_measures_of_a_rollout():
    """Half a reward is not correct; a failed grading is a wrong answer of reward 0."""
    failed = [Score(None, status, "why") for status in ("error", "timeout", "invalid")]
    done = rollout(
        [ok(1.0), ok(0.5), ok(0.0), ok(0.0)],
        [ok(1.0), *failed],
        [ok(0.5), ok(0.5), ok(0.99), ok(-1.0)],
    )
    got = evaluate.held_out_measures(done, k=2)
    assert got["avg_at_k"] == pytest.approx((1.5 + 1.0 + 0.99) / 12)
    assert got["pass_at_1"] == pytest.approx(2 / 12)
    assert got["pass_at_k"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)


def test_with_one_sample_all_three_are_the_accuracy():
    got = evaluate.held_out_measures(rollout([ok(1.0)], [ok(0.0)], [ok(1.0)], [ok(0.0)]), k=1)
    assert got == {"avg_at_k": 0.5, "pass_at_1": 0.5, "pass_at_k": 0.5}


def test_k_beyond_the_samples_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"k=4 is more than samples=2: .*raise samples or lower k"):
        EvaluationConfig(samples=2, k=4)
    with pytest.raises(ValueError, match=r"k=0 must be at least 1"):
        EvaluationConfig(k=0)
    assert EvaluationConfig(samples=4, k=4).k == 4


def test_fewer_prompts_than_are_held_out_come_from_all_of_them():
    """Held-out examples come task by task; a part of them is to have every task."""
    examples = tuple(
        Example(ids=(1, i), text=str(i), source="ab"[i >= 5], entry={}, where="") for i in range(10)
    )
    data = PromptData(train=(), held_out=examples, num_too_long=0, num_overlapping=0)
    assert [p.source for p in evaluate.held_out_prompts(data, 4)] == ["a", "a", "b", "b"]
    assert [p.text for p in evaluate.held_out_prompts(data, 10)] == [str(i) for i in range(10)]
    assert len(evaluate.held_out_prompts(data, 99)) == 10
    assert evaluate.held_out_prompts(data, 0) == []
