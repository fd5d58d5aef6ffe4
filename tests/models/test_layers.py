"""The arithmetic of a block against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import layers


def test_causal_mask_as_worked_in_its_docstring():
    mask = np.asarray(layers.causal_mask(jnp.asarray([[1, 1, 2, 0]])))[0].astype(int)
    assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("rows", (1, 2, 7, layers.FEW_ROWS, layers.FEW_ROWS + 1))
def test_linear_is_one_function_for_every_number_of_rows(rows):
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 1, 6)), rng.normal(size=(3, 4, 6))
    got = jax.jit(layers.linear)(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    assert got.shape == (rows, 1, 3, 4)
    np.testing.assert_allclose(got, np.einsum("xti,oci->xtoc", x, w), rtol=1e-4, atol=1e-5)


def test_rms_norm_and_its_scale_invariance():
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(3, 5, 8)), rng.normal(size=8)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    got = layers.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    narrow = layers.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale), 1e-5)
    assert narrow.dtype == jnp.bfloat16


def naive_attention(q_THC, k_SKC, v_SKC, mask_TS):
    """One row, one head at a time."""
    T, H, C = q_THC.shape
    group = H // k_SKC.shape[1]
    out = np.zeros((T, H, C))
    for h in range(H):
        scores = q_THC[:, h] @ k_SKC[:, h // group].T / np.sqrt(C)
        scores = np.where(mask_TS, scores, -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        out[:, h] = p / p.sum(1, keepdims=True) @ v_SKC[:, h // group]
    return out


@pytest.mark.parametrize("T, H", ((1, 2), (3, 4), (6, 4)))
def test_attention_over_cache_and_new_tokens_equals_the_naive_loop(T, H):
    """Grouped heads, uneven lengths (one row empty), a tree-like mask, huge values past the length:
    few and many query rows take different products."""
    rng = np.random.default_rng(T)
    B, K, C, S = 3, 2, 4, 64
    length = np.array([0, 13, 64])
    with jax.enable_x64(True):
        q, k, v = (rng.normal(size=(B, T, n, C)) for n in (H, K, K))
        old_k, old_v = (rng.normal(size=(B, S, K, C)) for _ in range(2))
        for b in range(B):
            old_k[b, length[b] :] = old_v[b, length[b] :] = 1e30
        mask = np.tril(rng.random((B, T, T)) < 0.5) | np.eye(T, dtype=bool)
        k_tiles = old_k.reshape(B, S // 32, 32, K, C).transpose(0, 3, 1, 4, 2)
        cached = tuple(map(jnp.asarray, (k_tiles, old_v.transpose(0, 2, 1, 3), length)))
        arrays = map(jnp.asarray, (q, k, v, mask))
        got = jax.jit(layers.attention)(*arrays, cached)
        for b in range(B):
            sees = np.concatenate([np.arange(S) < length[b] + np.zeros((T, 1)), mask[b]], axis=1)
            keys, values = np.concatenate([old_k[b], k[b]]), np.concatenate([old_v[b], v[b]])
            want = naive_attention(q[b], keys, values, sees)
            np.testing.assert_allclose(got[b], want, rtol=0, atol=1e-12)
            if length[b] == 0:  # as if there were no cache
                alone = layers.attention(*(jnp.asarray(x[b : b + 1]) for x in (q, k, v, mask)))
                np.testing.assert_allclose(got[b], alone[0], rtol=0, atol=1e-12)
                continue
            wrong = naive_attention(q[b, :, ::-1], keys, values, sees)
            assert np.abs(wrong - got[b]).max() > 1e-3  # heads read the wrong keys


def test_gated_mlp_against_numpy():
    rng = np.random.default_rng(1)
    shapes = dict(w_gate=(6, 4), w_up=(6, 4), w_down=(4, 6), b_gate=(6,), b_up=(6,), b_down=(4,))
    p = {n: rng.normal(size=s) for n, s in shapes.items()}
    x = rng.normal(size=(2, 3, 4))
    gate, up = (x @ p[f"w_{n}"].T + p[f"b_{n}"] for n in ("gate", "up"))
    want = (gate / (1 + np.exp(-gate)) * up) @ p["w_down"].T + p["b_down"]
    p = {n: jnp.asarray(w, jnp.float32) for n, w in p.items()}
    got = layers.gated_mlp(jnp.asarray(x, jnp.float32), p)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
