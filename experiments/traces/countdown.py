"""The countdown game by depth-first search."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.traces.steps import finish

Value = tuple[int, str]  # a number and the expression that makes it


def trace(item: Mapping[str, Any]) -> str:
    """10 from 2, 3, 9 -> 3+2=5 9; 14 4 45; 3-2=1 9; 10: join two numbers, then what is left.

    The line of a try has the operation and the numbers that are left. Where those are two, the
    next line has their sum, difference, product and quotient, if it is whole, up to the target.
    Raises ValueError where there is no solution.
    """
    metadata = item["metadata"]
    steps: list[str] = []
    numbers = [(number, str(number)) for number in metadata["numbers"]]
    expression = _search(numbers, metadata["target"], steps)
    if expression is None:
        raise ValueError(f"no way to {metadata['target']} from {metadata['numbers']}")
    return finish(steps, expression)


def _search(numbers: list[Value], target: int, steps: list[str]) -> str | None:
    if len(numbers) == 2:
        made = {value: expression for value, expression, _ in _combinations(*numbers)}
        seen = list(itertools.takewhile(lambda value: value != target, made))
        steps.append(" ".join(map(str, [*seen, target] if target in made else seen)))
        return made.get(target)
    for i, j in itertools.combinations(range(len(numbers)), 2):
        others = [numbers[k] for k in range(len(numbers)) if k not in (i, j)]
        for value, expression, step in _combinations(numbers[i], numbers[j]):
            left = [(value, f"({expression})"), *others]
            steps.append(f"{step}={' '.join(str(number) for number, _ in left)}")
            if found := _search(left, target, steps):
                return found
    return None


def _combinations(a: Value, b: Value) -> Iterator[tuple[int, str, str]]:
    """Sum, difference, product and quotient: value, expression and step of each."""
    (x, left), (y, right) = max(a, b), min(a, b)
    results = [("+", x + y), ("-", x - y), ("*", x * y)]
    if y and x % y == 0:
        results.append(("/", x // y))
    for operator, value in results:
        yield value, f"{left}{operator}{right}", f"{x}{operator}{y}"
