"""Several local processes as one: status, logs, signals, cores."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import launch

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux lets a process choose its cores")


def command(script, *options, processes=2):
    return [
        sys.executable,
        "-m",
        "experiments.launch",
        f"--processes={processes}",
        *options,
        "--",
        sys.executable,
        "-c",
        script,
    ]


def run(*args, **kwargs):
    return subprocess.run(
        command(*args, **kwargs), cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_process_has_its_number_and_its_log(tmp_path):
    script = "import os; print(*(os.environ['TLT_' + n] for n in ('INDEX', 'PROCESSES')), 'hello')"
    done = run(script, f"--logs={tmp_path}", processes=3)
    assert (done.returncode, done.stdout) == (0, "0 3 hello\n")
    logs = [(tmp_path / f"process_{i}.log").read_text() for i in range(3)]
    assert logs == [f"{i} 3 hello\n" for i in range(3)]


def test_one_that_fails_ends_all():
    script = (
        "import os, sys, time\n"
        "if os.environ['TLT_INDEX'] == '1': print('no such model'); sys.exit(7)\n"
        "time.sleep(100)"
    )
    began = time.monotonic()
    done = run(script)
    assert done.returncode == 7 and time.monotonic() - began < 20
    assert "process 1 of 2 ended with 7" in done.stderr and "  no such model" in done.stderr


def test_one_that_is_killed_is_named_with_its_last_lines():
    script = (
        "import os, signal, time\n"
        "print('step 3', flush=True)\n"
        "if os.environ['TLT_INDEX'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(100)"  # will not stop
    )
    began = time.monotonic()
    done = run(script)
    assert done.returncode == 128 + 9 and time.monotonic() - began < 60
    assert "process 1 of 2 was killed by SIGKILL" in done.stderr and "  step 3" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number, tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "def stop(n, _): print('got', n, flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)"
    )
    process = subprocess.Popen(command(script, f"--logs={tmp_path}"), cwd=ROOT)
    logs = [tmp_path / f"process_{i}.log" for i in range(2)]
    end = time.monotonic() + 30
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == 0
    assert all(f"got {number.value}" in log.read_text() for log in logs)


@LINUX
def test_the_processes_die_with_a_killed_launch(tmp_path):
    script = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(100)"
    process = subprocess.Popen(command(script), cwd=ROOT)
    end = time.monotonic() + 30
    while len(pids := [int(p.name) for p in tmp_path.iterdir()]) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


@LINUX
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pinned_processes_share_no_core(tmp_path):
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    assert run(script, "--pin", f"--logs={tmp_path}").returncode == 0
    cores = [set(eval((tmp_path / f"process_{i}.log").read_text())) for i in range(2)]
    assert cores[0] and len(cores[0]) == len(cores[1]) and not cores[0] & cores[1]


def test_cores_are_shared_evenly_or_refused():
    assert launch.shares([0, 1, 2, 5, 6], 2) == [[0, 1], [2, 5]]
    with pytest.raises(ValueError, match="each of 3 processes a core of its own, and there are 2"):
        launch.shares([0, 1], 3)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--processes=2", "python"], "put the command behind --"),
        (["--processes=2", "--"], "there is no command"),
        (["--processes=0", "--", "x"], "--processes=0 must be at least 1"),
        (["--", "x"], "--processes"),
    ],
)
def test_wrong_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit):
        launch.parse(argv)
    assert words in capsys.readouterr().err


def test_a_command_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--processes=2", "--", "no-such-command"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1 and "no-such-command" in done.stderr
    assert "Traceback" not in done.stderr
