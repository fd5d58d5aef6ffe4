"""From training weights to the weights that rollouts read.

The trained arrays are donated at every update, and donating an array deletes every view of it. The
published copy is never donated and carries a version, to which caches and features belong.
"""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Published:
    params: dict  # in the layout of decoding
    version: int  # RL steps behind it


def publish(layout: Callable[[dict], dict], params: dict, version: int) -> Published:
    """Copy training weights by `layout` (one program, as `transformer.decode_layout`) and wait."""
    return Published(jax.block_until_ready(layout(params)), version)
