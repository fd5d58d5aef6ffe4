"""One frozen dataclass per run, made from the ConfigDict of a config file.

Each section's dataclass, with its checks, lives beside the module that reads it.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence

from tlt_jax.checkpoint import CheckpointConfig
from tlt_jax.loggers import LOGGERS
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.data_config import DataConfig
from tlt_jax.rl.evaluate import EvaluationConfig
from tlt_jax.rl.optimizer import TrainerConfig
from tlt_jax.rl.policy import PolicyConfig
from tlt_jax.rl.reward_config import RewardConfig
from tlt_jax.rl.rollout import RolloutConfig
from tlt_jax.rl.warm_up import WarmUpConfig
from tlt_jax.sharding.distributed import DistributedConfig
from tlt_jax.sharding.mesh import MeshConfig

SCHEDULES = ("fixed", "fast")


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int  # RL steps
    data: DataConfig
    policy: PolicyConfig = PolicyConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    schedule: str = "fixed"  # or "fast": decisions by the clock, content equal up to ties
    logger: str = ""  # or "tensorboard", "wandb": a copy of metrics.jsonl for a dashboard
    seed: int = 0  # of the sampling noise and of random weights; data has its own

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not known; use one of {SCHEDULES}")
        if self.logger not in LOGGERS:
            raise ValueError(f"logger={self.logger!r} is not known; use one of {tuple(LOGGERS)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^32): keys take 32 bits of it")
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature=0: all responses to a prompt would be the same, and nothing "
                "could be learned from comparing them; set it above 0"
            )
        self._check_algorithm()
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

    def _check_algorithm(self):
        algorithm, rollout = self.algorithm, self.rollout
        if rollout.samples < algorithm.min_samples:
            raise ValueError(
                f"rollout.samples={rollout.samples}: algorithm {algorithm.name!r} compares a "
                f"response with the others to its prompt, so there must be at least "
                f"{algorithm.min_samples}"
            )
        if algorithm.mini_batches > rollout.prompts:
            raise ValueError(
                f"algorithm.mini_batches={algorithm.mini_batches} is more than rollout.prompts="
                f"{rollout.prompts}: a mini-batch holds whole groups"
            )
        optimizer_steps = self.steps * algorithm.optimizer_steps
        if self.trainer.schedule != "constant" and self.trainer.total_steps < optimizer_steps:
            raise ValueError(
                f"trainer.total_steps={self.trainer.total_steps}: the learning rate would be 0 "
                f"before the end of {self.steps} steps of {algorithm.optimizer_steps} optimizer "
                f"steps each; set it to at least {optimizer_steps}"
            )
        if algorithm.overlong_buffer > rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than "
                f"rollout.max_new_tokens={rollout.max_new_tokens}; the paper's is a fifth of it"
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


def differences(saved: Mapping, now: Mapping, may_change: Sequence[str] = ()) -> list[str]:
    """Settings that differ between two `to_dict`s, as "a.b: 1 there, 2 here".

    may_change: names of settings or sections that are left out. Tuples and lists are the same.
    """
    saved, now = (dict(_flat(json.loads(json.dumps(values)))) for values in (saved, now))
    return [
        f"{name}: {saved.get(name, 'missing')!r} there, {now.get(name, 'missing')!r} here"
        for name in {**now, **saved}
        if name.split(".")[0] not in may_change
        and saved.get(name, _MISSING) != now.get(name, _MISSING)
    ]


_MISSING = object()


def _flat(values: Mapping, prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def to_dict(config) -> dict:
    """Plain nested dictionaries of a config, as config.json holds them."""
    return dataclasses.asdict(config)
