"""Run every point of a config file's `sweep()`, each in a process and a folder of its own:

    python -m experiments.sweep --config=PATH[:ARGUMENT] --workdir=DIR

`experiments/points.py` shows how sweep() is written. The folders are named by the overrides; what
a run printed is in its log.txt. The same command goes on with what was interrupted and skips what
is finished; `python -m experiments.report DIR` makes the table. Split a sweep over machines that
share DIR by --only=1/2 and --only=2/2.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.points import Point, load_points
from tlt_jax import atomic
from tlt_jax.config import differences, to_dict
from tlt_jax.rl import fixed_hashing
from tlt_jax.rl.run import MAY_CHANGE, METRICS, finished_steps

SWEEP, LOG, ERROR = "sweep.json", "log.txt", "error.txt"
_STOP_LIMIT_S = 20.0  # that a run may take to end after a signal


def shard(points: Sequence[Point], only: str) -> list[Point]:
    """Part i of n of the points, every n-th of them. Raises ValueError for what is not i/n."""
    part, slash, parts = only.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--only={only} must be i/n with 1 <= i <= n, such as 1/2")
    return list(points[int(part) - 1 :: int(parts)])


def check_folder(folder: Path, points: Sequence[Point]):
    """Raise ValueError where `folder` holds another sweep, a run, or runs of other settings."""
    if (folder / METRICS).exists():
        raise ValueError(f"--workdir={folder} holds a run; choose another folder for the sweep")
    if (folder / SWEEP).exists():
        try:
            saved = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
            names = [point["name"] for point in saved["points"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / SWEEP} is no record of a sweep ({error!r})") from None
        if missing := [name for name in names if name not in {p.name for p in points}]:
            raise ValueError(
                f"--workdir={folder} holds another sweep: {len(missing)} of its {len(names)} "
                f"points are not in this one, such as {missing[0]!r}; choose another folder"
            )
    for point in points:
        run = folder / point.name
        if (run / METRICS).exists() and (run / METRICS).stat().st_size > 0:
            saved = json.loads((run / "config.json").read_text(encoding="utf-8"))["config"]
            if different := differences(saved, to_dict(point.config), MAY_CHANGE):
                raise ValueError(
                    f"{run} holds a run of another config: {'; '.join(different)}; choose another "
                    "--workdir or go back to its settings"
                )


def is_finished(folder: Path, point: Point) -> bool:
    return finished_steps(folder / point.name) == point.config.steps


class Stopped(BaseException):
    """A signal that ends the sweep; its number is the first argument."""


@dataclasses.dataclass(frozen=True)
class Running:
    point: Point
    process: subprocess.Popen
    log_start: int  # bytes of log.txt from earlier starts
    began: float

    def send(self, number: int):
        """To all processes of the run: it leads a group of its own."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # over already; the second is what macOS says of one not waited for


def command(config: str, folder: Path, point: Point) -> list[str]:
    """The module, with its arguments, that runs a point or goes on with it."""
    given = [f"--config={config}", f"--workdir={folder / point.name}", *point.flags()]
    return ["experiments.main", *given]


def start(config: str, folder: Path, point: Point) -> Running:
    run = folder / point.name
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOG, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.supervised", *command(config, folder, point)],
            stdin=subprocess.PIPE,  # closes when this process dies, and the run with it
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it once, through this process
            env={**os.environ, **fixed_hashing.ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
        )
    return Running(point, process, log_start, time.monotonic())


def run_points(config: str, folder: Path, points: Sequence[Point], jobs: int) -> dict[str, str]:
    """Run points, `jobs` at a time; the error of each that failed, by its name.

    Stopped, in this process at any moment, ends the runs by the same signal.
    """
    waiting, running, failed = list(points), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(config, folder, waiting.pop(0)))
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                seconds, outcome = time.monotonic() - run.began, "finished"
                if run.process.returncode != 0 or not is_finished(folder, run.point):
                    failed[run.point.name] = outcome = _failure(folder, run)
                left = len(waiting) + len(running)
                print(f"{run.point.name}: {outcome} ({seconds:.0f} s, {left} to go)", flush=True)
            time.sleep(0.05)
    except Stopped as stop:
        deadline = time.monotonic() + _STOP_LIMIT_S
        for run in running:
            run.send(stop.args[0])
        while any(r.process.poll() is None for r in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise
    finally:
        for run in running:
            run.send(signal.SIGKILL)
            run.process.wait()
    return failed


def _failure(folder: Path, run: Running) -> str:
    """What a run died of, in a line; error.txt gets it where the run itself could not write one."""
    with open(folder / run.point.name / LOG, "rb") as log:
        log.seek(run.log_start)
        text = log.read().decode("utf-8", "replace")
    code = run.process.returncode
    error = first_error_line(text) if code > 0 else ""
    if code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    error = error or f"ended with status {code} and no message"
    if not (folder / run.point.name / ERROR).exists() and not _in_use(folder / run.point.name):
        atomic.write_text(folder / run.point.name / ERROR, error + "\n")
    return error


def _in_use(workdir: Path) -> bool:
    """Whether another process works on a run: its folder is not this sweep's to write in."""
    try:
        with open(workdir / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def first_error_line(text: str) -> str:
    """The first line of the error that ended a program: after its last traceback, if it shows one,
    or else the last line of all."""
    lines = [line for line in text.splitlines() if line.strip()]
    for i in reversed(range(len(lines))):
        if lines[i].startswith("Traceback (most recent call last)"):
            after = [line for line in lines[i + 1 :] if not line.startswith((" ", "\t"))]
            return after[0] if after else lines[-1].strip()
    return lines[-1].strip() if lines else ""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.sweep", None, __doc__, formatter_class=raw)
    parser.add_argument("--config", required=True, help="config file, PATH or PATH:ARGUMENT")
    parser.add_argument("--workdir", required=True, type=Path, help="folder of the sweep")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="1/1", help="part i of n of the points, as i/n")
    parser.add_argument("--dry_run", action="store_true", help="show the commands, do nothing")
    return parser.parse_args(argv)


def prepare(given: argparse.Namespace) -> tuple[list[Point], list[Point]]:
    """This process's points, and those of them not finished; everything checked and recorded.

    Raises ValueError or OSError before anything is written.
    """
    if given.jobs < 1:
        raise ValueError(f"--jobs={given.jobs} must be at least 1")
    points = load_points(given.config)
    mine = shard(points, given.only)
    check_folder(given.workdir, points)
    if not given.dry_run:
        given.workdir.mkdir(parents=True, exist_ok=True)
        record = [{"name": p.name, "overrides": p.overrides} for p in points]
        atomic.write_json(given.workdir / SWEEP, {"config": given.config, "points": record})
    return mine, [point for point in mine if not is_finished(given.workdir, point)]


def stop(number: int, _):
    raise Stopped(number)


def main(argv: Sequence[str]):
    given = parse(argv)
    try:
        mine, missing = prepare(given)
    except OSError as error:
        raise SystemExit(
            f"--workdir={given.workdir} cannot be used: {error.strerror}; choose another folder"
        ) from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{len(mine)} points, {len(mine) - len(missing)} of them finished before", flush=True)
    if given.dry_run:
        for point in missing:
            print("python -m", shlex.join(command(given.config, given.workdir, point)))
        return
    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        failed = run_points(given.config, given.workdir, missing, given.jobs)
    except Stopped as stopped:
        [number] = stopped.args
        print(f"stopped by {signal.Signals(number).name}; the same command goes on", flush=True)
        raise SystemExit(128 + number) from None
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    print(f"{len(mine) - len(failed)} points finished, {len(failed)} failed", flush=True)
    if failed:
        raise SystemExit("\n".join(f"{name}: {error}" for name, error in failed.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
