"""The pool of ahead-of-time compiled programs: what CUDA graphs are to the original.

A program is compiled for exact shapes, dtypes and placement, and refuses anything else, so nothing
recompiles behind the caller's back. The pool knows what each one cost.
"""

import dataclasses
import time

import jax


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    run: jax.stages.Compiled
    compile_seconds: float  # tracing, lowering and compiling
    temporary_bytes: int  # scratch while it runs, beside arguments and results


class ProgramPool:
    """Programs by name; `get` compiles what is missing."""

    def __init__(self):
        self.programs: dict[str, Program] = {}

    def get(self, name: str, function, *args, out=None, donate=()) -> Program:
        """The program `name`, compiling `function` for the shapes and placement of `args` (arrays
        or ShapeDtypeStructs; nothing else of them is read) unless it is there. out: placement of
        the results, a sharding or a tree of them. donate: arguments whose memory is reused."""
        if name not in self.programs:
            start = time.perf_counter()
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
            run = jitted.lower(*jax.tree.map(shape_of, args)).compile()
            seconds = time.perf_counter() - start
            memory = run.memory_analysis()  # None where a backend does not tell
            temporary = 0 if memory is None else memory.temp_size_in_bytes
            self.programs[name] = Program(name, run, seconds, temporary)
        return self.programs[name]

    @property
    def compile_seconds(self) -> float:
        return sum(p.compile_seconds for p in self.programs.values())

    def table(self) -> str:
        """One line per program: name, compile seconds, temporary megabytes."""
        rows = [
            f"{p.name:<34}{p.compile_seconds:>9.2f} s{p.temporary_bytes / 1e6:>11.1f} MB"
            for p in self.programs.values()
        ]
        head = f"{'program':<34}{'compile':>11}{'temporary':>14}"
        total = f"{len(rows)} programs, {self.compile_seconds:.1f} s compiling"
        return "\n".join([head, *rows, total])


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, for a placed array, sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def bucket_for(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`, or the largest there is."""
    return next((b for b in buckets if b >= size), buckets[-1])
