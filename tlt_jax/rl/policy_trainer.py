"""The policy update: gradients summed over micro-batches, clipped, applied with AdamW.

Three compiled programs, none of which depends on how many samples or tokens an update has:
`add_gradient` (one micro-batch into a donated accumulator), `global_norm`, and `apply_gradient`
(donated state). Losses are divided by the token count of the whole update, so their gradients
simply add up.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax.models import layers, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.log_probs import token_log_probs
from tlt_jax.rl import packing
from tlt_jax.rl.loss import grpo_loss
from tlt_jax.rl.packing import BatchShape, PackedBatch, Sample

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Optimizer, loss and micro-batches of the policy update."""

    learning_rate: float = 1e-5
    schedule: str = "constant"  # after the warm-up: constant, or linear or cosine down to zero
    warmup_steps: int = 0
    total_steps: int = 0  # linear, cosine: updates until zero, warm-up included
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # of weight matrices; norms and biases are left alone
    clip_norm: float = 1.0  # of the gradient of the whole update
    clip_low: float = 0.2  # ratio held within [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
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
        for name in ("weight_decay", "warmup_steps", "clip_low", "clip_high"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")

    def learning_rate_at(self, step):
        """Learning rate of update number `step` (from 0): linear warm-up, then the schedule."""
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
    step: jax.Array  # [] int32, updates done


@flax.struct.dataclass
class Total:
    """What micro-batches add up to."""

    grads: dict
    loss: jax.Array
    clip_fraction: jax.Array  # tokens whose ratio was clipped, of all
    computed: jax.Array  # tokens, those of `gap_*`
    gap_sum: jax.Array  # of |trainer log-prob - rollout log-prob|
    gap_max: jax.Array
    gap_outside: jax.Array  # tokens whose ratio of the two leaves [0.9, 1.1]


class NonFiniteError(FloatingPointError):
    """A loss or gradient is NaN or infinite; the parameters are those before the update."""


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


@functools.partial(jax.jit, static_argnames="config")
def init_optimizer(config: TrainerConfig, params: dict) -> tuple:
    """The optimizer's state before the first update."""
    return optimizer(config).init(params)


@jax.jit
def zero_total(params: dict) -> Total:
    """The accumulator before the first micro-batch."""
    return Total(jax.tree.map(jnp.zeros_like, params), *(jnp.zeros(()) for _ in range(6)))


global_norm = jax.jit(optax.tree.norm)


@functools.partial(jax.jit, static_argnames=("model", "config", "temperature"))
def batch_log_probs(model: ModelConfig, config: TrainerConfig, temperature, params, batch):
    """Log-probs [N] of the scored tokens under `params`, at the sampling temperature."""
    mask_BTT = layers.causal_mask(batch.segments, batch.prefixes)
    out = transformer.forward(model, params, batch.tokens, batch.positions, mask_BTT)
    hidden_ND = out.hidden.reshape(-1, model.width)[batch.at]
    return token_log_probs(
        model,
        params,
        hidden_ND,
        batch.targets,
        batch.count,
        temperature=temperature,
        chunk=config.head_chunk,
    )


@functools.partial(
    jax.jit, static_argnames=("model", "config", "temperature"), donate_argnames="total"
)
def add_gradient(
    model, config, temperature, params, total: Total, batch: PackedBatch, denominator
) -> Total:
    """Add the loss, gradient and metrics of one micro-batch to `total`.

    denominator: scored tokens of the whole update, over all micro-batches and devices.
    """
    mask_N = jnp.arange(batch.at.shape[0]) < batch.count

    def loss_of(params):
        logp_N = batch_log_probs(model, config, temperature, params, batch)
        loss, metrics = grpo_loss(
            logp_N,
            batch.old_logp,
            batch.advantages,
            mask_N,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            denominator=denominator,
        )
        return loss, (logp_N, metrics)

    (loss, (logp_N, metrics)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    gap_N = jnp.where(mask_N, logp_N - batch.rollout_logp, 0.0)
    ratio_N = jnp.exp(gap_N)
    return Total(
        grads=jax.tree.map(jnp.add, total.grads, grads),
        loss=total.loss + loss,
        clip_fraction=total.clip_fraction + metrics["clip_fraction"],
        computed=total.computed + batch.count,
        gap_sum=total.gap_sum + jnp.sum(jnp.abs(gap_N)),
        gap_max=jnp.maximum(total.gap_max, jnp.max(jnp.abs(gap_N))),
        gap_outside=total.gap_outside + jnp.sum(jnp.abs(ratio_N - 1) > 0.1),
    )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def apply_gradient(config: TrainerConfig, state: TrainState, grads: dict, norm) -> TrainState:
    """One AdamW step with `grads`, scaled down where their global norm exceeds `clip_norm`."""
    scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)


class PolicyTrainer:
    """Holds the training state and updates it from samples.

    `params` (stacked layout) are taken over: the first update donates their buffers.
    row_tokens: longest prompt plus longest response; samples: how many an update usually has.
    Together they fix the shape of every micro-batch, so nothing compiles after the first update.
    temperature: of the sampling, whose log-probs are trained; greedy rollouts (0) train at 1.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainerConfig,
        params: dict,
        *,
        row_tokens: int,
        samples: int,
        temperature: float = 1.0,
    ):
        self.model, self.config = model, config
        self.temperature = float(temperature) or 1.0
        self.shape = BatchShape.within(config.micro_batch_tokens, row_tokens, samples)
        opt_state = init_optimizer(config, params)
        self.state = TrainState(params, opt_state, jnp.zeros((), jnp.int32))

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """One optimizer step on `samples` -> metrics.

        Raises NonFiniteError, naming the step, for a NaN or infinite loss or gradient, before
        anything of the state is changed, and ValueError where no sample has a response token.
        """
        step = int(self.state.step)
        tokens = sum(len(s.response) for s in samples)
        if tokens == 0:
            raise ValueError(
                f"update {step} has {len(samples)} samples and no response token; skip the update"
            )
        total = self.gradient(samples)
        norm = global_norm(total.grads)
        metrics = {
            "loss": total.loss,
            "grad_norm": norm,
            "clip_fraction": total.clip_fraction,
            "logp_gap_mean": total.gap_sum / total.computed,  # NaN: no sample had an advantage
            "logp_gap_max": jnp.where(total.computed > 0, total.gap_max, jnp.nan),
            "logp_gap_outside": total.gap_outside / total.computed,
            "learning_rate": self.config.learning_rate_at(step),
        }
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(metrics[name]):
                raise NonFiniteError(
                    f"{name}={metrics[name]} in update {step}; the parameters were not changed"
                )
        self.state = apply_gradient(self.config, self.state, total.grads, norm)
        return metrics | {"tokens": tokens}

    def gradient(self, samples: list[Sample]) -> Total:
        """The gradient of the whole update, unclipped, with its loss and metrics.

        Samples whose advantages are all zero count in the denominator and are not computed: their
        loss and gradient are exactly zero. The log-prob gap is that of the samples computed.
        """
        denominator = np.float32(sum(len(s.response) for s in samples))
        samples = [s for s in samples if np.any(s.advantages)]
        total = zero_total(self.state.params)
        batches = packing.pack(samples, self.shape, packed=self.config.pack)
        # A first update without any advantage compiles what later ones need, all the same.
        for batch in batches or [packing.empty(self.shape)]:
            total = add_gradient(
                self.model,
                self.config,
                self.temperature,
                self.state.params,
                total,
                batch,
                denominator,
            )
        return total

    def log_probs(self, samples: list[Sample]) -> list[np.ndarray]:
        """Log-probs of every response token under the current parameters, per sample."""
        batches = packing.pack(samples, self.shape, packed=self.config.pack)
        fixed = (self.model, self.config, self.temperature, self.state.params)
        values = [np.array(batch_log_probs(*fixed, batch)) for batch in batches]
        return packing.unpack(batches, values, len(samples))
