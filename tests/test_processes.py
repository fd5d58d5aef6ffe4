"""Training on slices and processes: the content of one device, whatever the layout."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tlt_jax.models import hf

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "--config=experiments/configs/tiny.py:smoke",
    "--config.steps=3",
    "--config.policy.vocab_size=260",  # the bytes' 259 ids do not go on two devices
    "--config.checkpoint.every=2",
    "--config.rollout.prompts=4",
    "--config.rollout.samples=4",
    "--config.rollout.rows=4",
    "--config.reward.grader=tests.rl.sample_graders:parity",
    "--config.reward.extractor=",
    "--config.evaluation.every=3",
    "--config.evaluation.prompts=4",
)
# (processes, devices in each, slices, tensor)
LAYOUTS = {
    "one device": (1, 1, 1, 1),
    "4 slices": (1, 4, 4, 1),
    "2 processes of 2 slices": (2, 2, 4, 1),
    "4 processes": (4, 1, 4, 1),
    "2 slices of 2 devices": (1, 4, 2, 2),
}


def command(workdir, layout, *changes, module="experiments.main", point=()):
    processes, devices, slices, tensor = LAYOUTS[layout]
    return [
        sys.executable,
        "-m",
        "experiments.launch",
        f"--processes={processes}",
        f"--devices={devices}",
        f"--logs={workdir}.logs",
        "--",
        sys.executable,
        "-m",
        module,
        *point,
        *SETTINGS,
        f"--workdir={workdir}",
        f"--config.mesh.slices={slices}",
        f"--config.mesh.tensor={tensor}",
        *changes,
    ]


def launch(*args, double=True, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(double))}
    return subprocess.run(
        command(*args, *(["--config.policy.dtype=float64"] if double else []), **options),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def content(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith("content/")} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(folder):
    done = launch(folder / "alone", "one device")
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "alone"


EXACT = ("reward", "length", "tokens", "prompts", "share", "eval", "step")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one device"])
def test_a_layout_has_the_content_of_one_device(folder, alone, layout):
    """float64: what was sampled and rewarded is equal, what was summed equal but for rounding."""
    workdir = folder / layout.replace(" ", "_")
    done = launch(workdir, layout)
    assert done.returncode == 0, done.stderr + done.stdout
    for a, b in zip(content(workdir), content(alone), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if any(word in key for word in EXACT):
                assert value == b[key], key
            else:
                np.testing.assert_allclose(value, b[key], rtol=1e-9, atol=1e-12, err_msg=key)
    _, trained = hf.load(workdir / "policy")
    _, expected = hf.load(alone / "policy")
    assert np.abs(trained["embed"] - expected["embed"]).max() < 1e-6  # saved in float32
    processes, _, slices, _ = LAYOUTS[layout]
    line = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert [f"pace/idle_share/{i}" in line for i in range(slices + 1)] == [True] * slices + [False]
    if processes > 1:
        assert "the weights of all processes have the hash" in done.stdout
        shares = [
            int(word.split()[0])
            for word in done.stdout.split("tokens trained on by process: ")[1].split(", ")[
                :processes
            ]
        ]
        assert all(share > 0 for share in shares) and len(set(shares)) > 1


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_gone_on_with_on_another(folder, alone):
    """Two steps on two processes, the third on one, and the other way round."""
    for name, first, then in (
        ("fewer", "2 processes of 2 slices", "one device"),
        ("more", "one device", "2 processes of 2 slices"),
    ):
        workdir = folder / name
        done = launch(workdir, first, "--config.steps=2")
        assert done.returncode == 0, done.stderr
        done = launch(workdir, then)
        assert done.returncode == 0, done.stderr
        a, b = content(workdir)[-1], content(alone)[-1]
        for key in a:
            np.testing.assert_allclose(a[key], b[key], rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    ["in a rollout", "in grading", "in an update", "before publishing", "before a manifest"],
)
def test_one_of_two_processes_killed(folder, point):
    """The job ends within a minute, not well, with what the dead one said last; it resumes."""
    layout, killed = "2 processes of 2 slices", 0 if point == "before a manifest" else 1
    if not (folder / "whole").exists():
        done = launch(folder / "whole", layout, double=False)
        assert done.returncode == 0, done.stderr
    workdir = folder / point.replace(" ", "_")
    began = time.monotonic()
    done = launch(
        workdir,
        layout,
        double=False,
        module="tests.rl.killed_run",
        point=(f"{point}@{killed}",),
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert f"process {killed} of 2 was killed by SIGKILL" in done.stderr
    ended = time.time()
    log = Path(f"{workdir}.logs") / f"process_{killed}.log"
    assert ended - log.stat().st_mtime < 60 and time.monotonic() - began < 300
    for line in log.read_text().splitlines()[-3:]:
        assert line in done.stderr
    assert launch(workdir, layout, double=False).returncode == 0
    assert content(workdir) == content(folder / "whole")
    files = [f / "policy" / "model.safetensors" for f in (workdir, folder / "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_processes_that_disagree_end_with_one_sentence(folder):
    """Each process gets its own seed through the environment; both say what differs."""
    script = (
        "import os, sys; from experiments import main; from absl import app, flags; "
        "sys.argv += ['--config.seed=' + os.environ['TLT_INDEX']]; "
        "app.run(main.main, flags_parser=main.parse_flags)"
    )
    base = command(folder / "disagree", "2 processes of 2 slices")
    at = base.index("--") + 2
    done = subprocess.run(
        [*base[:at], "-c", script, *base[at + 2 :]],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    for i in range(2):
        said = Path(f"{folder / 'disagree'}.logs/process_{i}.log").read_text()
        assert "config: seed is 0 in process 0 and 1 in process 1" in said
        assert "Traceback" not in said


def test_a_mesh_that_cannot_be_is_refused_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.main", *SETTINGS, f"--workdir={tmp_path / 'run'}"]
        + ["--config.mesh.slices=2"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "mesh.slices=2, fsdp=1, tensor=1 need 2 devices in this process, which has 1" in (
        done.stderr
    )
