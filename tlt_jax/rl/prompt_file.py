"""Prompt files: JSON lines, CSV, Parquet (verl's columns among them) and Hugging Face data sets."""

import csv
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tlt_jax.rl.prompt_record import Columns, PromptRecord, make_record

_USUAL = Columns()
HUB = "hf:"  # before the id of a data set on the Hugging Face hub
Rows = Iterator[tuple[str, Mapping[str, Any]]]  # where a row is, and its values by column


def read_prompt_file(
    path: str | os.PathLike, columns: Columns = _USUAL, *, split: str = "", subset: str = ""
) -> list[PromptRecord]:
    """Read the prompts of a file, in its order; duplicates are kept.

    path: a .jsonl, .json (JSON lines as well), .csv or .parquet file; a folder that `datasets`
    saved or can load; or `hf:OWNER/NAME` for the hub. split: of a data set with several. subset: of
    a data set on the hub with several. Text is UTF-8; a byte order mark, CRLF line ends and blank
    lines are tolerated. Raises ValueError naming the file and the line or row (from 1) for what is
    not as `PromptRecord` describes, and for a file without prompts.
    """
    path = os.fspath(path)
    records = []
    for where, fields in _rows(path, split, subset):
        try:
            records.append(make_record(where, fields, columns))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not records:
        raise ValueError(f"{path} holds no prompts; it needs at least one row with a prompt")
    return records


def source_name(path: str) -> str:
    """Name of the data in a prompt file that does not name its sources: its path or hub id."""
    return path.removeprefix(HUB)


def _rows(path: str, split: str, subset: str) -> Rows:
    if path.startswith(HUB) or Path(path).is_dir():
        return _data_set(path, split, subset)
    if not Path(path).exists():
        raise FileNotFoundError(
            f"{path} does not exist; a data set on the Hugging Face hub is written {HUB}OWNER/NAME"
        )
    if split or subset:
        raise ValueError(f"{path} is one file: it has no split={split!r} or subset={subset!r}")
    if (kind := Path(path).suffix.lower()) not in _READERS:
        raise ValueError(f"{path}: files of kind {kind!r} cannot be read, only {list(_READERS)}")
    return _READERS[kind](path)


def _json_lines(path: str) -> Rows:
    # In binary, because text mode also splits at characters that may stand inside JSON strings.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                where = f"{path}:{number}"
                try:
                    yield where, _json_object(line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"broken JSON: {error.msg} at column {error.colno}; each line must hold one object"
        ) from None
    except RecursionError:
        raise ValueError("broken JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _csv(path: str) -> Rows:
    """Rows of a CSV file with a header; an empty cell is no value. Quoted cells may hold lines."""
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    csv.field_size_limit(sys.maxsize)  # long prompts are judged by their tokens, later
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{where}: broken CSV: {error}; check the quotes") from None
        if row is None:
            return
        if not row:
            continue
        if not header:
            header = row
            if len(set(header)) < len(header) or not all(header):
                raise ValueError(f"{where}: the header needs a distinct name per column: {header}")
        elif len(row) != len(header):
            raise ValueError(
                f"{where}: {len(row)} cells, but the header has {len(header)}; "
                "a cell with commas needs quotes"
            )
        else:
            yield where, {name: cell or None for name, cell in zip(header, row)}


def _parquet(path: str) -> Rows:
    parquet = _optional("pyarrow.parquet", path)
    import pyarrow

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=256)
        number = 0
        for batch in batches:
            for row in _python_rows(batch, path, number):
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error!s:.200}") from None


def _python_rows(batch, path: str, before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                where = f"{path}, row {before + i + 1}"
                raise ValueError(f"{where}: not UTF-8 ({error.reason})") from None
        raise


def _data_set(path: str, split: str, subset: str) -> Rows:
    datasets = _optional("datasets", path)
    saved = any((Path(path) / n).exists() for n in ("state.json", "dataset_dict.json"))
    if saved and subset:
        raise ValueError(f"{path} was saved by save_to_disk, so it has no subset={subset!r}")
    try:
        if saved:
            loaded = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(source_name(path), subset or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{path}: datasets cannot load it: {type(error).__name__}: {error!s:.300}"
        ) from None
    where = path
    if isinstance(loaded, datasets.DatasetDict):
        splits = list(loaded)
        if split not in splits and (split or len(splits) > 1):
            raise ValueError(f"{path} has no split={split!r}; choose one of {splits}")
        split = split or splits[0]
        loaded, where = loaded[split], f"{path} ({split})"
    elif split and split != str(loaded.split):
        raise ValueError(f"{path} holds one split, {str(loaded.split)!r}, not split={split!r}")
    for number, row in enumerate(loaded, 1):
        yield f"{where}, row {number}", row


_READERS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _optional(module: str, path: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package {module.split('.')[0]} ({error}); install it with "
            "pip install -r requirements-extra.txt"
        ) from None
