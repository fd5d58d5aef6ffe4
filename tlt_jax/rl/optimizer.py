"""AdamW with a learning-rate schedule: one step on a gradient, clipped by its global norm."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tlt_jax.sharding.rules import TRAINING, constrain

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Optimizer and micro-batches of the policy update; its loss is the algorithm's."""

    learning_rate: float = 1e-5
    schedule: str = "constant"  # after the warm-up: constant, or linear or cosine down to zero
    warmup_steps: int = 0
    total_steps: int = 0  # linear, cosine: optimizer steps until zero, warm-up included
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # of weight matrices; norms and biases are left alone
    clip_norm: float = 1.0  # of the gradient of a whole optimizer step
    micro_batch_tokens: int = 2048  # tokens of a micro-batch, padding included
    pack: bool = True  # several samples per row
    head_chunk: int = 1024  # tokens whose logits exist at once

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not known; use one of {SCHEDULES}")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule={self.schedule!r} needs total_steps > warmup_steps, got "
                f"total_steps={self.total_steps}, warmup_steps={self.warmup_steps}"
            )
        for name in ("learning_rate", "clip_norm", "micro_batch_tokens", "head_chunk", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        for name in ("weight_decay", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")

    def learning_rate_at(self, step):
        """Learning rate of optimizer step number `step` (from 0): linear warm-up, then the
        schedule."""
        warm = jnp.minimum(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.schedule == "constant":
            return self.learning_rate * warm
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        done = jnp.clip(done, 0.0, 1.0)
        left = 1 - done if self.schedule == "linear" else (1 + jnp.cos(jnp.pi * done)) / 2
        return self.learning_rate * warm * left


@flax.struct.dataclass
class TrainState:
    params: dict  # master weights, stacked layout
    opt_state: tuple
    step: jax.Array  # [] int32, optimizer steps done


def optimizer(config: TrainerConfig) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101). Clipping is done before it, on the summed gradient."""

    def decayed(params):
        def is_matrix(path, _):
            name = path[-1].key
            return not name.endswith("norm") and not name.startswith("b_")

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.adamw(
        config.learning_rate_at,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def init_optimizer(config: TrainerConfig, params: dict, mesh: Mesh | None = None) -> tuple:
    """The optimizer's state before the first update; split over a mesh as `TRAINING` says."""
    state = optimizer(config).init(params)
    return state if mesh is None else constrain(mesh, TRAINING, state)


global_norm = jax.jit(optax.tree.norm)


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="state")
def apply_gradient(
    config: TrainerConfig, state: TrainState, grads: dict, norm, mesh: Mesh
) -> TrainState:
    """One AdamW step with `grads`, scaled down where their global norm exceeds `clip_norm`."""
    scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.params)
    state = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
    return constrain(mesh, TRAINING, state)
