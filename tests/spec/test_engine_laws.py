"""The engine against the reference sampler: the same tokens whatever shares a batch, and when."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import sample_rows
from tests.spec import tiny
from tlt_jax.models import kv_cache, transformer
from tlt_jax.spec import engine as engines
from tlt_jax.spec import noise
from tlt_jax.spec import round as rounds
from tlt_jax.spec import state as states
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Group, Sampling

SETTINGS = (
    Sampling(36),
    Sampling(30, temperature=0.7, top_p=0.8),
    Sampling(36, temperature=1.5, top_p=0.9, top_k=5),
    Sampling(20, temperature=0.0),
)
TAPS = (0, 2, 1)


def drive(engine, params, groups, sampling, run_key):
    """({(draw, member): response}, the (rows, slots) of every segment) of one session."""
    session = engine.start(params, groups, sampling=sampling, run_key=run_key)
    answers, shapes = {}, []
    while not session.done:
        session.dispatch()
        shapes.append((len(session.rows), session.slots))
        for r in session.collect():
            assert (r.group.draw, r.member) not in answers
            answers[r.group.draw, r.member] = r
    return answers, shapes


def differing(answers, expected, uids):
    """The responses whose tokens, length or reason to stop are not the reference's."""
    assert len(answers) == len(uids)
    wrong = []
    for (_, draw, member), want in zip(uids, expected):
        got, tokens = answers[draw, member], [t for t, _, _ in want]
        reason = "stop" if tokens[-1] in tiny.EOS else "length"
        if got.tokens.tolist() != tokens or got.finish_reason != reason:
            wrong.append((draw, member))
    return wrong


def check(engine, params, groups, sampling, run_key):
    """Zero differences in tokens, 1e-9 in log-probs. Returns the responses and segment shapes."""
    prompts, uids = tiny.rows_of(groups)
    expected = sample_rows(engine.model, params, run_key, prompts, uids, sampling, tiny.EOS)
    answers, shapes = drive(engine, params, groups, sampling, run_key)
    assert differing(answers, expected, uids) == []
    for (_, draw, member), want in zip(uids, expected):
        got = answers[draw, member].log_probs
        np.testing.assert_allclose(got, [lp for _, lp, _ in want], rtol=0, atol=1e-9)
    return answers, shapes


def drive_adding(engine, params, groups, sampling, run_key, when):
    """As `drive`, the groups added by parts; `when` says of a session whether to add the next."""
    parts = [list(part) for part in np.array_split(np.array(groups, object), 4)]
    session = engine.start(params, parts[0], sampling=sampling, run_key=run_key)
    parts, answers, shapes = parts[1:], {}, []
    while not session.done or parts:
        if parts and (session.done or when(session)):
            session.add(parts.pop(0))
        session.dispatch()
        shapes.append((len(session.rows), session.slots))
        answers.update({(r.group.draw, r.member): r for r in session.collect()})
    return answers, shapes


@pytest.fixture(scope="module")
def float64():
    """An engine in float64 whose sessions use every kind of program, and its parameters."""
    with jax.enable_x64(True):
        config, params = tiny.model()
        shapes = EngineConfig(
            batch_buckets=(2, 6),
            cache_buckets=(32, 64),
            prompt_buckets=(32,),
            prefill_rows=(1, 2),
            segment_rounds=3,
            taps=TAPS,
        )
        yield Engine(config, shapes, tiny.EOS), transformer.unstack_layers(params), params


@pytest.mark.parametrize("when", ["in the tail", "when nothing is left"])
def test_groups_added_on_the_way_get_the_same_tokens(float64, when):
    """A batch that has shrunk grows again, and the cache widens for a longer prompt."""
    engine, params, _ = float64
    run_key = jax.random.key(11)
    groups = sorted(
        tiny.requests(12, longest=24, vocab=engine.model.vocab_size), key=lambda g: len(g.prompt)
    )
    sampling = SETTINGS[0]
    together, _ = drive(engine, params, groups, sampling, run_key)
    added, shapes = drive_adding(
        engine,
        params,
        groups,
        sampling,
        run_key,
        lambda session: when == "in the tail" and session.live < 2 and not session.queue,
    )
    assert added.keys() == together.keys()
    for key, response in added.items():
        np.testing.assert_array_equal(response.tokens, together[key].tokens)
        assert response.finish_reason == together[key].finish_reason
    rows = [rows for rows, _ in shapes]
    assert any(a < b for a, b in zip(rows, rows[1:]))


def test_an_added_group_is_checked_like_any_other(float64):
    engine, params, _ = float64
    group = Group((1, 2), 0, 2, noise.TRAIN)
    session = engine.start(params, [group], sampling=SETTINGS[0], run_key=jax.random.key(0))
    for bad in (group, Group((), 1, 1, noise.TRAIN)):
        with pytest.raises(ValueError, match="two groups share|is empty"):
            session.add([Group((5,), 9, 1, noise.TRAIN), bad])
    assert len(list(session.run())) == 2  # nothing was added


def test_tokens_are_the_references_in_every_bucket(float64):
    """A few thousand tokens in float64, shuffled prompts, single-token prompts, refilled and
    compacted rows, members of a group admitted at different times: zero differences."""
    engine, params, stacked = float64
    seen, tokens, reasons = set(), 0, set()
    for i, sampling in enumerate(SETTINGS):
        groups = tiny.requests(24, longest=28, vocab=engine.model.vocab_size, seed=i)
        answers, shapes = check(engine, params, groups, sampling, jax.random.key(i))
        seen |= set(shapes)
        tokens += sum(len(r.tokens) for r in answers.values())
        reasons |= {r.finish_reason for r in answers.values()}
    short = tiny.requests(5, longest=6, vocab=engine.model.vocab_size, seed=9)
    _, shapes = check(engine, stacked, short, Sampling(8), jax.random.key(9))
    assert seen | set(shapes) == {(b, s) for b in (2, 6) for s in (32, 64)}
    assert tokens > 3000 and reasons == {"stop", "length"}


def test_log_probs_and_features_are_those_of_a_teacher_forced_pass(float64):
    """One pass over prompt and response gives the log-probs to 1e-9 and, at the places that
    predicted each token, the captured hidden states; there is one row of them per token."""
    engine, params, stacked = float64
    groups = tiny.requests(12, longest=28, vocab=engine.model.vocab_size, seed=5)
    answers, _ = drive(engine, params, groups, SETTINGS[0], jax.random.key(3))
    responses = list(answers.values())
    log_probs, features = tiny.teacher_forced(engine.model, stacked, responses, width=64, taps=TAPS)
    for r, rows, feature in zip(responses, log_probs, features):
        picked = rows[np.arange(len(r.tokens)), r.tokens]
        np.testing.assert_allclose(r.log_probs, picked, rtol=0, atol=1e-9)
        assert r.features.shape == (len(r.tokens), len(TAPS), engine.model.width)
        np.testing.assert_allclose(r.features, feature, rtol=0, atol=1e-9)


def test_order_of_prompts_and_company_change_nothing(float64):
    """The same draws in another order, and one of them alone, give bit-identical tokens."""
    engine, params, _ = float64
    groups = tiny.requests(10, longest=20, vocab=engine.model.vocab_size, seed=2)
    run_key = jax.random.key(11)
    one, _ = drive(engine, params, groups, SETTINGS[0], run_key)
    two, _ = drive(engine, params, sorted(groups, key=lambda g: g.draw), SETTINGS[0], run_key)
    alone, _ = drive(engine, params, groups[3:4], SETTINGS[0], run_key)
    other, _ = drive(engine, params, groups, SETTINGS[0], jax.random.key(12))
    assert {k: r.tokens.tolist() for k, r in one.items()} == {
        k: r.tokens.tolist() for k, r in two.items()
    }
    assert all(r.tokens.tolist() == one[k].tokens.tolist() for k, r in alone.items())
    assert any(r.tokens.tolist() != one[k].tokens.tolist() for k, r in other.items())


def check_float32(engine, params, groups, sampling, run_key):
    """Rows may leave the reference at a numerical tie, at most one per 5k tokens (and one).

    Each must be shown to be a tie: the two highest perturbed scores lay closer than four times the
    largest log-prob gap that the change of shape made where the tokens agreed. Returns the number
    of compared tokens.
    """
    prompts, uids = tiny.rows_of(groups)
    expected = sample_rows(engine.model, params, run_key, prompts, uids, sampling, tiny.EOS)
    answers, _ = drive(engine, params, groups, sampling, run_key)
    compared, error, gaps = 0, 0.0, []
    for (_, draw, member), want in zip(uids, expected):
        got = answers[draw, member]
        for token, log_prob, (want_token, want_log_prob, gap) in zip(
            got.tokens, got.log_probs, want
        ):
            compared += 1
            if token != want_token:
                gaps.append(gap)
                break
            error = max(error, abs(log_prob - want_log_prob))
        else:
            assert len(got.tokens) == len(want)
    assert 0 < error < 1e-4
    assert all(gap < 4 * error for gap in gaps), (gaps, error)
    assert len(gaps) <= 1 + compared // 5000, f"{len(gaps)} ties in {compared} tokens"
    return compared


def float32_engine(**fields):
    config, params = tiny.model("float32")
    shapes = dict(batch_buckets=(6,), cache_buckets=(64,), prompt_buckets=(32,), prefill_rows=(1,))
    return Engine(config, EngineConfig(**{**shapes, **fields}), tiny.EOS), params


def test_float32_differs_at_numerical_ties_only():
    engine, params = float32_engine(segment_rounds=5)
    groups = tiny.requests(24, longest=28, vocab=engine.model.vocab_size)
    assert check_float32(engine, params, groups, SETTINGS[0], jax.random.key(0)) > 800


# Deliberately wrong engines: each patch makes one plausible mistake and must be noticed.


def same_noise_by_row(monkeypatch):
    """Noise that depends on the row of the batch."""
    wrong = lambda key, at: noise.seeds(key + jnp.arange(len(at), dtype=key.dtype)[:, None], at)  # noqa: E731
    monkeypatch.setattr(rounds, "noise", types.SimpleNamespace(seeds=wrong))


def noise_one_late(monkeypatch):
    """The noise of the position that is fed, not of the one that is sampled."""
    wrong = lambda key, at: noise.seeds(key, at - 1)  # noqa: E731
    monkeypatch.setattr(rounds, "noise", types.SimpleNamespace(seeds=wrong))


def noise_reused(monkeypatch):
    """Two positions in a row share their noise."""
    wrong = lambda key, at: noise.seeds(key, at // 2 * 2)  # noqa: E731
    monkeypatch.setattr(rounds, "noise", types.SimpleNamespace(seeds=wrong))


def cache_one_off(monkeypatch):
    """Keys and values land one slot late."""
    wrong = lambda cache, kv, rows, slots: kv_cache.write(cache, kv, rows, slots + 1)  # noqa: E731
    monkeypatch.setattr(rounds, "kv_cache", types.SimpleNamespace(write=wrong))


def eos_ignored(monkeypatch):
    monkeypatch.setattr(rounds, "is_in", lambda token_B, ids: jnp.zeros(token_B.shape, bool))


def refilled_rows_keep_their_key(monkeypatch):
    """A row that is used again samples with the noise of the response before."""

    def wrong(state, prefix, new, run_key, right=states.admit):
        used = (state.limit > 0)[:, None]
        fresh = right(state, prefix, new, run_key)
        return fresh.replace(key=jnp.where(used, state.key, fresh.key))

    monkeypatch.setattr(states, "admit", wrong)


def prefix_one_short(monkeypatch):
    """The prefix counts one slot less than was filled."""

    def wrong(model, params, tokens, length, right=engines.prefill):
        cache = right(model, params, tokens, length)
        return cache.replace(length=jnp.maximum(cache.length - 1, 0))

    monkeypatch.setattr(engines, "prefill", wrong)


def compaction_forgets_the_cache(monkeypatch):
    """Rows move, their caches stay."""

    def wrong(state, rows_N, slots, right=states.take_rows):
        moved = right(state, rows_N, slots)
        stay = right(state, jnp.arange(rows_N.shape[0]), slots)
        return moved.replace(cache=stay.cache.replace(length=moved.cache.length))

    monkeypatch.setattr(states, "take_rows", wrong)


MISTAKES = (
    None,
    same_noise_by_row,
    noise_one_late,
    noise_reused,
    cache_one_off,
    eos_ignored,
    refilled_rows_keep_their_key,
    prefix_one_short,
    compaction_forgets_the_cache,
)


@pytest.fixture(scope="module")
def small():
    """Requests to a one-layer model and what the reference answers, before anything is patched."""
    with jax.enable_x64(True):
        config, params = tiny.model(num_layers=1)
        groups = tiny.requests(8, longest=9, vocab=config.vocab_size)
        prompts, uids = tiny.rows_of(groups)
        sampling = Sampling(20)
        args = (prompts, uids, sampling, tiny.EOS)
        expected = sample_rows(config, params, jax.random.key(0), *args, rows=32)
        yield config, transformer.unstack_layers(params), groups, sampling, expected, uids


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__ if m else "none")
def test_a_wrong_engine_fails_the_same_check(small, mistake, monkeypatch):
    config, params, groups, sampling, expected, uids = small
    batches = (4,) if mistake is not compaction_forgets_the_cache else (2, 4)
    shapes = EngineConfig(
        batch_buckets=batches, cache_buckets=(32,), prompt_buckets=(32,), prefill_rows=(1,)
    )
    if mistake is not None:
        mistake(monkeypatch)
    engine = Engine(config, shapes, tiny.EOS)
    answers, _ = drive(engine, params, groups, sampling, jax.random.key(0))
    assert bool(differing(answers, expected, uids)) == (mistake is not None)


# The long versions.


@pytest.mark.slow
def test_fifty_thousand_tokens_without_a_difference():
    """float64, three batch and three cache buckets, two prompt buckets, features off."""
    with jax.enable_x64(True):
        config, params = tiny.model()
        shapes = EngineConfig(
            batch_buckets=(2, 6, 24),
            cache_buckets=(32, 64, 128),
            prompt_buckets=(32, 64),
            prefill_rows=(1, 4),
        )
        engine, unstacked = Engine(config, shapes, tiny.EOS), transformer.unstack_layers(params)
        settings = (
            Sampling(64),
            Sampling(50, temperature=0.7),
            Sampling(64, temperature=0.7, top_p=0.9, top_k=20),
            Sampling(40, temperature=0.0),
        )
        tokens, seen = 0, set()
        for i, sampling in enumerate(settings):
            groups = tiny.requests(330, longest=60, vocab=48, seed=20 + i)
            answers, shapes = check(engine, unstacked, groups, sampling, jax.random.key(i))
            tokens += sum(len(r.tokens) for r in answers.values())
            seen |= set(shapes)
        for count, longest in ((2, 6), (5, 6), (9, 6), (4, 30), (2, 60)):
            groups = tiny.requests(count, longest=longest, vocab=48, seed=30 + count)
            seen |= set(check(engine, unstacked, groups, Sampling(26), jax.random.key(7))[1])
        assert tokens >= 50_000
        assert seen == {(b, s) for b in (2, 6, 24) for s in (32, 64, 128)}


@pytest.mark.slow
def test_float32_over_fifty_thousand_tokens():
    engine, params = float32_engine(batch_buckets=(4, 32), cache_buckets=(64, 128))
    compared = 0
    for i, sampling in enumerate((Sampling(64), Sampling(64, temperature=0.7), Sampling(60, 0.0))):
        groups = tiny.requests(400, longest=30, vocab=48, seed=50 + i)
        compared += check_float32(engine, params, groups, sampling, jax.random.key(i))
    assert compared > 50_000


def test_each_group_samples_as_it_says():
    """Rows of one batch with temperatures, masks and lengths of their own."""
    with jax.enable_x64(True):
        config, params = tiny.model("float64")
        ways = [Sampling(9), Sampling(3, temperature=0.0), Sampling(6, 0.7, top_p=0.8, top_k=5)]
        groups = [Group((3, 1, 4), d, 2, 0, way) for d, way in enumerate(ways)]
        shapes = EngineConfig(batch_buckets=(6,), cache_buckets=(32,), prompt_buckets=(32,))
        engine = Engine(config, shapes)
        key = jax.random.key(0)
        together = list(engine.start(params, groups, sampling=Sampling(1), run_key=key).run())
        assert len(together) == 6
        for response in together:
            way = response.group.sampling
            assert len(response.tokens) == way.max_new_tokens
            alone = engine.start(
                params,
                [dataclasses.replace(response.group, sampling=None)],
                sampling=way,
                run_key=key,
            )
            [same] = [r for r in alone.run() if r.member == response.member]
            np.testing.assert_array_equal(response.tokens, same.tokens)
            np.testing.assert_allclose(response.log_probs, same.log_probs, atol=1e-12)


def test_bfloat16_is_sampled_from_float32_scores_of_its_own_program():
    """Log-probs are float32 and near those of a float32 teacher-forced pass."""
    config, params = tiny.model("float32")
    half = dataclasses.replace(config, dtype="bfloat16")
    shapes = EngineConfig(batch_buckets=(4,), cache_buckets=(64,), prompt_buckets=(32,))
    [answers] = Engine(half, shapes).generate(
        params, [[5, 6, 7]], samples=4, sampling=Sampling(24), seed=3
    )
    log_probs, _ = tiny.teacher_forced(config, params, answers, width=32)
    expected = [
        np.take_along_axis(p, r.tokens[:, None], 1)[:, 0] for p, r in zip(log_probs, answers)
    ]
    assert all(r.log_probs.dtype == np.float32 for r in answers)
    gap = np.mean([np.abs(e - r.log_probs).mean() for e, r in zip(expected, answers)])
    assert 1e-6 < gap < 0.1  # bfloat16 differs, and not by much
