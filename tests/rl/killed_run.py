"""A training run that kills itself with SIGKILL at a named point: the driver of test_kill.py.

    python -m tests.rl.killed_run POINT --config=… --workdir=… [--config.…]

POINT is one of POINTS, or `never`; POINT@N kills process N of several. Functions of the run are
wrapped from outside, so that the code under test knows nothing of this.
"""

import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from experiments import main
from tlt_jax import atomic, checkpoint
from tlt_jax.atomic import LineFile
from tlt_jax.models import hf
from tlt_jax.rl import evaluate, loop, policy_trainer, run
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.run import Run
from tlt_jax.rl.warm_up import SUPERVISED
from tlt_jax.sharding.distributed import INDEX
from tlt_jax.spec.session import Session


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner: Any, name: str, nth: int = 1, *, after=False, only: Callable = lambda *_: True):
    """Die before (or after) the nth call of `owner.name` for whose arguments `only` holds."""
    function = getattr(owner, name)
    calls = 0

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += bool(only(*args))
        if not after and calls == nth:
            die()
        result = function(*args, **kwargs)
        if after and calls == nth:
            die()
        return result

    setattr(owner, name, wrapped)


def tear_line(nth: int):
    """Die with half of the nth synced line (one of metrics.jsonl) written."""
    append, calls = LineFile.append, 0

    def torn(self, text, *, sync):
        nonlocal calls
        calls += sync
        if sync and calls == nth:
            append(self, text[: len(text) // 2], sync=True)
            die()
        append(self, text, sync=sync)

    LineFile.append = torn


def is_manifest(source, target):
    return str(target).endswith(checkpoint.MANIFEST)


def is_policy(source, target):
    return str(target).endswith("policy")


def is_rl(trainer):
    return trainer.algorithm is not SUPERVISED


# Steps are counted from 1; evaluation and warm-up call some of these as well, hence the numbers.
POINTS: dict[str, Callable[[], None]] = {
    "never": lambda: None,
    "in the warm-up": lambda: kill_at(policy_trainer, "apply_gradient", 5),
    "in the first evaluation": lambda: kill_at(evaluate, "held_out_measures"),
    "in a rollout": lambda: kill_at(Session, "collect", 12),
    "in grading": lambda: kill_at(RewardPool, "submit", 20),
    "waiting for rewards": lambda: kill_at(RewardPool, "drain", 4),
    "in an update": lambda: kill_at(
        loop.PolicyTrainer, "gradient", 2, after=True, only=lambda self, *_: is_rl(self)
    ),
    "before publishing": lambda: kill_at(run, "publish", 4),
    "in a metrics line": lambda: tear_line(4),
    "between metrics line and checkpoint": lambda: kill_at(Run, "save", 3),
    "as a checkpoint starts": lambda: kill_at(
        checkpoint.ocp, "save_checkpointables_async", 3, after=True
    ),
    "before a manifest": lambda: kill_at(
        atomic, "write_json", 3, only=lambda path, _: is_manifest(None, path)
    ),
    "in a manifest": lambda: kill_at(os, "replace", 3, only=is_manifest),
    "removing a checkpoint": lambda: kill_at(
        shutil, "rmtree", only=lambda path, *_: path.parent.name == "checkpoints" and path.exists()
    ),
    "saving the policy": lambda: kill_at(os, "replace", only=is_policy),
    "before the end": lambda: kill_at(hf, "save", after=True),
}

if __name__ == "__main__":
    point, _, process = sys.argv.pop(1).partition("@")
    if process in ("", os.environ.get(INDEX)):
        POINTS[point]()
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main.main, flags_parser=main.parse_flags)
