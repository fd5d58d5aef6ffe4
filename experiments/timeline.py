"""Where the time of a run went, from its events:

    python -m experiments.timeline WORKDIR [--json]

Per slice: the share of the rollouts that it decoded, prefilled and had nothing to do, and how much
of its decoding ran beside that of the other slices while responses still waited. Per process: the
share of the steps that lies in no span of work or waiting, the loop's own overhead.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.report import as_text
from tlt_jax.events import all_events_files, read_events

Span = tuple[float, float]
# Spans in which a process works or waits for others. Rollout and evaluate hold these; a slice that
# is idle is no excuse: another works, or the process waits for a reward or at a barrier.
WORK = (
    "barrier",
    "checkpoint",
    "compile",
    "decode",
    "prefill",
    "publish",
    "reward wait",
    "update",
)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans in order."""
    out: list[list[float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return [(start, end) for start, end in out]


def length(spans: Iterable[Span]) -> float:
    """Seconds that spans cover together."""
    return sum(end - start for start, end in merged(spans))


def common(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """The time that lies in both."""
    a, b, out = merged(a), merged(b), []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def timeline(events: Sequence[dict]) -> dict:
    """The figures of a run's events, as `read_events` gives them for all of its processes.

    The first step is left out where there are others: it compiles.
    """

    def spans(name: str, **fields) -> list[Span]:
        return [
            (e["t0"], e["t1"])
            for e in events
            if e["name"] == name
            and all(e.get(k, e["fields"].get(k)) == v for k, v in fields.items())
        ]

    updates = [sorted(spans("update", process=p)) for p in sorted({e["process"] for e in events})]
    if not updates or not updates[0]:
        raise ValueError("no step is finished in these events; wait for the first one")
    # A step goes from the end of an update to the end of the next.
    begin, end = updates[0][0][1], updates[0][-1][1]
    if len(updates[0]) == 1:
        begin = min(e["t0"] for e in events if e["name"] == "rollout")
    steps = [(begin, end)]
    slices, processes = [], []
    workers = sorted({e["fields"]["worker"] for e in events if e["name"] == "decode"})
    rollouts = common(spans("rollout", process=0), steps)
    busy = {w: common(spans("decode", worker=w), steps) for w in workers}
    full = {
        w: merged(
            (e["t0"], e["t1"])
            for e in events
            if e["name"] == "decode" and e["fields"]["worker"] == w and e["fields"].get("waiting")
        )
        for w in workers
    }
    for w in workers:
        while_full = common(full[w], steps)
        others = [v for v in workers if v != w and while_full]
        beside = [length(common(while_full, busy[v])) / length(while_full) for v in others]
        slices.append(
            {
                "slice": w,
                "decode": length(busy[w]) / length(rollouts),
                "prefill": length(common(spans("prefill", worker=w), steps)) / length(rollouts),
                "idle": length(common(spans("idle", worker=w), steps)) / length(rollouts),
                "beside_others_while_full": float(np.mean(beside))
                if while_full and beside
                else None,
            }
        )
    for p in range(len(updates)):
        work = common([s for name in WORK for s in spans(name, process=p)], steps)
        if not work:  # it was there before a resume on fewer
            continue
        processes.append({"process": p, "in_no_span": 1 - length(work) / (end - begin)})
    return {
        "steps": len(updates[0]),
        "seconds": end - begin,
        "slices": slices,
        "processes": processes,
    }


def as_tables(found: dict) -> str:
    def share(x: float | None) -> str:
        return "" if x is None else f"{x:.2%}"

    rows = [
        [
            str(s["slice"]),
            *(share(s[k]) for k in ("decode", "prefill", "idle")),
            share(s["beside_others_while_full"]),
        ]
        for s in found["slices"]
    ]
    header = ["slice", "decode", "prefill", "idle", "decode beside others, queue full"]
    processes = [[str(p["process"]), share(p["in_no_span"])] for p in found["processes"]]
    return (
        f"{found['seconds']:.1f} s of steps\n"
        + as_text(header, rows)
        + "\n"
        + as_text(["process", "in no span"], processes)
    )


def main(argv: Sequence[str]):
    parser = argparse.ArgumentParser("experiments.timeline", description=__doc__.split("\n")[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    paths = all_events_files(given.workdir)
    try:
        if not paths:
            raise ValueError(f"{given.workdir} holds no events.jsonl; give the workdir of a run")
        found = timeline(read_events(*paths))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(found) if given.json else as_tables(found))


if __name__ == "__main__":
    main(sys.argv[1:])
