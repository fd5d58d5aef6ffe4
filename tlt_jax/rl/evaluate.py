"""Held-out evaluation: pass@1, pass@k and avg@k, by the same engine, with noise of its own."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tlt_jax.rl.data import Prompt, PromptData
from tlt_jax.rl.prompt_stream import PromptStream
from tlt_jax.rl.rollout import Graded, Rollout
from tlt_jax.spec.noise import EVALUATE

CORRECT = 1.0  # the least reward of a right answer


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """On held-out prompts: before the first step, every `every` steps, and at the end.

    The same prompts with the same noise every time, so that two evaluations differ by the policy
    alone. Sampled at `temperature` (0: greedy), `samples` responses to each of `prompts` prompts;
    0 prompts: no evaluation. pass@k is estimated from all samples, so `k` is at most `samples`.
    """

    every: int = 10
    prompts: int = 64
    samples: int = 1
    k: int = 1
    temperature: float = 1.0

    def __post_init__(self):
        for name, least in (("every", 1), ("prompts", 0), ("samples", 1), ("k", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature=0 with samples={self.samples}: greedy samples are all the same; take "
                "1, or a temperature above 0"
            )
        if self.k > self.samples:
            raise ValueError(
                f"k={self.k} is more than samples={self.samples}: pass@k needs at least k samples "
                "of each prompt; raise samples or lower k"
            )


def held_out_prompts(data: PromptData, count: int) -> list[Prompt]:
    """`count` of the held-out prompts, as every evaluation draws them: evenly spaced over all of
    them, because they come task by task."""
    total = len(data.held_out)
    count = min(count, total)
    examples = [data.held_out[i * total // count] for i in range(count)]
    if not examples:
        return []
    return PromptStream(examples, seed=0, domain=EVALUATE, shuffle=False).take(len(examples))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the `correct` ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021, arXiv 2107.03374, eq. 1,
    as the product of (1 - k / i) over i = n - c + 1 … n, which no binomial overflows.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got {n=}, {correct=}, {k=}"
        )
    if n - correct < k:  # every choice of k holds a correct one
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def prompt_rewards(graded: Sequence[Graded]) -> dict[int, np.ndarray]:
    """Rewards [M] of the M samples of each prompt, by draw; a failed grading is a wrong answer."""
    rewards: dict[int, list[float]] = {}
    for g in graded:
        value = g.score.value if g.score.status == "ok" else 0.0
        rewards.setdefault(g.prompt.draw, []).append(value)
    return {draw: np.array(values) for draw, values in rewards.items()}


def measures(rewards_M: np.ndarray, k: int) -> dict[str, float]:
    """What one prompt's samples say: avg_at_k (mean reward of all), pass_at_1, pass_at_k."""
    n, correct = len(rewards_M), int(np.sum(rewards_M >= CORRECT))
    return {
        "avg_at_k": float(np.mean(rewards_M)),
        "pass_at_1": pass_at_k(n, correct, 1),
        "pass_at_k": pass_at_k(n, correct, k),
    }


def held_out_measures(rollout: Rollout, k: int) -> dict[str, float]:
    """The means of `measures` over the prompts of an evaluation, all equally weighted."""
    each = [measures(rewards_M, k) for rewards_M in prompt_rewards(rollout.graded).values()]
    return {name: float(np.mean([m[name] for m in each])) for name in each[0]}
