"""The workers of this process: an engine on each of its slices, all fed by one coordinator."""

import time
from collections.abc import Iterator, Sequence

import jax

from tlt_jax.events import EventLog
from tlt_jax.rl.coordinator import Coordinator, Dispatch
from tlt_jax.spec.engine import Engine
from tlt_jax.spec.queue import Queue
from tlt_jax.spec.request import Response

POLL_S = 0.0002  # between two looks at several segments in flight


class Workers:
    """Engines that decode side by side; live as long as a run.

    engines: of this process's slices, all with one config. first: number of the first of them among
    the `total` slices of all processes.
    """

    def __init__(self, engines: Sequence[Engine], first: int = 0, total: int | None = None):
        self.engines, self.first = list(engines), first
        self.total = len(self.engines) if total is None else total
        self.rows = self.engines[0].config.batch_buckets[-1]

    def __len__(self) -> int:
        return len(self.engines)

    def table(self) -> str:
        """The programs of every engine and what they cost."""
        return "\n".join(
            f"slice {self.first + i}\n{engine.pool.table()}"
            if self.total > 1
            else engine.pool.table()
            for i, engine in enumerate(self.engines)
        )


class Decoding:
    """One rollout on the workers: sessions on one queue.

    params: published weights as each engine's slice holds them. share: how many of the responses
    that wait are this process's; others may take the rest, or some of these.
    """

    def __init__(
        self,
        workers: Workers,
        params: Sequence[dict],
        queue: Queue,
        run_key: jax.Array,
        *,
        share: int,
        fixed: bool,
        events: EventLog,
    ):
        self.workers, self.queue, self.events = workers, queue, events
        self.began = [0.0] * len(workers)  # of what each does now, as a span
        self.waiting = [0] * len(workers)  # responses in the queue when its segment started
        each = -(-share // len(workers))
        with events.span("compile"):
            self.sessions = [
                engine.session(p, queue, run_key, each)
                for engine, p in zip(workers.engines, params, strict=True)
            ]
        self.coordinator = Coordinator(len(workers), workers.rows, fixed=fixed, now=events.now())
        self.queued(share)

    def queued(self, share: int):
        """Tell the coordinator that responses were put into the queue."""
        self.coordinator.queued(self.events.now(), len(self.queue), share)

    def run(self) -> Iterator[list[Response]]:
        """Yield what each segment finished, often nothing, until nothing waits or decodes."""
        while True:
            while (dispatch := self.coordinator.next()) is not None:
                self._start(dispatch)
            if not self.coordinator.flying:
                return
            yield self._collect(self._first_ready())

    def _start(self, dispatch: Dispatch):
        session, i = self.sessions[dispatch.worker], dispatch.worker
        self.began[i] = self.events.now()
        session.dispatch(dispatch.admit)
        self.waiting[i] = len(self.queue)
        self.coordinator.started(self.events.now(), i, session.live, self.waiting[i])

    def _first_ready(self) -> int:
        """A worker whose segment is over, waiting for one."""
        flying = self.coordinator.flying
        if len(flying) == 1:
            [i] = flying
            if (prompts := self.sessions[i].prefilling) is not None:
                prompts.block_until_ready()
                self._prefilled(i)
            self.sessions[i].wait()
            return i
        while True:
            for i in flying:
                prompts = self.sessions[i].prefilling
                if prompts is not None and prompts.is_ready():
                    self._prefilled(i)
                if self.sessions[i].ready():
                    return i
            time.sleep(POLL_S)

    def _prefilled(self, i: int):
        self._span("prefill", i)
        self.sessions[i].prefilling = None

    def _collect(self, i: int) -> list[Response]:
        session = self.sessions[i]
        rows, live = len(session.rows), session.live
        self._span("decode", i, rows=rows, live=live, waiting=self.waiting[i])
        finished = session.collect()
        self.coordinator.ended(self.events.now(), i, session.live)
        return finished

    def _span(self, name: str, i: int, **fields):
        now = self.events.now()
        self.events.add(name, self.began[i], now, worker=self.workers.first + i, **fields)
        self.began[i] = now
