"""A chain of sums and differences, from the left, the rest written out again each time."""

import re
from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish

_TERM = re.compile(r"([+-]?)\s*(-?\d+)")


def trace(item: Mapping[str, Any]) -> str:
    """4 - 1 + 7 - 2 -> 3+7-2, 10-2, 8: each line has one term less than the one before."""
    terms = _TERM.findall(item["metadata"]["expression"])
    total, rest = int(terms[0][0] + terms[0][1]), terms[1:]
    steps = []
    while rest:
        (sign, number), *rest = rest
        total += int(number) if sign == "+" else -int(number)
        if rest:
            steps.append(f"{total}{''.join(s + n for s, n in rest)}")
    return finish(steps, total)
