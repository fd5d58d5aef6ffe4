"""Alignment by hand, first-fit-decreasing by hand, and masks from lengths alone."""

import numpy as np
import pytest

from tlt_jax.rl.packing import (
    BatchShape,
    Sample,
    first_fit_decreasing,
    pack,
    scored_positions,
    unpack,
)


def sample(prompt, response, advantage=1.0):
    logp = -np.arange(1, len(response) + 1, dtype=np.float32)
    return Sample(np.array(prompt), np.array(response), advantage, logp)


def test_alignment_by_hand():
    assert scored_positions(3, 2).tolist() == [2, 3]
    assert scored_positions(1, 3).tolist() == [0, 1, 2]
    assert scored_positions(4, 0).tolist() == []
    (batch,) = pack(
        [sample([5, 6, 7], [8, 9], 0.5), sample([1], [2, 3], -1.0)], BatchShape(2, 8), packed=True
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0] * 8]
    assert batch.segments.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [0] * 8]
    assert batch.count == 4
    assert batch.at.tolist() == [2, 3, 5, 6] + [0] * 12
    assert batch.targets.tolist() == [8, 9, 2, 3] + [0] * 12
    assert batch.sample.tolist() == [0, 0, 1, 1] + [-1] * 12
    assert batch.advantages.tolist() == [0.5, 0.5, -1, -1] + [0] * 12
    assert batch.rollout_logp.tolist() == [-1, -2, -1, -2] + [0] * 12


@pytest.mark.parametrize("packed", [False, True])
def test_every_scored_token_follows_its_logits_within_one_segment(packed):
    rng = np.random.default_rng(0)
    samples = [
        sample(rng.integers(1, 9, rng.integers(1, 6)), rng.integers(1, 9, rng.integers(0, 8)))
        for _ in range(40)
    ]
    batches = pack(samples, BatchShape(3, 16), packed=packed)
    seen = 0
    for batch in batches:
        assert batch.tokens.shape == (3, 16) and batch.at.shape == (48,)
        row, t = np.divmod(batch.at[: batch.count], 16)
        np.testing.assert_array_equal(batch.tokens[row, t + 1], batch.targets[: batch.count])
        np.testing.assert_array_equal(batch.segments[row, t + 1], batch.segments[row, t])
        np.testing.assert_array_equal(batch.positions[row, t + 1], batch.positions[row, t] + 1)
        assert np.all(batch.segments[row, t] > 0)
        seen += batch.count
    assert seen == sum(len(s.response) for s in samples)
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
    with_old = Sample(np.array([1]), np.array([2]), 1.0, np.zeros(1), old_logp=np.zeros(1))
    with pytest.raises(ValueError, match="old_logp"):
        pack([sample([1], [2]), with_old], BatchShape(2, 8), packed=False)
