"""How long the responses to each prompt were when it was last visited: longest first.

A rollout is as long as its last response. Started first, the long ones overlap with all the others.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tlt_jax.rl.data import Prompt


class LengthHistory:
    """Mean response length by prompt, of its newest visit."""

    def __init__(self, lengths: Mapping[str, float] | None = None):
        self._lengths = dict(lengths or {})

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts, the longest expected first; ties keep their order.

        One that was never visited counts as the mean of those in the history.
        """
        known = list(self._lengths.values())
        usual = float(np.mean(known)) if known else 0.0
        return sorted(prompts, key=lambda p: -self._lengths.get(_key(p), usual))

    def update(self, visits: Iterable[tuple[Prompt, int]]):
        """Take note of the lengths, in tokens, of finished responses to some prompts."""
        lengths: dict[str, list[int]] = {}
        for prompt, length in visits:
            lengths.setdefault(_key(prompt), []).append(length)
        self._lengths |= {key: float(np.mean(each)) for key, each in lengths.items()}

    def state(self) -> dict[str, float]:
        """A JSON value to make an equal history from."""
        return dict(self._lengths)


def _key(prompt: Prompt) -> str:
    return hashlib.sha256(np.array(prompt.ids, np.int64).tobytes()).hexdigest()[:16]
