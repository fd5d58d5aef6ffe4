"""The process that runs graders. It talks through its standard input, a socket to its parent.

Its parent kills it when an answer runs too long. When the parent itself dies, even by SIGKILL, the
socket closes and the worker ends at once. If a grader holds the interpreter lock just then (a
runaway regular expression does), an alarm after a little more processor time than the deadline ends
it; if the worker is stopped just then, the system does: its process group has become an orphan.
"""

import contextlib
import math
import numbers
import os
import pickle
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection

from tlt_jax.rl import graders

STARTED = "started"  # the grader is loaded; its deadline begins
_GRACE_S = 1.0  # beyond the deadline, so that the parent's own kill comes first
# Of processor time, so that being stopped does not count; that of all threads, hence the cores.
_ALARM = signal.ITIMER_PROF, signal.SIGPROF
_CORES = os.cpu_count() or 1


def main() -> None:
    """Grade requests (grader, text, entry, deadline_s) until the parent goes away.

    Each is answered by STARTED and then (status, value, detail), or by the latter alone if the
    grader cannot be loaded. A text of None asks for no more than loading it; with a deadline of
    None too, that is not answered.
    """
    _die_first()
    connection = Connection(os.dup(0))
    # Graders may read their input or print; neither may reach the socket.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        grader, text, entry, deadline_s = pickle.loads(requests.get())
        if deadline_s is None:
            with contextlib.suppress(BaseException):  # said again when there is a text to grade
                graders.resolve(grader, entry)
            continue
        try:
            grade = graders.resolve(grader, entry)
        except graders.GraderError as error:
            connection.send(("error", None, str(error)))
            continue
        except BaseException:
            connection.send(("error", None, _last_error("could not load the grader: ")))
            continue
        connection.send(STARTED)
        # The default action of the alarm needs no interpreter. No grader can catch it but one that
        # sets an alarm of its own.
        timer, number = _ALARM
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, (deadline_s + _GRACE_S) * _CORES)
        try:
            reply = check_value(0.0 if text is None else grade(text, entry))
        except BaseException:
            reply = ("error", None, _last_error(""))
        signal.setitimer(timer, 0)
        connection.send(reply)


def _die_first() -> None:
    """Have Linux end this process, and not the run, when an answer (10^10^10) eats up memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no Linux


def check_value(value) -> tuple[str, float | None, str]:
    """Return ("ok", value as float, "") for a finite real number, else ("invalid", None, why)."""
    if not isinstance(value, numbers.Real):
        return "invalid", None, f"returned a {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return "invalid", None, f"returned {number}"
    return "ok", number, ""


def _last_error(prefix: str) -> str:
    return (prefix + traceback.format_exc(limit=-3))[:2000]


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Pass requests on; at the end of the socket kill this process and all that it started."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
