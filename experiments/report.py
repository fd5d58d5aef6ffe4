"""One table of a sweep, or of a single run: mean and 95 % interval over seeds.

    python -m experiments.report DIR
    python -m experiments.report DIR --metric=content/response_length_mean --format=csv --out=FILE

A row is a point of the sweep with all of its seeds (`seed` and `data.seed` are what is repeated),
in the order of the config file's sweep(). `first` and `last` of a metric are means over the first
and last --last RL steps that have it; of a held-out measure, the first and the last evaluation. The
interval is that of Student's t. A row is of its finished runs; if it has none, of what they reached
so far. Content is the same for the same sweep, however often it was interrupted; --pace adds
seconds, which are not.
"""

import argparse
import csv
import io
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.sweep import ERROR, SWEEP
from tlt_jax import atomic
from tlt_jax.metrics import EVALUATION_KEYS, KEYS, read_metrics
from tlt_jax.rl.run import METRICS, finished_steps

REPLICATES = ("seed", "data.seed")
DEFAULT_METRICS = ("content/reward_mean", "content/eval_avg_at_k", "content/eval_pass_at_k")
FORMATS = ("text", "markdown", "csv")
# Student's t of 97.5 %, by degrees of freedom from 1.
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % interval, t * s / sqrt(n); None of a single value.

    More than 31 values take the t of 31, a little too wide.
    """
    n = len(values)
    if n == 1:
        return values[0], None
    t = T_975[min(n - 1, len(T_975)) - 1]
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n)


class RunRecord:
    """What a run's folder says; a last line that a crash tore is left out."""

    def __init__(self, folder: Path, overrides: Mapping):
        self.overrides = dict(overrides)
        path = folder / METRICS
        self.lines = read_metrics(path) if path.exists() else []
        config = folder / "config.json"
        steps = None
        if config.exists():
            steps = json.loads(config.read_text(encoding="utf-8"))["config"]["steps"]
        self.finished = steps is not None and finished_steps(folder) == steps
        self.failed = not self.finished and (folder / ERROR).exists()

    def first_and_last(self, metric: str, last: int) -> tuple[float, float] | None:
        """Of a metric, as the module's docstring says; None where the run has no value of it."""
        values = [line[metric] for line in self.lines if line.get(metric) is not None]
        if not values:
            return None
        few = 1 if metric in EVALUATION_KEYS else last
        return statistics.fmean(values[:few]), statistics.fmean(values[-few:])

    def seconds(self) -> float:
        """Of all steps and of the evaluation before the first one."""
        steps = [line["pace/step_seconds"] for line in self.lines if "pace/step_seconds" in line]
        before = [line["pace/eval_seconds"] for line in self.lines if line["content/step"] == 0]
        return sum(steps) + sum(before)


def read_runs(folder: Path) -> list[RunRecord]:
    """The runs of a sweep's folder, or the run of its own. Raises ValueError for another folder."""
    try:
        if (folder / SWEEP).exists():
            points = json.loads((folder / SWEEP).read_text(encoding="utf-8"))["points"]
            return [RunRecord(folder / p["name"], p["overrides"]) for p in points]
        if (folder / "config.json").exists():
            return [RunRecord(folder, {})]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} cannot be read as a sweep or a run: {error!r}") from None
    raise ValueError(f"{folder} holds neither {SWEEP} of a sweep nor config.json of a run")


def grouped(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs that differ by no more than their seeds, in the order of the first of each group."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        own = {k: v for k, v in run.overrides.items() if k not in REPLICATES}
        groups.setdefault(json.dumps(own, sort_keys=True), []).append(run)
    return list(groups.values())


def status(runs: Sequence[RunRecord]) -> str:
    finished = sum(run.finished for run in runs)
    failed = sum(run.failed for run in runs)
    unfinished = len(runs) - finished - failed
    counts = {"finished": finished, "unfinished": unfinished, "failed": failed}
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)


def table(
    runs: Sequence[RunRecord], metrics: Sequence[str], last: int, pace: bool
) -> tuple[list[str], list[list]]:
    """Header and rows; a cell is text or, of a metric, what `interval` gives, or None."""
    axes = [key for run in runs for key in run.overrides if key not in REPLICATES]
    axes = list(dict.fromkeys(axes))
    names = [name.split("/")[1] for name in metrics]
    header = [*axes, *(f"{name} {end}" for name in names for end in ("first", "last"))]
    header += ["seconds"] * pace + ["runs"]
    rows = []
    for group in grouped(runs):
        row: list = [str(group[0].overrides.get(key, "")) for key in axes]
        counted = [run for run in group if run.finished] or group
        for name in metrics:
            found = [run.first_and_last(name, last) for run in counted]
            found = [pair for pair in found if pair is not None]
            row += [interval(end) for end in zip(*found)] if found else [None, None]
        if pace:
            row.append(interval([run.seconds() for run in counted]))
        rows.append([*row, status(group)])
    return header, rows


def _cell(cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    mean, half = cell
    least = min(x for x in (abs(mean), half or 0.0, 1.0) if x) if abs(mean) < 0.01 else 1.0
    digits = 1 if abs(mean) >= 100 else max(3, 1 - math.floor(math.log10(least)))
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def as_text(header: list[str], rows: list[list]) -> str:
    cells = [header, *([_cell(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]
    return "\n".join(lines) + "\n"


def as_markdown(header: list[str], rows: list[list]) -> str:
    cells = [header, ["---"] * len(header), *([_cell(c) for c in row] for row in rows)]
    escaped = [[c.replace("|", "\\|") for c in row] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


def as_csv(header: list[str], rows: list[list]) -> str:
    """Numbers in full; an interval has its half-width in a column of its own, empty for one run."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numeric = [i for i in range(len(header)) if any(isinstance(row[i], tuple) for row in rows)]
    expand = [(i, part) for i in range(len(header)) for part in range(1 + (i in numeric))]
    writer.writerow([header[i] + " ±" * part for i, part in expand])
    for row in rows:
        cells = [
            row[i] if i not in numeric else (row[i] or (None, None))[part] for i, part in expand
        ]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return file.getvalue()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.report", None, __doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a sweep, or of one run")
    parser.add_argument("--metric", action="append", help="key of metrics.jsonl; may be repeated")
    parser.add_argument("--last", type=int, default=3, help="RL steps at each end")
    parser.add_argument("--pace", action="store_true", help="seconds too")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--out", type=Path, help="file to write; standard output without it")
    return parser.parse_args(argv)


def main(argv: Sequence[str]):
    given = parse(argv)
    try:
        metrics = given.metric or DEFAULT_METRICS
        if unknown := [name for name in metrics if name not in KEYS]:
            raise ValueError(f"--metric={unknown[0]} is no metric; known: {', '.join(KEYS)}")
        if given.last < 1:
            raise ValueError(f"--last={given.last} must be at least 1")
        found = table(read_runs(given.folder), metrics, given.last, given.pace)
        text = {"text": as_text, "markdown": as_markdown, "csv": as_csv}[given.format](*found)
        if given.out is None:
            sys.stdout.write(text)
        else:
            atomic.write_text(given.out, text)
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
