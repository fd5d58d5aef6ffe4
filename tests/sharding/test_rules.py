"""Every array of every layout has a rule, and the mesh divides it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.spec import tiny
from tlt_jax.models import kv_cache, transformer
from tlt_jax.rl.optimizer import TrainerConfig, init_optimizer
from tlt_jax.sharding import rules
from tlt_jax.sharding.mesh import MeshConfig, make_mesh, slice_mesh
from tlt_jax.spec import state

ALL = dict(tied=False, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def model():
    return tiny.model("float32", **ALL)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(slices=2, fsdp=2, tensor=2))


def test_training_weights_and_moments_shrink_with_the_devices(model, mesh):
    _, params = model
    everything = {"params": params, "optimizer": init_optimizer(TrainerConfig(), params)}
    placed = rules.place(mesh, rules.TRAINING, everything)
    for a, b in zip(jax.tree.leaves(everything), jax.tree.leaves(placed)):
        assert jnp.array_equal(a, b)

    def bytes_of(tree):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    whole, part = sum(x.nbytes for x in jax.tree.leaves(everything)), bytes_of(placed)
    assert whole / 8 <= part < whole / 7  # norms and biases are split by fewer
    moments = jax.tree_util.tree_leaves_with_path(placed["optimizer"])
    specs = [x.sharding.spec for p, x in moments if rules.path_of(p).endswith("u/layers/w_q")]
    assert specs == [placed["params"]["layers"]["w_q"].sharding.spec] * 2  # mu and nu


def test_what_a_slice_holds_has_rules(model, mesh):
    config, params = model
    here = slice_mesh(mesh, 1)
    rules.place(here, rules.PUBLISHED, transformer.decode_layout(config, params))
    rules.place(here, rules.DECODE, state.empty(config, 4, 64))
    rules.place(here, rules.PREFIX, kv_cache.empty(config, 3, 32))


def test_an_array_without_a_rule_is_an_error(mesh):
    for name in ("layers/w_new", "my_embed_table", "new_embed"):
        with pytest.raises(ValueError, match=f"no sharding rule matches '{name}'"):
            rules.spec_of(rules.TRAINING, name)
    assert rules.spec_of(rules.TRAINING, "optimizer/0/mu/embed") == P("tensor", ("slice", "fsdp"))


def test_what_lies_there_already_is_not_copied(model, mesh):
    _, params = model
    placed = rules.place(mesh, rules.TRAINING, params)
    again = rules.place(mesh, rules.TRAINING, placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again)))
