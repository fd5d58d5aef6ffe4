"""Which worker does what, and when: a state machine without a clock or a device of its own.

A worker decodes on one slice of the mesh, a segment at a time. Events come in with the time they
happened (`queued`, `started`, `ended`), decisions go out (`next`); whoever drives it, the live loop
or a simulator, does the work. Times are seconds on any one clock that never goes back.
"""

import dataclasses
import enum


class State(enum.Enum):
    BUSY = "busy"  # works on rows, or can start to
    IDLE = "idle"  # has none, or others come first by the logical clock


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Start a segment on a worker, letting in at most `admit` of the responses that wait."""

    worker: int
    admit: int


@dataclasses.dataclass
class _Worker:
    live: int = 0  # rows with a response; of a segment in flight, those at its start
    flying: bool = False
    segments: int = 0  # started: the logical clock of `fixed`
    target: int = 0  # rows that it is to fill while responses wait
    since: float = 0.0  # when it last became busy or idle
    idle: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # spans that are over
    state: State = State.IDLE


class Coordinator:
    """Feeds workers from one queue of responses.

    rows: the most that a worker decodes together. Responses are spread evenly where there are fewer
    than rows for them; else each worker is refilled as its rows finish.

    fixed: who takes what from the queue does not depend on the clock. Workers are served in the
    order of (segments started, number), so one that has room waits for those that are behind it,
    as long as responses wait. Otherwise first come, first served.
    """

    def __init__(self, workers: int, rows: int, *, fixed: bool, now: float = 0.0):
        if workers < 1 or rows < 1:
            raise ValueError(f"workers={workers} and rows={rows} must be at least 1")
        self.rows, self.fixed = rows, fixed
        self.waiting = 0
        self.workers = [_Worker(since=now) for _ in range(workers)]

    def queued(self, now: float, waiting: int, share: int | None = None):
        """`waiting` responses wait, some of them new. share: how many of those are this
        coordinator's to start, where others take from the same queue; by default all."""
        self.waiting = waiting
        total = (waiting if share is None else share) + sum(w.live for w in self.workers)
        even, extra = divmod(total, len(self.workers))
        for i, worker in enumerate(self.workers):
            worker.target = min(self.rows, even + (i < extra))
        if not any(w.flying for w in self.workers):
            for worker in self.workers:
                worker.segments = 0
        self._settle(now)

    def next(self) -> Dispatch | None:
        """What to start now, to be reported by `started`; None where nothing can be."""
        for i, worker in enumerate(self.workers):
            if worker.flying:
                continue
            if self._can_start(i):
                return Dispatch(i, self._room(worker))
        return None

    def started(self, now: float, worker: int, live: int, waiting: int):
        """A segment runs on `worker`, of `live` rows; none if 0, because others were faster to take
        from the queue. `waiting` responses are left."""
        w = self.workers[worker]
        if w.flying:
            raise ValueError(f"worker {worker} was started while its segment is in flight")
        w.live, w.flying, self.waiting = live, live > 0, waiting
        w.segments += 1
        self._settle(now)

    def ended(self, now: float, worker: int, live: int):
        """The segment of `worker` is over; `live` of its rows go on."""
        w = self.workers[worker]
        if not w.flying:
            raise ValueError(f"a segment of worker {worker} ended and none was in flight")
        w.live, w.flying = live, False
        self._settle(now)

    @property
    def flying(self) -> list[int]:
        """Workers with a segment in flight."""
        return [i for i, w in enumerate(self.workers) if w.flying]

    @property
    def done(self) -> bool:
        """Whether every response has been decoded."""
        return not self.waiting and all(w.state is State.IDLE for w in self.workers)

    def idle_spans(self) -> list[list[tuple[float, float]]]:
        """When each worker was idle and then busy again."""
        return [list(w.idle) for w in self.workers]

    def idle_since(self) -> list[float | None]:
        """Since when each worker is idle; None while it is busy."""
        return [w.since if w.state is State.IDLE else None for w in self.workers]

    def _room(self, worker: _Worker) -> int:
        return max(0, min(worker.target - worker.live, self.waiting))

    def _can_start(self, i: int) -> bool:
        """Whether a segment of worker `i`, which has none in flight, may start now."""
        room = self._room(self.workers[i])
        if room and self.fixed and not self._is_first(i):
            return False
        return bool(room or self.workers[i].live)

    def _is_first(self, i: int) -> bool:
        """Whether no worker can still come to take from the queue at an earlier logical time."""
        return all(
            (self.workers[i].segments, i) <= (w.segments, j)
            for j, w in enumerate(self.workers)
            if w.flying or w.live or self._room(w)
        )

    def _settle(self, now: float):
        """Turn workers busy or idle, as they stand now."""
        for i, w in enumerate(self.workers):
            state = State.BUSY if w.flying or self._can_start(i) else State.IDLE
            if state is not w.state:
                if state is State.BUSY and now > w.since:
                    w.idle.append((w.since, now))
                w.state, w.since = state, now
