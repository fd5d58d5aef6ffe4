"""Run one command as several processes of this machine:

    python -m experiments.launch --processes 2 [--pin] [--devices 2] [--logs DIR] -- COMMAND...

COMMAND is one that trains, such as `python -m experiments.main --config=… --workdir=…`; its
processes meet by themselves. With --pin each has cores of its own, the honest stand-in for
separate accelerators. The output of process 0 comes here, that of each goes to DIR/process_N.log.
If one fails, all are stopped, and the status of this command is not 0. POSIX.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tlt_jax.sharding.distributed import COORDINATOR, INDEX, PROCESSES

GRACE_S = 10.0  # for the others to end by themselves, then when asked to, before they are killed
LAST_LINES = 10


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def shares(cores: Sequence[int], processes: int) -> list[list[int]]:
    """Cores of each process, as many for each. Raises ValueError for fewer cores than processes."""
    each = len(cores) // processes
    if not each:
        raise ValueError(
            f"--pin gives each of {processes} processes a core of its own, and there are "
            f"{len(cores)}; start fewer, or leave --pin out"
        )
    return [list(cores[i * each : (i + 1) * each]) for i in range(processes)]


def _prepare(cores: Sequence[int] | None):
    """In the child, before the command: its cores, and its end with that of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if cores is not None:
        os.sched_setaffinity(0, cores)


def start(
    command: Sequence[str],
    index: int,
    given: argparse.Namespace,
    address: str,
    cores: Sequence[int] | None,
) -> subprocess.Popen:
    environment = {
        **os.environ,
        COORDINATOR: address,
        PROCESSES: str(given.processes),
        INDEX: str(index),
        "PYTHONUNBUFFERED": "1",  # what a killed process said last is in its log
    }
    if given.devices:
        environment["JAX_NUM_CPU_DEVICES"] = str(given.devices)
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: _prepare(cores),
        start_new_session=True,
    )


def copy_output(process: subprocess.Popen, log: Path, show: bool):
    """What a process says, into its log and, if `show`, to this command's output."""
    with open(log, "wb") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            if show:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()


def signal_all(running: Sequence[subprocess.Popen], number: int):
    for process in running:
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass


def wait(running: Sequence[subprocess.Popen], seconds: float):
    """Until all have ended, or that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(p.poll() is None for p in running):
        time.sleep(0.05)


def stop(running: Sequence[subprocess.Popen]):
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal_all(running, number)
        wait(running, GRACE_S)


def watch(running: Sequence[subprocess.Popen]) -> int | None:
    """Wait until all have ended well, or one has not: then stop the others. Returns its number."""
    while True:
        statuses = [process.poll() for process in running]
        failed = [i for i, status in enumerate(statuses) if status]
        if failed:
            # Those with an error of their own say it; not all who wait for the failed one can.
            wait(running, GRACE_S)
            stop(running)
            # A killed process is the cause where others failed because of it.
            return next((i for i in failed if statuses[i] < 0), failed[0])
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.05)


def launch(given: argparse.Namespace) -> int:
    """Run the processes and return the exit status."""
    cores = None
    if given.pin:
        if not hasattr(os, "sched_getaffinity"):
            raise ValueError("--pin needs Linux, which lets a process choose its cores")
        cores = shares(sorted(os.sched_getaffinity(0)), given.processes)
    logs = given.logs or Path(tempfile.mkdtemp(prefix="tlt_jax_launch_"))
    logs.mkdir(parents=True, exist_ok=True)
    address = f"localhost:{free_port()}"
    running: list[subprocess.Popen] = []
    copying = []
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signal_all(running, number))
        for i in range(given.processes):
            running.append(start(given.command, i, given, address, cores and cores[i]))
            log = logs / f"process_{i}.log"
            args = (running[i], log, i == 0)
            thread = threading.Thread(target=copy_output, args=args, daemon=True)
            thread.start()
            copying.append(thread)
        failed = watch(running)
    finally:
        signal_all(running, signal.SIGKILL)
        for thread in copying:
            thread.join(GRACE_S)  # a grandchild may hold the pipe
    if failed is None:
        if given.logs is None:
            shutil.rmtree(logs, ignore_errors=True)
        return 0
    status = running[failed].returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    lines = (logs / f"process_{failed}.log").read_text(errors="replace").splitlines()
    print(
        f"process {failed} of {given.processes} {how}, so all were stopped; its last lines "
        f"({logs}/process_{failed}.log):",
        *(f"  {line}" for line in lines[-LAST_LINES:]),
        sep="\n",
        file=sys.stderr,
    )
    return status if status > 0 else 128 - status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.launch", None, __doc__, formatter_class=raw)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--pin", action="store_true", help="give each process cores of its own")
    parser.add_argument("--devices", type=int, default=0, help="CPU devices in each process")
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder of the logs (a temporary one, kept where the command fails)",
    )
    if "--" not in argv:
        parser.error("put the command behind --, as in: --processes 2 -- python -m ...")
    split = argv.index("--")
    given = parser.parse_args(argv[:split])
    given.command = list(argv[split + 1 :])
    if not given.command:
        parser.error("there is no command behind --")
    if given.processes < 1:
        parser.error(f"--processes={given.processes} must be at least 1")
    if given.devices < 0:
        parser.error(f"--devices={given.devices} must not be negative")
    return given


def main(argv: Sequence[str]):
    given = parse(argv)
    try:
        raise SystemExit(launch(given))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
