"""Run a module as `python -m` does, in a process that dies with the one that started it:

    python -m experiments.supervised MODULE ARGUMENT…

For a parent that starts it with a pipe as standard input, whose other end it holds and never writes
to, and as the leader of a session of its own. When the parent dies, even by SIGKILL, the pipe
closes, and this process ends at once with all that it started in its session.
"""

import os
import runpy
import signal
import sys
import threading


def watch_parent():
    """End this process group when standard input, a pipe from the parent, closes."""
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def watch():
        os.read(pipe, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("experiments.supervised must lead a process group of its own; see its docstring")
    watch_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
