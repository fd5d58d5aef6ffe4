"""The mesh: who is where, and what cannot be."""

import types

import jax
import pytest

from tests.spec import tiny
from tlt_jax.sharding.mesh import (
    MeshConfig,
    data_shards,
    local_slices,
    make_mesh,
    single_device_mesh,
    slice_mesh,
)


def test_slices_are_consecutive_devices():
    mesh = make_mesh(MeshConfig(slices=2, fsdp=2, tensor=2))
    assert mesh.axis_names == ("slice", "fsdp", "tensor") and data_shards(mesh) == 4
    assert list(mesh.devices.flat) == jax.devices()[:8]
    assert list(slice_mesh(mesh, 1).devices.flat) == jax.devices()[4:8]
    assert slice_mesh(mesh, 1).axis_names == ("fsdp", "tensor")
    assert local_slices(mesh) == [0, 1]
    assert single_device_mesh().shape == {"slice": 1, "fsdp": 1, "tensor": 1}


def processes(*devices):
    """Devices as those of several processes, in no good order."""
    return [
        types.SimpleNamespace(process_index=p, id=10 * p + i)
        for i in range(max(devices))
        for p, count in enumerate(devices)
        if i < count
    ]


def made(config, devices, monkeypatch):
    monkeypatch.setattr("tlt_jax.sharding.mesh.Mesh", lambda grid, *_, **__: grid)
    return [[d.id for d in part.flat] for part in make_mesh(config, devices)]


def test_a_slice_lies_in_one_process_and_each_has_as_many(monkeypatch):
    config = MeshConfig(slices=4, tensor=2)
    assert made(config, processes(4, 5), monkeypatch) == [[0, 1], [2, 3], [10, 11], [12, 13]]


@pytest.mark.parametrize(
    "config, devices, words",
    [
        (MeshConfig(slices=3), (4, 4), "slices=3 cannot be shared evenly by 2 processes"),
        (MeshConfig(slices=2, tensor=2), (2, 1), "need 2 devices in process 1, which has 1"),
        (MeshConfig(slices=1, fsdp=2), (1,), r"fsdp=2.* need 2 devices in this process, .* 1\."),
    ],
)
def test_too_few_devices_are_named(config, devices, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(config, processes(*devices))


def test_sizes_below_one_and_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tensor=0"):
        MeshConfig(tensor=0)
    model, _ = tiny.model("float32")
    model.check_split(tensor=2, data=4)
    with pytest.raises(ValueError, match="mesh.tensor=4 does not divide .* num_kv_heads=2"):
        model.check_split(tensor=4)
    with pytest.raises(ValueError, match="3, does not divide the model's width=16"):
        model.check_split(data=3)
