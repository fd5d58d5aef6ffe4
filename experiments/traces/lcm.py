"""Least common multiple: the greatest common divisor, then a division and a product."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import euclid, finish


def trace(item: Mapping[str, Any]) -> str:
    """4, 6 -> 6=1*4+2, 4=2*2+0, 4/2=2, 2*6=12: the multiple so far goes on to the next number."""
    first, *others = item["metadata"]["numbers"]
    steps, multiple = [], first
    for number in others:
        more, divisor = euclid(multiple, number)
        factor = multiple // divisor
        multiple = factor * number
        steps += [*more, f"{factor * divisor}/{divisor}={factor}", f"{factor}*{number}={multiple}"]
    return finish(steps, multiple)
