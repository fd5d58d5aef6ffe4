"""Greatest common divisor by Euclid's algorithm."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import division, finish


def trace(item: Mapping[str, Any]) -> str:
    """12, 18, 8 -> 18=1*12+6, 12=2*6+0, 8=1*6+2, 6=3*2+0: each number with the divisor so far."""
    first, *others = item["metadata"]["numbers"]
    steps, divisor = [], first
    for number in others:
        larger, divisor = max(divisor, number), min(divisor, number)
        steps.append(division(larger, divisor))
        while rest := larger % divisor:
            larger, divisor = divisor, rest
            steps.append(division(larger, divisor))
    return finish(steps, divisor)
