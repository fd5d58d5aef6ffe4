"""The global mesh, (slice, fsdp, tensor), and the sub-mesh that a slice's worker decodes on.

A slice is the devices of one worker: fsdp x tensor of them, all of one process. Training shards
over all three axes; published weights are sharded over `tensor` and replicated over the rest.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

SLICE, FSDP, TENSOR = "slice", "fsdp", "tensor"
DATA = (SLICE, FSDP)  # the axes that split rows of a batch


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices used."""

    slices: int = 1  # workers
    fsdp: int = 1  # within a slice: rows decoded apart, training weights split further
    tensor: int = 1  # within a slice: heads, mlp and vocabulary split

    def __post_init__(self):
        for name in ("slices", "fsdp", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def slice_devices(self) -> int:
        return self.fsdp * self.tensor


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The global mesh over `devices` (JAX's own), slice by slice, process by process.

    Every process gets as many slices; of more devices than these need its first are used. Raises
    ValueError where that cannot be.
    """
    by_process = collections.defaultdict(list)
    for device in jax.devices() if devices is None else devices:
        by_process[device.process_index].append(device)
    processes, size = len(by_process), config.slice_devices
    if config.slices % processes:
        raise ValueError(
            f"mesh.slices={config.slices} cannot be shared evenly by {processes} processes; use a "
            f"multiple of {processes}. A slice never spans processes"
        )
    here = config.slices // processes * size  # devices of each process
    few = {p: len(found) for p, found in by_process.items() if len(found) < here}
    if few:
        process, found = min(few.items())
        where = f"process {process}" if processes > 1 else "this process"
        raise ValueError(
            f"mesh.slices={config.slices}, fsdp={config.fsdp}, tensor={config.tensor} need {here} "
            f"devices in {where}, which has {found}. Ask for less, or, on CPUs, for more devices: "
            f"JAX_NUM_CPU_DEVICES={here}"
        )
    used = [d for p in sorted(by_process) for d in by_process[p][:here]]
    grid = np.array(used).reshape(config.slices, config.fsdp, config.tensor)
    return Mesh(grid, (SLICE, FSDP, TENSOR), axis_types=(AxisType.Auto,) * 3)


def slice_mesh(mesh: Mesh, i: int) -> Mesh:
    """The devices of slice `i`, with the axes fsdp and tensor."""
    return Mesh(mesh.devices[i], (FSDP, TENSOR), axis_types=(AxisType.Auto,) * 2)


def single_device_mesh(device: jax.Device | None = None) -> Mesh:
    """A global mesh of one device, JAX's first by default."""
    return make_mesh(MeshConfig(), [device or jax.local_devices()[0]])


def local_slices(mesh: Mesh) -> list[int]:
    """Numbers of the slices whose devices are this process's."""
    here = jax.process_index()
    return [i for i, part in enumerate(mesh.devices) if part.flat[0].process_index == here]


def data_shards(mesh: Mesh) -> int:
    """Parts that the rows of a training batch are split into."""
    return mesh.shape[SLICE] * mesh.shape[FSDP]
