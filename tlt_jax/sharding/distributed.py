"""Several processes as one program, on JAX's own runtime: who is there, and how they meet.

Every process runs the same command. Between programs of the whole mesh they agree through the
coordination service of `jax.distributed`, on the host, where waiting has no limit of its own: a
device collective dies after half a minute without its peers, so a barrier comes before each.
In a single process all of this does nothing. This file alone knows JAX's private client.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed as _jax_distributed

RENDEZVOUS_S = 60  # for all processes to come
HEARTBEAT_S = 10  # without a sign of life, then a process is dead; long work gives signs too
BARRIER_S = 24 * 3600  # a tail may be slow; a death ends the wait
LINGER_S = 3  # the end of process 0 ends the others; those with the same error may still say it
CHUNK = 1 << 20  # bytes of one value; the service takes messages of at most 4 MB
# What `experiments.launch` tells the processes that it starts.
COORDINATOR, PROCESSES, INDEX = "TLT_COORDINATOR", "TLT_PROCESSES", "TLT_INDEX"
NONE, AUTO = "none", "auto"


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Which processes run together.

    coordinator: "none": this one alone, unless `experiments.launch` started it; "auto": those of
    the cluster, as JAX finds them (Slurm, Open MPI, Kubernetes, Cloud TPU); or host:port of process
    0, with `processes` and `index` said here.
    """

    coordinator: str = NONE
    processes: int = 0
    index: int = -1

    def __post_init__(self):
        if self.coordinator in (NONE, AUTO):
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"distributed.coordinator={self.coordinator!r} is neither none, auto nor host:port"
            )
        if self.processes < 1 or not 0 <= self.index < self.processes:
            raise ValueError(
                f"distributed.processes={self.processes}, index={self.index}: with a coordinator "
                "say how many processes there are, and which this one is, from 0"
            )


def join(config: DistributedConfig):
    """Meet the other processes. To be called first, before JAX has looked for devices.

    Raises RuntimeError, within about a minute, where they do not come or do not fit.
    """
    if config.coordinator == NONE and COORDINATOR in os.environ:
        config = DistributedConfig(
            os.environ[COORDINATOR], int(os.environ[PROCESSES]), int(os.environ[INDEX])
        )
    if config.coordinator == NONE:
        return
    fixed = {}
    if config.coordinator != AUTO:
        if config.processes == 1:
            return
        _check_address(config)
        fixed = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.index,
        }
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would swallow SIGTERM, to be asked about by whoever saves at a preemption.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            **fixed,
            initialization_timeout=RENDEZVOUS_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=RENDEZVOUS_S,
        )
        jax.devices()  # a meeting, too: each tells the others what it has
    except (RuntimeError, ValueError) as error:
        where = f" (coordinator {config.coordinator}, process {config.index})" if fixed else ""
        raise RuntimeError(
            f"the processes did not meet{where}: {str(error).splitlines()[0][:300]}. Start all of "
            "them within a minute of each other, each with an index of its own"
        ) from error


def _check_address(config: DistributedConfig):
    """Raise RuntimeError for an address that cannot be: JAX itself would abort the process."""
    host, _, port = config.coordinator.rpartition(":")
    if config.index == 0:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("", int(port)))
            except OSError as error:
                raise RuntimeError(
                    f"process 0 cannot listen on port {port}: {error.strerror}; choose another "
                    "for distributed.coordinator"
                ) from None
        return
    end = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"process {config.index} found no coordinator at {config.coordinator} within "
                    f"{RENDEZVOUS_S} s ({error}); is process 0 running there, and the port open?"
                ) from None
        time.sleep(0.2)


@contextlib.contextmanager
def together(config: DistributedConfig) -> Iterator[None]:
    """Run a command as one of several processes: `join`, the body, and an orderly end.

    An error of the body is printed and ends the process at once: the others may wait for it for
    ever, and Python's own way out would wait for them. They are told by its end.
    """
    join(config)
    try:
        yield
        if count() > 1:
            barrier("end")
            jax.distributed.shutdown()
    except BaseException as error:
        if count() == 1:
            raise
        if isinstance(error, SystemExit):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if index() == 0:
            time.sleep(LINGER_S)
        os._exit(1)


def index() -> int:
    """The number of this process."""
    return _jax_distributed.global_state.process_id or 0


def count() -> int:
    """How many processes there are."""
    return _jax_distributed.global_state.num_processes or 1


def _client():
    return _jax_distributed.global_state.client


_names: set[str] = set()


def _new(name: str) -> str:
    """The name of a meeting, which is held once: the service would let a second one pass."""
    if name in _names:
        raise ValueError(f"the processes have met at {name!r} before; give each meeting its name")
    _names.add(name)
    return name


def barrier(name: str):
    """Wait until every process has come to this point. name: of this meeting alone."""
    if count() > 1:
        _client().wait_at_barrier(_new(f"tlt barrier {name}"), BARRIER_S * 1000)


def exchange(name: str, value: Any) -> list:
    """Every process's picklable `value`, in their order. All must come. name: as of `barrier`."""
    if count() == 1:
        return [value]
    prefix, client = _new(f"tlt exchange {name}"), _client()
    data = pickle.dumps(value)
    parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    for i, part in enumerate(parts):
        client.key_value_set_bytes(f"{prefix}/{index()}/{i}", part)
    client.key_value_set(f"{prefix}/{index()}/parts", str(len(parts)))
    found = []
    for process in range(count()):
        if process == index():
            found.append(value)
            continue
        key = f"{prefix}/{process}"
        total = int(client.blocking_key_value_get(f"{key}/parts", BARRIER_S * 1000))
        data = b"".join(
            client.blocking_key_value_get_bytes(f"{key}/{i}", BARRIER_S * 1000)
            for i in range(total)
        )
        found.append(pickle.loads(data))
    # Nobody may clear what another has not read.
    client.wait_at_barrier(f"{prefix} read", BARRIER_S * 1000)
    client.key_value_delete(f"{prefix}/{index()}/")
    return found


def agree(what: str, value: Mapping):
    """Raise ValueError, on every process, where their values (JSON) differ, naming what does."""
    found = exchange(what, json.loads(json.dumps(value)))
    for process, other in enumerate(found):
        if other != found[0]:
            first, second = _flat(found[0]), _flat(other)
            keys = [k for k in {**first, **second} if first.get(k) != second.get(k)]
            raise ValueError(
                f"the processes differ in {what}: "
                + "; ".join(
                    f"{k} is {first.get(k, 'missing')!r} in process 0 and "
                    f"{second.get(k, 'missing')!r} in process {process}"
                    for k in keys
                )
                + ". Start all with the same command and the same code"
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    out = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return out


class Tickets:
    """The numbers 0 to `total` - 1, each given to one process only.

    name: the same on all processes, and of these tickets alone.
    """

    def __init__(self, name: str, total: int):
        self.name, self.total, self._next = f"tlt tickets {name}", total, 0

    def claim(self, wanted: int) -> range:
        """The next numbers, as many of those wanted as are left."""
        if count() == 1:
            start, self._next = self._next, self._next + wanted
        else:
            start = _client().key_value_increment(self.name, wanted) - wanted
        return range(min(start, self.total), min(start + wanted, self.total))
