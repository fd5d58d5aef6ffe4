"""The evaluation command: it repeats what training measured, and counts by task."""

import dataclasses
import json
import sys
import types

import jax
import numpy as np
import pytest
from absl import flags

from experiments import evaluate
from experiments.configs import tiny
from tests.reference import full_pass
from tests.rl import sample_graders
from tlt_jax.config import Config, from_dict
from tlt_jax.models import hf
from tlt_jax.rl import loop
from tlt_jax.rl.rewards import Score
from tlt_jax.rl.run import Run
from tlt_jax.sharding.publish import publish

SMALL = {
    "rollout.rows": 8,
    "evaluation.prompts": 4,
    "evaluation.samples": 3,
    "evaluation.k": 2,
    # Right, wrong and failed gradings of what a model of random weights says.
    "reward.grader": f"{sample_graders.__name__}:fails_on_some",
    "reward.extractor": "",
}


class Silent:
    def start(self, what, total):
        pass

    def advance(self):
        pass

    def step(self, line):
        pass


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A config, the folder of its policy, and how training evaluates it."""
    values = tiny.get_config("smoke")
    with values.unlocked():
        values.update_from_flattened_dict(SMALL)
    config = from_dict(Config, values)
    folder = tmp_path_factory.mktemp("run")
    run = Run(config, folder, Silent())
    try:
        line = loop._evaluation(run, publish(run.mesh, run.layout, run.policy.params, 0))
    finally:
        run.close()
    params = jax.device_get(run.policy.params)
    hf.save(folder / "policy", run.policy.model, params, tokenizer=run.policy.tokenizer)
    return config, folder, line


@pytest.fixture
def command(measured, monkeypatch, capsys):
    """Run the command on that policy; what it printed."""
    _, folder, _ = measured

    def command(*arguments):
        argv = [
            "--config=experiments/configs/tiny.py:smoke",
            f"--model={folder / 'policy'}",
            *(f"--config.{key}={value}" for key, value in SMALL.items()),
            *arguments,
        ]
        monkeypatch.setattr(sys, "argv", ["evaluate", *argv])  # ml_collections reads it there
        evaluate.main(argv)
        return capsys.readouterr().out

    yield command
    for name in [n for n in flags.FLAGS if n.startswith("config.")]:
        delattr(flags.FLAGS, name)


def test_it_measures_what_training_does(measured, command, tmp_path):
    _, _, line = measured
    out = tmp_path / "found.json"
    printed = command(f"--out={out}")
    found = json.loads(out.read_text())
    for name in evaluate.MEASURES:
        assert found["overall"][name]["mean"] == line[f"content/eval_{name}"]
    assert 0 < line["content/eval_pass_at_1"] < line["content/eval_pass_at_k"]
    assert found["overall"]["grading_failures"] > 0 and "gradings failed" in printed
    assert (found["samples"], found["k"], found["temperature"]) == (3, 2, 1.0)
    assert found["overall"]["responses"] == 4 * 3
    [(task, of_task)] = found["tasks"].items()
    assert task == "basic_arithmetic" and of_task["avg_at_k"] == found["overall"]["avg_at_k"]
    assert "pass@2" in printed and "avg@3" in printed and "max/median" in printed


def test_sharpness_is_that_of_a_pass_over_each_response_alone(measured, tmp_path):
    """Packed with their prompts they give what each gives in a row of its own."""
    config, _, _ = measured
    run = Run(config, tmp_path, Silent())
    run.close()
    rng = np.random.default_rng(0)
    graded = [
        types.SimpleNamespace(
            prompt=prompt,
            response=types.SimpleNamespace(
                tokens=rng.integers(0, 200, length, dtype=np.int32), log_probs=np.zeros(length)
            ),
        )
        for prompt, lengths in zip(run.held_out, [(4, 1), (2, 3)])
        for length in lengths
    ]
    sharp = evaluate.response_sharpness(run, graded, 0.8)
    expected = []
    for g in graded:
        ids = [*g.prompt.ids, *g.response.tokens]
        tokens_NT = np.array([ids], np.int32)
        lengths_N = np.array([len(ids)], np.int32)
        logits, _ = full_pass(run.policy.model, run.policy.params, tokens_NT, lengths_N)
        p = np.asarray(jax.nn.softmax(logits[0, len(g.prompt.ids) - 1 : -1] / 0.8), np.float64)
        expected.append([p.max(axis=1), -(p * np.log(p)).sum(axis=1)])
    np.testing.assert_allclose(sharp, np.concatenate(expected, axis=1), atol=1e-4)


def graded(draw, tokens, value, reason="stop"):
    score = Score(value, "error" if value is None else "ok", "")
    response = types.SimpleNamespace(tokens=np.zeros(tokens), finish_reason=reason)
    return types.SimpleNamespace(
        prompt=types.SimpleNamespace(draw=draw), response=response, score=score
    )


def test_figures_of_hand_made_responses():
    some = [graded(0, 1, 1.0), graded(0, 3, 0.0), graded(1, 2, None), graded(1, 10, 0.5, "length")]
    sharp = np.stack([np.linspace(0, 1, 16), np.full(16, 2.0)])
    got = evaluate.describe(some, sharp, k=2)
    assert got["pass_at_1"] == {"mean": 0.25, "standard_error": 0.25}
    assert got["pass_at_k"] == {"mean": 0.5, "standard_error": 0.5}
    assert got["avg_at_k"] == {"mean": 0.375, "standard_error": 0.125}
    assert got["length_percentiles"]["0"] == 1 and got["length_percentiles"]["50"] == 2.5
    assert got["length_percentiles"]["100"] == 10 and got["length_max_over_median"] == 4
    assert (got["truncated_share"], got["grading_failures"]) == (0.25, 1)
    assert got["mean_largest_probability"] == pytest.approx(0.5) and got["mean_entropy"] == 2.0
    one = evaluate.describe(some[:2], sharp[:, :4], k=1)
    assert one["prompts"] == 1 and one["avg_at_k"]["standard_error"] is None


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--samples=2", "--k=3"], r"k=3 is more than samples=2"),
        (["--samples=0"], r"samples=0 must be at least 1"),
        (["--model=/none"], r"'/none' does not exist"),
        (["--out={}/none/x.json"], r"No such file"),
        (["--out={}"], r"--out=.* exists; choose another file"),
        (["--config.evaluation.prompts=0"], r"nothing to evaluate on; raise both"),
        (["--config.rollout.rowz=1"], r"no such setting: rowz"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(command, tmp_path, arguments, words):
    with pytest.raises(SystemExit, match=words):
        command(*(argument.format(tmp_path) for argument in arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["--rows=4", "--workdir=x", "extra", "--config.seed"])
def test_an_unknown_argument_is_refused(command, capsys, argument):
    with pytest.raises(SystemExit):
        command(argument)
    assert f"unknown argument {argument}" in capsys.readouterr().err


def test_samples_and_k_of_the_command_line():
    config = from_dict(Config, tiny.get_config("smoke"))
    config = dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, samples=4, k=2)
    )
    given = types.SimpleNamespace(samples=None, k=None, model=None)
    cases = [((None, None), (4, 2)), ((8, None), (8, 8)), ((8, 3), (8, 3)), ((None, 4), (4, 4))]
    for (given.samples, given.k), expected in cases:
        got = evaluate.asked_for(config, given).evaluation
        assert (got.samples, got.k) == expected
