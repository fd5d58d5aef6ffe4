"""events.jsonl: what ran when, as spans; exportable as a Chrome trace for Perfetto."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax import atomic

MAX_BUFFERED = 1000
RUN_START = "run_start"


def events_file(workdir: Path, process: int) -> Path:
    """Where a process of a run writes its spans."""
    return workdir / ("events.jsonl" if process == 0 else f"events.{process}.jsonl")


def all_events_files(workdir: Path) -> list[Path]:
    """Those of all processes that ever worked on a run, also when it had more of them, in order."""
    found = [events_file(workdir, 0)]
    while (path := events_file(workdir, len(found))).exists():
        found.append(path)
    return [path for path in found if path.exists()]


class EventLog:
    """Collects finished spans of all threads and appends them to a file, one JSON line each.

    A line: name, t0 and t1 in seconds since this log was opened (monotonic clock), pid, thread,
    fields. The first line of each opening, named "run_start", holds the wall-clock time of its
    zero, so that the openings of a resumed run can be laid on one time axis.
    Lines are buffered; call `flush` once per RL step.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = atomic.LineFile(path)
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._zero = time.monotonic()
        self.add(RUN_START, 0.0, 0.0, unix=time.time())
        self.flush()

    def now(self) -> float:
        """Return the seconds since this log was opened: the clock of `add`."""
        return time.monotonic() - self._zero

    @contextlib.contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[None]:
        """Record the time that the block took, also when it raises (then with an `error` field)."""
        start = self.now()
        try:
            yield
        except BaseException as error:
            fields["error"] = type(error).__name__
            raise
        finally:
            self.add(name, start, self.now(), **fields)

    def add(self, name: str, start: float, end: float, /, **fields: Any) -> None:
        """Record a span from `start` to `end`, both readings of `now`.

        Raises ValueError if it ends before it starts, TypeError if a field is no JSON value.
        """
        if not 0 <= start <= end:
            raise ValueError(f"span {name!r} from {start} to {end} must not end before it starts")
        line = json.dumps(
            {
                "name": name,
                "t0": round(start, 6),
                "t1": round(end, 6),
                "pid": os.getpid(),
                "thread": threading.current_thread().name,
                "fields": fields,
            },
            default=_plain_number,
        )
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= MAX_BUFFERED:
                self._write_lines()

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lock:
            self._write_lines()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _write_lines(self) -> None:
        if self._lines:
            self._file.append("\n".join(self._lines) + "\n", sync=False)
            self._lines = []


def _plain_number(value):
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"event field {value!r} of type {type(value).__name__} is no JSON value")


def read_events(*paths: str | os.PathLike) -> list[dict]:
    """Read event files, one per process, with t0 and t1 in seconds since the earliest opening.

    Each event also gets `process`, the place of its file among `paths`. A last line without line
    end (a crash tore it) is left out; any other line that is no event raises ValueError with its
    number.
    """
    events, openings = [], []
    for process, path in enumerate(paths):
        shift = 0.0
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break
                try:
                    event = json.loads(line)
                    if event["name"] == RUN_START:
                        shift = event["fields"]["unix"]
                        openings.append(shift)
                    times = {"t0": event["t0"] + shift, "t1": event["t1"] + shift}
                    events.append(event | times | {"process": process})
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: not an event line ({error!r})") from error
    zero = min(openings, default=0.0)
    return [e | {"t0": e["t0"] - zero, "t1": e["t1"] - zero} for e in events]


def to_chrome_trace(events_paths: Sequence[str | os.PathLike], out_path: str | os.PathLike) -> None:
    """Write the spans of event files, one per process, as Chrome trace JSON, which ui.perfetto.dev
    opens.

    Spans with a `worker` field share that worker's row, others their thread's; where spans of one
    row overlap without nesting (asynchronous work) the row is split, as the format demands.
    """
    trace: list[dict] = []
    rows: dict[tuple[int, str], list[dict]] = {}
    for event in read_events(*events_paths):
        worker = event["fields"].get("worker")
        name = event["thread"] if worker is None else f"worker {worker}"
        rows.setdefault((event["process"], name), []).append(event)
    for process in range(len(events_paths)):
        name = {"name": f"process {process}"}
        trace.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": name})
    for (pid, name), events in sorted(rows.items()):
        for lane in _nested_lanes(events):
            tid = len(trace)
            trace.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            )
            for event in lane:
                start, end = round(event["t0"] * 1e6), round(event["t1"] * 1e6)
                trace.append(
                    {
                        "ph": "X",
                        "name": event["name"],
                        "ts": start,
                        "dur": end - start,
                        "pid": pid,
                        "tid": tid,
                        "args": event["fields"],
                    }
                )
    atomic.write_text(out_path, json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))


def _nested_lanes(events: list[dict]) -> list[list[dict]]:
    """Split spans into lanes in which any two are nested or disjoint: first lane that fits."""
    lanes: list[list[dict]] = []
    open_ends: list[list[float]] = []  # per lane, ends of the spans open at t0, outermost first
    for event in sorted(events, key=lambda event: (event["t0"], -event["t1"])):
        for ends in open_ends:
            while ends and ends[-1] <= event["t0"]:
                ends.pop()
        fits = [not ends or event["t1"] <= ends[-1] for ends in open_ends]
        chosen = fits.index(True) if True in fits else len(lanes)
        if chosen == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[chosen].append(event)
        open_ends[chosen].append(event["t1"])
    return lanes
