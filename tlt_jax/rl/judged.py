"""A graded rollout as arrays, and what of it the update trains on."""

import dataclasses
from collections.abc import Set

import numpy as np

from tlt_jax.rl.algorithm import AlgorithmConfig, assign_advantages
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.rewards import Score
from tlt_jax.rl.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class Judged:
    """One entry per response, in the rollout's order."""

    rollout: Rollout
    scores: list[Score]
    valid_N: np.ndarray  # bool: graded successfully
    chosen_N: np.ndarray  # bool: of a group that is trained on
    rewards_N: np.ndarray  # float64, NaN where not valid
    advantages: list[float | np.ndarray]  # one or per token; 0 where not valid or not chosen

    @classmethod
    def of(cls, rollout: Rollout, chosen: Set[int], algorithm: AlgorithmConfig) -> "Judged":
        """chosen: draws of the groups to train on."""
        scores = [g.score for g in rollout.graded]
        valid_N = np.array([s.status == "ok" for s in scores])
        groups_N = np.array([g.prompt.draw for g in rollout.graded])
        chosen_N = np.array([draw in chosen for draw in groups_N])
        rewards_N = np.array([s.value if s.status == "ok" else np.nan for s in scores])
        lengths_N = np.array([len(g.response.tokens) for g in rollout.graded])
        advantages = assign_advantages(
            algorithm, rewards_N, groups_N, valid_N & chosen_N, lengths_N
        )
        return cls(rollout, scores, valid_N, chosen_N, rewards_N, advantages)

    def samples(self) -> list[Sample]:
        """What the update trains on: the validly graded responses of the chosen groups."""
        return [
            Sample(
                np.array(g.prompt.ids, np.int32),
                g.response.tokens,
                advantage,
                g.response.log_probs,
                group=g.prompt.draw,
            )
            for g, advantage, kept in zip(
                self.rollout.graded, self.advantages, self.valid_N & self.chosen_N
            )
            if kept
        ]
