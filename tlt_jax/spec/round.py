"""One round of decoding, and a segment of many: the inner loop of every rollout.

Everything here is pure and of fixed shape; a whole segment is one device program.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import kv_cache, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.spec import noise
from tlt_jax.spec.sampling import sample
from tlt_jax.spec.state import DecodeState


@flax.struct.dataclass
class Emitted:
    """What a segment of R rounds produced; places where a row was not live hold token -1."""

    token: jax.Array  # [B, R] int32
    log_prob: jax.Array  # [B, R]
    features: jax.Array | None  # [B, R, taps, D], the hidden states that predicted each token


def plain_round(
    config: ModelConfig, params: dict, state: DecodeState, *, eos_ids: tuple, taps: tuple
) -> tuple[DecodeState, Emitted]:
    """Feed each row's newest token, sample the next, commit. Emitted arrays have R = 1."""
    length_B = state.cache.length
    B = length_B.shape[0]
    sees_itself = jnp.ones((B, 1, 1), bool)
    out = transformer.forward(
        config, params, state.token[:, None], length_B[:, None], sees_itself, state.cache, taps
    )
    logits_BV = transformer.logits(config, params, out.hidden[:, 0])
    token_B, log_prob_B = sample(logits_BV, noise.seeds(state.key, length_B + 1), state.sampling)

    # A finished row writes past the end, where writes are dropped; so does a row of NaN logits.
    # That the token is looked at also tells the compiler that every read of the cache comes before
    # the write: without it XLA copies the whole cache in every round (2.6x the time at 32 rows).
    commits = state.live & (token_B < config.vocab_size)
    slot_B = jnp.where(commits, length_B, state.cache.slots)
    cache = kv_cache.write(state.cache, out.kv, jnp.arange(B), slot_B[:, None])
    length_B = length_B + state.live
    # After this round the row holds `length` cached tokens and the new one.
    done = is_in(token_B, eos_ids) | (length_B + 1 >= state.limit)
    emitted = Emitted(
        jnp.where(state.live, token_B, -1)[:, None], log_prob_B[:, None], out.features
    )
    new_state = state.replace(
        cache=cache.replace(length=length_B),
        token=jnp.where(state.live, token_B, state.token),
        live=state.live & ~done,
    )
    return new_state, emitted


def segment(
    config: ModelConfig, params: dict, state: DecodeState, *, rounds: int, eos_ids, taps
) -> tuple[DecodeState, Emitted]:
    """`rounds` plain rounds with a static trip count; finished rows are masked, not skipped."""

    def body(state, _):
        return plain_round(config, params, state, eos_ids=eos_ids, taps=taps)

    state, emitted = jax.lax.scan(body, state, length=rounds)
    # Scan stacks in front: [R, B, 1, ...] -> [B, R, ...].
    return state, jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), emitted)


def is_in(token_B: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Whether each token is one of a static, possibly empty, set of ids."""
    hit = jnp.zeros(token_B.shape, bool)
    for i in ids:
        hit |= token_B == i
    return hit
