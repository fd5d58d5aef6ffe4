"""A word spelt backward."""

from collections.abc import Mapping
from typing import Any

from experiments.traces.steps import finish


def trace(item: Mapping[str, Any]) -> str:
    """sun -> s u n, n u s: the letters, and the letters from the last to the first."""
    word = item["metadata"]["word"]
    return finish([" ".join(word), " ".join(reversed(word))], word[::-1])
