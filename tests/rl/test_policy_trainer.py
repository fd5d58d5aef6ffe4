"""Laws of the update: the same gradient cut any way; nothing recompiles; NaN changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import layers, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.rl import policy_trainer
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy_trainer import NonFiniteError, PolicyTrainer, TrainerConfig

MODEL = ModelConfig(
    vocab_size=37,
    width=16,
    mlp_width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
    tied=True,
    qkv_bias=True,
)
DOUBLE = dataclasses.replace(MODEL, dtype="float64")
ROW = 20


def make_samples(n=7, seed=0, old=False):
    """Groups of three samples of one prompt; prompts and responses of uneven lengths."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        if i % 3 == 0:
            prompt = rng.integers(0, 37, rng.integers(1, 8))
        response = rng.integers(0, 37, rng.integers(1, 12))
        logp = rng.uniform(-4, -3, len(response)).astype(np.float32)
        before = logp if old else None
        # float32, so that batches hold exactly the values that the reference reads.
        advantage = np.float32(rng.normal())
        samples.append(Sample(prompt, response, advantage, logp, old_logp=before, group=i // 3))
    return samples


@functools.cache
def random_params(model):
    return jax.device_get(transformer.init(model, jax.random.key(1)))


def make(model=MODEL, rows=2, samples=7, temperature=1.0, **settings):
    config = TrainerConfig(micro_batch_tokens=rows * ROW, **settings)
    params = jax.tree.map(jnp.array, random_params(model))  # a copy: the trainer donates it
    return PolicyTrainer(
        model, config, params, row_tokens=ROW, samples=samples, temperature=temperature
    )


@functools.partial(jax.jit, static_argnames=("model", "old"))
def sample_gradient(params, tokens_T, first, end, advantage, old_logp_T, tokens, *, model, old):
    """Loss and gradient of tokens first, …, end - 1 of one row, by all logits of the row."""

    def loss_of(params):
        T = tokens_T.shape[0]
        mask = layers.causal_mask(jnp.ones((1, T), jnp.int32))
        at = jnp.arange(T)
        hidden = transformer.forward(model, params, tokens_T[None], at[None], mask).hidden
        logp_TV = jax.nn.log_softmax(transformer.logits(model, params, hidden))[0]
        logp = logp_TV[at[:-1], tokens_T[1:]]
        ratio = jnp.exp(logp - (old_logp_T[1:] if old else jax.lax.stop_gradient(logp)))
        loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return jnp.sum(jnp.where((first <= at[1:]) & (at[1:] < end), loss, 0)) / tokens

    return jax.value_and_grad(loss_of)(params)


def plain_gradient(model, samples, old=False):
    """One sample at a time and all its logits, no packing: the loss as the formula reads."""
    tokens = sum(len(s.response) for s in samples)
    total = []
    for s in samples:
        P, end = len(s.prompt), s.tokens
        ids, before = np.zeros(ROW, np.int32), np.zeros(ROW)
        ids[:end] = np.concatenate([s.prompt, s.response])
        before[P:end] = s.old_logp if old else 0
        values = random_params(model), ids, P, end, s.advantages, before, tokens
        total.append(sample_gradient(*values, model=model, old=old))
    return jax.tree.map(lambda *x: sum(np.asarray(y) for y in x), *total)


def distance(a, b):
    """Largest over tensors of norm(a - b) / norm(b)."""
    return max(
        np.linalg.norm(x - y) / np.linalg.norm(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


@pytest.mark.parametrize("old", [False, True])
def test_gradient_does_not_depend_on_how_the_update_is_cut(old):
    with jax.enable_x64(True):
        samples = make_samples(old=old)
        loss, want = plain_gradient(DOUBLE, samples, old)
        for rows in (2,) if old else (7, 2):
            trainer = make(DOUBLE, rows, head_chunk=16)
            for pack in (False, True):
                trainer.config = dataclasses.replace(trainer.config, pack=pack)
                total = trainer.gradient(samples)
                assert distance(total.grads, want) <= 1e-10, (rows, pack)
                np.testing.assert_allclose(total.loss, loss, rtol=1e-10)


def test_samples_without_advantage_count_in_the_denominator_only():
    with jax.enable_x64(True):
        samples = make_samples()
        samples[2:5] = [dataclasses.replace(s, advantages=0.0) for s in samples[2:5]]
        _, want = plain_gradient(DOUBLE, samples)
        total = make(DOUBLE).gradient(samples)
        assert distance(total.grads, want) <= 1e-10
        computed = [len(s.response) for s in samples if s.advantages]
        assert total.computed == sum(computed) < sum(len(s.response) for s in samples)


def test_a_mean_per_micro_batch_would_be_seen():
    with jax.enable_x64(True):
        samples = make_samples()
        trainer = make(DOUBLE)
        want = trainer.gradient(samples).grads
        halves = [trainer.gradient(part).grads for part in (samples[:3], samples[3:])]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        assert distance(mean, want) > 1e-2


def test_remat_changes_no_gradient():
    with jax.enable_x64(True):
        samples = make_samples()
        plain = make(DOUBLE).gradient(samples).grads
        again = make(dataclasses.replace(DOUBLE, remat=True)).gradient(samples).grads
        assert distance(again, plain) <= 1e-12


def test_nothing_recompiles_and_runs_are_bit_equal():
    programs = (
        policy_trainer.add_gradient,
        policy_trainer.apply_gradient,
        policy_trainer.global_norm,
        policy_trainer.zero_total,
    )

    def run():
        trainer = make(learning_rate=1e-2, schedule="cosine", warmup_steps=1, total_steps=5)
        metrics = [trainer.update(make_samples(7, seed=7))]
        sizes = [p._cache_size() for p in programs]
        metrics += [trainer.update(make_samples(n, seed=n)) for n in (3, 12)]
        assert [p._cache_size() for p in programs] == sizes
        return metrics, jax.device_get(trainer.state)

    (metrics, state), (again, state_again) = run(), run()
    assert metrics == again
    jax.tree.map(np.testing.assert_array_equal, state, state_again)
    assert state.step == 3
    assert [m["tokens"] for m in metrics] == [
        sum(len(s.response) for s in make_samples(n, seed=n)) for n in (7, 3, 12)
    ]
    rates = [m["learning_rate"] for m in metrics]
    np.testing.assert_allclose(rates, [5e-3, 1e-2, 1e-2 * (1 + np.cos(np.pi / 4)) / 2], rtol=1e-6)


def test_an_update_raises_what_was_good_and_lowers_what_was_bad():
    trainer = make(learning_rate=1e-2)
    good, bad = make_samples(4)[::3]  # of two prompts
    samples = [dataclasses.replace(good, advantages=1.0), dataclasses.replace(bad, advantages=-1.0)]
    before = [x.sum() for x in trainer.log_probs(samples)]
    for _ in range(3):
        trainer.update(samples)
    after = [x.sum() for x in trainer.log_probs(samples)]
    assert after[0] > before[0] and after[1] < before[1]


def test_log_probs_and_gap():
    trainer = make()
    samples = make_samples()
    logp = trainer.log_probs(samples)
    assert [len(x) for x in logp] == [len(s.response) for s in samples]

    def gap(shift):
        moved = [dataclasses.replace(s, rollout_logp=x + shift) for s, x in zip(samples, logp)]
        metrics = trainer.update(moved)  # at 1e-5 it moves log-probs by less than the tolerance
        return [metrics[f"logp_gap_{name}"] for name in ("mean", "max", "outside")]

    assert max(gap(0.0)) < 1e-5
    np.testing.assert_allclose(gap(0.5), [0.5, 0.5, 1.0], atol=2e-3)


def test_temperature_is_that_of_the_sampling():
    samples = make_samples()
    trainer = make(temperature=0.5)
    params = trainer.state.params
    # A head of twice the scale at temperature 1 is the head at temperature 0.5.
    untied = dataclasses.replace(MODEL, tied=False)
    sharper = make(untied)
    sharper.state = sharper.state.replace(params={**params, "head": 2 * params["embed"]})
    for a, b in zip(trainer.log_probs(samples), sharper.log_probs(samples)):
        np.testing.assert_allclose(a, b, atol=1e-5)
    greedy, plain = make(temperature=0.0), make(temperature=1.0)
    for a, b in zip(greedy.log_probs(samples), plain.log_probs(samples)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stops_before_the_parameters_change(bad):
    trainer = make()
    samples = make_samples()
    trainer.update(samples)
    before = jax.device_get(jax.tree.map(jnp.copy, trainer.state))
    broken = [dataclasses.replace(samples[0], advantages=bad), *samples[1:]]
    with pytest.raises(NonFiniteError, match="in update 1; the parameters were not changed"):
        trainer.update(broken)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)
    trainer.update(samples)  # and the trainer still works


def test_clipping_is_of_the_whole_gradient():
    # Adam is blind to the scale of its first gradient, so the second moment is looked at.
    samples = make_samples()
    free = make(clip_norm=1e6)
    norm = free.update(samples)["grad_norm"]
    held = make(clip_norm=norm / 2)
    held.update(samples)
    nu = [jax.device_get(t.state.opt_state[0].nu) for t in (free, held)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 4 * b, rtol=1e-4), *nu)


def test_weight_decay_leaves_norms_and_biases():
    samples = [dataclasses.replace(s, advantages=0.0) for s in make_samples()]
    trainer = make(learning_rate=0.1, weight_decay=0.5)
    before = jax.device_get(trainer.state.params)
    trainer.update(samples)
    after = jax.device_get(trainer.state.params)
    np.testing.assert_allclose(after["layers"]["w_q"], 0.95 * before["layers"]["w_q"], rtol=1e-5)
    np.testing.assert_allclose(after["embed"], 0.95 * before["embed"], rtol=1e-5)
    for name in ("attn_norm", "mlp_norm", "b_q"):
        np.testing.assert_array_equal(after["layers"][name], before["layers"][name])
    np.testing.assert_array_equal(after["norm"], before["norm"])


def test_the_state_is_updated_in_place():
    trainer = make()
    old = trainer.state.params["embed"]
    trainer.update(make_samples())
    assert old.is_deleted()


def test_bad_settings_are_named():
    for settings, text in [
        (dict(schedule="step"), "schedule='step'"),
        (dict(schedule="cosine"), "total_steps=0"),
        (dict(learning_rate=0.0), "learning_rate=0.0 must be greater than 0"),
        (dict(beta2=1.0), "beta2=1.0"),
        (dict(clip_low=-0.1), "clip_low=-0.1"),
    ]:
        with pytest.raises(ValueError, match=text):
            TrainerConfig(**settings)
    with pytest.raises(ValueError, match="no response token"):
        make().update([Sample(np.array([1]), np.array([], int), 1.0, np.array([]))])


def test_an_update_without_advantages_changes_nothing_but_adam_and_measures_no_gap():
    trainer = make()
    samples = [dataclasses.replace(s, advantages=0.0, old_logp=None) for s in make_samples()]
    before = jax.device_get(jax.tree.map(jnp.copy, trainer.state.params))
    metrics = trainer.update(samples)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert np.isnan(metrics["logp_gap_mean"]) and np.isnan(metrics["logp_gap_max"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state.params), before)
