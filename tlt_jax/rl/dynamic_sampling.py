"""Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): more prompts until enough groups tell.

A group whose responses all have one reward gives no gradient. Prompts are drawn in whole batches
until enough groups are informative, and the first of those *by draw order* are trained on, never
the first to finish: short and easy groups finish first.
"""

from collections.abc import Callable, Mapping, Sequence

from tlt_jax.rl.data import Prompt
from tlt_jax.rl.rewards import Score


def informative(scores: Sequence[Score]) -> bool:
    """Whether two valid rewards of a group differ."""
    return len({s.value for s in scores if s.status == "ok"}) > 1


class DynamicSampling:
    """Decides, for one rollout, when to draw another batch and which groups to train on.

    take: gives the next n prompts. wanted: groups to train on, and prompts per batch. samples:
    responses per prompt. max_batches: the most to draw.

    Another batch is drawn once those before cannot suffice whatever their missing scores are. That
    moment depends on the clock, the number of batches on the scores alone.
    """

    def __init__(
        self, take: Callable[[int], list[Prompt]], wanted: int, samples: int, max_batches: int
    ):
        self.take, self.wanted, self.samples, self.max_batches = take, wanted, samples, max_batches
        self.drawn = take(wanted)
        self.batches = 1

    def more(self, scores: Mapping[tuple[int, int], Score]) -> list[Prompt]:
        """The prompts to add, given the scores so far by (draw, member)."""
        groups = _by_group(scores)
        possible = 0
        for prompt in self.drawn:
            known = groups.get(prompt.draw, [])
            possible += informative(known) or len(known) < self.samples
        if possible >= self.wanted or self.batches == self.max_batches:
            return []
        self.batches += 1
        prompts = self.take(self.wanted)
        self.drawn = [*self.drawn, *prompts]
        return prompts

    def chosen(self, scores: Mapping[tuple[int, int], Score]) -> set[int]:
        """Draws of the groups to train on: the first informative ones, filled up with the first
        others where too few are, those of which nothing could be graded last."""
        groups = _by_group(scores)

        def rank(draw: int) -> tuple[bool, bool, int]:
            group = groups.get(draw, [])
            return not informative(group), all(s.status != "ok" for s in group), draw

        return set(sorted((p.draw for p in self.drawn), key=rank)[: self.wanted])


def _by_group(scores: Mapping[tuple[int, int], Score]) -> dict[int, list[Score]]:
    groups: dict[int, list[Score]] = {}
    for (draw, _), score in scores.items():
        groups.setdefault(draw, []).append(score)
    return groups
