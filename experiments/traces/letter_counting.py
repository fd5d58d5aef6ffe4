"""How often a letter occurs in a text, letter by letter."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish


def trace(item: Mapping[str, Any]) -> str:
    """h in "Hut Bach" -> h1 u t, b a c h2: a word a line, the count so far after each match."""
    letter, count, steps = item["metadata"]["target_letter"], 0, []
    for word in item["metadata"]["span"]:
        spelt = []
        for character in word.lower():
            count += character == letter
            spelt.append(f"{character}{count}" if character == letter else character)
        steps.append(" ".join(spelt))
    return finish(steps, count)
