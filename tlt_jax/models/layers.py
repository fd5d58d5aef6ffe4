"""The arithmetic of a transformer block, as functions over arrays."""

import math

import jax
import jax.numpy as jnp

from tlt_jax.models.kv_cache import TILE

# A product of 2 to FEW_ROWS rows is computed weight-first on CPUs, see `linear`.
FEW_ROWS = 64


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, the mean in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale_D, tuple(range(x.ndim - 1))).astype(x.dtype)
    return (wide * inverse).astype(x.dtype) * scale


def linear(x: jax.Array, w: jax.Array, out_dtype=None) -> jax.Array:
    """x [..., I] times w [*O, I] -> [..., *O], accumulated in `out_dtype` (default: that of x).

    For 2 to FEW_ROWS rows on a CPU the product is taken as w @ x^T, with both transposes
    materialised: 1.1 to 1.5 times as fast as x @ w^T there (EXPERIMENTS.md, "Decode primitives").
    The barriers keep the compiler from folding the transposes back.
    """
    rows = math.prod(x.shape[:-1])
    x_MI, w_OI = x.reshape(rows, x.shape[-1]), w.reshape(-1, w.shape[-1]).astype(x.dtype)

    def plain(x_MI, w_OI):
        return jnp.einsum("MI,OI->MO", x_MI, w_OI, preferred_element_type=out_dtype)

    def weight_first(x_MI, w_OI):
        hold = jax.lax.optimization_barrier
        return hold(jnp.matmul(w_OI, hold(x_MI.T), preferred_element_type=out_dtype)).T

    if 1 < rows <= FEW_ROWS:
        y_MO = jax.lax.platform_dependent(x_MI, w_OI, cpu=weight_first, default=plain)
    else:
        y_MO = plain(x_MI, w_OI)
    return y_MO.reshape(*x.shape[:-1], *w.shape[:-1])


def causal_mask(segments_BT: jax.Array, prefixes_BT: jax.Array | None = None) -> jax.Array:
    """[B, T, T] boolean: who attends to whom, by segment number; 0 marks padding.

    Worked: segments 1 1 2 0 give rows 1000, 1100, 0010, 0001. Padding sees itself, so that no
    softmax is empty; nothing else sees padding. prefixes_BT: for each token a second segment that
    it sees, 0 for none, so that several continuations can share one prompt. Worked: segments
    1 1 2 3 with prefixes 0 0 1 1 give 1000, 1100, 1110, 1101.
    """
    T = segments_BT.shape[1]
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    if prefixes_BT is not None:
        same |= prefixes_BT[:, :, None] == segments_BT[:, None, :]
    real = (segments_BT > 0)[:, None, :]
    lower = jnp.tril(jnp.ones((T, T), bool))[None]
    return (same & lower & real) | jnp.eye(T, dtype=bool)[None]


def attention(q_BTHC, k_BTKC, v_BTKC, mask_BTT, cached=None):
    """Softmax attention of T new tokens over the row's committed tokens and each other.

    mask_BTT: which of the new tokens each new token sees. cached: (k, v, length_B) of one layer
    as `KVCache` holds them, or None. Query head h reads key head h // (H / K). Scores and softmax
    are float32 (or float64). Returns [B, T, H, C].
    """
    B, T, H, C = q_BTHC.shape
    K = k_BTKC.shape[2]
    G = H // K
    dtype = jnp.promote_types(q_BTHC.dtype, jnp.float32)
    q_BTKGC = (q_BTHC * C**-0.5).reshape(B, T, K, G, C)
    new_BKTGU = jnp.einsum("BTKGC,BUKC->BKTGU", q_BTKGC, k_BTKC, preferred_element_type=dtype)
    new_BKTGU = jnp.where(mask_BTT[:, None, :, None, :], new_BKTGU, -jnp.inf)
    top = jnp.max(new_BKTGU, axis=-1, keepdims=True)
    if cached is None:
        p_BKTGU = jnp.exp(new_BKTGU - top)
        total = jnp.sum(p_BKTGU, axis=-1, keepdims=True)
        p_BKTGU = (p_BKTGU / total).astype(v_BTKC.dtype)
        return jnp.einsum("BKTGU,BUKC->BTKGC", p_BKTGU, v_BTKC).reshape(B, T, H, C)

    k_tiles, v_BKSC, length_B = cached
    # The query rows of one key head, T * G of them, share its cached keys.
    q_BKXC = q_BTKGC.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, C)
    old_BKXS = cached_scores(q_BKXC, k_tiles)
    committed = jnp.arange(v_BKSC.shape[2])[None] < length_B[:, None]
    old_BKXS = jnp.where(committed[:, None, None, :], old_BKXS, -jnp.inf)
    new_BKXU = new_BKTGU.reshape(B, K, T * G, T)
    top = jnp.maximum(top.reshape(B, K, T * G, 1), jnp.max(old_BKXS, axis=-1, keepdims=True))
    # The two parts keep their own arrays: joining them would copy the scores of the whole cache.
    old_BKXS, new_BKXU = jnp.exp(old_BKXS - top), jnp.exp(new_BKXU - top)
    total = jnp.sum(old_BKXS, -1, keepdims=True) + jnp.sum(new_BKXU, -1, keepdims=True)
    out_BKXC = jnp.einsum("BKXS,BKSC->BKXC", old_BKXS.astype(v_BKSC.dtype), v_BKSC)
    out_BKXC += jnp.einsum("BKXU,BUKC->BKXC", new_BKXU.astype(v_BTKC.dtype), v_BTKC)
    out_BKXC = (out_BKXC / total).astype(q_BTHC.dtype)
    return out_BKXC.reshape(B, K, T, G, C).transpose(0, 2, 1, 3, 4).reshape(B, T, H, C)


def cached_scores(q_BKXC: jax.Array, k_tiles: jax.Array) -> jax.Array:
    """q times the cached keys [B, K, S/TILE, C, TILE] -> [B, K, X, S], float32 (or float64).

    On a CPU few query rows are multiplied and summed outright: batched products of this size cost
    1.5 to 2.3 times as much there (EXPERIMENTS.md, "Decode primitives").
    """
    B, K, X, _ = q_BKXC.shape
    dtype = jnp.promote_types(q_BKXC.dtype, jnp.float32)

    def products(q_BKXC, k_tiles):
        return jnp.einsum("BKXC,BKNCW->BKXNW", q_BKXC, k_tiles, preferred_element_type=dtype)

    def sums(q_BKXC, k_tiles):
        pairs = q_BKXC.astype(dtype)[:, :, None, :, :, None] * k_tiles[:, :, :, None]
        return jnp.sum(pairs, axis=4).transpose(0, 1, 3, 2, 4)  # BKNXW -> BKXNW

    if X <= 8:
        scores = jax.lax.platform_dependent(q_BKXC, k_tiles, cpu=sums, default=products)
    else:
        scores = products(q_BKXC, k_tiles)
    return scores.reshape(B, K, X, k_tiles.shape[2] * TILE)


def gated_mlp(x: jax.Array, p: dict) -> jax.Array:
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), biases where `p` has them."""
    gate, up = (biased(linear(x, p[f"w_{n}"]), p.get(f"b_{n}")) for n in ("gate", "up"))
    return biased(linear(jax.nn.silu(gate) * up, p["w_down"]), p.get("b_down"))


def biased(x: jax.Array, b: jax.Array | None) -> jax.Array:
    """x plus a bias over its last axes, or x where there is none."""
    if b is None:
        return x
    return x + jnp.expand_dims(b.astype(x.dtype), tuple(range(x.ndim - b.ndim)))
