"""Who starts which response: every one exactly once, whatever the processes do."""

import functools
import random
from collections import Counter

import pytest

from tlt_jax.rl.shares import FixedQueue, SharedQueue, share_of
from tlt_jax.sharding.distributed import Tickets
from tlt_jax.spec.noise import TRAIN
from tlt_jax.spec.queue import Queue
from tlt_jax.spec.request import Group, Sampling


def groups(count, members=3, first=0):
    return [Group((1,), first + i, members, TRAIN) for i in range(count)]


def entries(count, members=3):
    return Queue(lambda group: None, Sampling(4)).known(groups(count, members))


def test_shares_are_even_disjoint_complete_and_mostly_whole_groups():
    for count in (1, 2, 3, 5):
        for number in range(12):
            all_of_them = entries(number)
            shares = [share_of(all_of_them, i, count) for i in range(count)]
            assert Counter(sum(shares, [])) == Counter(all_of_them)
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            split = sum(
                len({i for i in range(count) if g in dict(shares[i])}) > 1
                for g, m in all_of_them
                if m == 0
            )
            assert split < count
    a, b, c = groups(3, members=2)
    known = Queue(lambda group: None, Sampling(4)).known([a, b, c])
    a, b, c = (known[i][0] for i in (0, 2, 4))
    assert share_of(known, 0, 2) == [(a, 0), (a, 1), (c, 0)]
    assert share_of(known, 1, 2) == [(b, 0), (b, 1), (c, 1)]


def test_a_fixed_queue_holds_its_share_and_knows_all_groups():
    queue = FixedQueue(lambda group: None, Sampling(4), 1, 2)
    assert queue.put(queue.known(groups(4))) == 6 == len(queue)
    assert [g.draw for g, _ in queue.take(99)] == [1, 1, 1, 3, 3, 3]
    assert [g.draw for g in queue.groups] == [0, 1, 2, 3]  # programs are compiled for all


def test_every_response_of_a_shared_queue_goes_to_one_process():
    for seed in range(50):
        rng, taken = random.Random(seed), []
        common = functools.cache(Tickets)  # one counter of a name, as the processes have
        queues = [
            SharedQueue(lambda group: None, Sampling(4), i, 3, "rollout 1", common)
            for i in range(3)
        ]
        for batch in (groups(7), groups(2, first=7)):
            shares = [q.put(q.known(batch)) for q in queues]
            assert sum(shares) == 3 * len(batch)
            order = [rng.randrange(3) for _ in range(60)] + [0, 1, 2]
            for i in order:
                asked = rng.randint(0, 4)
                got = queues[i].take(asked)
                assert len(got) <= asked
                taken += got
            for q in queues:
                taken += q.take(99)
                assert not len(q) and q.take(1) == []
        assert Counter((g.draw, m) for g, m in taken) == Counter(
            (d, m) for d in range(9) for m in range(3)
        )


def test_a_shared_queue_is_filled_again_only_when_it_is_empty():
    queue = SharedQueue(lambda group: None, Sampling(4), 0, 2, "r", Tickets)
    queue.put(queue.known(groups(1)))
    with pytest.raises(RuntimeError, match="3 responses of r still wait"):
        queue.put(queue.known(groups(1, first=1)))
