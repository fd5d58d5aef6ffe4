"""The policy update: gradients summed over micro-batches, clipped, applied with AdamW.

Four compiled programs, none of which depends on how many samples or tokens an update has:
`batch_log_probs`, `add_gradient` (one micro-batch into a donated accumulator), and `global_norm`
and `apply_gradient` of `optimizer.py`. Every token carries its share of the loss of a whole
optimizer step, so losses and gradients of micro-batches simply add up.
"""

import dataclasses
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tlt_jax.models import layers, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.log_probs import token_log_probs
from tlt_jax.rl import loss, packing
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.optimizer import (
    TrainerConfig,
    TrainState,
    apply_gradient,
    global_norm,
    init_optimizer,
)
from tlt_jax.rl.packing import BatchShape, PackedBatch, Sample
from tlt_jax.sharding.mesh import DATA, data_shards, single_device_mesh
from tlt_jax.sharding.rules import (
    PUBLISHED,
    TRAINING,
    WHOLE,
    constrain,
    gathered,
    place,
    whole,
)

# Sums over the tokens computed: those of the loss, and gap = |trainer - rollout log-prob|,
# gap_outside = tokens whose ratio of the two leaves [0.9, 1.1].
SUMS = (*loss.SUMS, "computed", "entropy", "gap", "gap_outside")


@flax.struct.dataclass
class Total:
    """What micro-batches add up to."""

    grads: dict
    loss: jax.Array
    sums: dict[str, jax.Array]  # by the names in SUMS
    gap_max: jax.Array


class NonFiniteError(FloatingPointError):
    """A loss or gradient is NaN or infinite; the parameters are those before that step."""


@functools.partial(jax.jit, static_argnames="mesh")
def zero_total(params: dict, mesh: Mesh) -> Total:
    """The accumulator before the first micro-batch."""
    zero = jnp.zeros(())
    sums = {name: zero for name in SUMS}
    grads = constrain(mesh, TRAINING, jax.tree.map(jnp.zeros_like, params))
    return Total(grads, loss=zero, sums=sums, gap_max=zero)


@functools.partial(jax.jit, static_argnames=("model", "config", "temperature", "mesh"))
def batch_log_probs(
    model: ModelConfig, config: TrainerConfig, temperature, mesh: Mesh, params, batch
):
    """Log-probs of the scored tokens under `params`, and the entropies of the distributions they
    are of, at the sampling temperature -> ([N], [N]); of micro-batches side by side ([S, N], …)."""
    tokens_BT, positions_BT, segments_BT, prefixes_BT = (
        x.reshape(-1, x.shape[-1])
        for x in (batch.tokens, batch.positions, batch.segments, batch.prefixes)
    )
    # Weights are brought together when their turn comes: layer by layer, and these at once.
    few = {name: x for name, x in params.items() if name != "layers"}
    params = {**params, **constrain(mesh, PUBLISHED, few)}
    out = transformer.forward(
        model,
        params,
        tokens_BT,
        positions_BT,
        layers.causal_mask(segments_BT, prefixes_BT),
        gather=functools.partial(gathered, mesh),
    )

    def of_one_device(hidden, at_N, targets_N, count):
        return token_log_probs(
            model,
            params,
            hidden.reshape(-1, model.width)[at_N],
            targets_N,
            count,
            temperature=temperature,
            chunk=config.head_chunk,
        )

    if batch.count.ndim == 0:
        return of_one_device(out.hidden, batch.at, batch.targets, batch.count)
    S = batch.count.shape[0]
    hidden_SBTD = out.hidden.reshape(S, -1, *out.hidden.shape[1:])
    return jax.vmap(of_one_device)(hidden_SBTD, batch.at, batch.targets, batch.count)


@functools.partial(
    jax.jit,
    static_argnames=("model", "config", "algorithm", "temperature", "mesh"),
    donate_argnames="total",
)
def add_gradient(
    model: ModelConfig,
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    temperature,
    mesh: Mesh,
    params,
    total: Total,
    batch: PackedBatch,
) -> Total:
    """Add the loss, gradient and sums of a micro-batch, or of several side by side, to `total`."""
    place_N = jax.lax.broadcasted_iota(jnp.int32, batch.at.shape, batch.at.ndim - 1)
    mask_N = place_N < batch.count[..., None]

    def loss_of_one(logp_N, mask_N, batch):
        return loss.policy_loss(
            logp_N,
            batch.advantages,
            batch.weights,
            mask_N,
            old_logp_N=batch.old_logp,
            rollout_logp_N=batch.rollout_logp,
            reference_logp_N=batch.reference_logp,
            sequences_N=batch.sequence,
            **algorithm.loss_settings(),
        )

    def loss_of(params):
        logp_N, entropy_N = batch_log_probs(model, config, temperature, mesh, params, batch)
        if batch.count.ndim == 0:
            value, sums = loss_of_one(logp_N, mask_N, batch)
        else:
            # Every token carries its share of the loss, so those of several devices add up.
            each = jax.vmap(loss_of_one)(logp_N, mask_N, batch)
            value, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
        return value, (logp_N, entropy_N, sums)

    (value, (logp_N, entropy_N, sums)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    # With several steps per rollout the gap is that of the first: later ones have moved on purpose.
    old_logp_N = logp_N if batch.old_logp is None else batch.old_logp
    gap_N = jnp.where(mask_N, old_logp_N - batch.rollout_logp, 0.0)
    sums |= {
        "computed": jnp.sum(batch.count),
        "entropy": jnp.sum(jnp.where(mask_N, entropy_N, 0.0)),
        "gap": jnp.sum(jnp.abs(gap_N)),
        "gap_outside": jnp.sum(jnp.abs(jnp.exp(gap_N) - 1) > 0.1),
    }
    return Total(
        grads=constrain(mesh, TRAINING, jax.tree.map(jnp.add, total.grads, grads)),
        loss=total.loss + value,
        sums={name: total.sums[name] + sums[name] for name in SUMS},
        gap_max=jnp.maximum(total.gap_max, jnp.max(jnp.abs(gap_N))),
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """What one optimizer step is made from."""

    samples: list[Sample]  # those to compute
    weights: np.ndarray  # [samples] of their tokens in the loss
    tokens: int  # of all samples, those not computed too


class PolicyTrainer:
    """Holds the training state and updates it from samples.

    `params` (stacked layout) are taken over: the first update donates their buffers, so a reference
    policy needs a copy of its own.
    row_tokens: longest prompt plus longest response; samples: how many an update usually has.
    Together they fix the shape of every micro-batch, so nothing compiles after the first update.
    max_new_tokens: longest response that can be. temperature: of the sampling, whose log-probs are
    trained; greedy rollouts (0) train at 1. mesh: the devices that share the work and the state, by
    default JAX's first alone; with several processes all make the same calls with the same samples,
    and each computes the micro-batches of its own devices.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        params: dict,
        *,
        row_tokens: int,
        samples: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        mesh: Mesh | None = None,
    ):
        self.model, self.config, self.algorithm = model, config, algorithm
        self.mesh = single_device_mesh() if mesh is None else mesh
        self.shards = data_shards(self.mesh)
        self.max_new_tokens = max_new_tokens
        self.temperature = float(temperature) or 1.0
        per_step = -(-samples // (algorithm.mini_batches * self.shards))
        self.shape = BatchShape.within(config.micro_batch_tokens, row_tokens, per_step)
        params = place(self.mesh, TRAINING, params)
        opt_state = init_optimizer(config, params, self.mesh)
        step = place(self.mesh, WHOLE, jnp.zeros((), jnp.int32))
        self.state = TrainState(params, opt_state, step)
        self.tokens_here = 0  # scored by this process's devices so far, all updates together

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """All epochs and mini-batches of one rollout -> metrics.

        Samples come in draw order; groups stay whole. With more than one step, log-probs of the old
        policy are computed once, before the first. Metrics: loss and grad_norm are means over
        the optimizer steps; learning_rate is that of the last; clip_fraction, _low, _high,
        importance_capped are shares of all response tokens; entropy (nats), kl (k3 to the
        reference; 0 without one) and logp_gap_* are over the tokens computed. Samples whose loss
        and gradient are exactly zero are not.

        Raises NonFiniteError, naming the optimizer step, for a NaN or infinite loss or gradient,
        before that step changes anything of the state, and ValueError where no sample has a
        response token or a reference log-prob is missing.
        """
        if not any(len(s.response) for s in samples):
            raise ValueError(
                f"optimizer step {int(self.state.step)} has {len(samples)} samples and no response "
                "token; skip the update"
            )
        parts = packing.mini_batches(samples, self.algorithm.mini_batches)
        steps = [self.prepare(p) for p in parts if any(len(s.response) for s in p)]
        if self.algorithm.optimizer_steps > 1:
            steps = self._with_old_log_probs(steps)
        order = steps * self.algorithm.epochs
        done = [self._step(step) for step in order]
        tokens = sum(step.tokens for step in order)
        total = {name: sum(d[name] for d in done) for name in (*SUMS, "loss", "grad_norm")}
        clipped = [total[f"clipped_{name}"] / tokens for name in ("low", "high", "dual")]
        return {
            "loss": total["loss"] / len(done),
            "grad_norm": total["grad_norm"] / len(done),
            "learning_rate": done[-1]["learning_rate"],
            "optimizer_steps": len(done),
            "tokens": sum(len(s.response) for s in samples),
            "clip_fraction": sum(clipped),
            "clip_fraction_low": clipped[0],
            "clip_fraction_high": clipped[1],
            "importance_capped": total["importance_capped"] / tokens,
            "entropy": total["entropy"] / total["computed"],
            "kl": total["kl"] / total["computed"],
            "logp_gap_mean": total["gap"] / total["computed"],
            "logp_gap_max": max(d["gap_max"] for d in done),
            "logp_gap_outside": total["gap_outside"] / total["computed"],
        }

    def prepare(self, samples: Sequence[Sample]) -> Step:
        """One optimizer step on `samples`: which of them to compute, and the weights of the loss.

        Without a KL in the loss a sample whose advantages are all zero has a loss and gradient of
        exactly zero: it counts in the denominators and is not computed. Where all are such, one is
        computed all the same, so that every update runs the same programs and has its metrics.
        """
        lengths = np.array([len(s.response) for s in samples])
        if self.algorithm.kl_in_loss and any(s.reference_logp is None for s in samples):
            raise ValueError(
                "a KL in the loss needs reference_logp of every sample; take it from "
                "log_probs(samples, reference_params)"
            )
        wanted = [
            i for i, s in enumerate(samples) if self.algorithm.kl_in_loss or np.any(s.advantages)
        ]
        if not lengths[wanted].any():
            wanted = np.flatnonzero(lengths)[:1]
        weights = loss.token_weights(self.algorithm.aggregation, lengths, self.max_new_tokens)
        return Step([samples[i] for i in wanted], weights[wanted], int(lengths.sum()))

    def _with_old_log_probs(self, steps: list[Step]) -> list[Step]:
        logp = iter(self.log_probs([s for step in steps for s in step.samples]))
        return [
            dataclasses.replace(
                step, samples=[dataclasses.replace(s, old_logp=next(logp)) for s in step.samples]
            )
            for step in steps
        ]

    def _step(self, step: Step) -> dict[str, float]:
        """One optimizer step -> its sums, loss, norm and learning rate."""
        number = int(self.state.step)
        total = self.gradient(step)
        norm = global_norm(total.grads)
        values = {
            **total.sums,
            "loss": total.loss,
            "gap_max": total.gap_max,
            "grad_norm": norm,
            "learning_rate": self.config.learning_rate_at(number),
        }
        values = {name: float(x) for name, x in jax.device_get(values).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                raise NonFiniteError(
                    f"{name}={values[name]} in optimizer step {number}; the parameters were not "
                    "changed"
                )
        self.state = apply_gradient(self.config, self.state, total.grads, norm, self.mesh)
        return values

    def gradient(self, step: Step) -> Total:
        """The gradient of the whole optimizer step, unclipped, with its loss and sums."""
        total = zero_total(self.state.params, self.mesh)
        for batch in packing.side_by_side(self._pack(step.samples, step.weights), self.shards):
            self.tokens_here += self._count_here(batch)
            total = add_gradient(
                self.model,
                self.config,
                self.algorithm,
                self.temperature,
                self.mesh,
                self.state.params,
                total,
                self._place(batch),
            )
        return total

    def _count_here(self, batch: PackedBatch) -> int:
        """Scored tokens of a micro-batch that this process's devices compute."""
        here = [d.flat[0].process_index == jax.process_index() for d in self._rows_of_devices()]
        return int(np.sum(np.reshape(batch.count, self.shards), where=here))

    def _rows_of_devices(self) -> np.ndarray:
        """Devices by data shard, [shards, tensor]."""
        return self.mesh.devices.reshape(self.shards, -1)

    def _place(self, batch: PackedBatch) -> PackedBatch:
        """Every device gets the rows and lists that it computes, and no others."""
        if self.shards == 1:
            return batch
        return place(self.mesh, ((r".*", PartitionSpec(DATA)),), _as_traced(batch))

    def host_params(self) -> dict:
        """The current parameters, whole, on the host; called by every process."""
        return jax.tree.map(lambda x: np.array(whole(self.mesh, x)), self.state.params)

    def log_probs(self, samples: Sequence[Sample], params: dict | None = None) -> list[np.ndarray]:
        """Log-probs [R] of every response token, per sample, under `params` or the current ones."""
        params = self.state.params if params is None else params
        # Bare samples, so that whoever asks runs one and the same program.
        bare = [Sample(s.prompt, s.response, 0.0, s.rollout_logp, group=s.group) for s in samples]
        batches = self._pack(bare)
        fixed = (self.model, self.config, self.temperature, self.mesh, params)
        values = []
        for batch in packing.side_by_side(batches, self.shards):
            logp = batch_log_probs(*fixed, self._place(batch))[0]
            values += list(np.array(whole(self.mesh, logp)).reshape(self.shards, -1))
        return packing.unpack(batches, values, len(samples))

    def _pack(self, samples: list[Sample], weights: np.ndarray | None = None) -> list[PackedBatch]:
        return packing.pack(
            samples, self.shape, packed=self.config.pack, weights=weights, shards=self.shards
        )


def _as_traced(batch: PackedBatch) -> PackedBatch:
    """In the dtypes that a jitted function takes host arrays in: float32 unless x64 is on."""
    return jax.tree.map(lambda x: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)), batch)
