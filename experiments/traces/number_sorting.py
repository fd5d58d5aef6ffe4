"""Insertion sort."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish


def trace(item: Mapping[str, Any]) -> str:
    """7, 3, 5 ascending -> 7; 3 7; 3 5 7: the sorted list after each number is put in its place."""
    metadata = item["metadata"]
    descending = metadata["direction"] == "descending"
    done: list[str] = []
    steps = []
    for number in metadata["original_numbers"]:
        place = next(
            (i for i, other in enumerate(done) if _before(number, other, descending)), len(done)
        )
        done.insert(place, number)
        steps.append(" ".join(done))
    return finish(steps, done)


def _before(number: str, other: str, descending: bool) -> bool:
    return float(number) > float(other) if descending else float(number) < float(other)
