"""The same seed asks the same questions in every process, whatever its hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_jax.rl import fixed_hashing
from tlt_jax.rl.tasks import Task, draw_sets

ROOT = Path(__file__).parents[2]
# Tasks of reasoning-gym 0.1.25 that walk over sets of strings while they draw.
SCRIPT = """
from tlt_jax.rl import tasks
some = [tasks.Task(n) for n in ("polynomial_multiplication", "isomorphic_strings", "ransom_note")]
args = dict(size=6, seed=0, domain=0, eval_size=3, eval_seed=0, eval_domain=1)
if {direct}:
    tasks.fixed_hashing.call = lambda function, *rest: function(*rest)
sets = tasks.draw_sets(some, **args)
print([(q.text, q.entry["item"]["answer"]) for q in (*sets.held_out, *sets.training[0])])
"""


def questions(hash_seed: str, direct: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{direct}", str(direct))],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_questions_do_not_depend_on_the_hash_seed():
    assert questions("1", direct=False) == questions("0", direct=False)


def test_drawn_in_the_process_itself_they_would():
    assert questions("1", direct=True) != questions("0", direct=True)


def test_an_error_of_the_child_is_raised_here(monkeypatch):
    monkeypatch.setattr(fixed_hashing.sys, "flags", type("Flags", (), {"hash_randomization": 1}))
    with pytest.raises(ValueError, match="task 'no_such' is unknown to reasoning-gym"):
        draw_sets(
            [Task("no_such")], size=1, seed=0, domain=0, eval_size=1, eval_seed=0, eval_domain=1
        )
    with pytest.raises(RuntimeError, match="failed in a child process"):
        fixed_hashing.call(os._exit, 3)
