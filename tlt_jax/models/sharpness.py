"""How sure a model is of its next token, without the logits of all tokens at once."""

import jax
import jax.numpy as jnp

from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig


def sharpness(
    config: ModelConfig, params: dict, hidden_ND: jax.Array, *, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Largest probability and entropy (nats) of softmax(logits / temperature) -> ([N], [N]).

    hidden_ND: after the final norm, as `forward` returns it. chunk: how many tokens have their
    logits at once. float32 (float64 in tests).
    """

    def of_token(hidden_D):
        logp_V = jax.nn.log_softmax(transformer.logits(config, params, hidden_D) / temperature)
        p_V = jnp.exp(logp_V)
        # A token of probability 0 has log-prob -inf; it adds nothing to the entropy.
        return jnp.max(p_V), -jnp.sum(jnp.where(p_V > 0, p_V * logp_V, 0.0))

    return jax.lax.map(of_token, hidden_ND, batch_size=chunk)
