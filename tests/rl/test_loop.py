"""The whole loop on the tiny model: what is identical to what, and what stops it."""

import dataclasses
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
from tlt_jax.rl import run as runs
from tlt_jax.rl.policy_trainer import NonFiniteError

STEP_KEYS = metrics.STEP_KEYS | {"pace/idle_share/0"}


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
    assert set(lines[1]) == STEP_KEYS
    assert set(lines[2]) == STEP_KEYS | metrics.EVALUATION_KEYS  # the last step evaluates
    events = read_events(folder / "events.jsonl")
    # Evaluation and step 1 read version 0, step 2 version 1, the last evaluation version 2.
    versions = [e["fields"]["version"] for e in events if e["name"] == "rollout"]
    assert versions == [0, 0, 1, 2]
    names = {event["name"] for event in events}
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
        for key in ("content/reward_mean", "content/tokens", "content/eval_avg_at_k"):
            assert a.get(key) == b.get(key)


def test_evaluating_more_often_does_not_change_training(base, tmp_path):
    often, _ = run(tmp_path / "often", **{"evaluation.every": 1})
    drop = metrics.EVALUATION_KEYS
    for a, b in zip(content(often.lines), content(base[0].lines)):
        assert {k: v for k, v in a.items() if k not in drop} == {
            k: v for k, v in b.items() if k not in drop
        }


def test_not_evaluating_at_all_does_not_change_training(base, tmp_path):
    never, _ = run(tmp_path / "never", **{"evaluation.prompts": 0})
    steps = [line for line in content(base[0].lines) if "content/loss" in line]
    assert len(base[0].lines) == len(steps) + 1  # and the evaluation before the first step
    trained = [{k: v for k, v in a.items() if k not in metrics.EVALUATION_KEYS} for a in steps]
    assert content(never.lines) == trained


def test_failing_gradings_are_masked_out_and_counted(tmp_path):
    grader = f"{sample_graders.__name__}:fails_on_some"
    summary, _ = run(tmp_path / "some", **{"reward.grader": grader, "reward.extractor": ""})
    line = summary.lines[1]
    assert 0 < line["content/valid_share"] < 1
    assert line["pace/reward_errors"] == round(16 * (1 - line["content/valid_share"]))


def test_a_step_in_which_all_gradings_fail_stops_the_run(tmp_path):
    grader = f"{sample_graders.__name__}:raises"
    with pytest.raises(RuntimeError, match=r"policy of step 0: none of \d+ gradings succeeded"):
        run(tmp_path / "none", **{"reward.grader": grader, "reward.extractor": ""})


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"policy.max_context": 32},
            r"longest prompt \(\d+ tokens\) and rollout\.max_new_tokens=4 exceed the model's "
            r"context of 32; .*data\.max_prompt_tokens=28",
        ),
        ({"rollout.max_new_tokens": 300, "trainer.micro_batch_tokens": 300}, r"one row of 3\d\d"),
        (
            {"reward.grader": "exact"},
            r"'basic_arithmetic', Calculate.*grader='exact' needs 'answer'",
        ),
        ({"policy.width": 60, "policy.num_heads": 8}, r"width=60, num_heads=8 together"),
        ({"policy.dtype": "float64"}, r"policy\.dtype='float64' needs .*JAX_ENABLE_X64=1"),
    ],
)
def test_what_cannot_work_is_refused_before_the_warm_up(tmp_path, monkeypatch, changes, words):
    monkeypatch.delattr(runs, "warm_up")
    with jax.enable_x64(False), pytest.raises(ValueError, match=words):
        run(tmp_path / "run", **changes)
    assert not list((tmp_path / "run").iterdir())


def test_a_line_of_a_file_without_an_answer_is_refused_before_the_warm_up(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n{"prompt": "what?"}\n')
    config = smoke(**{"warm_up.steps": 0})
    data = dataclasses.replace(config.data, tasks=(), train_file=str(file), eval_size=0)
    reward = dataclasses.replace(config.reward, grader="exact")
    evaluation = dataclasses.replace(config.evaluation, prompts=0)
    config = dataclasses.replace(config, data=data, reward=reward, evaluation=evaluation)
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl:2, what\?: grader='exact' needs 'answer'"
    ):
        loop.train(config, tmp_path, Silent())
    file.write_text(file.read_text().replace('"what?"', '"2 + 2 = ", "answer": "4"'))
    summary = loop.train(config, tmp_path, Silent())
    # No held-out prompts, so no evaluation: neither before the first step nor after the last.
    assert [set(line) for line in summary.lines] == [STEP_KEYS] * 2


def test_a_nan_weight_stops_the_run_before_anything_is_learnt(tmp_path, monkeypatch):
    load = runs.policy.load

    def broken(*args):
        found = load(*args)
        found.params["norm"] = found.params["norm"].at[0].set(np.nan)
        return found

    monkeypatch.setattr(runs.policy, "load", broken)
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


def test_stale_published_weights_raise_an_alarm(tmp_path, monkeypatch):
    """A publish that hands out other weights than the trainer's shows in the log-prob gap."""
    layout = transformer.decode_layout

    def stale(model, params):
        return layout(model, jax.tree.map(lambda x: x * 1.5, params))

    monkeypatch.setattr(runs.transformer, "decode_layout", stale)
    with pytest.warns(UserWarning, match="published weights those of the trainer"):
        run(tmp_path / "stale")
