"""Train from a config file:

    python -m experiments.main --config=experiments/configs/quickstart.py --workdir=DIR

Any setting can be overridden (--config.trainer.learning_rate=1e-5). The workdir gets config.json,
metrics.jsonl, events.jsonl, trace.json (for ui.perfetto.dev) and, at the end, policy/, a folder in
the Hugging Face layout.
"""

import importlib.metadata
import logging
import resource
import subprocess
import sys
import traceback
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags

from experiments.progress import TerminalProgress
from tlt_jax import atomic
from tlt_jax.config import Config, from_dict, to_dict
from tlt_jax.events import to_chrome_trace
from tlt_jax.rl.loop import Summary, train

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "reasoning-gym")


def prepare_workdir(workdir: Path, config: Config):
    """Make the folder and write config.json before any work is done.

    Raises SystemExit with one sentence where it cannot be written or already holds a run.
    """
    for name in ("metrics.jsonl", "policy"):
        # A start that failed leaves an empty file of metrics.
        if (workdir / name).exists() and (workdir / name).stat().st_size:
            raise SystemExit(
                f"--workdir={workdir} already holds a run ({name}); choose another folder or "
                "remove this one"
            )
    record = {
        "config": to_dict(config),
        "command": sys.argv,
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [str(d) for d in jax.devices()],
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        atomic.write_json(workdir / "config.json", record)
    except OSError as error:
        raise SystemExit(
            f"--workdir={workdir} cannot be written: {error.strerror}; choose another folder"
        ) from None


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
        line["content/eval_accuracy"] for line in summary.lines if "content/eval_accuracy" in line
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
        print(f"  held-out accuracy  untrained {scores[0]:.3f}   trained {scores[-1]:.3f}")
    print(
        f"  time               rollout {total['rollout']:.0f} s ({tokens / total['rollout']:.0f} "
        f"tokens/s), update {total['update']:.0f} s, compiling {summary.compile_seconds:.0f} s "
        f"({100 * summary.compile_seconds / summary.seconds:.0f} %)"
    )
    # Kilobytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(f"  peak memory        {peak / 1e9:.1f} GB")
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
    workdir = Path(WORKDIR.value)
    prepare_workdir(workdir, config)
    cache = workdir.parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
    try:
        with TerminalProgress(config.steps) as progress:
            summary = train(config, workdir, progress)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        # What users can mend comes as one sentence; what they cannot is in the file it names.
        atomic.write_text(workdir / "error.txt", traceback.format_exc())
        where = f"(where it happened: {workdir}/error.txt)"
        raise SystemExit(f"{type(error).__name__}: {error} {where}") from None
    to_chrome_trace(workdir / "events.jsonl", workdir / "trace.json")
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
