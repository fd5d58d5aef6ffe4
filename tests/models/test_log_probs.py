"""Chunked log-probs against the direct formula, and no array of all tokens x vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.log_probs import token_log_probs

V, D = 61, 8


def config(dtype="float64"):
    return ModelConfig(V, D, 8, 1, 1, 1, 8, max_context=64, tied=True, dtype=dtype)


def direct(head_VD, hidden_ND, targets_N, temperature):
    logp = jax.nn.log_softmax(hidden_ND @ head_VD.T / temperature)
    return jnp.take_along_axis(logp, targets_N[:, None], -1)[:, 0]


def arrays(N):
    rng = np.random.default_rng(0)
    head, hidden = rng.normal(size=(V, D)), rng.normal(size=(N, D))
    return head, hidden, rng.integers(0, V, N), rng.normal(size=N)


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize("count", [0, 1, 9, 17])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_direct_value_and_gradient(chunk, count, temperature):
    with jax.enable_x64(True):
        head, hidden, targets, weights = arrays(17)

        def chunked(head, hidden):
            logp, entropy = token_log_probs(
                config(),
                {"embed": head},
                hidden,
                targets,
                jnp.int32(count),
                temperature=temperature,
                chunk=chunk,
            )
            # The entropy takes no gradient, so adding it must change none.
            value = jnp.sum((logp * weights)[:count]) + jnp.sum(entropy)
            return value, (logp[:count], entropy[:count])

        def plain(head, hidden):
            logp = direct(head, hidden, targets, temperature)
            return jnp.sum((logp * weights)[:count]), logp[:count]

        got, (got_logp, got_entropy) = jax.grad(chunked, (0, 1), has_aux=True)(head, hidden)
        want, want_logp = jax.grad(plain, (0, 1), has_aux=True)(head, hidden)
        np.testing.assert_allclose(got_logp, want_logp, rtol=1e-12)
        scores = hidden[:count] @ head.T / temperature
        p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(got_entropy, -(p * np.log(p)).sum(-1), rtol=0, atol=1e-12)
        for g, w in zip(got, want):
            assert np.linalg.norm(g - w) <= 1e-12 * np.linalg.norm(w)


def test_places_past_count_take_no_gradient():
    with jax.enable_x64(True):
        head, hidden, targets, _ = arrays(8)

        def total(head, hidden):
            logp, _ = token_log_probs(
                config(), {"embed": head}, hidden, targets, jnp.int32(3), chunk=8
            )
            return jnp.sum(logp)  # a caller that forgets the mask

        def three(head, hidden):
            return jnp.sum(direct(head, hidden, targets, 1.0)[:3])

        got = jax.grad(total, (0, 1))(head, hidden)
        want = jax.grad(three, (0, 1))(head, hidden)
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, atol=1e-13)


def largest_intermediate(fn, *args):
    """Elements of the largest array that any equation of `fn`, at any depth, writes."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return max(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def test_no_array_of_tokens_by_vocabulary():
    N, chunk, vocab = 512, 32, 4096
    wide = ModelConfig(vocab, D, 8, 1, 1, 1, 8, max_context=64, tied=True)
    shapes = [
        jax.ShapeDtypeStruct((vocab, D), jnp.float32),
        jax.ShapeDtypeStruct((N, D), jnp.float32),
        jax.ShapeDtypeStruct((N,), jnp.int32),
    ]

    def chunked(head, hidden, targets):
        count, head = jnp.int32(N), {"embed": head}
        logp, entropy = token_log_probs(wide, head, hidden, targets, count, chunk=chunk)
        return jnp.sum(logp) + jnp.sum(entropy)

    def plain(head, hidden, targets):
        return jnp.sum(direct(head, hidden, targets, 1.0))

    assert largest_intermediate(jax.grad(chunked, (0, 1)), *shapes) == chunk * vocab
    assert largest_intermediate(jax.grad(plain, (0, 1)), *shapes) >= N * vocab

    def temporary(fn):
        compiled = jax.jit(jax.grad(fn, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(chunked) < N * vocab * 4 / 2
    assert temporary(plain) >= N * vocab * 4
