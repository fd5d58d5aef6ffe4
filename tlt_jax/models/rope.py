"""Rotary position embedding (arXiv 2104.09864) with the stretchings of long-context models.

Frequencies are computed once at trace time, in float64 on the host.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position, [C/2] float64: theta^(-2i/C), stretched as `rope.kind` says."""
    freq = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "none":
        return freq
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freq)
    return _yarn(rope, freq, head_dim)


def _llama3(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, a linear blend between them."""
    turns = rope.original_context * freq / (2 * math.pi)  # full turns within the old context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / rope.factor


def _yarn(rope: RopeConfig, freq: np.ndarray, head_dim: int) -> np.ndarray:
    """arXiv 2309.00071, section 3.2: a ramp over dimensions from kept to interpolated."""

    def dimension_of(turns: float) -> float:
        # The (fractional) dimension that makes `turns` full turns within the old context.
        span = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return (1 - ramp) * freq + ramp * freq / rope.factor


def tables(rope: RopeConfig, head_dim: int, positions_BT: jax.Array, dtype) -> tuple:
    """cos and sin, each [B, T, C/2], in float32 (float64 if `dtype` is)."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    freq_C = jnp.asarray(frequencies(rope, head_dim), dtype)
    angle = positions_BT.astype(dtype)[:, :, None] * freq_C[None, None]
    scale = rope.attention_factor if rope.kind == "yarn" else 1.0
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x_BTHC: jax.Array, cos_sin: tuple) -> jax.Array:
    """Rotate the pairs (i, i + C/2) of every head; the pairing of Hugging Face checkpoints."""
    cos, sin = (t[:, :, None] for t in cos_sin)
    a, b = jnp.split(x_BTHC.astype(cos.dtype), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)
