"""Rewards graded in killable worker processes, while the tail of a rollout still decodes."""

import collections
import dataclasses
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import Any

from tlt_jax.rl import fixed_hashing
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.reward_worker import STARTED

STATUSES = ("ok", "error", "timeout", "invalid")
_PATIENCE = 0.025  # of the deadline, before an answer gives way to those that wait
_LOAD_LIMIT_S = 120.0  # to start a worker and import a grader, on a busy machine
# Not multiprocessing.Process: it would import the caller's main module in each worker, with jax.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tlt_jax.rl.reward_worker import main; main()"
)


@dataclasses.dataclass(frozen=True)
class Score:
    """What grading one response gave.

    status: "ok"; "error" (the grader raised, could not be loaded, or its process died); "timeout";
    "invalid" (it returned no finite number). value: the reward if "ok", else None.
    """

    value: float | None
    status: str
    detail: str


class RewardPool:
    """Worker processes that grade responses, each under a deadline.

    `submit` returns at once; results come in order of completion, under the caller's keys. An
    answer that runs for `deadline_s` seconds has its worker killed and replaced. One that runs for
    a fortieth of that gives way if others wait: its process is stopped, a spare worker goes on,
    and when no answer waits it runs on beside the `num_workers`. So answers that hang cost the
    others next to nothing, and spend their deadlines side by side. Workers see neither jax nor the
    caller's main module, and die with the caller. To be used by one thread. POSIX only.
    """

    def __init__(self, num_workers: int, spare_workers: int, deadline_s: float):
        check_pool(num_workers, spare_workers, deadline_s)
        self._deadline_s = deadline_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._pending = 0
        self._turns = threading.Semaphore(num_workers)  # to grade, without being slow
        self._spares = spare_workers
        self._lock = threading.Lock()  # of the next
        self._slow = 0  # answers that gave way, at most one per spare
        self._loads: list[bytes] = []  # requests that load what a new worker is to have ready
        self._closed = False
        self._workers = [
            _Worker(deadline_s, self._loads) for _ in range(num_workers + spare_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._threads = [
            threading.Thread(target=self._feed, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def load(self, grader: Grader, entry: Mapping[str, Any]) -> None:
        """Load `grader` in a worker and wait for it. Raises ValueError if that fails.

        To be called before the first `submit`, so that a grader that cannot work costs no work.
        All workers, later ones too, then load it by themselves before they are asked to grade.
        """
        if self._pending:
            raise ValueError(f"load the grader before submitting; {self._pending} are pending")
        self._put(None, grader, None, entry)
        [(_, score)] = self.drain()
        if score.status != "ok":
            raise ValueError(f"grader={grader.name!r} does not work: {score.detail.strip()}")
        self._loads.append(pickle.dumps((grader, None, dict(entry), None)))
        for worker in self._workers:
            worker.preload(self._loads[-1])

    def submit(self, key: Any, grader: Grader, text: str, entry: Mapping[str, Any]) -> None:
        """Queue a response for grading. Raises at once if `entry` cannot be pickled."""
        self._put(key, grader, text, entry)

    def poll(self) -> list[tuple[Any, Score]]:
        """Return the results that are ready, without waiting."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self._pending -= len(results)
        return results

    def drain(self) -> list[tuple[Any, Score]]:
        """Wait for all that was submitted and return the results not yet returned."""
        results = [self._results.get() for _ in range(self._pending)]
        self._pending = 0
        return results

    def close(self) -> None:
        """Kill the workers. What has not been graded is dropped."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        for _ in self._threads:
            self._turns.release()
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _put(self, key: Any, grader: Grader, text: str | None, entry: Mapping[str, Any]) -> None:
        if self._closed:
            raise ValueError("the reward pool is closed")
        request = pickle.dumps((grader, text, dict(entry), self._deadline_s))
        self._pending += 1
        self._jobs.put((key, request))

    def _feed(self, worker: "_Worker") -> None:
        """See one job after the other through, until the end of the queue."""
        while True:
            self._turns.acquire()
            if (job := self._jobs.get()) is None:
                break
            key, request = job
            score, gave_way = worker.grade(request, self._go_on_without, self._is_quiet)
            self._results.put((key, score))
            if gave_way:
                with self._lock:
                    self._slow -= 1
            else:
                self._turns.release()
            worker.try_to_start()  # if it was killed: it loads while others grade
        worker.kill()

    def _go_on_without(self) -> bool:
        """If answers wait and there is a spare, give it the turn of a slow worker."""
        with self._lock:
            if self._is_quiet() or self._slow == self._spares:
                return False
            self._slow += 1
        self._turns.release()
        return True

    def _is_quiet(self) -> bool:
        return self._closed or self._jobs.empty()


class _Worker:
    """One worker process, replaced when it dies. One thread drives it; `close` is any thread's."""

    def __init__(self, deadline_s: float, loads: Sequence[bytes]):
        self._deadline_s, self._loads = deadline_s, loads
        self._closed = False
        self._lock = threading.Lock()  # of the process, against `close` during a restart
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process, if it does not run. Raises OSError where that fails."""
        with self._lock:
            if self._process is not None:
                return
            if self._closed:
                raise OSError("the reward pool is closed")
            self._connection, theirs = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                env={**os.environ, **fixed_hashing.ENVIRONMENT},  # the same score in every run
                # Out of reach of Ctrl-C; killed with its own children. No session of its own: Linux
                # would then give it a share of the processor as if it were another program.
                process_group=0,
            )
            theirs.close()
            for request in self._loads:
                self._connection.send_bytes(request)

    def try_to_start(self) -> None:
        """Start the process ahead of the next request, which tries again where this fails."""
        try:
            self.start()
        except OSError:
            pass

    def preload(self, request: bytes) -> None:
        """Have the process load a grader, without waiting or an answer."""
        with self._lock:
            if self._process is not None:
                try:
                    self._connection.send_bytes(request)
                except OSError:
                    pass  # it died; the next one loads it when it starts

    def grade(
        self, request: bytes, give_way: Callable[[], bool], is_quiet: Callable[[], bool]
    ) -> tuple[Score, bool]:
        """Send one request and wait for its score, at most until it has run for the deadline.

        Returns the score and whether `give_way`, asked now and then while that takes long, said
        that another goes on. Then this process runs only while `is_quiet`.
        """
        gave_way = False
        try:
            self.start()
            self._connection.send_bytes(request)
            if not self._connection.poll(_LOAD_LIMIT_S):
                self.kill()
                detail = f"the grader did not load within {_LOAD_LIMIT_S} s"
                return Score(None, "error", detail), gave_way
            reply = self._connection.recv()
            if reply == STARTED:
                left, patience = self._deadline_s, _PATIENCE * self._deadline_s
                began = time.monotonic()
                while not self._connection.poll(patience):
                    now = time.monotonic()
                    left, began = left - (now - began), now
                    if left <= 0:
                        self.kill()
                        detail = f"killed at the deadline of {self._deadline_s} s"
                        return Score(None, "timeout", detail), gave_way
                    gave_way = gave_way or give_way()
                    if gave_way and not is_quiet():
                        self._signal(signal.SIGSTOP)
                        while not is_quiet() and not self._connection.poll(patience):
                            pass
                        self._signal(signal.SIGCONT)
                        began = time.monotonic()
                reply = self._connection.recv()
        except Exception as error:
            # Counted as a failure of this answer, whatever it was: a feeding thread that ended
            # here would leave the caller waiting for ever.
            status = self.kill()
            detail = f"the worker died (exit status {status}): {error!r}"
            return Score(None, "error", detail), gave_way
        return Score(reply[1], reply[0], reply[2]), gave_way

    def kill(self) -> int | None:
        """Kill the process and what it started, if it runs; return its exit status."""
        with self._lock:
            if self._process is None:
                return None
            self._signal()
            status = self._process.wait()
            self._connection.close()
            self._process = None
            return status

    def close(self) -> None:
        """Kill the process for good; the driving thread notices and cleans up."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._signal()

    def _signal(self, number: int = signal.SIGKILL) -> None:
        """To the process and what it started."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # already dead: the second is what macOS says of a process not yet waited for


def check_pool(num_workers: int, spare_workers: int, deadline_s: float) -> None:
    """Raise ValueError if there can be no `RewardPool` of these."""
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers} must be at least 1")
    if spare_workers < 0:
        raise ValueError(f"spare_workers={spare_workers} must not be negative")
    if not 0 < deadline_s < float("inf"):
        raise ValueError(f"deadline_s={deadline_s} must be a positive number of seconds")


def count_statuses(scores: Iterable[Score]) -> dict[str, int]:
    """Return how many scores have each of STATUSES."""
    counts = collections.Counter(score.status for score in scores)
    return {status: counts[status] for status in STATUSES}


def require_some_ok(scores: Iterable[Score], what: str) -> None:
    """Raise RuntimeError, with the first failure, if not one response was graded.

    what: they belong to, for the message.
    """
    scores = list(scores)
    if all(score.status != "ok" for score in scores):
        counts = {status: n for status, n in count_statuses(scores).items() if n}
        first = scores[0].detail.strip() if scores else "there were no responses"
        raise RuntimeError(
            f"{what}: none of {len(scores)} gradings succeeded ({counts}), so nothing is "
            f"known of the policy; the first failure: {first}"
        )
