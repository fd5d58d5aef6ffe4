"""Which process starts which response of a rollout.

Every process knows all of them, in the same order. With a fixed schedule each starts a share that
nothing changes; otherwise the next one of the queue is whoever's that asks first, so that a process
that runs dry takes what another has not started.
"""

from collections.abc import Callable, Sequence

from tlt_jax.sharding.distributed import Tickets
from tlt_jax.spec.queue import Entry, Queue
from tlt_jax.spec.request import Group, Sampling


def share_of(entries: Sequence[Entry], index: int, count: int) -> list[Entry]:
    """The responses that process `index` of `count` starts.

    Groups are dealt in turn, because a prompt is prefilled wherever a member of its group starts;
    those that are left over are dealt by member. Worked: groups a b c of two for two processes give
    a a c0 and b b c1.
    """
    groups: dict[Group, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry[0], []).append(entry)
    dealt = list(groups.values())
    whole = len(dealt) // count * count
    left = [entry for group in dealt[whole:] for entry in group]
    mine = [entry for group in dealt[index:whole:count] for entry in group]
    return mine + left[index::count]


class FixedQueue(Queue):
    """This process's share of the responses, and no other."""

    def __init__(self, check: Callable, sampling: Sampling, index: int, count: int):
        super().__init__(check, sampling)
        self.index, self.count = index, count

    def put(self, entries: Sequence[Entry]) -> int:
        mine = share_of(entries, self.index, self.count)
        super().put(mine)
        return len(mine)


class SharedQueue(Queue):
    """One queue of all processes; each response goes to the first that asks.

    tickets: makes the counter that all processes share, from its name and how much it gives out.
    """

    def __init__(
        self,
        check: Callable,
        sampling: Sampling,
        index: int,
        count: int,
        name: str,
        tickets: Callable[[str, int], Tickets] = Tickets,
    ):
        super().__init__(check, sampling)
        self.index, self.count, self.name, self._new_tickets = index, count, name, tickets
        self._tickets: Tickets | None = None
        self._first = 0  # place of what ticket 0 stands for

    def put(self, entries: Sequence[Entry]) -> int:
        if len(self):
            raise RuntimeError(f"{len(self)} responses of {self.name} still wait; take them first")
        self._first = len(self.entries)
        self._tickets = self._new_tickets(f"{self.name} from {self._first}", len(entries))
        super().put(entries)
        return len(share_of(entries, self.index, self.count))

    def take(self, count: int) -> list[Entry]:
        if not count or not len(self):
            return []
        claimed = self._tickets.claim(count)
        # Those between were taken by others: this process comes to know of it only now.
        self.next = self._first + claimed.stop
        return self.entries[self._first + claimed.start : self._first + claimed.stop]
