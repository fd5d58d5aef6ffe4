"""A sampler to hold the engine against: the whole prefix again for every token, no cache, and top-k
and top-p by sorting. It shares the model's arithmetic and the noise with the engine, nothing else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import layers, transformer
from tlt_jax.spec import noise


@functools.partial(jax.jit, static_argnums=(0, 4))
def full_pass(config, params, tokens_NT, length_N, taps=()):
    """Logits [N, T, V] and features [N, T, taps, D] of rows padded behind `length`."""
    N, T = tokens_NT.shape
    places = jnp.broadcast_to(jnp.arange(T)[None], (N, T))
    mask = layers.causal_mask((places < length_N[:, None]).astype(jnp.int32))
    out = transformer.forward(config, params, tokens_NT, places, mask, taps=taps)
    return transformer.logits(config, params, out.hidden), out.features


@functools.partial(jax.jit, static_argnums=0)
def next_logits_and_noise(config, params, run_key, tokens_NT, length_N, uid_N3):
    """Logits and noise, [N, V] each, of the token at position `length`."""
    logits_NTV, _ = full_pass(config, params, tokens_NT, length_N)
    logits_NV = jnp.take_along_axis(logits_NTV, length_N[:, None, None] - 1, axis=1)[:, 0]
    seed_N2 = noise.seeds(noise.row_keys(run_key, *uid_N3.T), length_N)
    return logits_NV, noise.gumbel(seed_N2, jnp.arange(config.vocab_size), logits_NV.dtype)


def masked(scores_NV: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """-inf outside the top-k set and then outside the nucleus; ties with the last one kept stay."""
    scores_NV = scores_NV.copy()
    for row in scores_NV:
        if top_k:
            row[row < np.sort(row)[::-1][min(top_k, len(row)) - 1]] = -np.inf
        if top_p < 1:
            order = np.sort(row)[::-1]
            p = np.exp(order - order[0])
            p /= p.sum()
            kept = np.searchsorted(np.cumsum(p), np.float32(top_p).astype(p.dtype))
            row[row < order[min(kept, len(row) - 1)]] = -np.inf
    return scores_NV


def sample_rows(config, params, run_key, prompts, uids, sampling, eos_ids=(), rows=64):
    """One list of (token, log-prob, gap) per prompt; uids: (domain, draw, member) of each. The gap
    lies between the two highest perturbed scores: what an error must reach to change the token."""
    answers = [[] for _ in prompts]
    left = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    temperature = np.float32(sampling.temperature or 1)
    while left:
        batch = left[:rows] + left[:1] * (rows - len(left[:rows]))
        texts = [[*prompts[i], *(t for t, _, _ in answers[i])] for i in batch]
        width = -(-max(map(len, texts)) // 32) * 32
        tokens_NT = np.array([t + [0] * (width - len(t)) for t in texts], np.int32)
        length_N = np.array([len(t) for t in texts], np.int32)
        uid_N3 = np.array([uids[i] for i in batch], np.uint32)
        arrays = next_logits_and_noise(config, params, run_key, tokens_NT, length_N, uid_N3)
        logits_NV, noise_NV = map(np.asarray, arrays)
        scores_NV = masked(logits_NV / temperature, sampling.top_p, sampling.top_k)
        noisy_NV = scores_NV + noise_NV * (sampling.temperature > 0)
        for n, i in enumerate(left[:rows]):
            token = int(np.argmax(noisy_NV[n]))
            top = scores_NV[n].max()
            log_prob = scores_NV[n, token] - top - np.log(np.exp(scores_NV[n] - top).sum())
            second, first = np.partition(noisy_NV[n], -2)[-2:]
            answers[i].append((token, log_prob, first - second))
        over = [
            i
            for i in left[:rows]
            if answers[i][-1][0] in eos_ids or len(answers[i]) == sampling.max_new_tokens
        ]
        left = [i for i in left if i not in over]
    return answers
