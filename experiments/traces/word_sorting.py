"""Insertion sort of words."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish


def trace(item: Mapping[str, Any]) -> str:
    """b, a, C ascending -> b; a b; C a b: sorted after each word, by code point."""
    metadata = item["metadata"]
    done: list[str] = []
    steps = []
    for word in metadata["transformed_words"]:
        if metadata["direction"] == "ascending":
            place = sum(other <= word for other in done)
        else:
            place = sum(other >= word for other in done)
        done.insert(place, word)
        steps.append(" ".join(done))
    return finish(steps, ", ".join(done))
