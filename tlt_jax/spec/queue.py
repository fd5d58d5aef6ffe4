"""Responses that wait to be sampled."""

import dataclasses
from collections.abc import Callable, Sequence

from tlt_jax.spec.request import Group, Sampling

Entry = tuple[Group, int]  # one response: a group and a member of it


class Queue:
    """Responses that wait for a row, in order. Several sessions may take from one queue."""

    def __init__(self, check: Callable[[Group], None], sampling: Sampling):
        self.check, self.sampling = check, sampling
        self.groups: list[Group] = []  # all there ever were
        self.entries: list[Entry] = []  # likewise
        self.next = 0  # of `entries`: those before have been taken
        self.draws: set[tuple[int, int]] = set()
        self.longest_prompt = 1  # tokens of the longest prompt there ever was
        self._last: dict[Group, int] = {}  # place of each group's last entry

    def __len__(self) -> int:
        return len(self.entries) - self.next

    def add(self, groups: Sequence[Group]):
        """Put groups at the end. Raises ValueError, adding none, for one that cannot be sampled or
        has the draw of another."""
        self.put(self.known(groups))

    def known(self, groups: Sequence[Group]) -> list[Entry]:
        """Take note of groups and return their responses, for `put`. Raises as `add` does."""
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
        return [(g, member) for g in groups for member in range(g.members)]

    def put(self, entries: Sequence[Entry]) -> int:
        """Put responses of known groups at the end. Returns how many this process is to start."""
        for entry in entries:
            self._last[entry[0]] = len(self.entries)
            self.entries.append(entry)
        return len(entries)

    def take(self, count: int) -> list[Entry]:
        """The next `count` responses, or as many as there are."""
        taken = self.entries[self.next : self.next + count]
        self.next += len(taken)
        return taken

    def waits(self, group: Group) -> bool:
        """Whether a response of this group has not been taken."""
        return self._last.get(group, -1) >= self.next
