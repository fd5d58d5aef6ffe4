"""The figures of a timeline, from spans laid by hand."""

import numpy as np
import pytest

from experiments import timeline
from tlt_jax.events import EventLog, read_events


def log(path, spans):
    """spans: (name, start, end, fields)."""
    with EventLog(path) as events:
        for name, start, end, fields in spans:
            events.add(name, start, end, **fields)
    return path


def test_common_and_merged_agree_with_a_grid():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = (
            [tuple(map(int, sorted(rng.integers(0, 40, 2)))) for _ in range(rng.integers(0, 9))]
            for _ in range(2)
        )

        def covered(spans):
            return {t for start, end in spans for t in range(start, end)}

        assert timeline.length(a) == len(covered(a))
        assert timeline.length(timeline.common(a, b)) == len(covered(a) & covered(b))


def test_shares_of_slices_and_processes(tmp_path):
    """Two steps of 10 s; the first is left out. Slice 1 is dry after 3 of 6 s of rollout."""
    first = [("rollout", 0, 9, {}), ("update", 9, 10, {})]
    second = [
        ("rollout", 10, 16, {}),
        ("prefill", 10, 11, {"worker": 0}),
        ("decode", 11, 13, {"worker": 0, "waiting": 4}),
        ("decode", 13, 16, {"worker": 0, "waiting": 0}),
        ("decode", 10, 12.5, {"worker": 1, "waiting": 5}),
        ("decode", 12.5, 13, {"worker": 1, "waiting": 0}),
        ("idle", 13, 16, {"worker": 1}),
        ("reward wait", 16, 17, {}),
        ("update", 17.5, 20, {}),
    ]
    events = read_events(log(tmp_path / "events.jsonl", first + second))
    found = timeline.timeline(events)
    assert found["seconds"] == pytest.approx(10)
    zero, one = found["slices"]
    assert zero == pytest.approx(
        {"slice": 0, "prefill": 1 / 6, "decode": 5 / 6, "idle": 0, "beside_others_while_full": 1.0}
    )
    assert one == pytest.approx(
        {
            "slice": 1,
            "prefill": 0,
            "decode": 0.5,
            "idle": 0.5,
            "beside_others_while_full": 1.5 / 2.5,
        }
    )
    [process] = found["processes"]
    assert process["in_no_span"] == pytest.approx(0.5 / 10)
    assert "5.00%" in timeline.as_tables(found)


def test_a_run_without_a_step_is_refused(tmp_path):
    events = read_events(log(tmp_path / "events.jsonl", [("decode", 0, 1, {"worker": 0})]))
    with pytest.raises(ValueError, match="no step is finished"):
        timeline.timeline(events)
    with pytest.raises(SystemExit, match=r"holds no events\.jsonl"):
        timeline.main([str(tmp_path / "nowhere")])
