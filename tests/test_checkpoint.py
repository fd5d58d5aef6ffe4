"""A checkpoint gives back the same bits, or says by name what is wrong with it."""

import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlt_jax import atomic, checkpoint
from tlt_jax.checkpoint import CheckpointConfig, CheckpointError, Checkpoints


def state(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "embed": jax.random.normal(keys[0], (40, 30)),
        "layers": {"w": jax.random.normal(keys[1], (2, 8, 8), jnp.bfloat16)},
    }
    return {"policy": {"params": params, "opt": optax.adamw(1e-3).init(params)}}


def equal(a, b) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def saved(folder, steps, config=None, **keep):
    checkpoints = Checkpoints(folder, config or CheckpointConfig(every=1))
    for step in steps:
        checkpoints.save(step, state(step), {"step": step}, **keep)
    checkpoints.wait()
    return checkpoints


def test_what_is_restored_is_what_was_saved(tmp_path):
    checkpoints = saved(tmp_path / "c", [3, 7])
    again = Checkpoints(tmp_path / "c", CheckpointConfig())
    assert again.steps() == [3, 7] and again.record(7) == {"step": 7}
    assert equal(again.restore(7, state()), state(7))
    assert not equal(again.restore(3, state()), state(7))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state()
    )
    assert equal(checkpoints.restore(3, shapes), state(3))


def test_parts_are_restored_one_by_one(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", CheckpointConfig())
    checkpoints.save(1, {**state(1), "drafter": {"w": jnp.ones(3)}}, {})
    checkpoints.wait()
    found = checkpoints.restore(1, {"drafter": {"w": jnp.zeros(3)}})
    assert equal(found, {"drafter": {"w": jnp.ones(3)}})


def test_arrays_may_be_donated_while_they_are_saved(tmp_path):
    big = {"policy": {"w": jnp.arange(2e6)}}
    expected = np.array(big["policy"]["w"])
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "c", CheckpointConfig())
    checkpoints.save(1, big, {})
    zeros = jax.block_until_ready(donate(big))
    assert big["policy"]["w"].is_deleted()  # the copy holds nothing of it
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.restore(1, zeros)["policy"]["w"], expected)


@pytest.mark.parametrize(
    "config, keep, left",
    [
        (CheckpointConfig(every=1, keep_last=1), False, [6]),
        (CheckpointConfig(every=1, keep_last=2), False, [5, 6]),
        (CheckpointConfig(every=1, keep_last=1, keep_every=3), False, [0, 3, 6]),
        (CheckpointConfig(every=1, keep_last=1), True, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_old_ones_are_removed_but_those_to_keep(tmp_path, config, keep, left):
    assert saved(tmp_path / "c", range(7), config, keep=keep).steps() == left


def test_no_checkpoint_is_removed_before_the_next_is_finished(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path / "c", [1], CheckpointConfig(every=1, keep_last=1))

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.atomic, "write_json", broken)
    checkpoints.save(2, state(2), {})
    with pytest.raises(CheckpointError, match=r"No space left.*; step 1 is the last good one\."):
        checkpoints.wait()
    assert equal(checkpoints.restore(1, state()), state(1))


def test_what_has_no_manifest_is_not_there_and_is_cleared_away(tmp_path):
    checkpoints = saved(tmp_path / "c", [1, 2])
    (tmp_path / "c" / "2" / checkpoint.MANIFEST).unlink()
    (tmp_path / "c" / "9").mkdir()
    again = Checkpoints(tmp_path / "c", CheckpointConfig())
    assert again.steps() == [1]
    again.save(2, state(5), {"step": 5})
    again.wait()
    assert equal(checkpoints.restore(2, state()), state(5))
    assert not (tmp_path / "c" / "9").exists()


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def biggest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: flip_a_byte(biggest_file(folder)), "is not what was written"),
        (lambda folder: biggest_file(folder).unlink(), "No such file"),
        (lambda folder: shutil.rmtree(folder / "arrays"), "No such file"),
        (lambda folder: (folder / checkpoint.MANIFEST).write_text("{"), "manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path, damage, words):
    checkpoints = saved(tmp_path / "c", [1, 2])
    damage(tmp_path / "c" / "2")
    with pytest.raises(CheckpointError, match=rf"c/2 is damaged .*{words}.*go on from step 1"):
        checkpoints.record(2)
    shutil.rmtree(tmp_path / "c" / "1")
    with pytest.raises(CheckpointError, match="go on from the start"):
        checkpoints.record(2)


def test_other_arrays_are_listed_and_nothing_is_cast(tmp_path):
    checkpoints = saved(tmp_path / "c", [1])
    like = state()
    params = like["policy"]["params"]
    params["embed"] = jnp.zeros((40, 31))
    params["layers"]["w"] = params["layers"]["w"].astype(jnp.float32)
    params["new"] = jnp.zeros(())
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(1, like)
    for words in (
        "3 of them",
        "policy/params/embed is float32[40,30] there and float32[40,31] here",
        "policy/params/layers/w is bfloat16[2,8,8] there and float32[2,8,8] here",
        "policy/params/new is missing there and float32[] here",
    ):
        assert words in str(error.value)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    checkpoints = saved(tmp_path / "c", [1])
    big = {"policy": {"w": jnp.arange(2e6)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # a file of 8 MB cannot be
    try:
        checkpoints.save(2, big, {})
        with pytest.raises(CheckpointError, match=r"File too large.*step 1 is the last good one"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == [1] and equal(checkpoints.restore(1, state()), state(1))
    checkpoints.save(2, big, {})  # once there is room again
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_a_folder_that_cannot_be_is_an_error_of_the_save(tmp_path):
    (tmp_path / "c").touch()
    checkpoints = Checkpoints(tmp_path / "c", CheckpointConfig())
    checkpoints.save(1, state(), {})
    with pytest.raises(CheckpointError, match="no checkpoint is the last good one"):
        checkpoints.save(2, state(), {})


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"every": -1}, "every=-1"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"every": 4, "keep_every": 6}, "keep_every=6 must be a multiple of every=4"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        CheckpointConfig(**settings)


def test_a_line_file_goes_on_where_it_was(tmp_path):
    path = tmp_path / "lines"
    file = atomic.LineFile(path)
    file.append("one\n", sync=False)
    size = file.size()
    file.append("two\n", sync=True)
    file.close()
    again = atomic.LineFile(path, size)
    again.append("deux\n", sync=True)
    assert path.read_text() == "one\ndeux\n"
    for wrong in (size - 1, 100):
        with pytest.raises(ValueError, match=f"no line that ends at byte {wrong}"):
            atomic.LineFile(path, wrong)
    assert path.read_text() == "one\ndeux\n"
