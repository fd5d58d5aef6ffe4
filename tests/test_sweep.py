"""Sweeps: what runs, what is skipped and gone on with, and that nothing outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments import report, sweep

ROOT = Path(__file__).parents[1]
CONFIG = """
from experiments.configs import tiny
from experiments.points import product

def get_config(arg="smoke"):
    return tiny.get_config(arg)

def sweep():
    return product({"seed": %s})
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Sweep over seeds with the stand-in; its folder and the status it ends with."""
    real = sweep.command
    monkeypatch.setattr(sweep, "command", lambda *a: ["tests.fake_run", *real(*a)[1:]])

    def run(seeds, *arguments, folder="sweep"):
        config = tmp_path / "swept.py"
        config.write_text(CONFIG % (seeds,))
        argv = [f"--config={config}", f"--workdir={tmp_path / folder}", *arguments]
        try:
            sweep.main(argv)
        except SystemExit as stop:
            return tmp_path / folder, stop.code
        return tmp_path / folder, 0

    return run


def starts(folder):
    files = folder.glob("*/starts.txt")
    return {path.parent.name: len(path.read_text().split()) for path in sorted(files)}


def test_a_crash_kills_one_point_and_the_same_command_does_the_rest(run, capsys):
    folder, code = run("range(3)", "--jobs=2")
    assert code == "seed=1: ValueError: no such reward\nseed=2: killed by SIGKILL"
    assert "3 points, 0 of them finished before" in capsys.readouterr().out
    assert starts(folder) == {"seed=0": 1, "seed=1": 1, "seed=2": 1}
    assert (folder / "seed=2" / "error.txt").read_text() == "killed by SIGKILL\n"
    assert "under way" in (folder / "seed=1" / "log.txt").read_text()
    assert "2 failed" in report.as_text(*report.table(report.read_runs(folder), [], 1, False))
    (folder / "mended").touch()
    folder, code = run("range(3)")
    assert code == "seed=2: killed by SIGKILL"
    assert "3 points, 1 of them finished before" in capsys.readouterr().out
    assert starts(folder) == {"seed=0": 1, "seed=1": 2, "seed=2": 2}


def test_a_dry_run_writes_nothing_and_names_the_commands(run, capsys, tmp_path):
    folder, code = run("[0, 5]", "--dry_run")
    assert code == 0 and not folder.exists()
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("python -m tests.fake_run --config=")
    assert out[2].endswith(f"--workdir={folder}/seed=5 --config.seed=5")


def test_shards_cover_every_point_once(run):
    for part in (2, 1, 3):
        folder, code = run("[0, 4, 5, 6, 7]", f"--only={part}/3")
        assert code == 0
    assert starts(folder) == {f"seed={s}": 1 for s in (0, 4, 5, 6, 7)}
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0", "-1/3"):
        assert f"--only={wrong} must be i/n" in run("[0]", f"--only={wrong}")[1]


def test_another_sweep_is_refused_and_a_longer_one_goes_on(run):
    folder, _ = run("[0, 4]")
    before = (folder / "sweep.json").read_bytes()
    _, code = run("[0, 5]")
    assert "holds another sweep: 1 of its 2 points are not in this one, such as 'seed=4'" in code
    assert (folder / "sweep.json").read_bytes() == before
    assert run("[0, 4, 5]")[1] == 0
    assert starts(folder) == {"seed=0": 1, "seed=4": 1, "seed=5": 1}
    names = [p["name"] for p in json.loads((folder / "sweep.json").read_text())["points"]]
    assert names == ["seed=0", "seed=4", "seed=5"]


def test_folders_that_hold_something_else_are_refused(run, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").touch()
    assert "holds a run; choose another folder" in run("[0]", folder="one")[1]
    (tmp_path / "file").touch()
    assert "cannot be used" in run("[0]", folder="file/below")[1]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "sweep.json").write_text('{"points": ')
    assert "is no record of a sweep" in run("[0]", folder="torn")[1]
    other = tmp_path / "other" / "seed=0"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text("{}\n")
    (other / "config.json").write_text('{"config": {"steps": 2, "seed": 7}}')
    assert "seed: 7 there, 0 here; choose another --workdir" in run("[0]", folder="other")[1]
    assert "--jobs=0 must be at least 1" in run("[0]", "--jobs=0")[1]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed orphan may stay as a zombie where nobody waits for it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def pids_of(folder):
    """The waiting run and its own child, once both are there."""
    path = folder / "seed=3" / "waiting"
    wait_for(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_and_the_sweep(run, tmp_path, capsys, number):
    pids = []

    def interrupt():
        pids.extend(pids_of(tmp_path / "sweep"))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(number)
    folder, code = run("[3, 4]")
    thread.join()
    assert code == 128 + number
    assert f"stopped by {number.name}; the same command goes on" in capsys.readouterr().out
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert starts(folder) == {"seed=3": 1} and not (folder / "seed=3" / "error.txt").exists()
    assert signal.getsignal(number) is before


STARTED = """
import subprocess, sys, time, types
from pathlib import Path
from experiments import sweep
sweep.command = lambda *_: ["tests.fake_run", *sys.argv[2:]]
{wrong}
run = sweep.start("", Path(sys.argv[1]), types.SimpleNamespace(name="seed=3"))
time.sleep(600)
"""
# Deliberately wrong: nothing watches the pipe.
UNWATCHED = """
real = subprocess.Popen
subprocess.Popen = lambda argv, **k: real([x for x in argv if "supervised" not in x], **k)
"""


@pytest.mark.parametrize("wrong", ["", pytest.param(UNWATCHED, marks=pytest.mark.slow)])
def test_runs_die_with_a_killed_sweep(tmp_path, wrong):
    run = [f"--workdir={tmp_path / 'seed=3'}", "--config.seed=3"]
    argv = [sys.executable, "-c", STARTED.format(wrong=wrong), str(tmp_path), *run]
    parent = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    pids = pids_of(tmp_path)
    time.sleep(0.2)
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    if wrong:
        time.sleep(0.5)
        assert all(alive(pid) for pid in pids)
        os.killpg(pids[0], signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(
    "text, line",
    [
        ("step 1\nwarning: x\nValueError: steps=0 must be at least 1\n", "ValueError: steps=0 mu"),
        ("Traceback (most recent call last):\n  File\nOSError: disk full\nhint\n", "OSError: disk"),
        ("Traceback (most recent call last):\n  cut off here\n", "cut off here"),
        ("\n \n", ""),
    ],
)
def test_the_first_line_of_an_error(text, line):
    found = sweep.first_error_line(text)
    assert found.startswith(line) and bool(found) == bool(line)


@pytest.mark.slow
def test_a_killed_sweep_gives_the_same_table(tmp_path, capsys):
    """Of real runs, through the command line; one sweep is killed twice in its first run."""
    config = tmp_path / "swept.py"
    config.write_text(CONFIG % ("range(2)",))

    def start(name):
        argv = [f"--config={config}", f"--workdir={tmp_path / name / 'sweep'}"]
        command = [sys.executable, "-m", "experiments.sweep", *argv]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    assert start("whole").wait() == 0
    for file, size in (("config.json", 1), ("metrics.jsonl", 600)):
        path = tmp_path / "killed" / "sweep" / "seed=0" / file
        sweep_process = start("killed")
        wait_for(lambda: path.exists() and path.stat().st_size >= size, seconds=300)  # noqa: B023
        sweep_process.kill()
        sweep_process.wait()
    assert start("killed").wait() == 0
    tables = []
    for name in ("whole", "killed"):
        report.main([str(tmp_path / name / "sweep")])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "2 finished" in tables[0]
    assert (tmp_path / "killed" / "sweep" / ".jax_cache").is_dir()
