"""A run that is killed, wherever, and started again ends as the one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rl.killed_run import POINTS

ROOT = Path(__file__).parents[2]
TINY = (
    "--config=experiments/configs/tiny.py:smoke",
    "--config.steps=5",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=1",
    "--config.rollout.prompts=4",
    "--config.rollout.samples=4",
    "--config.rollout.rows=8",
    "--config.reward.grader=tests.rl.sample_graders:parity",
    "--config.reward.extractor=",
    "--config.evaluation.every=2",
    "--config.evaluation.prompts=4",
)
SMOLLM2 = (
    "--config=experiments/configs/quickstart.py:smoke",
    "--config.steps=4",
    "--config.checkpoint.every=1",
    "--config.evaluation.prompts=2",
)
SEED = 20261201


def start(point: str, workdir: Path, settings) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rl.killed_run", point, *settings, f"--workdir={workdir}"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(point: str, workdir: Path, settings) -> int:
    process = start(point, workdir, settings)
    output, _ = process.communicate(timeout=600)
    assert process.returncode in (0, -signal.SIGKILL), output
    return process.returncode


def outcome(workdir: Path):
    """All content of a finished run: its metrics and the bytes of its final parameters."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    content = [{k: v for k, v in line.items() if k.startswith("content/")} for line in lines]
    assert (workdir / "DONE").exists()
    return content, (workdir / "policy" / "model.safetensors").read_bytes()


class Reference:
    """The run that was not killed, and how long it takes with compiled programs at hand."""

    def __init__(self, folder: Path, settings):
        self.folder, self.settings = folder, settings
        finish("never", folder / "first", settings)
        began = time.monotonic()
        finish("never", folder / "reference", settings)
        self.seconds = time.monotonic() - began
        self.outcome = outcome(folder / "reference")
        assert self.outcome == outcome(folder / "first")

    def check_killed_at(self, point: str):
        workdir = self.folder / point.replace(" ", "_")
        assert finish(point, workdir, self.settings) == -signal.SIGKILL, "it was not killed"
        assert finish("never", workdir, self.settings) == 0
        assert outcome(workdir) == self.outcome

    def check_killed_after(self, seconds: float):
        workdir = self.folder / f"{seconds:.3f}"
        process = start("never", workdir, self.settings)
        time.sleep(seconds)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it had ended before"
        assert finish("never", workdir, self.settings) == 0
        assert outcome(workdir) == self.outcome


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("smollm2"), SMOLLM2)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in POINTS if p != "never"])
def test_killed_at_a_named_point(tiny, point):
    tiny.check_killed_at(point)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [random.Random(SEED + i).random() for i in range(10)])
def test_killed_at_a_random_time(tiny, fraction):
    tiny.check_killed_after(0.9 * fraction * tiny.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before a manifest", "in an update"])
def test_a_real_model_killed(smollm2, point):
    smollm2.check_killed_at(point)
