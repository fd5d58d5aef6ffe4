"""Policy-gradient losses as pure functions over tokens: no model, no batch layout inside.

GRPO (arXiv 2402.03300, equation 3), per response token with ratio r = pi / pi_old:

    loss = -(1 / denominator) * sum over tokens of min(r * A, clip(r, 1 - low, 1 + high) * A)

Differs from the paper in:
  - the denominator is the token count of the whole update (over all micro-batches and devices),
    not a mean per response and then per group, so the loss does not depend on how an update is
    cut up, and long responses are not weighted down;
  - the two clip ranges may differ (arXiv 2503.14476, "clip-higher");
  - there is no KL term;
  - with one update per rollout pi_old is pi itself, taken by `stop_gradient`.
"""

import jax
import jax.numpy as jnp


def grpo_loss(logp_N, old_logp_N, advantages_N, mask_N, *, clip_low, clip_high, denominator):
    """The clipped surrogate, summed over tokens and divided by `denominator` -> (loss, metrics).

    All arrays have one shape (any). mask_N: boolean, tokens that count; the others may hold
    anything, NaN included. old_logp_N: log-probs of the policy that the ratio is taken against,
    None for the policy itself. clip_low, clip_high: the ratio is held within [1 - low, 1 + high].
    metrics are shares of `denominator`, so they add up over micro-batches as the loss does.
    """
    # Masked places get harmless values before any arithmetic: a NaN times zero is still NaN, in
    # the loss and in its gradient.
    logp_N = jnp.where(mask_N, logp_N, 0.0)
    advantages_N = jnp.where(mask_N, advantages_N, 0.0)
    if old_logp_N is None:
        old_logp_N = jax.lax.stop_gradient(logp_N)
    else:
        old_logp_N = jnp.where(mask_N, old_logp_N, 0.0)
    ratio_N = jnp.exp(logp_N - old_logp_N)
    free_N = ratio_N * advantages_N
    held_N = jnp.clip(ratio_N, 1 - clip_low, 1 + clip_high) * advantages_N
    loss = -jnp.sum(jnp.minimum(free_N, held_N)) / denominator
    clipped = jnp.sum(held_N < free_N) / denominator
    return loss, {"clip_fraction": clipped}
