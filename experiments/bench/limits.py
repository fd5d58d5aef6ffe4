"""How near the decode step comes to what this machine can do, and where the rest goes.

A step must read every weight and every committed key and value once, and multiply every weight
with every row. The limit is the larger of the two at the rates measured here, in this run:

    seconds >= max(bytes / bandwidth, 2 * parameters * rows / product rate)

The profile adds up the operations of a traced segment by what they are for.
"""

import collections
import dataclasses
import glob
import gzip
import json
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.spec.engine import Engine, EngineConfig

PRODUCT_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 576, 1536), (4096, 1024, 4096))


@dataclasses.dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes per second, reading
    product_rate: float  # float32 operations per second


@dataclasses.dataclass(frozen=True)
class Step:
    """One round of the warm decode program."""

    rows: int
    seconds: float  # median over repetitions
    limit: float  # seconds
    bound: str  # "memory" or "products": what the limit comes from
    profile: dict[str, float]  # class of operations -> seconds per round, longest first

    @property
    def share(self) -> float:
        return self.limit / self.seconds


def best_seconds(function, repetitions: int = 8) -> float:
    """The shortest of several runs of `function`, after one that does not count."""
    function()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine() -> Machine:
    """Reading speed over 256 MB and the best rate of a few float32 products, all cores."""
    array = np.ones(64 << 20, np.float32)
    pieces = np.split(array, 64)
    on_device = jnp.asarray(array)
    total = jax.jit(jnp.sum)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        seconds = min(
            best_seconds(lambda: list(threads.map(np.max, pieces))),
            best_seconds(lambda: total(on_device).block_until_ready()),
        )
    rates = []
    multiply = jax.jit(jnp.matmul)
    for m, k, n in PRODUCT_SHAPES:
        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        run = lambda a=a, b=b: multiply(a, b).block_until_ready()  # noqa: E731
        rates.append(2 * m * k * n / best_seconds(run))
    return Machine(array.nbytes / seconds, max(rates))


def limit(model: ModelConfig, machine: Machine, rows: int, committed: int) -> tuple[float, str]:
    """(seconds, "memory" or "products") that a round of `rows` rows takes at least.

    committed: tokens in the cache of each row. The weights that count are those a round reads
    whole: an untied embedding is looked up, not read.
    """
    width = jnp.dtype(model.dtype).itemsize
    used = model.num_params - (0 if model.tied else model.vocab_size * model.width)
    pair = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    memory = width * (used + rows * committed * pair) / machine.bandwidth
    products = 2 * used * rows / machine.product_rate
    return max((memory, "memory"), (products, "products"))


def measure_steps(
    model: ModelConfig, params: dict, machine: Machine, rows: list[int], slots: int, rounds: int
) -> list[Step]:
    """Time and profile the decode program at each number of rows, caches half full.

    params: unstacked. The programs run in turn, so that a slow spell of the machine hits all.
    """
    config = EngineConfig(
        tuple(sorted(rows)), (slots,), (slots // 2,), segment_rounds=rounds, taps=()
    )
    engine = Engine(model, config)
    programs = {b: engine.decode_program(params, b, slots).run for b in rows}
    states = {b: engine.empty_program(b, slots).run() for b in rows}

    def segment(b: int) -> float:
        state = states[b]
        full = jnp.full((b,), slots // 2, jnp.int32)
        cache = state.cache.replace(length=full)
        state = state.replace(cache=cache, limit=full * 4, live=jnp.ones((b,), bool))
        jax.block_until_ready(state)
        start = time.perf_counter()
        states[b], emitted = programs[b](params, state)
        jax.block_until_ready(emitted)
        return (time.perf_counter() - start) / rounds

    times = {b: [] for b in rows}
    for _ in range(12):
        for b in rows:
            times[b].append(segment(b))
    steps = []
    for b in rows:
        seconds, bound = limit(model, machine, b, slots // 2)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                segment(b)
            spent = classify(model, b, programs[b].as_text(), read_trace(folder))
        profile = {name: t / rounds for name, t in spent.most_common()}
        # The first run is warm-up.
        steps.append(Step(b, statistics.median(times[b][1:]), seconds, bound, profile))
    return steps


def read_trace(folder: str) -> dict[str, float]:
    """Seconds by HLO instruction, from what `jax.profiler.trace` wrote into a folder."""
    (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    spent = collections.Counter()
    for event in events:
        name = event.get("args", {}).get("hlo_op")
        if event.get("ph") == "X" and name is not None:
            spent[name] += event["dur"] / 1e6
    return spent


INSTRUCTION = re.compile(r"%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<code>[\w-]+)\((?P<rest>.*)")


def classify(model: ModelConfig, rows: int, hlo: str, spent: dict[str, float]):
    """Add up seconds by class. Operations that only hold others (loops, calls) are left out."""
    what = {}
    for line in hlo.splitlines():
        if found := INSTRUCTION.search(line):
            where = re.search(r'op_name="([^"]*)"', found["rest"])
            dims = re.findall(r"\d+", found["type"].split("{")[0].partition("[")[2])
            dims = tuple(int(d) for d in dims if d != "1")
            what[found["name"]] = found["code"], dims, where[1] if where else ""
    classes = collections.Counter()
    for name, seconds in spent.items():
        code, dims, where = what.get(name, ("", (), ""))
        if code not in ("while", "conditional", "call"):
            classes[class_of(model, rows, code, dims, where)] += seconds
    return classes


def class_of(model: ModelConfig, rows: int, code: str, dims: tuple, where: str) -> str:
    """What an instruction is for, by its result's dimensions (without ones) and its op_name."""
    c = model
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    outputs = {
        c.vocab_size: "head",
        c.mlp_width: "gate and up",
        c.width: "width-sized outputs",
        q: "width-sized outputs" if q == c.width else "queries",
        kv: "keys and values",
    }
    if code == "dot" or where.endswith("dot_general"):
        for size, name in outputs.items():
            if sorted(dims) == sorted(d for d in (rows, size) if d != 1):
                return f"products: {name}"
    if where.endswith("scatter"):
        return "cache writes"
    if code == "copy" or "copy" in where:
        return "copies"
    if "attention" in where:
        return "attention and rotary"
    if "Transformer" in where:
        return "norms, activations, residuals"
    if c.vocab_size in dims or "cond" in where:
        return "sampling"
    if c.num_kv_heads in dims:
        return "attention and rotary"
    return "rest"


def table(machine: Machine, steps: list[Step]) -> str:
    """The limits and the profile, for people."""
    lines = [
        f"machine: {machine.bandwidth / 1e9:.1f} GB/s read, "
        f"{machine.product_rate / 1e9:.0f} GFLOP/s float32 products",
        f"{'rows':>5}{'step':>11}{'limit':>11}{'share':>8}  bound by",
    ]
    for s in steps:
        times = f"{s.seconds * 1e3:>8.2f} ms{s.limit * 1e3:>8.2f} ms"
        lines.append(f"{s.rows:>5}{times}{s.share:>8.0%}  {s.bound}")
    names = list(dict.fromkeys(name for s in steps for name in s.profile))
    head = "".join(f"{f'{s.rows} rows':>10}" for s in steps)
    lines += ["", f"{'ms per step, by operation':<34}{head}"]
    for name in names:
        cells = "".join(f"{s.profile.get(name, 0.0) * 1e3:>10.2f}" for s in steps)
        lines.append(f"{name:<34}{cells}")
    return "\n".join(lines)
