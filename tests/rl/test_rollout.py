"""Rollouts on several slices: the same tokens on any number of them, and where the time went."""

import jax
import numpy as np
import pytest

from tests.spec import tiny
from tlt_jax.events import EventLog, read_events
from tlt_jax.models import transformer
from tlt_jax.rl.data import Prompt
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.length_history import LengthHistory
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.rollout import Sampler
from tlt_jax.rl.workers import Workers
from tlt_jax.sharding.mesh import MeshConfig, make_mesh, slice_mesh
from tlt_jax.sharding.publish import publish
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.noise import TRAIN
from tlt_jax.spec.request import Sampling

LENGTH = Grader("tests.rl.sample_graders:length")
SHAPES = EngineConfig(
    batch_buckets=(2, 4),
    cache_buckets=(32, 64),
    prompt_buckets=(32,),
    prefill_rows=(1, 2),
    segment_rounds=3,
)


class Words:
    """A tokenizer whose text is the token ids."""

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        yield tiny.model()


@pytest.fixture(scope="module")
def pool():
    with RewardPool(2, 0, deadline_s=30) as pool:
        yield pool


def prompts(count, first=0):
    rng = np.random.default_rng(first)
    return [
        Prompt(
            ids=tuple(int(t) for t in rng.integers(0, 48, rng.integers(1, 12))),
            text="",
            source="",
            entry={},
            where="",
            draw=first + i,
            domain=TRAIN,
        )
        for i in range(count)
    ]


def sampler_on(model, pool, path, slices, fixed=True):
    config, params = model
    mesh = make_mesh(MeshConfig(slices=slices))
    engines = [Engine(config, SHAPES, tiny.EOS, slice_mesh(mesh, i)) for i in range(slices)]
    published = publish(mesh, lambda p: transformer.decode_layout(config, p), params, 0)
    sampler = Sampler(
        Workers(engines),
        run_key=jax.random.key(5),
        tokenizer=Words(),
        grader_of=lambda prompt: LENGTH,
        pool=pool,
        events=EventLog(path),
        fixed=fixed,
    )
    return sampler, [published.view(i) for i in range(slices)]


def found(rollout):
    return [
        (g.prompt.draw, g.response.member, g.response.tokens.tolist(), g.text, g.score.value)
        for g in rollout.graded
    ]


def sample(model, pool, path, slices, *, fixed=True, count=9, **options):
    sampler, views = sampler_on(model, pool, path, slices, fixed)
    rollout = sampler.rollout(
        views, prompts(count), samples=3, sampling=Sampling(20, temperature=1.3), **options
    )
    sampler.events.close()
    return rollout


@pytest.fixture(scope="module")
def alone(model, pool, tmp_path_factory):
    with jax.enable_x64(True):
        return sample(model, pool, tmp_path_factory.mktemp("alone") / "events.jsonl", 1)


@pytest.mark.parametrize("fixed", (True, False))
@pytest.mark.parametrize("slices", (2, 4))
def test_tokens_and_scores_do_not_depend_on_the_slices(model, pool, tmp_path, alone, slices, fixed):
    with jax.enable_x64(True):
        rollout = sample(model, pool, tmp_path / "events.jsonl", slices, fixed=fixed)
    assert found(rollout) == found(alone)
    for a, b in zip(rollout.graded, alone.graded):
        np.testing.assert_allclose(a.response.log_probs, b.response.log_probs, rtol=0, atol=1e-12)
    lengths = [len(g.response.tokens) for g in alone.graded]
    assert min(lengths) < 10 and max(lengths) == 20  # uneven: rows are refilled


def segments(path):
    spans = [e for e in read_events(path) if e["name"] == "decode"]
    fields = ("rows", "live")  # not how many wait: one that has no room does not ask
    return [
        [tuple(e["fields"][f] for f in fields) for e in spans if e["fields"]["worker"] == w]
        for w in range(4)
    ]


def test_a_fixed_schedule_gives_each_slice_the_same_batches_every_time(
    model, pool, tmp_path, monkeypatch
):
    """Also where one slice is slow to look."""
    with jax.enable_x64(True):
        sample(model, pool, tmp_path / "a.jsonl", 4)
        monkeypatch.setattr("tlt_jax.rl.workers.POLL_S", 0.02)
        sample(model, pool, tmp_path / "b.jsonl", 4)
    assert segments(tmp_path / "a.jsonl") == segments(tmp_path / "b.jsonl")
    assert all(len(each) > 1 for each in segments(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("fixed", (True, False))
def test_more_prompts_may_follow(model, pool, tmp_path, fixed):
    """What follows once the first scores are in is sampled as if it had been there at once."""

    def more(scores):
        if len(scores) < 12 or more.asked:  # with a schedule by the clock, before all are in
            return []
        more.asked = True
        return prompts(3, first=50)

    more.asked = False
    with jax.enable_x64(True):
        rollout = sample(model, pool, tmp_path / "a.jsonl", 2, fixed=fixed, count=4, more=more)
        sampler, views = sampler_on(model, pool, tmp_path / "b.jsonl", 1)
        whole = sampler.rollout(
            views,
            [*prompts(4), *prompts(3, first=50)],
            samples=3,
            sampling=Sampling(20, temperature=1.3),
        )
    assert found(rollout) == found(whole)


def test_longest_first_changes_the_order_and_no_token(model, pool, tmp_path, alone):
    history = LengthHistory()
    with jax.enable_x64(True):
        first = sample(model, pool, tmp_path / "a.jsonl", 2, history=history)
        again = sample(model, pool, tmp_path / "b.jsonl", 2, history=history)
    assert found(first) == found(again) == found(alone)
    order = [p.draw for p in history.longest_first(prompts(9))]
    lengths = {d: 0 for d in order}
    for g in alone.graded:
        lengths[g.prompt.draw] += len(g.response.tokens)
    assert [lengths[d] for d in order] == sorted(lengths.values(), reverse=True)
    assert segments(tmp_path / "a.jsonl") != segments(tmp_path / "b.jsonl")


def test_idle_time_is_seen(model, pool, tmp_path):
    """Three responses on four slices: one has nothing to do from the start."""
    with jax.enable_x64(True):
        rollout = sample(model, pool, tmp_path / "events.jsonl", 4, count=1)
    events = read_events(tmp_path / "events.jsonl")
    idle = dict.fromkeys(range(4), 0.0)
    for e in events:
        if e["name"] == "idle":
            idle[e["fields"]["worker"]] += e["t1"] - e["t0"]
    decoding = {e["fields"]["worker"] for e in events if e["name"] == "decode"}
    assert decoding == {0, 1, 2} and idle[3] > 0.0
    shares = rollout.idle_shares
    assert len(shares) == 4 and shares[3] == max(shares) == pytest.approx(rollout.tail_share)
    assert 0.0 <= min(shares) < shares[3] < 1.0
    for worker, seconds in idle.items():
        assert seconds == pytest.approx(shares[worker] * rollout.seconds, abs=1e-4)
    assert rollout.moved == 0
