"""Worked solutions of reasoning-gym questions, written by code: what the cold start teaches.

A trace is the text of a right response: steps, one a line, each of which needs only what stands
in the question or in the lines before it, and at the end the answer in its tags. `TRACES` maps
the name of a task to the function that makes the trace of one of its items.
"""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.traces import (
    base_conversion,
    chain_sum,
    count_bits,
    gcd,
    letter_counting,
    prime_factorization,
    spell_backward,
    word_sorting,
)

TRACES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "base_conversion": base_conversion.trace,
    "chain_sum": chain_sum.trace,
    "count_bits": count_bits.trace,
    "gcd": gcd.trace,
    "letter_counting": letter_counting.trace,
    "prime_factorization": prime_factorization.trace,
    "spell_backward": spell_backward.trace,
    "word_sorting": word_sorting.trace,
}
