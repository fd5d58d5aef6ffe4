"""Prime factors by trial division."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import division, finish


def trace(item: Mapping[str, Any]) -> str:
    """42 -> 42=21*2+0, 21=10*2+1, 21=7*3+0, 7<9: divisors upwards until their square is larger."""
    number, divisor = item["metadata"]["number"], 2
    steps, factors = [], []
    while divisor * divisor <= number:
        steps.append(division(number, divisor))
        if number % divisor:
            divisor = _next_prime(divisor)
        else:
            factors.append(divisor)
            number //= divisor
    steps.append(f"{number}<{divisor * divisor}")
    return finish(steps, " × ".join(map(str, [*factors, number])))


def _next_prime(number: int) -> int:
    number += 1
    while any(number % i == 0 for i in range(2, int(number**0.5) + 1)):
        number += 1
    return number
