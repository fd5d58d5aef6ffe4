"""A graded rollout as arrays, and what of it the update trains on."""

import dataclasses
from collections.abc import Sequence, Set

import numpy as np

from tlt_jax.rl.advantages import overlong_penalty
from tlt_jax.rl.algorithm import AlgorithmConfig, assign_advantages
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.rewards import Score
from tlt_jax.rl.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class Judged:
    """One entry per response, in the rollout's order: by draw, then member."""

    rollout: Rollout
    scores: list[Score]
    groups_N: np.ndarray  # int, draw of the prompt
    lengths_N: np.ndarray  # int, tokens
    rewards_N: np.ndarray  # float64, NaN where grading failed
    valid_N: np.ndarray  # bool, where it did not
    trained_N: np.ndarray  # bool, valid and of a group that is trained on

    @classmethod
    def of(cls, rollout: Rollout, chosen: Set[int]) -> "Judged":
        """chosen: draws of the groups to train on."""
        scores = [g.score for g in rollout.graded]
        groups_N = np.array([g.prompt.draw for g in rollout.graded])
        valid_N = np.array([s.status == "ok" for s in scores])
        return cls(
            rollout,
            scores,
            groups_N,
            np.array([len(g.response.tokens) for g in rollout.graded]),
            np.array([s.value if s.status == "ok" else np.nan for s in scores]),
            valid_N,
            valid_N & np.array([draw in chosen for draw in groups_N]),
        )

    def samples(self) -> list[Sample]:
        """What the update trains on, without advantages yet."""
        return [
            Sample(
                np.array(g.prompt.ids, np.int32),
                g.response.tokens,
                0.0,
                g.response.log_probs,
                group=g.prompt.draw,
            )
            for g, trained in zip(self.rollout.graded, self.trained_N)
            if trained
        ]

    def advantages(
        self,
        algorithm: AlgorithmConfig,
        max_new_tokens: int,
        kl: Sequence[np.ndarray] | None = None,
    ) -> list[float | np.ndarray]:
        """One advantage, or one per token, of every sample. kl: see `assign_advantages`."""
        penalty_N = overlong_penalty(self.lengths_N, max_new_tokens, algorithm.overlong_buffer)
        if kl is not None:
            known = iter(kl)
            kl = [next(known) if trained else np.zeros(0) for trained in self.trained_N]
        advantages = assign_advantages(
            algorithm,
            self.rewards_N + penalty_N,
            self.groups_N,
            self.trained_N,
            self.lengths_N,
            kl,
        )
        return [a for a, trained in zip(advantages, self.trained_N) if trained]
