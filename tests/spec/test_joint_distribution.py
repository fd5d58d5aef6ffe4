"""What the public engine samples is the model's distribution: chi-square on an enumerable model.

Tokens of one response and of two members of a group are tested jointly, because a wrong use of the
noise leaves every single token's distribution right.
"""

import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.reference import full_pass
from tests.spec import tiny
from tlt_jax.models import transformer
from tlt_jax.spec import noise
from tlt_jax.spec import round as rounds
from tlt_jax.spec import state as states
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Sampling

EOS, PROMPT, DRAWS = 0, (2, 1, 3), 20_000


@pytest.fixture(scope="module")
def model():
    config, params = tiny.model("float32", vocab_size=4, width=8, mlp_width=16, num_layers=1)
    return config, transformer.unstack_layers(params)


def new_engine(config):
    """Rounds of one segment cover the three tokens; batches large, for speed."""
    return Engine(
        config,
        EngineConfig(
            batch_buckets=(1000,),
            cache_buckets=(32,),
            prompt_buckets=(32,),
            prefill_rows=(1, 500),
            segment_rounds=3,
        ),
        eos_ids=(EOS,),
    )


@pytest.fixture(scope="module")
def engine(model):
    return new_engine(model[0])


def probabilities(model, length: int, temperature: float) -> dict:
    """The exact probability of every response of at most `length` tokens."""
    config, params = model
    prefixes = [p for n in range(length) for p in itertools.product(range(4), repeat=n)]
    texts = np.zeros((len(prefixes), 8), np.int32)
    for i, p in enumerate(prefixes):
        texts[i, : 3 + len(p)] = PROMPT + p
    lengths = np.array([3 + len(p) for p in prefixes], np.int32)
    logits_NTV = np.asarray(full_pass(config, params, texts, lengths)[0], np.float64)
    p_of = {}
    for i, prefix in enumerate(prefixes):
        scores = logits_NTV[i, lengths[i] - 1] / temperature
        p_of[prefix] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    found = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, p in found.items():
            if text and text[-1] == EOS:
                grown[text] = p
            else:
                grown |= {(*text, v): p * p_of[text][v] for v in range(4)}
        found = grown
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


def p_value(samples: list, expected: dict) -> float:
    """Chi-square of counted against expected outcomes; cells below 5 are joined."""
    counts = dict.fromkeys(expected, 0)
    for s in samples:
        counts[s] += 1
    want = np.array(list(expected.values())) * len(samples)
    have = np.array(list(counts.values()))
    rare = want < 5
    if rare.any():
        want = np.append(want[~rare], want[rare].sum())
        have = np.append(have[~rare], have[rare].sum())
    return stats.chisquare(have, want).pvalue


def responses(engine, model, tokens: int, temperature: float, members: int = 1):
    """DRAWS responses: `members` to each of as many draws of one prompt as that takes."""
    groups = engine.generate(
        model[1],
        [PROMPT] * (DRAWS // members),
        samples=members,
        sampling=Sampling(tokens, temperature=temperature),
        seed=0,
    )
    return [tuple(tuple(r.tokens.tolist()) for r in group) for group in groups]


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_joint_over_consecutive_tokens(engine, model, temperature):
    """Three tokens with EOS among them, one member of each draw."""
    samples = [group[0] for group in responses(engine, model, 3, temperature)]
    assert p_value(samples, probabilities(model, 3, temperature)) > 1e-3
    other = 0.7 if temperature == 1 else 1.0
    assert p_value(samples, probabilities(model, 3, other)) < 1e-9


def test_members_of_one_draw(engine, model):
    """Many members of one draw, as a large group has them."""
    answers = engine.generate(model[1], [PROMPT], samples=DRAWS, sampling=Sampling(3), seed=6)
    samples = [tuple(r.tokens.tolist()) for r in answers[0]]
    assert p_value(samples, probabilities(model, 3, 1.0)) > 1e-3


def pair_probabilities(model):
    one = probabilities(model, 2, 1.0)
    return {(a, b): one[a] * one[b] for a in one for b in one}


def test_two_members_are_independent(engine, model):
    """The joint distribution of two members' responses is the product."""
    assert p_value(responses(engine, model, 2, 1.0, 2), pair_probabilities(model)) > 1e-3


def test_neighbouring_draws_are_independent(engine, model):
    samples = [group[0] for group in responses(engine, model, 2, 1.0)]
    pairs = list(zip(samples[::2], samples[1::2]))
    assert p_value(pairs, pair_probabilities(model)) > 1e-3


def test_one_noise_for_all_members_is_rejected(model, monkeypatch):
    """Each member alone would pass."""

    def wrong(state, prefix, new, run_key, right=states.admit):
        return right(state, prefix, new.replace(member=0 * new.member), run_key)

    monkeypatch.setattr(states, "admit", wrong)
    pairs = responses(new_engine(model[0]), model, 2, 1.0, 2)
    assert p_value([a for a, _ in pairs], probabilities(model, 2, 1.0)) > 1e-3
    assert p_value(pairs, pair_probabilities(model)) < 1e-9


def test_noise_used_twice_is_rejected(model, monkeypatch):
    """Each position alone would pass."""
    wrong = lambda key, at: noise.seeds(key, jnp.zeros_like(at))  # noqa: E731
    monkeypatch.setattr(rounds, "noise", types.SimpleNamespace(seeds=wrong))
    samples = [group[0] for group in responses(new_engine(model[0]), model, 3, 1.0)]
    assert p_value([s[:1] for s in samples], probabilities(model, 1, 1.0)) > 1e-3
    assert p_value(samples, probabilities(model, 3, 1.0)) < 1e-9


def test_same_seed_same_tokens_and_another_seed_others(engine, model):
    sampling = Sampling(3)
    runs = [
        engine.generate(model[1], [PROMPT] * 50, samples=2, sampling=sampling, seed=seed)
        for seed in (1, 1, 2)
    ]
    a, b, c = ([r.tokens.tolist() for group in run for r in group] for run in runs)
    assert a == b and a != c


def test_answers_come_in_the_order_of_the_prompts(engine, model):
    prompts = [(1,), (2, 3), (3, 3, 3)]
    answers = engine.generate(model[1], prompts, samples=2, sampling=Sampling(2))
    for i, group in enumerate(answers):
        assert [r.group.prompt for r in group] == [prompts[i]] * 2
        assert [r.member for r in group] == [0, 1]
    assert answers[0][0].features is None
