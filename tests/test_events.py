"""events.jsonl and its Chrome trace; files that a crash cannot tear."""

import json
import threading
import time

import numpy as np
import pytest

from tlt_jax import atomic
from tlt_jax.events import RUN_START, EventLog, read_events, to_chrome_trace


def test_spans_of_many_threads_are_all_there(tmp_path):
    path = tmp_path / "events.jsonl"

    def work(worker):
        for i in range(400):
            with events.span("decode", worker=worker, i=i):
                pass

    with EventLog(path) as events:
        threads = [threading.Thread(target=work, args=(w,), name=f"t{w}") for w in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = [event for event in read_events(path) if event["name"] == "decode"]
    got = {(s["fields"]["worker"], s["fields"]["i"], s["thread"]) for s in spans}
    assert len(spans) == 1600
    assert got == {(w, i, f"t{w}") for w in range(4) for i in range(400)}


def test_a_span_holds_its_time_its_fields_and_its_error(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:
        before = events.now()
        with pytest.raises(KeyError), events.span("update", rows=np.int32(8)):
            time.sleep(0.02)
            raise KeyError("x")
        after = events.now()
    [span] = [event for event in read_events(path) if event["name"] == "update"]
    assert before - 1e-6 <= span["t0"] <= span["t1"] - 0.02 <= after
    assert span["fields"] == {"rows": 8, "error": "KeyError"}


def test_flush_writes_and_the_buffer_is_bounded(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:
        events.add("a", 0.0, 1.0)
        assert len(read_events(path)) == 1
        events.flush()
        assert len(read_events(path)) == 2
        for _ in range(1500):
            events.add("a", 0.0, 1.0)
        assert len(read_events(path)) > 1000


def test_bad_spans(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as events:
        with pytest.raises(ValueError, match="must not end before"):
            events.add("a", 2.0, 1.0)
        with pytest.raises(TypeError, match="no JSON value"):
            events.add("a", 1.0, 2.0, rows={1, 2})


def test_a_second_opening_goes_on_behind_a_torn_line_on_one_time_axis(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:
        events.add("first", 0.0, 0.5)
    with open(path, "a") as file:
        file.write('{"name": "to')
    assert [event["name"] for event in read_events(path)] == [RUN_START, "first"]
    time.sleep(0.05)
    with EventLog(path) as events:
        events.add("second", 0.0, 0.5)
    first, second = (e for e in read_events(path) if e["name"] != RUN_START)
    assert first["t0"] == 0.0
    assert 0.04 < second["t0"] < 5


def test_read_events_names_the_broken_line(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).close()
    with open(path, "a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="events.jsonl:2: not an event line"):
        read_events(path)


def test_chrome_trace_rows_hold_only_nested_or_disjoint_spans(tmp_path):
    path, out = tmp_path / "events.jsonl", tmp_path / "trace.json"
    rng = np.random.default_rng(0)
    added = {}
    with EventLog(path) as events:
        for i in range(200):
            start, length = rng.integers(0, 1000), rng.integers(0, 100)
            worker = int(rng.integers(0, 3))
            events.add("decode", start / 1e3, (start + length) / 1e3, worker=worker, i=i)
            added[i] = (start * 1000, length * 1000, f"worker {worker}")
    to_chrome_trace([path], out)
    trace = json.loads(out.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M"}
    spans = [e for e in trace if e["ph"] == "X" and e["name"] == "decode"]
    got = {e["args"]["i"]: (e["ts"], e["dur"], names[e["pid"], e["tid"]]) for e in spans}
    assert got == added
    for a in spans:
        for b in spans:
            if a is not b and a["tid"] == b["tid"] and a["ts"] <= b["ts"] < a["ts"] + a["dur"]:
                nested = b["ts"] + b["dur"] <= a["ts"] + a["dur"]
                assert nested or (a["ts"] == b["ts"])


def test_files_of_several_processes_share_one_time_axis(tmp_path):
    """Each process counts from its own opening; a trace shows them where they were."""
    paths = [tmp_path / "events.jsonl", tmp_path / "events.1.jsonl"]
    for path, unix, start in zip(paths, (1000.0, 1010.0), (12.0, 2.0)):
        path.write_text(
            json.dumps({"name": RUN_START, "t0": 0.0, "t1": 0.0, "fields": {"unix": unix}})
            + "\n"
            + json.dumps(
                {"name": "x", "t0": start, "t1": start + 1, "thread": "T", "fields": {"worker": 0}}
            )
            + "\n"
        )
    spans = [e for e in read_events(*paths) if e["name"] == "x"]
    assert [(e["process"], e["t0"]) for e in spans] == [(0, 12.0), (1, 12.0)]


def test_write_text_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    atomic.write_json(path, {"seed": 1})
    assert json.loads(path.read_text()) == {"seed": 1}
    with pytest.raises(ValueError):
        atomic.write_json(path, {"seed": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text(path, "x" * 100_000 + "\ud800")
    assert json.loads(path.read_text()) == {"seed": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
