"""The table of a sweep: what is averaged, over which runs, and that it is always the same."""

import csv
import json
import math

import pytest
from scipy import stats

from experiments import report
from experiments.points import point_name

STEPS = 5


def write_run(folder, overrides, rewards, *, steps=STEPS, held_out=(0.25, 0.5), done=True):
    """A run's folder whose steps had these rewards, with an evaluation before and at the end."""
    run = folder / point_name(overrides)
    run.mkdir(parents=True)
    first, last = ({"content/eval_avg_at_k": x, "pace/eval_seconds": 1.0} for x in held_out)
    lines = [{"content/step": 0, **first}]
    for step, reward in enumerate(rewards, 1):
        lines.append(
            {"content/step": step, "content/reward_mean": reward, "pace/step_seconds": 2.0}
        )
    if done:
        lines[-1] |= last
        (run / "DONE").write_text(json.dumps({"steps": steps}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.json").write_text(json.dumps({"config": {"steps": steps}}))
    return run


def write_sweep(folder, points):
    record = [{"name": point_name(p), "overrides": p} for p in points]
    (folder / "sweep.json").write_text(json.dumps({"config": "x.py", "points": record}))


@pytest.fixture
def swept(tmp_path):
    """Two learning rates with three seeds each; of the slower, one is cut and one failed."""
    points = [{"lr": lr, "seed": seed} for lr in (0.1, 0.01) for seed in range(3)]
    write_sweep(tmp_path, points)
    for seed in range(3):
        write_run(tmp_path, points[seed], [0.0, 0.1 * seed, 0.5, 0.5 + 0.1 * seed, 1.0])
    write_run(tmp_path, points[3], [0.25] * STEPS)
    write_run(tmp_path, points[4], [0.9] * 2, done=False)
    failed = tmp_path / point_name(points[5])
    failed.mkdir()
    (failed / "error.txt").write_text("ValueError")
    return tmp_path


def make(folder, *arguments, capsys):
    report.main([str(folder), *arguments])
    return capsys.readouterr().out


def rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_means_and_intervals_over_seeds(swept, capsys):
    fast, slow = rows(make(swept, "--last=2", "--format=csv", capsys=capsys))
    first, last = [0.0, 0.05, 0.1], [0.75, 0.8, 0.85]
    for name, values in (("first", first), ("last", last)):
        mean, half = (float(fast[f"reward_mean {name}{part}"]) for part in ("", " ±"))
        low, high = stats.t.interval(0.95, 2, loc=mean, scale=stats.sem(values))
        assert mean == pytest.approx(sum(values) / 3)
        assert (high - low) / 2 == pytest.approx(half, rel=1e-3)
    assert float(fast["eval_avg_at_k first"]) == 0.25
    assert float(fast["eval_avg_at_k last"]) == 0.5
    assert fast["eval_pass_at_k last"] == ""
    # The unfinished run, with its .9, and the failed one are not in the mean; one has no interval.
    assert (slow["reward_mean last"], slow["reward_mean last ±"]) == ("0.25", "")
    assert (fast["lr"], slow["lr"]) == ("0.1", "0.01")
    assert fast["runs"] == "3 finished"
    assert slow["runs"] == "1 finished, 1 unfinished, 1 failed"


def test_the_t_table_is_students():
    for df, t in enumerate(report.T_975, 1):
        assert t == pytest.approx(stats.t.ppf(0.975, df), abs=6e-4)
    assert report.interval([0.5]) == (0.5, None)
    values = [float(i % 7) for i in range(100)]
    half = report.interval(values)[1]
    assert 1 < half / (stats.t.ppf(0.975, 99) * stats.sem(values)) < 1.04
    normal = 1.96 * stats.sem(values[:3])  # what three seeds would be given without Student
    assert report.interval(values[:3])[1] > 2 * normal


def test_seed_and_data_seed_are_what_is_repeated(tmp_path, capsys):
    points = [{"seed": 0, "data.seed": 0}, {"seed": 1, "data.seed": 1}, {"seed": 0, "lr": 1.0}]
    write_sweep(tmp_path, points)
    for point in points:
        write_run(tmp_path, point, [0.5] * STEPS)
    found = rows(make(tmp_path, "--format=csv", capsys=capsys))
    assert [(row["lr"], row["runs"]) for row in found] == [
        ("", "2 finished"),
        ("1.0", "1 finished"),
    ]


def test_a_torn_last_line_is_ignored_and_the_table_is_deterministic(swept, capsys):
    """Order of the folders, torn lines and pace do not show; a changed number does."""
    before = make(swept, capsys=capsys)
    run = swept / "lr=0.1,seed=0"
    path = run / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"content/step": 6, "content/reward_mean": 9')
    assert make(swept, capsys=capsys) == before
    path.write_text(whole.replace('"pace/step_seconds": 2.0', '"pace/step_seconds": 7.0'))
    assert make(swept, capsys=capsys) == before
    path.write_text(whole.replace('"content/reward_mean": 1.0', '"content/reward_mean": 0.5'))
    assert make(swept, capsys=capsys) != before


def test_seconds_only_where_asked_for(swept, capsys):
    assert "seconds" not in make(swept, capsys=capsys)
    fast, _ = rows(make(swept, "--pace", "--format=csv", capsys=capsys))
    assert (fast["seconds"], fast["seconds ±"]) == ("11.0", "0.0")  # 5 steps, 1 evaluation before


def test_text_and_markdown_show_the_same_cells(swept, capsys, tmp_path):
    text = make(swept, "--metric=content/reward_mean", "--last=1", capsys=capsys)
    assert text.splitlines()[0].split() == "lr reward_mean first reward_mean last runs".split()
    assert text.splitlines()[1].startswith("0.1   0.000 ± 0.000")
    out = tmp_path / "table.md"
    make(swept, "--format=markdown", f"--out={out}", capsys=capsys)
    lines = out.read_text().splitlines()
    assert lines[1] == "|" + " --- |" * 8
    assert lines[2].startswith("| 0.1 | 0.200 ± 0.083 ") and lines[3].endswith("1 failed |")
    assert all(line.count("|") == 9 for line in lines)


def test_a_single_run_shows_what_it_reached(tmp_path, capsys):
    run = write_run(tmp_path, {}, [0.1, 0.2], done=False)
    [row] = rows(make(run, "--last=1", "--format=csv", capsys=capsys))
    assert (row["reward_mean first"], row["reward_mean last"]) == ("0.1", "0.2")
    assert row["runs"] == "1 unfinished"
    # Finished with fewer steps than its config now asks for.
    (run / "DONE").write_text('{"steps": 2}')
    assert rows(make(run, "--format=csv", capsys=capsys))[0]["runs"] == "1 unfinished"
    assert math.isclose(report.read_runs(run)[0].seconds(), 5.0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{}"], r"holds neither sweep\.json of a sweep nor config\.json of a run"),
        (["{}/none"], r"holds neither"),
        (["{}", "--metric=content/reward"], r"--metric=content/reward is no metric; known: .*rew"),
        (["{}", "--last=0"], r"--last=0 must be at least 1"),
    ],
)
def test_what_cannot_be_reported_is_refused(tmp_path, arguments, words):
    with pytest.raises(SystemExit, match=words):
        report.main([argument.format(tmp_path) for argument in arguments])


def test_a_place_that_cannot_be_written_is_named(swept):
    with pytest.raises(SystemExit, match=r"none/.*: No such file"):
        report.main([str(swept), f"--out={swept}/none/table.md"])
