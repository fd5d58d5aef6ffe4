"""The points of a sweep: what a config file's `sweep()` gives, and what each point is called.

A point is a flat dictionary of overrides, {"trainer.learning_rate": 1e-3, "seed": 1}, of the config
that `get_config` of the same file returns. A config file with the helpers below:

    def sweep():
        return product({"algorithm.name": ["grpo", "rloo"], "seed": range(3)})
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tlt_jax.config import Config, from_dict, to_dict

Overrides = dict[str, Any]
Axes = Mapping[str, Iterable] | Iterable[Overrides]  # keys with their values, or points
_LONGEST_NAME = 120
_PLAIN = re.compile(r"[a-z0-9._+-]+")  # alike on file systems that ignore case


def product(*axes: Axes) -> list[Overrides]:
    """Every combination, the last axis fastest: product({"a": [1, 2], "b": [3, 4]}) has 4 points.

    Several arguments are multiplied too, and each may be a list of points, such as a `zip_`.
    """
    lists = [points for part in axes for points in _axes(part)]
    return [_merged(points) for points in itertools.product(*lists)]


def zip_(*axes: Axes) -> list[Overrides]:
    """Side by side: zip_({"a": [1, 2], "b": [3, 4]}) is a=1, b=3 and a=2, b=4.

    Raises ValueError where the lengths differ.
    """
    lists = [points for part in axes for points in _axes(part)]
    if len({len(points) for points in lists}) > 1:
        lengths = {" ".join(points[0]) if points else "": len(points) for points in lists}
        raise ValueError(f"zip_ needs axes of one length, got {lengths}")
    return [_merged(points) for points in zip(*lists)]


def chain(*sweeps: Iterable[Overrides]) -> list[Overrides]:
    """One after the other: chain([{}], product(…)) is a baseline and a grid."""
    return list(itertools.chain(*sweeps))


def _axes(part: Axes) -> list[list[Overrides]]:
    if isinstance(part, Mapping):
        return [[{key: value} for value in values] for key, values in part.items()]
    return [list(part)]


def _merged(points: Iterable[Overrides]) -> Overrides:
    merged: Overrides = {}
    for point in points:
        if twice := sorted(merged.keys() & point.keys()):
            raise ValueError(f"{twice[0]!r} is on two axes of the sweep; give it once")
        merged |= point
    return merged


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str  # of its folder
    overrides: Overrides
    config: Config

    def flags(self) -> list[str]:
        """What sets the overrides on the command line of `experiments.main`."""
        return [f"--config.{key}={value}" for key, value in self.overrides.items()]


def load_points(config: str) -> list[Point]:
    """The points of the config file `config`, PATH or PATH:ARGUMENT, all of them checked.

    Raises ValueError, naming the point, for a file without `sweep`, an unknown key, a value of the
    wrong type, settings that `Config` refuses, and two points that are the same run.
    """
    path, _, argument = config.partition(":")
    module = _load_module(Path(path))
    for name in ("get_config", "sweep"):
        if not hasattr(module, name):
            raise ValueError(
                f"{path} has no {name}(); a sweep needs it (see experiments/points.py)"
            )
    found = module.sweep()
    if not isinstance(found, Iterable) or isinstance(found, (str, Mapping)):
        raise ValueError(f"sweep() of {path} must give dictionaries of overrides, got {found!r}")
    points, same = [], {}
    for overrides in found:
        if not isinstance(overrides, Mapping) or not all(isinstance(k, str) for k in overrides):
            raise ValueError(f"sweep() of {path} gave {overrides!r}, which is no dict of overrides")
        base = module.get_config(argument) if argument else module.get_config()
        point = _point(dict(overrides), base)
        settings = json.dumps(to_dict(point.config), sort_keys=True)
        if settings in same:
            raise ValueError(
                f"points {same[settings]!r} and {point.name!r} of the sweep are the same run; its "
                "result would count twice"
            )
        same[settings] = point.name
        points.append(point)
    if not points:
        raise ValueError(f"sweep() of {path} gave no points")
    return points


def point_name(overrides: Overrides) -> str:
    """The folder of a point: its overrides, `key=value` joined by commas and sorted by key.

    Different overrides have different names, also where case is ignored. What cannot stand in a
    name, or would make it too long, is left out, and a hash of the overrides added.
    """
    parts = [f"{key}={_text(value)}" for key, value in sorted(overrides.items())]
    name = ",".join(parts) or "base"
    plain = all(_PLAIN.fullmatch(key) for key in overrides)
    plain = plain and all(_is_plain(value) for value in overrides.values())
    if plain and len(name) <= _LONGEST_NAME:
        return name
    exact = json.dumps(sorted(overrides.items()))
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9._+=,-]+", "_", name.lower())[: _LONGEST_NAME - 13]
    return f"{readable}~{digest}"


def _text(value) -> str:
    return value if isinstance(value, str) else repr(value).lower()


def _is_plain(value) -> bool:
    """Whether a value's text stands for that value alone: the string "1" looks like a number."""
    if not isinstance(value, str):
        return True
    return _PLAIN.fullmatch(value) is not None and not _looks_like_a_literal(value)


def _looks_like_a_literal(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("true", "false")
    return True


def _point(overrides: Overrides, base: ConfigDict) -> Point:
    for key, value in overrides.items():
        if type(value) not in (bool, int, float, str):
            raise ValueError(f"{key}={value!r} in the sweep: give a bool, a number or a string")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value!r} in the sweep is not finite")
        _override(base, key, value)
    name = point_name(overrides)
    try:
        return Point(name, overrides, from_dict(Config, base))
    except (TypeError, ValueError) as error:
        raise ValueError(f"point {name!r} of the sweep: {error}") from None


def _override(config: ConfigDict, key: str, value) -> None:
    *sections, last = key.split(".")
    section = config
    for name in (*sections, last):
        if not isinstance(section, ConfigDict) or name not in section:
            known = [k for k in _leaves(config)]
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{key!r} in the sweep is no setting; is {close!r} meant?")
        if name is not last:
            section = section[name]
    if isinstance(section[last], ConfigDict):
        raise ValueError(f"{key!r} in the sweep is a section; override its settings one by one")
    try:
        section[last] = value
    except TypeError:
        expected = section.get_type(last).__name__
        raise ValueError(f"{key}={value!r} in the sweep must be of type {expected}") from None


def _leaves(config: ConfigDict, prefix: str = "") -> Iterable[str]:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _load_module(path: Path):
    if not path.is_file():
        raise ValueError(
            f"--config={path} does not exist; give a config file, PATH or PATH:ARGUMENT"
        )
    spec = importlib.util.spec_from_file_location("sweep_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
