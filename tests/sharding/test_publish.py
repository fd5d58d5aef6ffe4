"""Publishing copies; slices view what was published."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.spec import tiny
from tlt_jax.models import transformer
from tlt_jax.sharding import rules
from tlt_jax.sharding.mesh import MeshConfig, make_mesh, slice_mesh
from tlt_jax.sharding.publish import publish


@pytest.mark.parametrize(
    "shape", [MeshConfig(), MeshConfig(slices=4), MeshConfig(slices=2, fsdp=2, tensor=2)]
)
def test_an_update_may_run_while_a_slice_holds_its_view(shape):
    config, params = tiny.model("float32")
    mesh = make_mesh(shape)
    trained = rules.place(mesh, rules.TRAINING, jax.tree.map(jnp.copy, params))
    layout = partial(transformer.decode_layout, config)
    published = publish(mesh, layout, trained, version=3)
    assert published.version == 3
    expected = jax.tree.map(np.array, layout(params))
    views = [published.view(i) for i in range(shape.slices)]
    update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    update(trained)
    assert all(x.is_deleted() for x in jax.tree.leaves(trained))
    for i, view in enumerate(views):
        jax.tree.map(np.testing.assert_array_equal, view, expected)
        devices = set(slice_mesh(mesh, i).devices.flat)
        assert all(x.sharding.device_set == devices for x in jax.tree.leaves(view))

    def pointers(x):
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]

    for x, *parts in zip(*map(jax.tree.leaves, (published.params, *views))):
        assert pointers(x) == sum(map(pointers, parts), [])  # shared, not copied


def test_a_view_of_the_trained_weights_themselves_would_be_deleted():
    """What publishing is for: the wrong way fails."""
    _, params = tiny.model("float32")
    mesh = make_mesh(MeshConfig())
    trained = rules.place(mesh, rules.TRAINING, jax.tree.map(jnp.copy, params))
    part = trained["embed"].addressable_shards[0].data
    view = jax.make_array_from_single_device_arrays(
        part.shape, jax.sharding.SingleDeviceSharding(part.device), [part]
    )
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(trained)
    with pytest.raises(RuntimeError, match="deleted"):
        np.array(view)
