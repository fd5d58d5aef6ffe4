"""Largest probability and entropy of the next token, by chunks, against the whole softmax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.spec.tiny import model as random_model
from tlt_jax.models import transformer
from tlt_jax.models.sharpness import sharpness


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_give_what_the_whole_softmax_does(tied):
    with jax.enable_x64(True):
        config, params = random_model("float64", vocab_size=37, tied=tied)
        hidden_ND = 10 * jax.random.normal(jax.random.key(0), (11, config.width), jnp.float64)
        logits_NV = np.asarray(transformer.logits(config, params, hidden_ND)) / 0.7
        p_NV = np.exp(logits_NV - logits_NV.max(axis=1, keepdims=True))
        p_NV /= p_NV.sum(axis=1, keepdims=True)
        assert p_NV.max() > 0.9 > p_NV.max(axis=1).min()
        for chunk in (4, 50):  # 11 tokens: two chunks and a rest; all at once
            largest_N, entropy_N = sharpness(
                config, params, hidden_ND, temperature=0.7, chunk=chunk
            )
            np.testing.assert_allclose(largest_N, p_NV.max(axis=1), atol=1e-12)
            np.testing.assert_allclose(entropy_N, stats.entropy(p_NV, axis=1), atol=1e-12)
        other_N, _ = sharpness(config, params, hidden_ND, temperature=1.0, chunk=4)
        assert np.max(np.abs(other_N - p_NV.max(axis=1))) > 0.01


def test_a_certain_token_has_no_entropy():
    """Probabilities that underflow to 0 are no NaN."""
    config, params = random_model("float32", vocab_size=37, tied=True)
    params = {**params, "embed": jnp.zeros_like(params["embed"]).at[5, 0].set(1e4)}
    config = dataclasses.replace(config, tied=True)
    hidden_ND = jnp.ones((2, config.width))
    largest_N, entropy_N = sharpness(config, params, hidden_ND, temperature=1.0, chunk=2)
    assert largest_N.tolist() == [1.0, 1.0] and entropy_N.tolist() == [0.0, 0.0]


def test_the_logits_of_all_tokens_never_exist():
    config, params = random_model("float32", vocab_size=4001, tied=True)
    jitted = jax.jit(lambda p, h: sharpness(config, p, h, temperature=1.0, chunk=8))
    hidden_ND = jax.ShapeDtypeStruct((512, config.width), jnp.float32)
    memory = jitted.lower(params, hidden_ND).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 4001 * 4 / 4
