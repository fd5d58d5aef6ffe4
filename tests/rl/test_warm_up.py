"""What the supervised phase teaches."""

import numpy as np
import pytest

from tlt_jax.models.tokenizer import byte_tokenizer
from tlt_jax.rl.data import Example
from tlt_jax.rl.warm_up import MOST_TIMES, WarmUpConfig, supervised_samples

TOKENIZER = byte_tokenizer()
EXAMPLES = [
    Example((1, 2), f"question {i}", "test", {"answer": str(i)}, f"line {i}") for i in range(4000)
]


def times_said(rambling: float, seed: int = 0) -> np.ndarray:
    """How often each answer is said, after a look at everything else in the samples."""
    config = WarmUpConfig(rambling=rambling, seed=seed)
    counts = []
    for i, sample in enumerate(supervised_samples(EXAMPLES, TOKENIZER, config)):
        *ids, end = sample.response
        assert end in TOKENIZER.eos_ids and tuple(sample.prompt) == (1, 2)
        said = TOKENIZER.decode(ids, specials=True).split(" ")
        assert set(said) == {str(i)}
        counts.append(len(said))
    return np.array(counts)


def test_without_rambling_every_answer_is_said_once():
    assert (times_said(0.0) == 1).all()


@pytest.mark.parametrize("rambling", [0.3, 0.6])
def test_an_answer_goes_on_with_the_given_chance_each_time(rambling):
    times = times_said(rambling)
    assert times.max() == MOST_TIMES
    for n in range(1, MOST_TIMES):
        reached = times >= n
        error = np.sqrt(rambling * (1 - rambling) / reached.sum())
        assert (times[reached] > n).mean() == pytest.approx(rambling, abs=4 * error)


def test_the_seed_decides_who_rambles():
    assert (times_said(0.6) == times_said(0.6)).all()
    assert (times_said(0.6) != times_said(0.6, seed=1)).any()


def test_an_example_without_an_answer_is_refused():
    example = Example((1, 2), "why?", "test", {}, "line 7 of questions.jsonl")
    with pytest.raises(ValueError, match=r"line 7 of questions\.jsonl, 'why\?', has none; use a"):
        supervised_samples([example], TOKENIZER, WarmUpConfig())
