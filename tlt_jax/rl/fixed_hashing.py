"""Calls whose result may not depend on Python's hash randomization.

Some packages walk over sets of strings while they draw: the same seed then gives other results in
every process, unless PYTHONHASHSEED is 0 from its start.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tlt_jax.rl.fixed_hashing import main; main()"
)


def call(function: Callable, *args: Any) -> Any:
    """function(*args), all picklable, in a process without hash randomization: this one, if it is
    such a process, else a child. Raises what the function raises."""
    if not sys.flags.hash_randomization:
        return function(*args)
    done = subprocess.run(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path)],
        input=pickle.dumps((function, args)),
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{function.__module__}.{function.__name__} failed in a child process (status "
            f"{done.returncode}); what it printed stands above"
        )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result


def main() -> None:
    """The child: read a call from standard input, write (result, error) to standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints may not reach the pipe
    function, args = pickle.load(sys.stdin.buffer)
    try:
        answer = function(*args), None
    except ValueError as error:
        answer = None, error
    with out:
        pickle.dump(answer, out)
