"""Groups of responses that wait to be sampled."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from tlt_jax.spec.request import Group, Sampling


class Queue:
    """Responses that wait for a row, in order."""

    def __init__(self, check: Callable[[Group], None], sampling: Sampling):
        self.check, self.sampling = check, sampling
        self.waiting: collections.deque[tuple[Group, int]] = collections.deque()
        self.groups: list[Group] = []  # all there ever were
        self.draws: set[tuple[int, int]] = set()
        self.longest_prompt = 1  # tokens of the longest prompt there ever was

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, groups: Sequence[Group]):
        """Put groups at the end. Raises ValueError, adding none, for one that cannot be sampled or
        has the draw of another."""
        groups = [
            g if g.sampling is not None else dataclasses.replace(g, sampling=self.sampling)
            for g in groups
        ]
        draws = set(self.draws)
        for group in groups:
            self.check(group)
            if (draw := (group.domain, group.draw)) in draws:
                raise ValueError(
                    f"two groups share domain {group.domain} and draw {group.draw}, so their "
                    "samples would be the same; give each draw of a prompt a number of its own"
                )
            draws.add(draw)
        self.draws = draws
        self.groups += groups
        self.longest_prompt = max([self.longest_prompt, *(len(g.prompt) for g in groups)])
        self.waiting.extend((g, member) for g in groups for member in range(g.members))

    def take(self, count: int) -> list[tuple[Group, int]]:
        """The next `count` responses, or as many as there are."""
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
