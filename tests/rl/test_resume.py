"""Interrupted and resumed is the same, bit for bit, as not interrupted."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests.rl import sample_graders
from tests.rl.test_loop import Silent, content, smoke
from tlt_jax.checkpoint import CheckpointError
from tlt_jax.models import hf
from tlt_jax.rl import loop
from tlt_jax.rl import run as runs
from tlt_jax.rl.policy_trainer import PolicyTrainer, init_optimizer

SETTINGS = {
    "steps": 4,
    "checkpoint.every": 2,
    "evaluation.every": 3,
    "reward.grader": f"{sample_graders.__name__}:parity",
    "reward.extractor": "",
}


class Interrupted(Exception):
    pass


def train(folder, **changes):
    folder.mkdir(exist_ok=True)
    return loop.train(smoke(**SETTINGS | changes), folder, Silent())


def interrupted(folder, monkeypatch, owner, name, nth, **changes):
    """Run until the nth call of owner.name."""
    function, calls = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Interrupted
        return function(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(owner, name, wrapped)
        train(folder, **changes)


def outcome(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return content(lines), (folder / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "reference"
    train(folder)
    lines, _ = outcome(folder)
    assert all(line["content/grad_norm"] > 0 for line in lines[1:])  # every step learns
    return folder


@pytest.mark.parametrize(
    "owner, name, nth",
    [
        (PolicyTrainer, "gradient", 24),  # in the update of step 4; 20 are the warm-up's
        (runs, "publish", 4),  # after the update of step 3
        (runs.Run, "record", 5),  # after the last step, before its line
        (hf, "save", 1),
    ],
)
def test_resumed_is_uninterrupted(reference, tmp_path, monkeypatch, owner, name, nth):
    interrupted(tmp_path / "run", monkeypatch, owner, name, nth)
    assert not (tmp_path / "run" / "DONE").exists()
    summary = train(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(reference)
    assert content(summary.lines) == outcome(reference)[0]


def test_a_run_that_died_before_its_first_checkpoint_starts_over(reference, tmp_path, monkeypatch):
    interrupted(tmp_path / "run", monkeypatch, PolicyTrainer, "gradient", 5)
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(reference)


def test_a_reference_policy_and_several_steps_per_rollout_resume(tmp_path, monkeypatch):
    """The reference is the policy before RL, also for a run that goes on from a later one."""
    settings = {
        "algorithm.name": "rloo",
        "algorithm.kl_coef": 0.1,
        "algorithm.mini_batches": 2,
        "checkpoint.every": 1,
        "checkpoint.keep_last": 1,
        "steps": 3,
    }
    train(tmp_path / "whole", **settings)
    interrupted(tmp_path / "cut", monkeypatch, runs, "publish", 4, **settings)
    train(tmp_path / "cut", **settings)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    lines, _ = outcome(tmp_path / "cut")
    assert lines[1]["content/optimizer_steps"] == 2 and lines[3]["content/kl"] > 0
    assert sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()) == ["0", "3"]


def test_more_steps_go_on_with_a_finished_run(reference, tmp_path):
    train(tmp_path / "run", steps=2, **{"evaluation.every": 3})
    assert runs.finished_steps(tmp_path / "run") == 2
    train(tmp_path / "run")
    assert runs.finished_steps(tmp_path / "run") == 4
    (lines, params), (wanted, wanted_params) = outcome(tmp_path / "run"), outcome(reference)
    assert params == wanted_params
    # The last step of a run evaluates; step 2 was one of the shorter run.
    extra = {k: v for k, v in lines[2].items() if "eval" not in k}
    assert [*lines[:2], extra, *lines[3:]] == wanted


@pytest.mark.parametrize("forgotten", ["optimizer", "draws"])
def test_forgetting_part_of_the_state_shows(reference, tmp_path, monkeypatch, forgotten):
    """Each part that is saved matters: a resume that restarts it ends elsewhere."""
    interrupted(tmp_path / "run", monkeypatch, runs, "publish", 4)
    with monkeypatch.context() as patch:
        if forgotten == "optimizer":
            restore = runs.Checkpoints.restore

            def fresh_moments(self, step, like):
                found = restore(self, step, like)
                opt_state = init_optimizer(smoke().trainer, found["policy"])
                return {**found, "optimizer": [opt_state, found["optimizer"][1]]}

            patch.setattr(runs.Checkpoints, "restore", fresh_moments)
        else:
            restore = runs.PromptStream.restore
            patch.setattr(
                runs.PromptStream,
                "restore",
                lambda self, state: restore(self, {**state, "draw": 0}),
            )
        train(tmp_path / "run")
    assert outcome(tmp_path / "run")[1] != outcome(reference)[1]


def test_after_a_resume_the_published_weights_are_the_restored_ones(
    reference, tmp_path, monkeypatch
):
    interrupted(tmp_path / "run", monkeypatch, runs, "publish", 4)
    seen = []
    publish = runs.publish

    def spied(mesh, layout, params, version):
        seen.append((version, np.array(params["embed"])))
        return publish(mesh, layout, params, version)

    monkeypatch.setattr(runs, "publish", spied)
    train(tmp_path / "run")
    checkpoints = runs.Checkpoints(tmp_path / "run" / "checkpoints", smoke().checkpoint)
    assert [version for version, _ in seen] == [2, 3, 4]
    assert checkpoints.steps()[-1] == 4
    assert not np.array_equal(seen[0][1], seen[-1][1])


def test_another_config_is_refused_with_what_differs(reference):
    before = (reference / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=r"trainer\.beta1: 0\.9 there, 0\.8 here; seed: 0 there, 5 here"
    ):
        train(reference, seed=5, **{"trainer.beta1": 0.8})
    with pytest.raises(ValueError, match=r"a run of 4 steps, more than steps=3"):
        train(reference, steps=3)
    assert (reference / "metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_stops_the_start_and_changes_nothing(tmp_path):
    train(tmp_path / "run", steps=2)
    arrays = tmp_path / "run" / "checkpoints" / "2" / "arrays"
    biggest = max(arrays.rglob("*"), key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-1])
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"checkpoints/2 is damaged .*go on from step 0"):
        train(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    train(tmp_path / "run", steps=2)
    assert runs.finished_steps(tmp_path / "run") == 2


def test_a_run_without_checkpoints_has_none(tmp_path):
    train(tmp_path / "run", steps=1, **{"checkpoint.every": 0})
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_starts_from_the_weights_of_another(reference, tmp_path, monkeypatch):
    interrupted(tmp_path / "cut", monkeypatch, runs, "publish", 4)
    key = runs.jax.random.key(0)

    def weights(path):
        config = dataclasses.replace(smoke().policy, path=str(path))
        return runs.policy.load(config, key).params

    def same(a, b):
        return all(map(np.array_equal, runs.jax.tree.leaves(a), runs.jax.tree.leaves(b)))

    final = weights(reference)
    assert same(final, weights(reference / "policy"))
    assert same(final, weights(reference / "checkpoints" / "4"))
    assert same(weights(tmp_path / "cut"), weights(reference / "checkpoints" / "2"))
    assert not same(final, weights(tmp_path / "cut"))
    with pytest.raises(ValueError, match=r"checkpoints/3' has no such .*there are \[2, 4\]"):
        weights(reference / "checkpoints" / "3")
    summary = train(tmp_path / "next", **{"policy.path": str(tmp_path / "cut"), "warm_up.steps": 0})
    assert len(summary.lines) == 5
