"""RL algorithms by name: presets over a few independent parts, and how the parts go together.

The parts are pure functions, each in the file that computes it: advantages (`advantages.py`),
ratio, clipping, KL and denominators (`loss.py`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tlt_jax.rl import advantages
from tlt_jax.rl.loss import AGGREGATIONS, KL_ESTIMATORS, RATIOS

# What an algorithm does where its preset says nothing else. The KL is off in all of them, because
# it costs a second model; kl and kl_in say what a kl_coef greater than 0 turns on.
DEFAULTS = {
    "advantage": "group",
    "ratio": "token",
    "aggregation": "token_mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "kl": "k3",
    "kl_coef": 0.0,
    "kl_in": "loss",
    "importance_cap": 0.0,
    "epochs": 1,
    "mini_batches": 1,
    "dynamic_sampling": False,
    "overlong_buffer": 0,
}
PRESETS = {
    # arXiv 2402.03300. The paper's own mean per response is aggregation="sequence_mean".
    "grpo": {},
    # arXiv 2503.20783: neither the std nor the length of a response weighs it.
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    # arXiv 2503.14476. The overlong buffer depends on max_new_tokens and stays off until it is set;
    # the paper's is a fifth of it.
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True},
    # arXiv 2402.14740: the log-prob of a response is the sum of its tokens', so no mean over them.
    # The paper takes one step per rollout, where clipping does nothing.
    "rloo": {
        "advantage": "leave_one_out",
        "aggregation": "constant",
        "kl": "k1",
        "kl_in": "reward",
    },
    # arXiv 2507.18071: the ratio of a sequence moves far less than that of a token.
    "gspo": {
        "ratio": "sequence",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # arXiv 2501.03262, both.
    "reinforce++": {"advantage": "batch", "kl": "k1", "kl_in": "reward"},
    "reinforce++_baseline": {"advantage": "batch_baseline", "kl": "k2"},
}
KL_PLACES = ("loss", "reward")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """name picks a preset; a setting of None is what the preset says, and is filled in at once.

    So a config has concrete settings only, and another name needs a new config, not `replace`.
    """

    name: str = "grpo"
    advantage: str | None = None  # of `advantages.ESTIMATORS`
    ratio: str | None = None  # of `loss.RATIOS`: token, sequence
    aggregation: str | None = None  # of `loss.AGGREGATIONS`: token_mean, sequence_mean, constant
    clip_low: float | None = None  # ratio held within [1 - clip_low, 1 + clip_high]
    clip_high: float | None = None
    dual_clip: float | None = None  # largest ratio where the advantage is negative; 0: off
    kl: str | None = None  # of `loss.KL_ESTIMATORS`: k1, k2, k3
    kl_coef: float | None = None  # 0: no KL, and no reference policy
    kl_in: str | None = None  # loss, reward
    importance_cap: float | None = None  # of trainer / rollout probability; 0: no correction
    epochs: int | None = None  # passes over a rollout
    mini_batches: int | None = None  # optimizer steps per epoch
    dynamic_sampling: bool | None = None  # draw until enough groups have differing rewards
    max_sampling_rounds: int | None = None  # batches of prompts that it draws at most
    overlong_buffer: int | None = None  # tokens before max_new_tokens that cost reward; 0: off

    def __post_init__(self):
        if self.name not in PRESETS:
            raise ValueError(f"name={self.name!r} is not known; use one of {', '.join(PRESETS)}")
        for name, value in (DEFAULTS | PRESETS[self.name]).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.max_sampling_rounds is None:
            object.__setattr__(self, "max_sampling_rounds", 10 if self.dynamic_sampling else 1)
        self._check()

    def _check(self):
        for name, known in (
            ("advantage", advantages.ESTIMATORS),
            ("ratio", RATIOS),
            ("aggregation", AGGREGATIONS),
            ("kl", KL_ESTIMATORS),
            ("kl_in", KL_PLACES),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(known)}")
        for name in ("clip_low", "clip_high", "kl_coef", "overlong_buffer"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("epochs", "mini_batches", "max_sampling_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dual_clip and not self.dual_clip > 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be greater than 1, or 0 for none")
        if self.importance_cap and not self.importance_cap >= 1:
            raise ValueError(
                f"importance_cap={self.importance_cap} must be at least 1, or 0 for no correction"
            )
        if self.kl_coef and self.kl_in == "reward" and self.kl != "k1":
            raise ValueError(
                f"kl={self.kl!r} in the reward has a gradient that is not that of the KL; use "
                "kl='k1', or kl_in='loss'"
            )
        if self.dynamic_sampling != (self.max_sampling_rounds > 1):
            raise ValueError(
                f"dynamic_sampling={self.dynamic_sampling} and max_sampling_rounds="
                f"{self.max_sampling_rounds} do not fit: set the first and at least 2 rounds, or "
                "neither"
            )

    @property
    def min_samples(self) -> int:
        """Responses per prompt without which nothing could be learned."""
        compares = self.advantage in advantages.COMPARES_A_GROUP or self.dynamic_sampling
        return 2 if compares else 1

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy are needed, in the loss or in the reward."""
        return self.kl_coef > 0

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs * self.mini_batches

    def loss_settings(self) -> dict:
        """The settings of `loss.policy_loss`."""
        return {
            "ratio": self.ratio,
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "dual_clip": self.dual_clip,
            "importance_cap": self.importance_cap,
            "kl": self.kl,
            "kl_coef": self.kl_coef if self.kl_in_loss else 0.0,
        }


def assign_advantages(
    algorithm: AlgorithmConfig,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    valid_N: np.ndarray,
    lengths_N: np.ndarray,
    kl: Sequence[np.ndarray] | None = None,
) -> list[float | np.ndarray]:
    """The advantage of each of N responses: a number, or one per token [R]; 0 where not valid.

    The arrays are those of `advantages.ESTIMATORS`. kl: per response log(pi / pi_ref) of its tokens
    under the policy that sampled them; needed with a KL in the reward, and only there. The
    reward then is r - kl_coef * (sum of kl over the response), whose expected gradient is that of
    r - kl_coef * KL of whole responses (arXiv 2402.14740). REINFORCE++ ("batch") gives
    token t the return that comes after it, r - kl_coef * (sum of kl from t on), and normalises
    those (arXiv 2501.03262).
    Raises ValueError for what `advantages.check` refuses, and for kl that is missing, not wanted,
    of other lengths or not finite.
    """
    arrays = advantages.check(rewards_N, groups_N, valid_N, lengths_N)
    rewards_N, groups_N, valid_N, lengths_N = arrays
    if algorithm.kl_in_reward != (kl is not None):
        raise ValueError(
            f"kl_coef={algorithm.kl_coef}, kl_in={algorithm.kl_in!r}: the KL of every response is "
            f"{'needed' if kl is None else 'not used'} for its advantage"
        )
    if kl is None:
        return advantages.ESTIMATORS[algorithm.advantage](*arrays).tolist()
    costs = _checked_costs(algorithm.kl_coef, kl, valid_N, lengths_N)
    if algorithm.advantage == "batch":
        returns = [r - np.cumsum(c[::-1])[::-1] for r, c in zip(rewards_N, costs)]
        return advantages.batch_per_token(returns, valid_N)
    rewards_N = rewards_N - np.array([c.sum() for c in costs])
    return advantages.ESTIMATORS[algorithm.advantage](
        rewards_N, groups_N, valid_N, lengths_N
    ).tolist()


def _checked_costs(coef: float, kl, valid_N, lengths_N) -> list[np.ndarray]:
    """coef * kl of every token, zeros for responses that are not valid."""
    if len(kl) != len(lengths_N):
        raise ValueError(f"kl has {len(kl)} entries for {len(lengths_N)} responses")
    costs = []
    for i, (values, ok, length) in enumerate(zip(kl, valid_N, lengths_N)):
        values = np.asarray(values, np.float64)
        if ok and (values.shape != (length,) or not np.isfinite(values).all()):
            raise ValueError(
                f"kl of response {i} must be {length} finite numbers, got {values.shape} of which "
                f"{np.isfinite(values).sum()} are finite"
            )
        costs.append(coef * values if ok else np.zeros(length))
    return costs
