"""What the engine compiles, moves and refuses."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.spec import tiny
from tlt_jax.models import transformer
from tlt_jax.sharding.mesh import single_device_mesh, slice_mesh
from tlt_jax.spec import noise
from tlt_jax.spec import state as states
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.programs import ProgramPool, bucket_for
from tlt_jax.spec.request import Group, Sampling

SHAPES = EngineConfig(
    batch_buckets=(1, 3), cache_buckets=(32, 64), prompt_buckets=(32,), prefill_rows=(1,)
)


@pytest.fixture(scope="module")
def model():
    config, params = tiny.model("float32", num_layers=1)
    return config, transformer.unstack_layers(params)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model[0], SHAPES, tiny.EOS)


def start(engine, model, groups, tokens=30, **fields):
    sampling = Sampling(tokens, **fields)
    return engine.start(model[1], groups, sampling=sampling, run_key=jax.random.key(0))


def test_nothing_compiles_after_start(engine, model):
    """Over refills, growth and compaction the pool stays as it was, and so do JAX's own caches:
    a second identical session runs with compilation forbidden."""
    groups = tiny.requests(5, longest=20, vocab=48)
    session = start(engine, model, groups)
    names = set(engine.pool.programs)
    shapes = set()
    while not session.done:
        session.dispatch()
        shapes.add((len(session.rows), session.slots))
        session.collect()
    assert set(engine.pool.programs) == names
    assert {b for b, _ in shapes} == {1, 3} and {s for _, s in shapes} == {32, 64}

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    session = start(engine, model, groups)
    started = len(compiled)
    for _ in session.run():
        pass
    assert len(compiled) == started
    assert set(engine.pool.programs) == names
    jax.jit(lambda x: x * 3 + 2)(np.arange(7.0))
    assert len(compiled) > started  # the listener can see a compilation


def test_nothing_compiles_after_start_when_the_prompt_bucket_exceeds_the_response(model):
    """A prompt of 40 in a bucket of 128 starts in a cache of 128 though 48 tokens fit 64."""
    config, _ = model
    shapes = EngineConfig(
        batch_buckets=(1,), cache_buckets=(64, 128), prompt_buckets=(32, 128), prefill_rows=(1,)
    )
    engine = Engine(config, shapes)
    session = start(engine, model, [Group((1,) * 40, 0, 1, 0)], tokens=8)
    names = set(engine.pool.programs)
    session.dispatch()
    assert set(engine.pool.programs) == names


def test_program_pool_compiles_once_and_tells_the_cost():
    pool = ProgramPool()
    double = lambda x: 2 * x  # noqa: E731
    program = pool.get("double", double, jnp.zeros(3))
    assert pool.get("double", double, jnp.zeros(3)) is program
    assert program.run(jnp.arange(3.0)).tolist() == [0, 2, 4]
    assert program.compile_seconds > 0 and program.temporary_bytes >= 0
    assert pool.compile_seconds == program.compile_seconds
    assert "double" in pool.table() and "1 programs" in pool.table()
    with pytest.raises((TypeError, ValueError)):
        program.run(jnp.zeros(4))


@pytest.mark.parametrize("rows", (1, 2, 8, 32, 64, 128))
@pytest.mark.parametrize("prompt, new", ((30, 30), (60, 128), (500, 2000)))
def test_at_most_twelve_decode_programs(rows, prompt, new):
    """`fit` covers what it was asked for with few programs; the default has three."""
    c = EngineConfig.fit(rows=rows, prompt_tokens=prompt, new_tokens=new)
    assert len(c.batch_buckets) * len(c.cache_buckets) <= 12
    assert c.batch_buckets[-1] == rows
    assert c.prompt_buckets[-1] >= prompt and c.cache_buckets[-1] >= prompt + new
    default = EngineConfig()
    assert len(default.batch_buckets) * len(default.cache_buckets) <= 12


def test_fit_takes_overrides():
    c = EngineConfig.fit(rows=8, prompt_tokens=10, new_tokens=20, segment_rounds=7, taps=(1,))
    assert c.segment_rounds == 7 and c.taps == (1,) and c.batch_buckets == (1, 4, 8)


def test_segments_move_nothing_and_donate_the_state(engine, model):
    """Under a transfer guard a decode program runs; the buffers it was given are gone."""
    session = start(engine, model, tiny.requests(3, longest=9, vocab=48))
    session.dispatch()
    session.collect()
    session._grow_to(64)
    params, state = session.params, session.state
    program = engine.decode_program(params, 3, session.slots)
    with jax.transfer_guard("disallow"):
        new_state, emitted = program.run(params, state)
        jax.block_until_ready(emitted.token)
    assert all(x.is_deleted() for x in state.cache.k + state.cache.v)
    assert state.cache.length.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, new_state)))
    with pytest.raises(Exception, match="[Dd]isallowed"), jax.transfer_guard("disallow"):
        program.run(params, jax.tree.map(np.asarray, new_state))  # the guard can fail


def test_admission_donates_the_state(engine, model):
    session = start(engine, model, tiny.requests(3, longest=9, vocab=48))
    session._fit_rows(3)
    before = session.state
    session._admit(session.queue.take(3))
    assert all(x.is_deleted() for x in before.cache.k + before.cache.v)


def test_dispatch_returns_and_ready_polls(engine, model):
    """The pieces of `run`, as a training loop drives them."""
    session = start(engine, model, tiny.requests(2, longest=9, vocab=48))
    found = 0
    while not session.done:
        session.dispatch()
        while not session.ready():
            pass
        found += len(session.collect())
    assert found == sum(g.members for g in tiny.requests(2, longest=9, vocab=48))


def test_no_prompts_give_no_answers(engine, model):
    assert engine.generate(model[1], [], sampling=Sampling(5)) == []


def test_both_layouts_and_another_device_give_the_same_tokens(engine, model):
    config, unstacked = model
    prompts = [[1, 2, 3], [9]]
    sampling = Sampling(6)
    one = engine.generate(unstacked, prompts, sampling=sampling)
    layers = jax.tree.map(lambda *x: jnp.stack(x), *unstacked["layers"])
    stacked = {**unstacked, "layers": layers}
    two = engine.generate(stacked, prompts, sampling=sampling)
    shapes = dataclasses.replace(SHAPES, batch_buckets=(2,), cache_buckets=(32,))
    mesh = slice_mesh(single_device_mesh(jax.devices()[3]), 0)
    elsewhere = Engine(config, shapes, tiny.EOS, mesh)
    three = elsewhere.generate(unstacked, prompts, sampling=sampling)
    tokens = [[r.tokens.tolist() for g in run for r in g] for run in (one, two, three)]
    assert tokens[0] == tokens[1] == tokens[2]
    session = elsewhere.start(
        unstacked, [Group((1,), 0, 1, 0)], sampling=sampling, run_key=jax.random.key(0)
    )
    session.dispatch()
    assert session.state.token.devices() == {jax.devices()[3]}


def test_nan_weights_stop_the_run(engine, model):
    config, params = model
    broken = {**params, "norm": params["norm"].at[0].set(jnp.nan)}
    with pytest.raises(FloatingPointError, match="NaN at draw 0, member 0, response token 0"):
        engine.generate(broken, [[1, 2]], sampling=Sampling(4))
    fine = engine.generate(params, [[1, 2]], sampling=Sampling(4))
    assert np.isfinite(fine[0][0].log_probs).all()


def test_padding_rows_are_neutral_and_dead_after_compaction():
    config, _ = tiny.model("float32", num_layers=1)
    state = states.empty(config, 3, 32)
    state = state.replace(
        token=jnp.arange(3), live=jnp.ones(3, bool), sampling=state.sampling.replace(
            temperature=jnp.asarray([0.5, 0.6, 0.7])
        ),
        cache=state.cache.replace(length=jnp.asarray([4, 5, 6])),
    )  # fmt: skip
    moved = states.take_rows(state, jnp.asarray([2, 0, 3, 3]), 64)
    assert moved.live.tolist() == [True, True, False, False]
    assert moved.token.tolist()[:2] == [2, 0]
    np.testing.assert_allclose(moved.sampling.temperature, [0.7, 0.5, 1, 1])
    assert moved.cache.length.tolist() == [6, 4, 0, 0] and moved.cache.slots == 64


def group(prompt, members=1):
    return Group(tuple(prompt), 4, members, noise.TRAIN)


@pytest.mark.parametrize(
    "groups, tokens, message",
    (
        ([group([])], 5, "prompt of draw 4 is empty"),
        ([group([1], members=0)], 5, "asks for 0 samples"),
        ([group([1, 48])], 5, "token 48, outside the vocabulary of 48"),
        ([group([1, -1])], 5, "token -1, outside the vocabulary"),
        ([group([1] * 33)], 5, "33 tokens, more than the largest prompt bucket 32"),
        ([group([1] * 30)], 40, "need 70 cache slots.*largest cache bucket 64"),
    ),
)
def test_bad_requests_are_refused_before_any_work(engine, model, groups, tokens, message):
    before = set(engine.pool.programs)
    with pytest.raises(ValueError, match=message):
        start(engine, model, [group([1, 2]), *groups], tokens)
    assert set(engine.pool.programs) == before


def test_requests_beyond_the_context_are_refused(model):
    config, params = model
    short = Engine(dataclasses.replace(config, max_context=20), SHAPES)
    with pytest.raises(ValueError, match="exceed the model's context of 20"):
        short.generate(params, [[1] * 10], sampling=Sampling(11))


@pytest.mark.parametrize(
    "fields, message",
    (
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(top_k=-1), "top_k=-1"),
    ),
)
def test_bad_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 5, **fields})


@pytest.mark.parametrize(
    "fields, message",
    (
        (dict(batch_buckets=()), r"batch_buckets=\(\)"),
        (dict(batch_buckets=(8, 2)), r"batch_buckets=\(8, 2\)"),
        (dict(batch_buckets=(0, 2)), r"batch_buckets=\(0, 2\)"),
        (dict(cache_buckets=(100,), prompt_buckets=(64,)), "cache_buckets holds 100"),
        (dict(prompt_buckets=(40,)), "prompt_buckets holds 40"),
        (dict(prompt_buckets=(512,)), "prompt_buckets end at 512.*raise cache_buckets"),
        (dict(prefill_rows=(2, 4)), "must begin with 1"),
        (dict(segment_rounds=0), "segment_rounds=0"),
    ),
)
def test_bad_engine_shapes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_taps_outside_the_model_are_refused(model):
    with pytest.raises(ValueError, match=r"taps \[-1, 2\].*num_layers=1"):
        Engine(model[0], EngineConfig(taps=(-1, 0, 1, 2)))


def test_bucket_for():
    assert [bucket_for((2, 8, 32), n) for n in (0, 1, 2, 3, 8, 9, 32, 99)] == [
        2, 2, 2, 8, 8, 32, 32, 32,
    ]  # fmt: skip


def test_a_session_says_what_is_wrong_with_the_order_of_calls(model):
    config, _ = model
    shapes = EngineConfig(
        batch_buckets=(1,), cache_buckets=(32,), prompt_buckets=(32,), prefill_rows=(1,)
    )
    session = start(Engine(config, shapes), model, [Group((1, 2), 0, 1, 0)], tokens=1)
    with pytest.raises(RuntimeError, match="no segment is in flight; dispatch one first"):
        session.ready()
    session.dispatch()
    with pytest.raises(RuntimeError, match="a segment is in flight; collect it"):
        session.dispatch()
    [response] = session.collect()
    assert len(response.tokens) == 1 and session.done
    with pytest.raises(RuntimeError, match="there is nothing to dispatch"):
        session.dispatch()


def test_draws_must_differ_and_fit_and_keys_must_be_threefry(model):
    config, params = model
    engine = Engine(config, EngineConfig(batch_buckets=(1,), prompt_buckets=(32,)))
    group = Group((1,), 0, 1, 0)
    with pytest.raises(ValueError, match="two groups share domain 0 and draw 0"):
        start(engine, model, [group, group], tokens=1)
    with pytest.raises(ValueError, match=r"draw -1 does not fit 32 bits"):
        start(engine, model, [Group((1,), -1, 1, 0)], tokens=1)
    with pytest.raises(ValueError, match=r"run_key is of the kind .*threefry2x32"):
        key = jax.random.key(0, impl="rbg")
        engine.start(params, [group], sampling=Sampling(1), run_key=key)
    with pytest.raises(ValueError, match=r"eos_ids \[-2\] lie outside the vocabulary"):
        Engine(config, EngineConfig(), eos_ids=(1, -2))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 32, 512, 4096])
@pytest.mark.parametrize("new_tokens", [1, 100, 4000])
def test_fit_covers_what_was_asked_with_few_programs(rows, new_tokens):
    c = EngineConfig.fit(rows=rows, prompt_tokens=70, new_tokens=new_tokens)
    assert c.batch_buckets[-1] == rows and c.prompt_buckets[-1] >= 70
    assert c.cache_buckets[-1] >= 70 + new_tokens
    assert len(c.batch_buckets) * len(c.cache_buckets) <= 12


def test_a_segment_copies_no_cache(model):
    """The write of the cache waits for every read (`plain_round`); otherwise XLA copies it all."""
    config, params = model
    shapes = EngineConfig(batch_buckets=(4,), cache_buckets=(64,), prompt_buckets=(32,))
    text = Engine(config, shapes).decode_program(params, 4, 64).run.as_text()
    K, C = config.num_kv_heads, config.head_dim
    for shape in (f"4,{K},2,{C},32", f"4,{K},64,{C}"):
        assert f"f32[{shape}]" in text
        copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
        assert not copies, f"{len(copies)} copies of cache arrays [{shape}] in a segment"
