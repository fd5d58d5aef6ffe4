"""The training stream: an endless, resumable sequence of draws over examples."""

import bisect
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tlt_jax.rl.data import Example, Prompt


class PromptStream:
    """An endless, resumable stream over examples; each prompt it gives has a draw of its own.

    Draw d is an example of the stage that d lies in (`Example.since`). Epoch e of a stage visits
    each of its examples once, in an order that only (seed, e, stage) determines, or in the given
    order without `shuffle`. So a draw's prompt is a function of the examples, seed and d alone.
    """

    def __init__(
        self, examples: Sequence[Example], *, seed: int, domain: int, shuffle: bool = True
    ):
        self._starts = sorted({example.since for example in examples})
        if self._starts[:1] != [0]:
            raise ValueError("a prompt stream needs at least one example for its first draw")
        self._stages = [[e for e in examples if e.since == start] for start in self._starts]
        self._seed, self._domain, self._shuffle = seed, domain, shuffle
        self._draw = 0
        self._order: tuple[tuple[int, int], np.ndarray] | None = None  # (stage, epoch), its order
        self._fingerprint = f"{seed} {domain} {shuffle} {fingerprint(examples)}"

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, across ends of epochs and stages."""
        prompts = [self._prompt(self._draw + i) for i in range(n)]
        self._draw += n
        return prompts

    def state(self) -> dict[str, int | str]:
        """Return what `restore` needs, as a flat JSON value."""
        return {"draw": self._draw, "examples": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if that was on other examples."""
        if state["examples"] != self._fingerprint:
            raise ValueError(
                "the saved data position belongs to other prompts, another seed or another domain; "
                "resume with the data settings of the saved run, or start a new workdir"
            )
        self._draw = int(state["draw"])

    def _prompt(self, draw: int) -> Prompt:
        stage = bisect.bisect_right(self._starts, draw) - 1
        examples = self._stages[stage]
        epoch, position = divmod(draw - self._starts[stage], len(examples))
        example = examples[self._epoch_order(stage, epoch)[position]]
        return Prompt(**vars(example), draw=draw, domain=self._domain)

    def _epoch_order(self, stage: int, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != (stage, epoch):
            count = len(self._stages[stage])
            rng = np.random.default_rng([self._seed, epoch, stage])
            order = rng.permutation(count) if self._shuffle else np.arange(count)
            self._order = (stage, epoch), order
        return self._order[1]


def fingerprint(examples: Iterable[Example]) -> str:
    """A hash of all that a run sees of examples: ids, what the reward reads, stage, order."""
    digest = hashlib.sha256()
    for e in examples:
        digest.update(np.array([e.since, len(e.ids), *e.ids], np.int64).tobytes())
        digest.update(json.dumps([e.source, e.entry], sort_keys=True, default=_plain).encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """What JSON has no word for: a set in an order of its own, anything else as text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
