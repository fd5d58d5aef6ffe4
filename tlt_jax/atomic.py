"""Files that a crash cannot leave half-written."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replace the file at `path` by `text`: readers see the old content or the new, never a part.

    The text goes to a temporary file in the same folder (a rename across file systems is a copy),
    reaches the disk, and is renamed into place. Raises OSError and removes the temporary file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON by `write_text`. NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_writable(path: str | os.PathLike) -> None:
    """Raise OSError now, rather than after hours of work, where `write_text` to `path` would fail.

    The file must not exist: trying leaves nothing behind.
    """
    write_text(path, "")
    Path(path).unlink()


def sync_folder(folder: str | os.PathLike) -> None:
    """Wait until the disk has a folder and the files in it, before it is renamed into place."""
    folder = Path(folder)
    for path in (*(p for p in folder.iterdir() if p.is_file()), folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class LineFile:
    """An append-only text file of whole lines, kept whole across crashes.

    Opening cuts a last line without its line end: a crash tore it. With `size` it cuts everything
    past that many bytes, a `size()` of earlier. Each `append` is one write. Raises ValueError for a
    file that is shorter than `size` or has no line end there.
    """

    def __init__(self, path: str | os.PathLike, size: int | None = None):
        self.path = Path(path)
        self._file = open(path, "a+b", buffering=0)
        if size is None:
            size = _end_of_last_line(self._file)
        elif not _ends_a_line(self._file, size):
            self._file.close()
            raise ValueError(
                f"{path} has no line that ends at byte {size}, where it is to be continued; it was "
                "changed or cut by someone else"
            )
        self._file.truncate(size)

    def size(self) -> int:
        """Bytes written so far, all of them whole lines."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, text: str, *, sync: bool) -> None:
        """Append `text`, which ends in a line end; with `sync`, wait until the disk has it.

        Raises OSError when the whole text does not fit on the disk, leaving the file as it was.
        """
        data = text.encode("utf-8")
        before = os.fstat(self._file.fileno()).st_size
        written = self._file.write(data)
        if written != len(data):
            self._file.truncate(before)
            raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes; is the disk full?")
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _ends_a_line(file, size: int) -> bool:
    file.seek(max(0, size - 1))
    return size == 0 or file.read(1) == b"\n"


def _end_of_last_line(file, block: int = 1 << 16) -> int:
    """Return the offset just past the last line end of an open binary file, 0 if it has none."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
