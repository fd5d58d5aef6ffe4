"""Laws of the update: the same gradient cut any way; nothing recompiles; NaN changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import layers, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.rl import loss, optimizer, policy_trainer
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.optimizer import TrainerConfig
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy_trainer import NonFiniteError, PolicyTrainer

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
GRPO = AlgorithmConfig("grpo")


def make_samples(n=7, seed=0, old=False, reference=False):
    """Groups of three samples of one prompt; prompts and responses of uneven lengths."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        if i % 3 == 0:
            prompt = rng.integers(0, 37, rng.integers(1, 8))
        response = rng.integers(0, 37, rng.integers(1, 12))
        logp = rng.uniform(-4, -3, len(response))
        other = rng.uniform(-4, -3, len(response))
        samples.append(
            Sample(
                prompt,
                response,
                rng.normal(),
                logp,
                old_logp=logp if old else None,
                reference_logp=other if reference else None,
                group=i // 3,
            )
        )
    return samples


@functools.cache
def random_params(model):
    return jax.device_get(transformer.init(model, jax.random.key(1)))


def make(model=MODEL, rows=2, samples=7, temperature=1.0, algorithm=GRPO, **settings):
    config = TrainerConfig(micro_batch_tokens=rows * ROW, **settings)
    params = jax.tree.map(jnp.array, random_params(model))  # a copy: the trainer donates it
    return PolicyTrainer(
        model,
        config,
        algorithm,
        params,
        row_tokens=ROW,
        samples=samples,
        max_new_tokens=12,
        temperature=temperature,
    )


@functools.partial(jax.jit, static_argnames=("model", "algorithm", "old"))
def sample_gradient(
    params, tokens_T, first, end, advantage, weight, old_T, reference_T, *, model, algorithm, old
):
    """Loss and gradient of tokens first, …, end - 1 of one row, by all logits of the row."""

    def loss_of(params):
        T = tokens_T.shape[0]
        mask = layers.causal_mask(jnp.ones((1, T), jnp.int32))
        at = jnp.arange(T)
        scored = (first <= at[1:]) & (at[1:] < end)
        hidden = transformer.forward(model, params, tokens_T[None], at[None], mask).hidden
        logp_TV = jax.nn.log_softmax(transformer.logits(model, params, hidden))[0]
        logp = logp_TV[at[:-1], tokens_T[1:]]
        now = jax.lax.stop_gradient(logp)
        before = old_T[1:] if old else now
        ratio = jnp.exp(logp - before)
        kl = ratio * (jnp.exp(reference_T[1:] - logp) - (reference_T[1:] - logp) - 1)
        if algorithm.ratio == "sequence":
            mean = jnp.sum(jnp.where(scored, now - before, 0)) / (end - first)
            ratio = jnp.exp(mean) * jnp.exp(logp - now)
        held = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gain = jnp.minimum(ratio * advantage, held * advantage)
        return weight * jnp.sum(jnp.where(scored, algorithm.kl_coef * kl - gain, 0))

    return jax.value_and_grad(loss_of)(params)


def plain_gradient(model, samples, algorithm=GRPO):
    """One sample at a time and all its logits, no packing: the loss as the formula reads."""
    n, tokens = len(samples), sum(len(s.response) for s in samples)
    total = []
    for s in samples:
        P, R, end = len(s.prompt), len(s.response), s.tokens
        weight = {"token_mean": 1 / tokens, "sequence_mean": 1 / (n * R), "constant": 1 / (n * 12)}
        ids, before, reference = np.zeros(ROW, np.int32), np.zeros(ROW), np.zeros(ROW)
        ids[:end] = np.concatenate([s.prompt, s.response])
        old = s.old_logp is not None
        before[P:end] = s.old_logp if old else 0
        reference[P:end] = s.reference_logp if algorithm.kl_coef else 0
        values = ids, P, end, s.advantages, weight[algorithm.aggregation], before, reference
        how = dict(model=model, algorithm=algorithm, old=old)
        total.append(sample_gradient(random_params(model), *values, **how))
    return jax.tree.map(lambda *x: sum(np.asarray(y) for y in x), *total)


def gradient(trainer, samples):
    return trainer.gradient(trainer.prepare(samples))


def distance(a, b):
    """Largest over tensors of norm(a - b) / norm(b)."""
    return max(
        np.linalg.norm(x - y) / np.linalg.norm(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


CASES = {
    "grpo": (GRPO, False),
    "grpo, old": (GRPO, True),
    "gspo": (AlgorithmConfig("gspo", clip_low=0.3, clip_high=0.3), True),
    "dr_grpo with k3": (AlgorithmConfig("dr_grpo", kl_coef=0.1), True),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_how_the_step_is_cut(case):
    algorithm, old = CASES[case]
    with jax.enable_x64(True):
        samples = make_samples(old=old, reference=algorithm.needs_reference)
        samples[3] = dataclasses.replace(samples[3], advantages=0.0)
        loss, want = plain_gradient(DOUBLE, samples, algorithm)
        for rows in (7, 2) if algorithm == GRPO and not old else (2,):
            trainer = make(DOUBLE, rows, algorithm=algorithm, head_chunk=16)
            for pack in (False, True):
                trainer.config = dataclasses.replace(trainer.config, pack=pack)
                total = gradient(trainer, samples)
                assert distance(total.grads, want) <= 1e-10, (rows, pack)
                np.testing.assert_allclose(total.loss, loss, rtol=1e-10)


def test_samples_without_advantage_count_in_the_denominator_only():
    with jax.enable_x64(True):
        samples = make_samples()
        samples[2:5] = [dataclasses.replace(s, advantages=0.0) for s in samples[2:5]]
        _, want = plain_gradient(DOUBLE, samples)
        total = gradient(make(DOUBLE), samples)
        assert distance(total.grads, want) <= 1e-10
        computed = [len(s.response) for s in samples if s.advantages]
        assert total.sums["computed"] == sum(computed) < sum(len(s.response) for s in samples)


def test_with_a_kl_in_the_loss_no_sample_is_left_out():
    samples = [dataclasses.replace(s, advantages=0.0) for s in make_samples(reference=True)]
    kl = make(algorithm=AlgorithmConfig(kl_coef=0.1))
    assert len(kl.prepare(samples).samples) == 7
    in_reward = make(algorithm=AlgorithmConfig(kl="k1", kl_coef=0.1, kl_in="reward"))
    assert len(in_reward.prepare(samples).samples) == 1
    with pytest.raises(ValueError, match="needs reference_logp of every sample"):
        kl.update(make_samples())


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_a_mean_per_micro_batch_would_be_seen(aggregation):
    with jax.enable_x64(True):
        samples = make_samples()
        trainer = make(DOUBLE, algorithm=AlgorithmConfig(aggregation=aggregation))
        want = gradient(trainer, samples).grads
        halves = [gradient(trainer, part).grads for part in (samples[:3], samples[3:])]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        assert distance(mean, want) > 1e-2


def test_remat_changes_no_gradient():
    with jax.enable_x64(True):
        samples = make_samples()
        plain = gradient(make(DOUBLE), samples).grads
        again = gradient(make(dataclasses.replace(DOUBLE, remat=True)), samples).grads
        assert distance(again, plain) <= 1e-12


PROGRAMS = (
    policy_trainer.add_gradient,
    policy_trainer.batch_log_probs,
    policy_trainer.zero_total,
    optimizer.apply_gradient,
    optimizer.global_norm,
)


def test_nothing_recompiles_and_runs_are_bit_equal():
    def run():
        trainer = make(learning_rate=1e-2, schedule="cosine", warmup_steps=1, total_steps=5)
        metrics = [trainer.update(make_samples(7, seed=7))]
        sizes = [p._cache_size() for p in PROGRAMS]
        metrics += [trainer.update(make_samples(n, seed=n)) for n in (3, 12)]
        assert [p._cache_size() for p in PROGRAMS] == sizes
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


def with_old(trainer, samples):
    logp = trainer.log_probs(samples)
    return [dataclasses.replace(s, old_logp=x) for s, x in zip(samples, logp)]


def test_old_log_probs_are_those_before_the_first_step():
    samples = make_samples()
    twice = make(algorithm=AlgorithmConfig(epochs=2), learning_rate=1e-2)
    metrics = twice.update(samples)
    assert metrics["optimizer_steps"] == 2 and metrics["clip_fraction"] > 0
    assert metrics["clip_fraction"] == pytest.approx(
        metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    )

    once, renewed = make(learning_rate=1e-2), make(learning_rate=1e-2)
    kept = with_old(once, samples)
    for _ in range(2):
        once.update(kept)
        renewed.update(samples)  # the policy itself as the old one, each time anew
    for a, b in zip(jax.tree.leaves(twice.state.params), jax.tree.leaves(once.state.params)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert distance(*(jax.device_get(t.state.params) for t in (renewed, once))) > 1e-3


def test_mini_batches_are_steps_on_whole_groups_with_their_own_denominators():
    samples = make_samples()
    parts = make(samples=7, algorithm=AlgorithmConfig(mini_batches=2), learning_rate=1e-2)
    metrics = parts.update(samples)
    single = make(samples=4, learning_rate=1e-2)
    kept = with_old(single, samples)
    by_hand = [single.update(kept[:3]), single.update(kept[3:])]  # groups 0 | 1, 2
    for a, b in zip(jax.tree.leaves(parts.state.params), jax.tree.leaves(single.state.params)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    for name in ("loss", "grad_norm"):
        want = np.mean([m[name] for m in by_hand])
        np.testing.assert_allclose(metrics[name], want, rtol=1e-4, atol=1e-6)
    assert metrics["optimizer_steps"] == 2
    assert metrics["tokens"] == sum(len(s.response) for s in samples)


def test_nothing_recompiles_with_epochs_mini_batches_and_a_reference():
    algorithm = AlgorithmConfig("gspo", epochs=2, mini_batches=3, kl_coef=0.1, importance_cap=2.0)
    trainer = make(samples=9, algorithm=algorithm)
    reference = jax.tree.map(jnp.copy, trainer.state.params)

    def update(n):
        samples = make_samples(n, seed=n)
        logp = trainer.log_probs(samples, reference)
        samples = [dataclasses.replace(s, reference_logp=x) for s, x in zip(samples, logp)]
        return trainer.update(samples)

    first = update(9)
    assert first["optimizer_steps"] == 6
    sizes = [p._cache_size() for p in PROGRAMS]
    steps = [update(n)["optimizer_steps"] for n in (3, 12, 6)]
    assert steps == [2, 6, 4]  # groups stay whole: one, four, two of them
    assert [p._cache_size() for p in PROGRAMS] == sizes


@jax.jit
def row_scores(params, tokens_T):
    """All logits [T, V] of one row."""
    T = tokens_T.shape[0]
    mask = layers.causal_mask(jnp.ones((1, T), jnp.int32))
    out = transformer.forward(MODEL, params, tokens_T[None], jnp.arange(T)[None], mask)
    return transformer.logits(MODEL, params, out.hidden)[0]


def test_entropy_kl_and_capped_share_by_all_logits():
    samples = make_samples(reference=True)
    samples[1] = dataclasses.replace(samples[1], advantages=0.0)  # not computed
    trainer = make(algorithm=AlgorithmConfig(importance_cap=1.2), temperature=0.7)
    entropy, kl, capped = [], [], []
    for s in [samples[0], *samples[2:]]:
        ids = np.zeros(ROW, np.int32)
        ids[: s.tokens] = np.concatenate([s.prompt, s.response])
        scores = np.asarray(row_scores(random_params(MODEL), ids), np.float64) / 0.7
        p_TV = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        for t, token in enumerate(s.response):
            p_V = p_TV[len(s.prompt) - 1 + t]
            entropy.append(-(p_V * np.log(p_V)).sum())
            d = s.reference_logp[t] - np.log(p_V[token])
            kl.append(np.exp(d) - d - 1)
            capped.append(p_V[token] / np.exp(s.rollout_logp[t]) > 1.2)
    metrics = trainer.update(samples)
    np.testing.assert_allclose(metrics["entropy"], np.mean(entropy), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], np.mean(kl), rtol=1e-5)
    assert 0 < sum(capped) < len(capped)
    np.testing.assert_allclose(metrics["importance_capped"] * metrics["tokens"], sum(capped))
    plain = make().update(make_samples())
    assert plain["kl"] == plain["importance_capped"] == 0


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
    with pytest.raises(NonFiniteError, match="step 1; the parameters were not changed"):
        trainer.update(broken)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)
    trainer.update(samples)  # and the trainer still works


def test_a_nan_in_a_later_step_leaves_the_state_of_the_one_before():
    samples = make_samples()
    broken = [*samples[:-1], dataclasses.replace(samples[-1], advantages=np.nan)]
    trainer = make(algorithm=AlgorithmConfig(mini_batches=2))
    with pytest.raises(NonFiniteError, match="in optimizer step 1"):
        trainer.update(broken)
    assert trainer.state.step == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(trainer.state)))


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
        (dict(clip_norm=0.0), "clip_norm=0.0"),
    ]:
        with pytest.raises(ValueError, match=text):
            TrainerConfig(**settings)
    with pytest.raises(ValueError, match="no response token"):
        make().update([Sample(np.array([1]), np.array([], int), 1.0, np.array([]))])


def test_an_update_without_advantages_changes_nothing_but_adam():
    samples = [dataclasses.replace(s, advantages=0.0) for s in make_samples()]
    for algorithm in (GRPO, AlgorithmConfig(mini_batches=2)):
        trainer = make(algorithm=algorithm)
        before = jax.device_get(jax.tree.map(jnp.copy, trainer.state.params))
        metrics = trainer.update(samples)
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
        assert metrics["optimizer_steps"] == algorithm.mini_batches
        assert all(np.isfinite(x) for x in metrics.values())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state.params), before)
