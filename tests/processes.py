"""Real processes that run a script together, for tests."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from experiments.launch import free_port
from tlt_jax.sharding.distributed import COORDINATOR, INDEX, PROCESSES

ROOT = Path(__file__).parents[1]
# Every script begins with this: it is one of several, and knows `d`, `index` and `count`.
BEGIN = """
import os, signal, sys, time
from tlt_jax.sharding import distributed as d
d.RENDEZVOUS_S = 20
with d.together(d.DistributedConfig()):
    index, count = d.index(), d.count()
"""


@dataclasses.dataclass
class Ended:
    """How a process ended, after how long, and what it said."""

    status: int
    seconds: float
    output: str


def run(script: str, processes: int, *, devices: int = 1, argv=(), limit_s=120.0) -> list[Ended]:
    """Run a script in some processes and wait for all, killing what is left at the limit."""
    code = BEGIN + textwrap.indent(textwrap.dedent(script), "    ")
    address, began = f"localhost:{free_port()}", time.monotonic()
    ended: dict[int, Ended] = {}

    def one(index: int):
        done = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            cwd=ROOT,
            env={
                **os.environ,
                COORDINATOR: address,
                PROCESSES: str(processes),
                INDEX: str(index),
                "JAX_NUM_CPU_DEVICES": str(devices),
                "JAX_PLATFORMS": "cpu",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = done.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            done.kill()
            output, _ = done.communicate()
        ended[index] = Ended(done.returncode, time.monotonic() - began, output)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[i] for i in range(processes)]
