"""The resumable stream of draws over examples."""

import json

import pytest

from tlt_jax.rl.data import Example
from tlt_jax.rl.prompt_stream import PromptStream
from tlt_jax.spec.noise import EVALUATE, TRAIN


def examples(n, offset=0):
    return [Example((i + offset, 1), f"text {i % 3}", "task", {"i": i}, "here") for i in range(n)]


def stream(n=7, seed=0, domain=TRAIN, **kwargs):
    return PromptStream(examples(n), seed=seed, domain=domain, **kwargs)


def test_each_epoch_visits_every_example_once_in_an_order_of_its_own():
    taken = stream().take(21)
    epochs = [tuple(p.ids[0] for p in taken[i : i + 7]) for i in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len(set(epochs)) == 3
    assert [p.draw for p in taken] == list(range(21))
    assert all(p.domain == TRAIN and p.entry == {"i": p.ids[0]} for p in taken)
    assert stream(seed=1).take(7) != taken[:7]


def test_how_prompts_are_asked_for_does_not_matter():
    whole = stream().take(30)
    parts = stream()
    assert [p for n in (1, 0, 9, 7, 13) for p in parts.take(n)] == whole


@pytest.mark.parametrize("cut", range(0, 16))
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(cut):
    whole = stream().take(30)
    first = stream()
    first.take(cut)
    state = json.loads(json.dumps(first.state()))
    resumed = stream()
    resumed.take(3)
    resumed.restore(state)
    assert resumed.take(30 - cut) == whole[cut:]


def test_without_shuffling_the_order_is_the_given_one_and_draws_still_count():
    evaluation = stream(domain=EVALUATE, shuffle=False)
    first, second = evaluation.take(7), evaluation.take(7)
    assert [p.ids[0] for p in first] == [p.ids[0] for p in second] == list(range(7))
    assert [p.draw for p in first + second] == list(range(14))
    assert {p.domain for p in first} == {EVALUATE}


@pytest.mark.parametrize(
    "other",
    [
        lambda: stream(n=8),
        lambda: stream(seed=1),
        lambda: stream(domain=EVALUATE),
        lambda: PromptStream(examples(7, offset=1), seed=0, domain=TRAIN),
    ],
)
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(ValueError, match="belongs to other prompts"):
        other().restore(stream().state())


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="at least one example"):
        PromptStream([], seed=0, domain=TRAIN)


def staged(**kwargs):
    begins = [0] * 3 + [4] * 7 + [9] * 2
    listed = [Example((i, 1), "", "", {}, "", since) for i, since in enumerate(begins)]
    return PromptStream(listed, seed=0, domain=TRAIN, **kwargs)


def test_a_stage_begins_at_its_draw_and_goes_round_its_own_examples():
    taken = staged().take(20)
    assert [p.draw for p in taken] == list(range(20))
    assert [p.since for p in taken] == [0] * 4 + [4] * 5 + [9] * 11
    ids = [p.ids[0] for p in taken]
    assert sorted(ids[:3]) == [0, 1, 2] and ids[3] in (0, 1, 2)
    assert len(set(ids[4:9])) == 5 and set(ids[4:9]) <= set(range(3, 10))
    assert all(sorted(ids[i : i + 2]) == [10, 11] for i in range(9, 19, 2))
    assert [p.ids[0] for p in staged(shuffle=False).take(10)] == [0, 1, 2, 0, 3, 4, 5, 6, 7, 10]
    for cut in range(12):
        resumed, first = staged(), staged()
        first.take(cut)
        resumed.restore(first.state())
        assert resumed.take(20 - cut) == taken[cut:]


def test_a_stage_without_a_first_example_is_refused():
    late = Example((1,), "", "", {}, "", since=4)
    with pytest.raises(ValueError, match="for its first draw"):
        PromptStream([late], seed=0, domain=TRAIN)
