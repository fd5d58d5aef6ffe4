"""From one base to another by way of the decimal number."""

import string
from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import division, finish

DIGITS = string.digits + string.ascii_lowercase


def trace(item: Mapping[str, Any]) -> str:
    """1101 in base 2 to base 5 -> 1,101; 1*2+1=3,01; 3*2+0=6,1; 6*2+1=13; 13=2*5+3:3; 2=0*5+2:23.

    Reading: the number so far and the digits to come. Writing: divisions, with the digits so far.
    A conversion from or to base 10 has only the other half. Raises ValueError for the number 0,
    which reasoning-gym writes as an empty text in most bases: such an item has no right answer.
    """
    metadata = item["metadata"]
    if metadata["decimal_value"] == 0:
        raise ValueError("base_conversion of 0 has no right answer; set its min_value to 1")
    read, number = _read(metadata["source_repr"], metadata["source_base"])
    written = _write(number, metadata["target_base"])
    return finish([*read, *written], metadata["target_repr"])


def _read(digits: str, base: int) -> tuple[list[str], int]:
    if base == 10:
        return [], int(digits)
    number, rest = DIGITS.index(digits[0]), digits[1:]
    steps = [_with(number, ",", rest)]
    while rest:
        digit, rest = DIGITS.index(rest[0]), rest[1:]
        sum_of = f"{number}*{base}+{digit}"
        number = number * base + digit
        steps.append(_with(f"{sum_of}={number}", ",", rest))
    return steps, number


def _with(step: object, mark: str, rest: str) -> str:
    return f"{step}{mark}{rest}" if rest else str(step)


def _write(number: int, base: int) -> list[str]:
    if base == 10:
        return []
    steps, digits = [], ""
    while number:
        digits = DIGITS[number % base] + digits
        steps.append(f"{division(number, base)}:{digits}")
        number //= base
    return steps
