"""Ones of a binary representation, by halving."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish


def trace(item: Mapping[str, Any]) -> str:
    """19 -> 19:1, 9:2, 4:2, 2:2, 1:3: each half, rounded down, and the odd numbers so far."""
    number, ones, steps = item["metadata"]["number"], 0, []
    while number:
        ones += number % 2
        steps.append(f"{number}:{ones}")
        number //= 2
    return finish(steps, ones)
