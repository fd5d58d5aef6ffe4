"""From training weights to the weights that rollouts read.

The trained arrays are donated at every update, and donating an array deletes every view of it. The
published copy is never donated and carries a version, to which caches and features belong.
"""

import dataclasses

import jax

from tlt_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class Published:
    params: dict  # unstacked layout
    version: int  # RL steps behind it


def publish(params: dict, version: int) -> Published:
    """Copy stacked training weights into the decode layout, in one program, and wait for it."""
    return Published(jax.block_until_ready(_copy(params)), version)


@jax.jit
def _copy(params: dict) -> dict:
    # Outputs of a program never share memory with arguments that are not donated.
    return transformer.unstack_layers(params)
