"""From training weights to the weights that rollouts read.

The trained arrays are donated at every update, and donating an array deletes every view of it. The
published copy is never donated and carries a version, to which caches and features belong.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding

from tlt_jax.sharding.mesh import slice_mesh
from tlt_jax.sharding.rules import PUBLISHED, TRAINING, constrain, place, shardings


@dataclasses.dataclass(frozen=True)
class Published:
    """Weights in the layout of decoding, whole on every slice but for the tensor axis."""

    params: dict  # on the global mesh
    version: int  # RL steps behind it
    mesh: Mesh

    def view(self, i: int) -> dict:
        """The weights as arrays on the sub-mesh of slice `i`, of this process; no copy: the arrays
        share the published buffers."""
        here = slice_mesh(self.mesh, i)
        devices = set(here.devices.flat)

        def part(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            shards = [s.data for s in x.addressable_shards if s.device in devices]
            return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

        return jax.tree.map(part, self.params, shardings(here, PUBLISHED, self.params))


def publish(mesh: Mesh, layout: Callable[[dict], dict], params: dict, version: int) -> Published:
    """Copy training weights by `layout` (as `transformer.decode_layout`) to every slice, in one
    program of the whole mesh, and wait. The result shares no memory with `params`."""
    params = _program(mesh, layout)(place(mesh, TRAINING, params))
    return Published(jax.block_until_ready(params), version, mesh)


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, layout: Callable[[dict], dict]) -> Callable[[dict], dict]:
    def published(params):
        return constrain(mesh, PUBLISHED, layout(params))

    return jax.jit(published)
