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


def goes_on_with(chance: float, times: np.ndarray) -> bool:
    """Whether of those who said it n times a share of about `chance` said it once more."""
    shares = {n: ((times > n).sum() / (times >= n).sum(), (times >= n).sum()) for n in (1, 2, 3)}
    error = {n: np.sqrt(chance * (1 - chance) / count) for n, (_, count) in shares.items()}
    return all(abs(share - chance) < 4 * error[n] for n, (share, _) in shares.items())


@pytest.mark.parametrize("rambling", [0.3, 0.6])
def test_an_answer_goes_on_with_the_given_chance_each_time(rambling):
    times = times_said(rambling)
    assert times.max() == MOST_TIMES == 4
    assert goes_on_with(rambling, times)
    assert not goes_on_with(rambling + 0.1, times)
    uniform = np.random.default_rng(0).integers(1, MOST_TIMES + 1, len(times))
    assert not goes_on_with(rambling, uniform)


def test_the_seed_decides_who_rambles():
    assert (times_said(0.6) == times_said(0.6)).all()
    assert (times_said(0.6) != times_said(0.6, seed=1)).any()


def test_an_example_without_an_answer_is_refused():
    example = Example((1, 2), "why?", "test", {}, "line 7 of questions.jsonl")
    with pytest.raises(ValueError, match=r"line 7 of questions\.jsonl, 'why\?', has none; use a"):
        supervised_samples([example], TOKENIZER, WarmUpConfig())
