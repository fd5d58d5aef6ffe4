"""One frozen dataclass per run, made from the ConfigDict of a config file.

Each section's dataclass, with its checks, lives beside the module that reads it.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping

from tlt_jax.rl.data_config import DataConfig
from tlt_jax.rl.evaluate import EvaluationConfig
from tlt_jax.rl.policy import PolicyConfig
from tlt_jax.rl.policy_trainer import TrainerConfig
from tlt_jax.rl.reward_config import RewardConfig
from tlt_jax.rl.rollout import RolloutConfig
from tlt_jax.rl.warm_up import WarmUpConfig


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int  # RL steps
    data: DataConfig
    policy: PolicyConfig = PolicyConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    seed: int = 0  # of the sampling noise and of random weights; data has its own

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^32): keys take 32 bits of it")
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature=0: all responses to a prompt would be the same, and nothing "
                "could be learned from comparing them; set it above 0"
            )
        if self.rollout.samples < 2:
            raise ValueError(
                f"rollout.samples={self.rollout.samples}: a response is compared with the others "
                "to its prompt, so there must be at least 2"
            )
        if self.rollout.top_p < 1 or self.rollout.top_k > 0:
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p}, top_k={self.rollout.top_k}: training needs "
                "the whole distribution (top_p=1, top_k=0), because the trainer's log-probs do not "
                "know which tokens were cut"
            )
        if self.evaluation.prompts > self.data.eval_size:
            raise ValueError(
                f"evaluation.prompts={self.evaluation.prompts} is more than data.eval_size="
                f"{self.data.eval_size}; raise the latter, or set evaluation.prompts=0 for none"
            )


def from_dict(kind: type, values: Mapping, where: str = "config"):
    """Build dataclass `kind` from a mapping (a ConfigDict, say), recursively.

    Raises TypeError naming an unknown key, a missing one or a value of the wrong type, and
    ValueError from the section's own checks.
    """
    if not isinstance(values, Mapping) and not hasattr(values, "items"):
        raise TypeError(f"{where} must be a section, got {values!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in fields:
            raise TypeError(f"{where}.{name} is no known setting; known here: {sorted(fields)}")
        arguments[name] = _convert(hints[name], value, f"{where}.{name}")
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            raise TypeError(f"{where}.{name} is missing; it has no default")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _convert(hint, value, where: str):
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        kinds = [k for k in typing.get_args(hint) if k is not type(None)]
        return _convert(kinds[0], value, where)
    if origin is tuple or hint is tuple:
        # A mapping stands for a tuple of named parts, which the section itself builds.
        if isinstance(value, (list, tuple)):
            return tuple(value)
        if hasattr(value, "to_dict"):
            return value.to_dict()
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{where}={value!r} must be a list, not {type(value).__name__}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(
            f"{where}={value!r} must be of type {hint.__name__}, not {type(value).__name__}"
        )
    return value


def to_dict(config) -> dict:
    """Plain nested dictionaries of a config, as config.json holds them."""
    return dataclasses.asdict(config)
