"""Log-probs of given tokens, and entropies, without the logits of all of them at once.

The head's product, the softmax and its gradient are done for a chunk of tokens at a time, so a
vocabulary of 150k costs [chunk, V] floats and not [tokens, V]. The backward pass computes a
chunk's logits again and adds up the head's gradient. Chunks past `count` are never computed:
padding costs nothing, and the shapes stay fixed.
"""

import functools

import jax
import jax.numpy as jnp

from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig


def token_log_probs(
    config: ModelConfig,
    params: dict,
    hidden_ND: jax.Array,
    targets_N: jax.Array,
    count: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """log_softmax(logits / temperature)[target] of the first `count` of N tokens, and the entropy
    of that softmax in nats -> (logp [N], entropy [N]).

    hidden_ND: after the final norm, as `forward` returns it. chunk: how many tokens may have their
    logits at once. Values past `count` are unspecified (finite where `hidden_ND` is) and take no
    gradient; nor does the entropy anywhere. float32 (float64 in tests).
    """
    N, _ = hidden_ND.shape
    # Even chunks: 1536 tokens in chunks of at most 1024 are two of 768, not 1024 and 512 + padding.
    chunk = -(-N // -(-N // chunk))
    pad = -N % chunk
    hidden_ND = jnp.pad(hidden_ND, ((0, pad), (0, 0)))
    targets_N = jnp.pad(targets_N, (0, pad))
    head_VD = transformer.head(config, params)
    logp_N, entropy_N = _chunked(hidden_ND, head_VD, targets_N, count, temperature, chunk)
    return logp_N[:N], entropy_N[:N]


def _scores(hidden_ND, head_VD, temperature):
    dtype = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    head_VD = head_VD.astype(hidden_ND.dtype)
    return jnp.einsum("ND,VD->NV", hidden_ND, head_VD, preferred_element_type=dtype) / temperature


def _slice(x, i, chunk):
    return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden_ND, head_VD, targets_N, count, temperature, chunk):
    return _forward(hidden_ND, head_VD, targets_N, count, temperature, chunk)[0]


def _forward(hidden_ND, head_VD, targets_N, count, temperature, chunk):
    def body(i, carry):
        scores = _scores(_slice(hidden_ND, i, chunk), head_VD, temperature)
        norm = jax.nn.logsumexp(scores, axis=-1)
        picked = jnp.take_along_axis(scores, _slice(targets_N, i, chunk)[:, None], axis=-1)
        # H = -sum p log p = norm - sum p * score
        mean_score = jnp.sum(jnp.exp(scores - norm[:, None]) * scores, axis=-1)
        new = (picked[:, 0] - norm, norm - mean_score, norm)
        put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * chunk, 0)  # noqa: E731
        return tuple(map(put, carry, new))

    zeros = jnp.zeros(targets_N.shape, jnp.promote_types(hidden_ND.dtype, jnp.float32))
    start = (zeros, zeros, zeros)
    logp_N, entropy_N, norm_N = jax.lax.fori_loop(0, _chunks(count, chunk), body, start)
    return (logp_N, entropy_N), (hidden_ND, head_VD, targets_N, count, norm_N)


def _backward(temperature, chunk, saved, grads):
    hidden_ND, head_VD, targets_N, count, norm_N = saved
    grad_N, _ = grads  # none from the entropy
    # Places past `count` in the last chunk have a softmax too: no gradient may come from them.
    grad_N = jnp.where(jnp.arange(grad_N.shape[0]) < count, grad_N, 0.0) / temperature
    V = head_VD.shape[0]

    def body(i, carry):
        dhidden_ND, dhead_VD = carry
        h = _slice(hidden_ND, i, chunk)
        p = jnp.exp(_scores(h, head_VD, temperature) - _slice(norm_N, i, chunk)[:, None])
        hit = _slice(targets_N, i, chunk)[:, None] == jnp.arange(V)[None]
        d = ((hit - p) * _slice(grad_N, i, chunk)[:, None]).astype(h.dtype)
        dh = jnp.einsum("NV,VD->ND", d, head_VD.astype(h.dtype))
        dhidden_ND = jax.lax.dynamic_update_slice_in_dim(dhidden_ND, dh, i * chunk, 0)
        dhead = jnp.einsum("NV,ND->VD", d, h, preferred_element_type=dhead_VD.dtype)
        return dhidden_ND, dhead_VD + dhead

    start = (jnp.zeros_like(hidden_ND), jnp.zeros_like(head_VD))
    dhidden_ND, dhead_VD = jax.lax.fori_loop(0, _chunks(count, chunk), body, start)
    return dhidden_ND, dhead_VD, None, None


def _chunks(count, chunk):
    return (count + chunk - 1) // chunk


_chunked.defvjp(_forward, _backward)
