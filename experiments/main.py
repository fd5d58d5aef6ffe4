"""Train from a config file:

    python -m experiments.main --config=experiments/configs/quickstart.py --workdir=DIR

Any setting can be overridden (--config.trainer.learning_rate=1e-5). The workdir gets config.json,
metrics.jsonl, events.jsonl, checkpoints/ and, at the end, trace.json (for ui.perfetto.dev) and
policy/, a folder in the Hugging Face layout. The same command goes on with a run that was killed.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO

import jax
from absl import app, flags
from ml_collections import config_flags

from experiments.progress import TerminalProgress
from tlt_jax import atomic
from tlt_jax.config import Config, differences, from_dict, to_dict
from tlt_jax.rl.loop import Summary, train
from tlt_jax.rl.policy import CHECKPOINTS, FINAL
from tlt_jax.rl.run import MAY_CHANGE, METRICS, finished_steps, peak_memory_gb
from tlt_jax.sharding import distributed

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "reasoning-gym")


def prepare_workdir(workdir: Path, config: Config):
    """Write config.json, or add this start to it, before any work is done.

    Raises SystemExit with one sentence where it cannot be written or holds another run.
    """
    path = workdir / "config.json"
    start = {
        "command": sys.argv,
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "versions": versions(),
        "devices": [str(d) for d in jax.devices()],
    }
    earlier = []
    for name in (METRICS, CHECKPOINTS, FINAL):
        if (workdir / name).exists() and not path.exists():
            raise SystemExit(
                f"--workdir={workdir} holds {name} and no config.json, so it is no run to go on "
                "with; choose another folder or remove this one"
            )
    try:
        if holds_work(workdir) and path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            earlier = saved["starts"]
            if different := differences(saved["config"], to_dict(config), MAY_CHANGE):
                raise SystemExit(
                    f"--workdir={workdir} holds a run of another config: {'; '.join(different)}. "
                    f"Go on with its settings (only {', '.join(MAY_CHANGE)} may change), or choose "
                    "another folder"
                )
            changed = [
                k for k in ("git_commit", "versions", "devices") if earlier[-1][k] != start[k]
            ]
            if changed:
                print(
                    f"note: {', '.join(changed)} changed since this run was last started, so its "
                    "content may differ from that of a run that was not interrupted"
                )
        for file in workdir.glob("error*.txt"):  # of an earlier start
            file.unlink()
        atomic.write_json(path, {"config": to_dict(config), "starts": [*earlier, start]})
    except OSError as error:
        raise SystemExit(
            f"--workdir={workdir} cannot be written: {error.strerror}; choose another folder"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{path} is no record of a run ({error!r}); choose another folder or remove it"
        ) from None


def hold(workdir: Path) -> IO:
    """Make the folder and lock it until the returned file is closed or the process ends.

    Raises SystemExit where that cannot be, or another process has the lock: two runs would tear
    each other's files.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / ".lock", "w")
    except OSError as error:
        raise SystemExit(
            f"--workdir={workdir} cannot be written: {error.strerror}; choose another folder"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit(
            f"--workdir={workdir} is in use by another process; wait for it or stop it first"
        ) from None
    return lock


def holds_work(workdir: Path) -> bool:
    """Whether an earlier start left anything that cost time; one that was refused did not."""
    metrics = workdir / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or (workdir / CHECKPOINTS).exists()


def git_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ from it; None outside git."""
    root = Path(__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def print_summary(summary: Summary, workdir: Path):
    """The end of a run for people: reward and accuracy before and after, and where time went."""
    steps = [line for line in summary.lines if "content/reward_mean" in line]
    scores = [
        line["content/eval_avg_at_k"] for line in summary.lines if "content/eval_avg_at_k" in line
    ]
    rewards = [line["content/reward_mean"] for line in steps]
    few = min(3, len(rewards))
    total = {
        name: sum(line[f"pace/{name}_seconds"] for line in steps) for name in ("rollout", "update")
    }
    tokens = sum(line["content/tokens"] for line in steps)
    print(summary.program_table)
    print(f"\n{len(steps)} RL steps in {summary.seconds:.0f} s")
    print(
        f"  mean reward        first {few} steps {sum(rewards[:few]) / few:.3f}"
        f"   last {few} steps {sum(rewards[-few:]) / few:.3f}"
    )
    if scores:
        print(f"  held-out reward    untrained {scores[0]:.3f}   trained {scores[-1]:.3f}")
    print(
        f"  time               rollout {total['rollout']:.0f} s ({tokens / total['rollout']:.0f} "
        f"tokens/s), update {total['update']:.0f} s, compiling {summary.compile_seconds:.0f} s "
        f"({100 * summary.compile_seconds / summary.seconds:.0f} %)"
    )
    print(f"  peak memory        {peak_memory_gb():.1f} GB")
    if len(summary.trained_tokens) > 1:
        each = ", ".join(map(str, summary.trained_tokens))
        print(f"  tokens trained on by process: {each}")
        print(f"  the weights of all processes have the hash {summary.weights}")
    print(f"  written            {workdir}/ (metrics.jsonl, events.jsonl, trace.json, policy/)")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        config = from_dict(Config, CONFIG.value)
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    # JAX tells at length about every accelerator that is not there.
    logging.getLogger("jax").setLevel(logging.WARNING)
    # orbax logs whole tracebacks, several times, of an error that it raises as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        with distributed.together(config.distributed):
            try:
                distributed.agree("config", comparable(config))
                distributed.agree("code", {"git_commit": git_commit(), "versions": versions()})
            except ValueError as error:
                raise SystemExit(str(error)) from None
            run_in(Path(WORKDIR.value), config)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(str(error)) from None


def run_in(workdir: Path, config: Config):
    """Run in a folder that one process looks after; the others do as that one finds."""
    with contextlib.ExitStack() as held:
        refusal, finished = None, False
        if distributed.index() == 0:
            try:
                held.enter_context(hold(workdir))
                prepare_workdir(workdir, config)
                finished = finished_steps(workdir) == config.steps
            except SystemExit as error:
                refusal = str(error)
        [(refusal, finished), *_] = distributed.exchange("workdir", (refusal, finished))
        if refusal is not None:
            raise SystemExit(refusal)
        if not finished:
            run(config, workdir)
        elif distributed.index() == 0:
            print(
                f"{workdir} holds this run, finished; raise steps to go on, or choose another "
                "folder"
            )


def comparable(config: Config) -> dict:
    """The settings that all processes of a run must share: all but their own number."""
    found = to_dict(config)
    del found["distributed"]["index"]
    return found


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def run(config: Config, workdir: Path):
    """Start the run of a folder, or go on with it, and say how it went."""
    cache = workdir.parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
    # Also what compiles in a moment: resumed runs and sweeps compile the same again and again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    leads = distributed.index() == 0
    try:
        with TerminalProgress(config.steps) as progress:
            summary = train(config, workdir, progress)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        # What users can mend comes as one sentence; what they cannot is in the file it names.
        path = workdir / ("error.txt" if leads else f"error.{distributed.index()}.txt")
        where = f"(where it happened: {path})"
        try:
            atomic.write_text(path, traceback.format_exc())
        except OSError as unwritable:
            where = f"({path} could not be written: {unwritable.strerror})"
        raise SystemExit(f"{type(error).__name__}: {error} {where}") from None
    if leads:
        print_summary(summary, workdir)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing, with one sentence in place of a traceback for a wrong setting."""
    try:
        rest = flags.FLAGS(argv)
        if CONFIG.value is not None:
            CONFIG.value.keys()  # a file that is not there raises at the first look only
        return rest
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        # The text of a KeyError comes in quotes, with escaped line ends.
        text = " ".join(str(error).replace("\\n", " ").replace("\\'", "'").split())
        if isinstance(error, (AttributeError, KeyError)):
            name = text.strip("\"'").replace("' ", ". ")
            text = f"no such setting: {name} (tlt_jax/config.py leads to all of them)"
        raise SystemExit(f"wrong command line: {text}") from None


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=parse_flags)
