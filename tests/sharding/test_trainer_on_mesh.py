"""The update on several devices is the update on one: gradients, moments, log-probs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.test_policy_trainer import ROW, make_samples, random_params
from tlt_jax.models.config import ModelConfig
from tlt_jax.rl import packing
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.optimizer import TrainerConfig
from tlt_jax.rl.policy_trainer import PolicyTrainer
from tlt_jax.sharding.mesh import MeshConfig, make_mesh

MODEL = ModelConfig(
    vocab_size=38,
    width=16,
    mlp_width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
    tied=False,
    qkv_bias=True,
    qk_norm=True,
    mlp_bias=True,
    o_bias=True,
)
MESHES = [(4, 1, 1), (2, 1, 2), (1, 4, 1), (2, 2, 1), (2, 2, 2)]
GRPO = AlgorithmConfig("grpo")
ALGORITHMS = {
    "grpo": GRPO,
    "several steps": AlgorithmConfig("grpo", mini_batches=2, epochs=2),
    "sequence ratios": AlgorithmConfig("gspo", mini_batches=2),
    "kl in the loss": AlgorithmConfig("grpo", kl_coef=0.1, kl_in="loss"),
}


def trained(shape, dtype, algorithm=GRPO, pack=True, updates=2):
    """(gradient of the first step, moments after the updates, log-probs, metrics, trainer)."""
    model = dataclasses.replace(MODEL, dtype=dtype)
    params = jax.tree.map(jnp.array, random_params(model))
    trainer = PolicyTrainer(
        model,
        TrainerConfig(micro_batch_tokens=2 * ROW, learning_rate=1e-2, pack=pack),
        algorithm,
        params,
        row_tokens=ROW,
        samples=13,
        max_new_tokens=12,
        temperature=0.7,
        mesh=make_mesh(MeshConfig(*shape)),
    )
    samples = make_samples(13, seed=3, reference=algorithm.needs_reference)
    grads = jax.device_get(trainer.gradient(trainer.prepare(samples)).grads)
    logp = trainer.log_probs(samples)
    metrics = [trainer.update(samples) for _ in range(updates)]
    return grads, jax.device_get(trainer.state.opt_state), logp, metrics, trainer


def distance(a, b):
    """The largest norm(a - b) / norm(b) of a tensor."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        np.linalg.norm(np.subtract(x, y, dtype=np.float64)) / max(np.linalg.norm(y), 1e-30)
        for x, y in pairs
    )


@pytest.fixture(scope="module")
def alone():
    found = {}

    def get(dtype, name):
        if (dtype, name) not in found:
            found[dtype, name] = trained((1, 1, 1), dtype, ALGORITHMS[name])
        return found[dtype, name]

    return get


def check(found, expected, tolerance):
    for part in range(3):
        assert distance(found[part], expected[part]) <= tolerance
    for a, b in zip(found[3], expected[3]):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e3 * tolerance)


@pytest.mark.parametrize("shape", MESHES)
def test_gradients_moments_and_log_probs_in_float64(alone, shape):
    with jax.enable_x64(True):
        found = trained(shape, "float64")
        check(found, alone("float64", "grpo"), 1e-12)
        unpacked = trained(shape, "float64", pack=False)
        check(unpacked, alone("float64", "grpo"), 1e-12)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "grpo"])
def test_every_kind_of_loss(alone, name):
    with jax.enable_x64(True):
        check(trained((2, 1, 2), "float64", ALGORITHMS[name]), alone("float64", name), 1e-12)


@pytest.mark.parametrize("shape", [(4, 1, 1), (2, 1, 2)])
def test_gradients_and_moments_in_float32(alone, shape):
    found, expected = trained(shape, "float32"), alone("float32", "grpo")
    assert distance(found[0], expected[0]) <= 1e-5
    assert distance(found[1], expected[1]) <= 1e-5


def test_a_loss_averaged_per_device_would_be_seen(alone, monkeypatch):
    """What many have shipped: each device divides by its own number of tokens."""
    side_by_side = packing.side_by_side

    def per_device(batches, shards):
        joined = []
        for batch in side_by_side(batches, shards):
            own = batch.weights.sum(axis=-1, keepdims=True)
            total = batch.weights.sum()
            joined.append(batch.replace(weights=batch.weights / np.maximum(own, 1e-9) * total / 4))
        return joined

    monkeypatch.setattr(packing, "side_by_side", per_device)
    with jax.enable_x64(True):
        found = trained((4, 1, 1), "float64")
        assert distance(found[0], alone("float64", "grpo")[0]) > 1e-3


def test_state_is_split_and_stays_split():
    *_, trainer = trained((2, 2, 2), "float32")
    leaves = jax.tree.leaves((trainer.state.params, trainer.state.opt_state))
    whole = sum(x.nbytes for x in leaves)
    part = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert part < whole / 6.5  # biases and norms are split by fewer
    total = trainer.gradient(trainer.prepare(make_samples(13, seed=3)))
    for x, g in zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(total.grads)):
        assert x.sharding.is_equivalent_to(g.sharding, x.ndim)
    assert trainer.tokens_here > 0
    host = trainer.host_params()
    assert distance(host, trainer.state.params) == 0
