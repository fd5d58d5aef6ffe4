"""Laws of the coordinator over random orders of events: nothing lost, nobody fed twice."""

import heapq
import random

import pytest

from tlt_jax.rl.coordinator import Coordinator, Dispatch, State


def simulate(lengths, workers, rows, *, fixed, seconds, later=(), thieves=None):
    """Decode responses of `lengths` segments in simulated time; checks every step's laws.

    seconds: of a segment, a function of (worker, live rows). later: lengths queued once all is
    done. thieves: a chance that another process takes the next response. Returns (who decoded
    each response, the rows of every segment, the coordinator, the time at the end).
    """
    coordinator = Coordinator(workers, rows, fixed=fixed)
    waiting, taken_by, segments = list(enumerate(lengths)), {}, []
    rounds = [list(later)] if later else []
    left = [{} for _ in range(workers)]  # response: segments to go
    flying, now, began = [], 0.0, [None] * workers
    coordinator.queued(now, len(waiting))
    while True:
        while (dispatch := coordinator.next()) is not None:
            w = dispatch.worker
            assert began[w] is None, "a worker was fed while its segment was in flight"
            assert dispatch.admit <= min(len(waiting), rows - len(left[w]))
            while waiting and thieves is not None and thieves() < 0.3:
                taken_by[waiting.pop(0)[0]] = "another process"
            for _ in range(min(dispatch.admit, len(waiting))):
                response, length = waiting.pop(0)
                left[w][response] = length
                taken_by[response] = w
            coordinator.started(now, w, len(left[w]), len(waiting))
            if left[w]:
                began[w] = now
                segments.append((w, len(left[w])))
                heapq.heappush(flying, (now + seconds(w, len(left[w])), w))
            assert sorted(coordinator.flying) == [i for i, b in enumerate(began) if b is not None]
        if not flying:
            assert coordinator.done and not waiting and not any(left)
            if not rounds:
                return taken_by, segments, coordinator, now
            waiting = list(enumerate(rounds.pop(0), len(taken_by)))
            coordinator.queued(now, len(waiting))
            continue
        now, w = heapq.heappop(flying)
        left[w] = {r: n - 1 for r, n in left[w].items() if n > 1}
        began[w] = None
        coordinator.ended(now, w, len(left[w]))


def random_case(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 3, 5, 20]) for _ in range(rng.randint(1, 60))]
    return rng, lengths, rng.randint(1, 5), rng.randint(1, 8)


def random_seconds(rng):
    return lambda worker, live: rng.expovariate(1.0)


@pytest.mark.parametrize("fixed", (True, False))
def test_every_response_is_decoded_once_whatever_the_order_of_events(fixed):
    for seed in range(200):
        rng, lengths, workers, rows = random_case(seed)
        later = [rng.randint(1, 4) for _ in range(rng.choice([0, 7]))]
        taken_by, *_ = simulate(
            lengths,
            workers,
            rows,
            fixed=fixed,
            seconds=random_seconds(rng),
            later=later,
            thieves=None if fixed or seed % 2 else rng.random,
        )
        assert sorted(taken_by) == list(range(len(lengths) + len(later)))


def outcomes(fixed):
    """Per case, whether two clocks give the same hand-out and the same batches per worker."""
    for seed in range(60):
        _, lengths, workers, rows = random_case(seed)
        runs = []
        for clock in range(2):
            rng = random.Random(1000 * seed + clock)
            taken_by, segments, *_ = simulate(
                lengths,
                workers,
                rows,
                fixed=fixed,
                seconds=random_seconds(rng),
                later=(3, 1, 2),
            )
            batches = [[n for w, n in segments if w == i] for i in range(workers)]
            runs.append((taken_by, batches))
        yield runs[0] == runs[1]


def test_with_a_logical_clock_the_hand_out_does_not_depend_on_time():
    assert all(outcomes(fixed=True))
    assert not all(outcomes(fixed=False))  # first come, first served does: the test can fail


def test_few_responses_are_spread_evenly():
    for fixed in (True, False):
        _, segments, *_ = simulate([1] * 10, 4, 32, fixed=fixed, seconds=lambda w, live: 1.0)
        assert segments == [(0, 3), (1, 3), (2, 2), (3, 2)]
        _, segments, *_ = simulate([1] * 2, 4, 32, fixed=fixed, seconds=lambda w, live: 1.0)
        assert segments == [(0, 1), (1, 1)]


def test_a_fast_worker_takes_more_where_the_clock_decides():
    def seconds(w, live):
        return 1.0 if w else 4.0

    taken_by, *_ = simulate([2] * 40, 2, 2, fixed=False, seconds=seconds)
    assert sum(w == 1 for w in taken_by.values()) > 25
    taken_by, *_ = simulate([2] * 40, 2, 2, fixed=True, seconds=seconds)
    assert sum(w == 1 for w in taken_by.values()) == 20


def test_busy_and_idle_time():
    """Worker 1 has its only response for one second; worker 0 works for four."""
    _, _, coordinator, end = simulate([4, 1], 2, 8, fixed=True, seconds=lambda w, live: 1.0)
    assert end == 4.0
    assert coordinator.idle_spans() == [[], []]
    assert coordinator.idle_since() == [4.0, 1.0]
    coordinator.queued(6.0, 1)
    assert coordinator.workers[0].state is State.BUSY
    assert coordinator.idle_since() == [None, 1.0]
    assert coordinator.idle_spans() == [[(4.0, 6.0)], []]


def test_a_worker_held_back_for_the_logical_clock_is_idle():
    """Worker 1's segments take one second and worker 0's four: it works a quarter of the time."""
    seconds = lambda w, live: 1.0 if w else 4.0  # noqa: E731
    *_, coordinator, end = simulate([2] * 40, 2, 2, fixed=True, seconds=seconds)
    spans = coordinator.idle_spans()
    assert not spans[0]
    idle = sum(t1 - t0 for t0, t1 in spans[1]) + end - coordinator.idle_since()[1]
    assert idle == pytest.approx(0.75 * end)


def test_a_worker_that_finds_the_queue_empty_rests():
    coordinator = Coordinator(1, 4, fixed=False)
    coordinator.queued(0.0, 3)
    assert coordinator.next() == Dispatch(0, 3)
    coordinator.started(1.0, 0, live=0, waiting=0)  # another process took them
    assert coordinator.next() is None and coordinator.done


def test_impossible_events_are_refused():
    with pytest.raises(ValueError, match="workers=0"):
        Coordinator(0, 1, fixed=True)
    coordinator = Coordinator(1, 1, fixed=True)
    coordinator.queued(0.0, 1)
    with pytest.raises(ValueError, match="none was in flight"):
        coordinator.ended(0.0, 0, 0)
    coordinator.started(0.0, 0, 1, 0)
    with pytest.raises(ValueError, match="while its segment is in flight"):
        coordinator.started(0.0, 0, 1, 0)
