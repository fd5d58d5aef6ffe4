"""Held-out accuracy, by the same engine, in a noise domain of its own."""

import dataclasses

from tlt_jax.rl.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """pass@1 on held-out prompts: before the first step, every `every` steps, and at the end.

    The same prompts with the same noise every time, so that two evaluations differ by the policy
    alone. Sampled at `temperature` (0: greedy), `samples` responses to each of `prompts` prompts;
    0 prompts: no evaluation.
    """

    every: int = 10
    prompts: int = 64
    samples: int = 1
    temperature: float = 1.0

    def __post_init__(self):
        for name, least in (("every", 1), ("prompts", 0), ("samples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


def accuracy(rollout: Rollout) -> float:
    """Mean reward of all responses; one whose grading failed counts as wrong (reward 0)."""
    scores = [g.score.value if g.score.status == "ok" else 0.0 for g in rollout.graded]
    return sum(scores) / len(scores)
