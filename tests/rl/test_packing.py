"""Alignment by hand, first-fit-decreasing by hand, and masks from lengths alone."""

import numpy as np
import pytest

from tlt_jax.rl.packing import (
    BatchShape,
    Sample,
    first_fit_decreasing,
    mini_batches,
    pack,
    scored_places,
    unpack,
)


def sample(prompt, response, advantage=1.0, group=None):
    logp = -np.arange(1, len(response) + 1, dtype=np.float32)
    return Sample(np.array(prompt), np.array(response), advantage, logp, group=group)


def test_alignment_by_hand():
    assert scored_places(2, 3, 2).tolist() == [2, 3]
    assert scored_places(2, 7, 2).tolist() == [2, 7]
    assert scored_places(0, 1, 3).tolist() == [0, 1, 2]
    assert scored_places(3, 4, 0).tolist() == []
    (batch,) = pack(
        [sample([5, 6, 7], [8, 9], 0.5), sample([1], [2, 3], -1.0)], BatchShape(2, 8), packed=True
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0] * 8]
    # A prompt and its response are two segments; the response also sees the prompt's.
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 3, 4, 4], [0] * 8]
    assert batch.prefixes.tolist() == [[0, 0, 0, 1, 1, 0, 3, 3], [0] * 8]
    assert batch.count == 4
    assert batch.at.tolist() == [2, 3, 5, 6] + [0] * 12
    assert batch.targets.tolist() == [8, 9, 2, 3] + [0] * 12
    assert batch.sample.tolist() == [0, 0, 1, 1] + [-1] * 12
    assert batch.advantages.tolist() == [0.5, 0.5, -1, -1] + [0] * 12
    assert batch.rollout_logp.tolist() == [-1, -2, -1, -2] + [0] * 12


def test_per_token_values_by_hand():
    samples = [
        Sample(np.array([1]), np.array(response), 1.0, *[np.full(len(response), x) for x in logp])
        for response, logp in [([8, 9], (-1, -2, -3)), ([], (0, 0, 0)), ([2], (-4, -5, -6))]
    ]
    weights = np.array([0.25, 9.0, 0.125])
    (batch,) = pack(samples, BatchShape(2, 4), packed=True, weights=weights)
    assert batch.count == 3
    assert batch.sample.tolist() == [0, 0, 2] + [-1] * 5
    assert batch.sequence.tolist() == [0, 0, 1] + [0] * 5
    assert batch.weights.tolist() == [0.25, 0.25, 0.125] + [0] * 5
    assert batch.rollout_logp.tolist() == [-1, -1, -4] + [0] * 5
    assert batch.old_logp.tolist() == [-2, -2, -5] + [0] * 5
    assert batch.reference_logp.tolist() == [-3, -3, -6] + [0] * 5
    # Every micro-batch counts its sequences from 0, and without weights there is no loss.
    first, second = pack(samples, BatchShape(1, 3), packed=False)[::2]
    assert first.sequence[0] == second.sequence[0] == 0
    assert not first.weights.any()


def test_mini_batches_are_even_and_hold_whole_groups_in_order():
    def groups_of(count, *groups):
        samples = [sample([1], [2], group=g) for g in groups]
        return [[s.group for s in part] for part in mini_batches(samples, count)]

    assert groups_of(2, 7, 7, 3, 3, 9, 9) == [[7, 7], [3, 3, 9, 9]]
    assert groups_of(2, 7, 3, 7, 3) == [[7, 7], [3, 3]]
    assert groups_of(3, 1, 2, 3, 4) == [[1], [2], [3, 4]]
    assert groups_of(4, 5, 5, 6) == [[5, 5], [6]]
    assert groups_of(2, None, None) == [[None], [None]]


def test_a_group_shares_its_prompt_by_hand():
    members = [sample([5, 6], [7, 8], group=3), sample([5, 6], [9, 4], group=3)]
    (batch,) = pack(members, BatchShape(1, 8), packed=True)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 4, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 0, 0]]
    assert batch.segments.tolist() == [[1, 1, 2, 2, 3, 3, 0, 0]]
    assert batch.prefixes.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.at[:4].tolist() == [1, 2, 1, 4]  # both first tokens at the prompt's last
    assert batch.targets[:4].tolist() == [7, 8, 9, 4]
    # Too long to share one row: the prompt is repeated in a second.
    (batch,) = pack(members, BatchShape(2, 5), packed=True)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0], [5, 6, 9, 4, 0]]


def grouped(rng):
    """20 prompts of 1 to 3 responses each, lengths from 0 up."""
    samples = []
    for group in range(20):
        prompt = rng.integers(1, 9, rng.integers(1, 6))
        for _ in range(rng.integers(1, 4)):
            samples.append(sample(prompt, rng.integers(1, 9, rng.integers(0, 8)), group=group))
    return samples


@pytest.mark.parametrize("packed", [False, True])
def test_every_scored_token_is_seen_once_and_follows_its_logits(packed):
    samples = grouped(np.random.default_rng(0))
    batches = pack(samples, BatchShape(3, 16), packed=packed)
    for batch in batches:
        assert batch.tokens.shape == (3, 16) and batch.at.shape == (48,)
        n = int(batch.count)
        row, t = np.divmod(batch.at[:n], 16)
        np.testing.assert_array_equal(batch.sample[n:], -1)
        for i in np.unique(batch.sample[:n]):
            mine = batch.sample[:n] == i
            P, R = len(samples[i].prompt), len(samples[i].response)
            np.testing.assert_array_equal(batch.targets[:n][mine], samples[i].response)
            # The logits of token j of the response stand at the token before it.
            np.testing.assert_array_equal(batch.positions[row, t][mine], P - 1 + np.arange(R))
            before = np.concatenate([samples[i].prompt[-1:], samples[i].response[:-1]])
            np.testing.assert_array_equal(batch.tokens[row, t][mine], before)
            # Prompt and response lie in one row, in a segment and its prefix.
            assert len(set(row[mine])) == 1
            inside = batch.segments[row, t][mine][1:]
            assert len(set(inside)) <= 1
            if R > 1:
                prefix = batch.prefixes[row, t][mine][1]
                assert prefix == batch.segments[row, t][mine][0]
    back = unpack(batches, [b.targets for b in batches], len(samples))
    for values, s in zip(back, samples):
        np.testing.assert_array_equal(values, s.response)


def test_first_fit_decreasing_by_hand():
    assert first_fit_decreasing([3, 7, 4, 6, 3], room=10) == [[1, 0], [3, 2], [4]]
    assert first_fit_decreasing([5, 5, 5], room=10) == [[0, 1], [2]]
    assert first_fit_decreasing([], room=10) == []


def test_packing_needs_fewer_rows():
    samples = [sample([1], [2, 3])] * 12
    assert len(pack(samples, BatchShape(1, 9), packed=True)) == 4
    assert len(pack(samples, BatchShape(1, 9), packed=False)) == 12


def test_a_pad_id_that_is_an_eos_changes_nothing():
    # 0 is what padding holds; here it is also the EOS and occurs in the prompt.
    (zero,) = pack([sample([0, 4, 0], [5, 0])], BatchShape(1, 8), packed=False)
    (other,) = pack([sample([3, 4, 3], [5, 3])], BatchShape(1, 8), packed=False)
    assert zero.count == 2 and zero.targets[:2].tolist() == [5, 0]
    for name in ("positions", "segments", "at", "sample", "advantages"):
        np.testing.assert_array_equal(getattr(zero, name), getattr(other, name))


def test_shape_fits_the_budget_and_spreads_rows():
    assert BatchShape.within(2048, 192, 32) == BatchShape(8, 192)
    assert BatchShape.within(192, 192, 32) == BatchShape(1, 192)
    assert BatchShape.within(100_000, 192, 32) == BatchShape(32, 192)
    with pytest.raises(ValueError, match="micro_batch_tokens=100 .* 192"):
        BatchShape.within(100, 192, 32)


def test_bad_samples_are_named():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens .*prompt 3, response 6"):
        pack([sample([1], [2]), sample([1] * 3, [2] * 6)], BatchShape(1, 8), packed=False)
    with pytest.raises(ValueError, match="empty prompt"):
        sample([], [1])
    with pytest.raises(ValueError, match="rollout_logp has 1 values .* 2 tokens"):
        Sample(np.array([1]), np.array([2, 3]), 1.0, np.zeros(1))
    with pytest.raises(ValueError, match="advantages has 3 values"):
        Sample(np.array([1]), np.array([2, 3]), np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="samples 0 and 1 share a group, not a prompt"):
        strangers = [sample([1], [2], group=0), sample([3], [2], group=0)]
        pack(strangers, BatchShape(1, 8), packed=True)
    with_old = Sample(np.array([1]), np.array([2]), 1.0, np.zeros(1), old_logp=np.zeros(1))
    with pytest.raises(ValueError, match="old_logp"):
        pack([sample([1], [2]), with_old], BatchShape(2, 8), packed=False)
