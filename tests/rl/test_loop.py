"""The whole loop on the tiny model: what is identical to what, and what stops it."""

import functools
import json

import jax
import numpy as np
import pytest

from experiments.configs import tiny
from tests.rl import sample_graders
from tlt_jax import metrics
from tlt_jax.config import Config, from_dict
from tlt_jax.events import read_events
from tlt_jax.models import hf, transformer
from tlt_jax.rl import loop
from tlt_jax.rl.policy_trainer import NonFiniteError


class Silent:
    """A progress display that only counts."""

    def __init__(self):
        self.advanced = 0

    def start(self, what, total):
        pass

    def advance(self):
        self.advanced += 1

    def step(self, line):
        pass


def smoke(**changes) -> Config:
    config = tiny.get_config("smoke")
    # Fewer rows than responses, so that rows are refilled; few enough for short tests.
    small = {"rollout.prompts": 4, "rollout.samples": 4, "rollout.rows": 8, "evaluation.prompts": 4}
    with config.unlocked():
        config.update_from_flattened_dict({**small, **changes})
    return from_dict(Config, config)


def run(folder, **changes):
    folder.mkdir()
    progress = Silent()
    summary = loop.train(smoke(**changes), folder, progress)
    return summary, progress


def content(lines):
    return [{k: v for k, v in line.items() if k.startswith("content/")} for line in lines]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "base"
    return (*run(folder), folder)


def test_a_run_leaves_metrics_events_and_a_policy(base):
    summary, progress, folder = base
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["content/step"] for line in lines] == [0, 1, 2]
    assert set(lines[1]) == metrics.STEP_KEYS
    assert set(lines[2]) == metrics.STEP_KEYS | metrics.EVALUATION_KEYS  # the last step evaluates
    names = {event["name"] for event in read_events(folder / "events.jsonl")}
    assert {"compile", "decode", "reward wait", "update", "publish", "evaluate"} <= names
    assert progress.advanced == 20 + 2 * 16 + 2 * 4  # warm-up steps, responses, evaluations
    model, params = hf.load(folder / "policy")
    assert model.num_layers == 2 and np.isfinite(params["embed"]).all()
    assert "decode rows=8" in summary.program_table


def test_the_same_seed_gives_the_same_content_and_another_does_not(base, tmp_path):
    again, _ = run(tmp_path / "again")
    other, _ = run(tmp_path / "other", seed=1)
    assert content(again.lines) == content(base[0].lines)
    assert content(other.lines) != content(base[0].lines)


def test_batch_buckets_and_segments_do_not_change_content(base, tmp_path):
    # Only the tokens are compared bit for bit: float32 log-probs depend on the batch shape.
    wide, _ = run(tmp_path / "wide", **{"rollout.rows": 16, "rollout.segment_rounds": 4})
    for a, b in zip(content(wide.lines), content(base[0].lines)):
        for key in ("content/reward_mean", "content/tokens", "content/eval_accuracy"):
            assert a.get(key) == b.get(key)


def test_evaluating_more_often_does_not_change_training(base, tmp_path):
    often, _ = run(tmp_path / "often", **{"evaluation.every": 1})
    drop = {"content/eval_accuracy"}
    for a, b in zip(content(often.lines), content(base[0].lines)):
        assert {k: v for k, v in a.items() if k not in drop} == {
            k: v for k, v in b.items() if k not in drop
        }


def test_failing_gradings_are_masked_out_and_counted(tmp_path):
    grader = f"{sample_graders.__name__}:fails_on_some"
    summary, _ = run(tmp_path / "some", **{"reward.grader": grader})
    line = summary.lines[1]
    assert 0 < line["content/valid_share"] < 1
    assert line["pace/reward_errors"] == round(16 * (1 - line["content/valid_share"]))


def test_a_step_in_which_all_gradings_fail_stops_the_run(tmp_path):
    grader = f"{sample_graders.__name__}:raises"
    with pytest.raises(RuntimeError, match=r"step 1: none of 16 gradings succeeded"):
        run(tmp_path / "none", **{"reward.grader": grader})


def test_a_nan_weight_stops_the_run_before_anything_is_learnt(tmp_path, monkeypatch):
    load = loop.policy.load

    def broken(*args):
        found = load(*args)
        found.params["norm"] = found.params["norm"].at[0].set(np.nan)
        return found

    monkeypatch.setattr(loop.policy, "load", broken)
    with pytest.raises(FloatingPointError, match="NaN"):
        run(tmp_path / "nan", **{"warm_up.steps": 0})


def test_a_nan_gradient_names_the_step_and_what_is_left(tmp_path, monkeypatch):
    def explode(*_):
        raise NonFiniteError("grad_norm=nan in update 0; the parameters were not changed")

    monkeypatch.setattr(loop.PolicyTrainer, "update", explode)
    with pytest.raises(
        NonFiniteError, match=r"RL step 1: .*last good weights are those it started"
    ):
        run(tmp_path / "nan", **{"warm_up.steps": 0})


def test_publishing_copies_so_that_an_update_cannot_delete_what_a_rollout_reads():
    config = smoke()
    found = loop.policy.load(config.policy, jax.random.key(0))
    layout = functools.partial(transformer.decode_layout, found.model)
    published = loop.publish(layout, found.params, version=3)
    donate = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    before = np.array(published.params["embed"])
    donate(found.params)
    assert found.params["embed"].is_deleted()
    np.testing.assert_array_equal(published.params["embed"], before)
    assert published.version == 3


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rollout.max_new_tokens": 500}, r"exceed the model's context of 512; lower either"),
        ({"trainer.micro_batch_tokens": 16}, r"micro_batch_tokens=16 is less than one row"),
        ({"policy.width": 60, "policy.num_heads": 8}, r"no transformers family"),
    ],
)
def test_what_cannot_work_is_refused_before_the_warm_up(tmp_path, monkeypatch, change, words):
    def no_work(*_):
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(loop, "warm_up", no_work)
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "bad", **change)


def test_stale_published_weights_raise_an_alarm(tmp_path, monkeypatch):
    """A publish that hands out other weights than the trainer's shows in the log-prob gap."""
    layout = transformer.decode_layout

    def stale(model, params):
        return layout(model, jax.tree.map(lambda x: x * 1.5, params))

    monkeypatch.setattr(loop.transformer, "decode_layout", stale)
    with pytest.warns(UserWarning, match="published weights those of the trainer"):
        run(tmp_path / "stale")
