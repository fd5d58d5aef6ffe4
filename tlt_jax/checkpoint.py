"""Checkpoints of a run: written in the background, finished or not there at all.

A checkpoint is a folder named by its step: `arrays/`, written by orbax, then `manifest.json`. The
manifest holds the run's record (what is not an array) and the size and CRC-32 of every file, so
what was interrupted has no manifest, and what was damaged later does not match it.
This file is the only one that knows orbax.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from tlt_jax import atomic
from tlt_jax.sharding import distributed

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save a run and what to keep of it."""

    every: int = 10  # RL steps between two checkpoints; the last step has one too; 0: none at all
    keep_last: int = 2  # newest checkpoints that stay
    keep_every: int = 0  # those of a step that this divides stay as well; 0: none

    def __post_init__(self):
        for name, least in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"keep_every={self.keep_every} must be a multiple of every={self.every}: only "
                "those steps have a checkpoint to keep"
            )


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the way out."""


class Checkpoints:
    """The checkpoints of one folder, which is made at the first save.

    One save runs at a time, in a thread; an error of it is raised by the next `save` or `wait`.
    With several processes all make the same calls, each writes what its devices hold, and process 0
    the manifest when all have.
    To be used by one thread. What an earlier process left unfinished is removed at the next save.
    """

    def __init__(self, folder: str | os.PathLike, config: CheckpointConfig):
        self.folder, self.config = Path(folder).absolute(), config
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        found = [path.parent.name for path in self.folder.glob(f"*/{MANIFEST}")]
        return sorted(int(name) for name in found if name.isdecimal())

    def save(self, step: int, parts: dict[str, Any], record: dict, *, keep: bool = False) -> None:
        """Start saving named pytrees of arrays and a JSON `record`, after any save under way.

        The arrays are copied on their devices first, so the caller may donate them right away.
        keep: this checkpoint is never removed. Raises CheckpointError if the save before failed.
        """
        self.wait()
        parts = _copy(parts)
        # Between processes orbax begins with programs of all devices: not beside the caller's own.
        begun = self._begin(step, parts) if distributed.count() > 1 else None
        self._thread = threading.Thread(
            target=self._save, args=(step, parts, record, keep, begun), name=f"checkpoint {step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being saved. Raises CheckpointError if the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            last = f"step {max(self.steps())} is" if self.steps() else "no checkpoint is"
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder}: {_first_line(error)}; {last} "
                "the last good one. Make room or choose another folder, then run the same command"
            ) from error

    def record(self, step: int) -> dict:
        """The record saved with a checkpoint. Raises CheckpointError if its files were damaged."""
        manifest = self._manifest(step)
        for name, size, crc in manifest["files"]:
            path = self.folder / str(step) / name
            try:
                found = _size_and_crc(path)
            except OSError as error:
                raise CheckpointError(self._damaged(step, f"{name}: {error.strerror}")) from None
            if found != (size, crc):
                raise CheckpointError(self._damaged(step, f"{name} is not what was written"))
        return manifest["record"]

    def restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The parts of a checkpoint that `like` names, in its shapes, dtypes and shardings.

        like: pytrees of arrays or of `jax.ShapeDtypeStruct`s with shardings. Raises CheckpointError
        naming the first arrays that differ in path, shape or dtype, before anything is read.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        wanted = _describe(abstract)
        saved = {
            path: array
            for path, array in self._manifest(step)["arrays"].items()
            if path.split("/")[0] in like
        }
        different = [
            f"{path} is {saved.get(path, 'missing')} there and {wanted.get(path, 'missing')} here"
            for path in {**wanted, **saved}
            if saved.get(path) != wanted.get(path)
        ]
        if different:
            raise CheckpointError(
                f"{self.folder / str(step)} holds other arrays than this run, {len(different)} of "
                f"them: {'; '.join(different[:3])}. Resume with the code and settings that wrote it"
            )
        try:
            return ocp.load_checkpointables(self.folder / str(step) / "arrays", abstract)
        except Exception as error:
            raise CheckpointError(self._damaged(step, _first_line(error))) from error

    def _manifest(self, step: int) -> dict:
        path = self.folder / str(step) / MANIFEST
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(self._damaged(step, f"{MANIFEST}: {error}")) from None

    def _damaged(self, step: int, why: str) -> str:
        earlier = [s for s in self.steps() if s != step]
        way = f"step {max(earlier)}" if earlier else "the start"
        return (
            f"the checkpoint {self.folder / str(step)} is damaged ({why}); remove that folder and "
            f"run the same command to go on from {way}"
        )

    def _begin(self, step: int, parts: dict[str, Any]) -> Any:
        """Have orbax start writing; the result waits for its end."""
        if distributed.index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            self._remove(step)  # of an earlier process that went on from a checkpoint before it
        distributed.barrier(f"checkpoint {step} begins")
        context = ocp.Context()
        # Trained float32 weights hardly compress, and trying takes four times as long.
        context.array.saving.use_compression = False
        with context:
            return ocp.save_checkpointables_async(self.folder / str(step) / "arrays", parts)

    def _save(self, step: int, parts: dict[str, Any], record: dict, keep: bool, begun: Any) -> None:
        here = self.folder / str(step)

        def finish():
            if distributed.index() == 0:
                self._seal(here, parts, record, keep)
                self._remove_old()

        try:
            _together(
                f"checkpoint {step} is written",
                lambda: (begun or self._begin(step, parts)).result(),
            )
            _together(f"checkpoint {step} is whole", finish)
        except BaseException as error:  # for the thread that asks next
            self._error = error

    def _seal(self, here: Path, parts: dict[str, Any], record: dict, keep: bool) -> None:
        """Write the manifest, which makes the files of a checkpoint one."""
        files = sorted(p for p in (here / "arrays").rglob("*") if p.is_file())
        manifest = {
            "keep": keep,
            "record": record,
            "arrays": _describe(parts),
            "files": [[str(p.relative_to(here)), *_size_and_crc(p)] for p in files],
        }
        atomic.write_json(here / MANIFEST, manifest)

    def _remove_old(self) -> None:
        steps = self.steps()
        for step in steps[: -self.config.keep_last]:
            every = self.config.keep_every
            try:
                kept = self._manifest(step)["keep"]
            except CheckpointError:  # of no use to anyone
                kept = False
            if not kept and not (every and step % every == 0):
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; interrupted in the middle, it has lost its manifest already."""
        with contextlib.suppress(OSError):
            (self.folder / str(step) / MANIFEST).unlink()
        shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for path in self.folder.iterdir():
            if path.name.isdecimal() and not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)


def _together(name: str, action: Callable[[], Any]) -> None:
    """Do a part of a save; raise on every process where one of them could not."""
    error = None
    try:
        action()
    except BaseException as raised:
        error = raised
    found = distributed.exchange(name, error and _first_line(error))
    if error is not None:
        raise error
    for process, said in enumerate(found):
        if said is not None:
            raise CheckpointError(f"process {process}: {said}")


@jax.jit
def _copy(parts):
    return jax.tree.map(jnp.copy, parts)


def _describe(tree: Any) -> dict[str, str]:
    """Shape and dtype of every array by its path, such as {"params/embed": "float32[512,64]"}."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{x.dtype}[{','.join(map(str, x.shape))}]"
        )
        for path, x in leaves
    }


def _size_and_crc(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
