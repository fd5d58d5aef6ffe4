"""Policy-gradient losses as pure functions over tokens: no model, no batch layout inside.

For every response token, with advantage A and the ratio r of the policy to the old one:

    loss = sum over tokens of  weight * importance * ( -held(r, A) * A + kl_coef * kl )

weight      denominator of the loss: `AGGREGATIONS`. Computed once for all tokens of an optimizer
            step, so the losses of micro-batches and devices add up, however the step is cut.
r           `RATIOS`: of the token, or of its whole sequence.
held        r kept within the clip range: `held_ratio`.
importance  truncated correction of the sampler's log-probs: `importance_weights`.
kl          distance to a reference policy: `KL_ESTIMATORS`, `kl_loss`.

GRPO (arXiv 2402.03300, equation 3) is: token ratio, sequence_mean, k3. DAPO (arXiv 2503.14476,
equation 8): token ratio, token_mean, clip_high > clip_low. Dr.GRPO (arXiv 2503.20783): constant.
GSPO (arXiv 2507.18071, equation 5): sequence ratio, sequence_mean.

Differs from the papers in:
  - the old policy of a rollout with one optimizer step is the policy itself, by `stop_gradient`;
  - the KL term is multiplied by the ratio (see `kl_loss`).
"""

import jax
import jax.numpy as jnp
import numpy as np

SUMS = ("clipped_low", "clipped_high", "clipped_dual", "importance_capped", "kl")


# --- weights of tokens: the denominators ---


def token_mean(lengths_N: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / (tokens of all responses): every token counts the same (DAPO, equation 8)."""
    return np.full(len(lengths_N), 1.0 / max(lengths_N.sum(), 1))


def sequence_mean(lengths_N: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / (responses * tokens of this one): every response counts the same (GRPO, equation 3)."""
    return 1.0 / (len(lengths_N) * np.maximum(lengths_N, 1))


def constant(lengths_N: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / (responses * longest possible response): a sum over tokens whose scale depends on no
    length (Dr.GRPO)."""
    return np.full(len(lengths_N), 1.0 / (len(lengths_N) * max_new_tokens))


AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}


def token_weights(aggregation: str, lengths_N: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Weight of each token of every response of one optimizer step, float64 [N], N responses.

    lengths_N: response tokens of *all* of them, those without an advantage too.
    """
    return AGGREGATIONS[aggregation](np.asarray(lengths_N), max_new_tokens)


# --- ratios to the old policy ---


def token_ratio(logp_N, old_logp_N, mask_N, sequences_N):
    """pi(token) / pi_old(token), as PPO has it (arXiv 1707.06347, section 3)."""
    return jnp.exp(logp_N - old_logp_N)


def sequence_ratio(logp_N, old_logp_N, mask_N, sequences_N):
    """Geometric mean over the response: s = exp(mean of (logp - old_logp)), for all its tokens.

    In the form of GSPO-token (arXiv 2507.18071, section 4.3): the value is s, the gradient
    that of the token alone, s * d logp. With one advantage per response and sequence_mean this is
    the value and gradient of GSPO itself (equation 5); it also takes advantages per token.
    """
    logratio_N = jax.lax.stop_gradient(logp_N - old_logp_N)
    N = logp_N.shape[0]
    count_S = jax.ops.segment_sum(mask_N.astype(logp_N.dtype), sequences_N, N)
    mean_S = jax.ops.segment_sum(logratio_N, sequences_N, N) / jnp.maximum(count_S, 1)
    return jnp.exp(mean_S)[sequences_N] * jnp.exp(logp_N - jax.lax.stop_gradient(logp_N))


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}


def held_ratio(ratio_N, advantages_N, *, clip_low, clip_high, dual_clip):
    """The ratio where it may still move, else the bound it ran into -> (held, {bound: where}).

    held * A = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), the objective of PPO (arXiv
    1707.06347, equation 7), with two clip ranges (arXiv 2503.14476, "clip-higher"). Where A < 0
    that has no lower bound; dual clip (arXiv 1912.09729) is max(that, dual_clip * A) with
    dual_clip > 1, or 0 for none. Held tokens take no gradient.
    """
    low_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    high_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    held_N = jnp.where(low_N, 1 - clip_low, jnp.where(high_N, 1 + clip_high, ratio_N))
    dual_N = jnp.zeros_like(low_N)
    if dual_clip:
        dual_N = (advantages_N < 0) & (ratio_N > dual_clip)
        held_N = jnp.where(dual_N, dual_clip, held_N)
    return held_N, {"clipped_low": low_N, "clipped_high": high_N, "clipped_dual": dual_N}


def importance_weights(old_logp_N, rollout_logp_N, cap):
    """min(pi_old / pi_rollout, cap), no gradient -> (weights, where capped).

    Tokens are sampled by other programs than those that train, whose log-probs differ a little;
    truncated importance sampling (https://fengyao.notion.site/off-policy-rl) corrects for it.
    """
    ratio_N = jax.lax.stop_gradient(jnp.exp(old_logp_N - rollout_logp_N))
    return jnp.minimum(ratio_N, cap), ratio_N > cap


# --- the distance to a reference policy ---


def k1(logp, reference_logp):
    """log(pi / pi_ref): unbiased for KL(pi || pi_ref) over samples of pi, of either sign."""
    return logp - reference_logp


def k2(logp, reference_logp):
    """(log(pi / pi_ref))^2 / 2: biased, but its gradient is that of the KL over samples of pi."""
    return (logp - reference_logp) ** 2 / 2


def k3(logp, reference_logp):
    """pi_ref / pi - 1 - log(pi_ref / pi): unbiased for the KL over samples of pi, and >= 0."""
    d = reference_logp - logp
    return jnp.expm1(d) - d


# http://joschu.net/blog/kl-approx.html
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(estimator, logp_N, old_logp_N, reference_logp_N):
    """Per token, a term whose gradient over samples of pi_old is that of KL(pi || pi_ref).

    k1 and k3 estimate the KL over samples of pi, so r * k, r = pi / pi_old, does over samples of
    pi_old, and so does its gradient, that of r included (arXiv 2512.02556, equation 7). Without r
    the gradient of k1 is zero in expectation, whatever the reference, and that of k3 is
    another divergence's. The gradient of k2 is right as it is, so r is a constant there.
    The ratio is that of the token. What a token does to the KL of those after it is not in this
    term; a KL in the reward has it.
    """
    ratio_N = jnp.exp(logp_N - old_logp_N)
    if estimator == "k2":
        ratio_N = jax.lax.stop_gradient(ratio_N)
    return ratio_N * KL_ESTIMATORS[estimator](logp_N, reference_logp_N)


# --- the loss ---


def policy_loss(
    logp_N,
    advantages_N,
    weights_N,
    mask_N,
    *,
    old_logp_N=None,
    rollout_logp_N=None,
    reference_logp_N=None,
    sequences_N=None,
    ratio,
    clip_low,
    clip_high,
    dual_clip,
    importance_cap,
    kl,
    kl_coef,
):
    """The loss of N tokens -> (loss, sums over tokens, by the names in `SUMS`).

    mask_N: boolean, tokens that count; where it is False the other arrays may hold anything, NaN
    included. old_logp_N: None for the policy itself. rollout_logp_N: read with importance_cap > 0.
    reference_logp_N: read with kl_coef > 0; where given, the sum of k3 is reported. sequences_N:
    in 0 … N - 1, the response of each token; all its tokens must be among the N. Read by the
    sequence ratio.
    """

    # Masked places get harmless values before any arithmetic: a NaN times zero is still NaN, in
    # the loss and in its gradient.
    def clean(x_N):
        return None if x_N is None else jnp.where(mask_N, x_N, jnp.zeros_like(x_N))

    logp_N, advantages_N, weights_N = clean(logp_N), clean(advantages_N), clean(weights_N)
    rollout_logp_N, reference_logp_N = clean(rollout_logp_N), clean(reference_logp_N)
    old_logp_N = jax.lax.stop_gradient(logp_N) if old_logp_N is None else clean(old_logp_N)

    ratio_N = RATIOS[ratio](logp_N, old_logp_N, mask_N, clean(sequences_N))
    held_N, where = held_ratio(
        ratio_N, advantages_N, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    loss_N = -held_N * advantages_N
    where["importance_capped"] = jnp.zeros_like(mask_N)
    if kl_coef:
        loss_N += kl_coef * kl_loss(kl, logp_N, old_logp_N, reference_logp_N)
    if importance_cap:
        importance_N, capped_N = importance_weights(old_logp_N, rollout_logp_N, importance_cap)
        loss_N *= importance_N
        where["importance_capped"] = capped_N & mask_N
    sums = {name: jnp.sum(where_N.astype(loss_N.dtype)) for name, where_N in where.items()}
    sums["kl"] = jnp.zeros((), loss_N.dtype)
    if reference_logp_N is not None:
        sums["kl"] = jnp.sum(k3(jax.lax.stop_gradient(logp_N), reference_logp_N))
    return jnp.sum(weights_N * loss_N), sums
