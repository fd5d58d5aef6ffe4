"""Laws of the transformer: causality, cached = uncached, stacked = unstacked, packed = apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.spec import tiny
from tlt_jax.models import kv_cache, layers, transformer
from tlt_jax.models.config import ModelConfig, RopeConfig

FEATURES = dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied=True)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(float64):
    return tiny.model(**FEATURES)


def positions(shape):
    return jnp.broadcast_to(jnp.arange(shape[1])[None], shape)


@partial(jax.jit, static_argnums=(0, 3))
def plain(config, params, tokens_BT, taps=()):
    """Every row in full, no cache."""
    mask = layers.causal_mask(jnp.ones(tokens_BT.shape, jnp.int32))
    return transformer.forward(
        config, params, tokens_BT, positions(tokens_BT.shape), mask, taps=taps
    )


def tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 48, shape), jnp.int32)


def test_causality_by_gradient(model):
    """The state at place t has no gradient to later embeddings, and some to every earlier one."""
    config, params = model
    B_T = (1, 6)
    mask = layers.causal_mask(jnp.ones(B_T, jnp.int32))

    def state_at(shift_TD, t):
        # One embedding row per place, so that places can be told apart.
        moved = {**params, "embed": params["embed"].at[:6].add(shift_TD)}
        out = transformer.forward(config, moved, jnp.arange(6)[None], positions(B_T), mask)
        return jnp.sum(out.hidden[0, t] * jnp.arange(1.0, config.width + 1))

    grads = jax.jit(jax.vmap(jax.grad(state_at), in_axes=(None, 0)))
    grad_TTD = np.asarray(grads(jnp.zeros((6, config.width)), jnp.arange(6)))
    reached = np.abs(grad_TTD).max(-1) > 1e-9
    np.testing.assert_array_equal(reached, np.tril(np.ones((6, 6), bool)))


def stacked(params):
    """The inverse of `unstack_layers`."""
    return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def test_cached_equals_uncached_for_every_split_and_uneven_lengths(model):
    """Each row is split where its own length says; the second part is fed at once, then token by
    token; slots past the length hold huge values."""
    config, params = model
    B, T, S = 8, 9, 32
    unstacked = transformer.unstack_layers(params)
    tokens_BT = tokens((B, T))
    want = plain(config, params, tokens_BT, taps=(0, 1, 2))
    full = plain(config, unstacked, tokens_BT)
    split_B = jnp.arange(1, B + 1)  # every split point: 1 to 8 of 9 tokens are committed
    places = jnp.where(positions((B, T)) < split_B[:, None], positions((B, T)), S)
    cache = kv_cache.empty(config, B, S)
    cache = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, 1e30), cache)
    cache = kv_cache.write(cache, full.kv, jnp.arange(B), places).replace(length=split_B)

    @jax.jit
    def step(cache, tokens_BN):
        at = cache.length[:, None] + positions(tokens_BN.shape)
        mask = layers.causal_mask(jnp.ones(tokens_BN.shape, jnp.int32))
        out = transformer.forward(config, unstacked, tokens_BN, at, mask, cache, taps=(0, 1, 2))
        cache = kv_cache.write(cache, out.kv, jnp.arange(B), at)
        return cache.replace(length=cache.length + tokens_BN.shape[1]), out

    def next_tokens(cache, count):
        at = cache.length[:, None] + jnp.arange(count)[None]
        return jnp.take_along_axis(tokens_BT, jnp.minimum(at, T - 1), axis=1), at

    def check(cache, count):
        fed, at = next_tokens(cache, count)
        cache, out = step(cache, fed)
        for b in range(B):
            n = int(np.sum(np.asarray(at[b]) < T))
            here = slice(int(at[b, 0]), int(at[b, 0]) + n)
            np.testing.assert_allclose(out.hidden[b, :n], want.hidden[b, here], atol=1e-10)
            np.testing.assert_allclose(out.features[b, :n], want.features[b, here], atol=1e-10)
        return cache

    check(cache, T - 1)
    for _ in range(T - 1):
        cache = check(cache, 1)


def test_rolling_back_is_setting_the_length(model):
    """After a rejected guess the next states are those of the accepted prefix."""
    config, params = model
    unstacked = transformer.unstack_layers(params)
    text, guess = tokens((1, 6)), tokens((1, 3), seed=1)
    cache = kv_cache.empty(config, 1, 32)

    @jax.jit
    def feed(cache, new):
        at = cache.length[:, None] + positions(new.shape)
        mask = layers.causal_mask(jnp.ones(new.shape, jnp.int32))
        out = transformer.forward(config, unstacked, new, at, mask, cache)
        cache = kv_cache.write(cache, out.kv, jnp.arange(1), at)
        return cache.replace(length=cache.length + new.shape[1]), out.hidden

    cache, _ = feed(cache, text[:, :3])
    rejected, _ = feed(cache, guess)
    _, got = feed(rejected.replace(length=jnp.asarray([3], jnp.int32)), text[:, 3:])
    want = plain(config, params, text).hidden[:, 3:]
    np.testing.assert_allclose(got, want, atol=1e-10)
    _, wrong = feed(rejected, text[:, 3:])
    assert np.abs(wrong - want).max() > 1e-3


@pytest.mark.parametrize("remat", (False, True))
def test_stacked_equals_unstacked(model, remat):
    """States, features and gradients, with and without recomputation; the round trip is exact."""
    config, params = model
    config = ModelConfig(**{**vars(config), "remat": remat})
    unstacked = transformer.unstack_layers(params)
    back = stacked(unstacked)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    tokens_BT = tokens((2, 7))
    one, two = (plain(config, p, tokens_BT, taps=(0, 1, 2)) for p in (params, unstacked))
    np.testing.assert_allclose(one.hidden, two.hidden, atol=1e-11)
    np.testing.assert_allclose(one.features, two.features, atol=1e-11)
    np.testing.assert_array_equal(one.features[:, :, 2], one.hidden)
    np.testing.assert_array_equal(one.features[:, :, 0], params["embed"][tokens_BT])
    loss = lambda p: jnp.sum(jnp.sin(plain(config, p, tokens_BT).hidden))  # noqa: E731
    grads = jax.jit(jax.grad(loss))
    a, b = grads(params), stacked(grads(unstacked))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-10), a, b)


def test_packed_rows_equal_separate_rows(model):
    """Segments share a row, positions restart, padding is behind; and a mask that ignores the
    segments differs."""
    config, params = model
    parts = [tokens((1, n), seed=n) for n in (3, 1, 5)]
    row = jnp.concatenate([*parts, jnp.zeros((1, 3), jnp.int32)], axis=1)
    segments = jnp.asarray([[1] * 3 + [2] + [3] * 5 + [0] * 3])
    places = jnp.asarray([[*range(3), 0, *range(5), *range(3)]])
    run = jax.jit(lambda mask: transformer.forward(config, params, row, places, mask).hidden)
    packed = run(layers.causal_mask(segments))
    mixed = run(layers.causal_mask(jnp.ones_like(segments)))
    assert np.isfinite(packed).all()
    for part, start in zip(parts, (0, 3, 4)):
        want = plain(config, params, part).hidden[0]
        span = slice(start, start + part.shape[1])
        np.testing.assert_allclose(packed[0, span], want, atol=1e-10)
        if start:
            assert np.abs(mixed[0, span] - want).max() > 1e-3


def test_a_cache_needs_unstacked_layers(model):
    config, params = model
    one = jnp.zeros((1, 1), jnp.int32)
    cache = kv_cache.empty(config, 1, 32)
    with pytest.raises(ValueError, match="unstack_layers"):
        transformer.forward(config, params, one, one, jnp.ones((1, 1, 1), bool), cache)


FULL_SIZE = {
    "Qwen2.5-7B": (
        ModelConfig(
            vocab_size=152064, width=3584, mlp_width=18944, num_layers=28, num_heads=28,
            num_kv_heads=4, head_dim=128, max_context=32768, qkv_bias=True,
        ),
        7_615_616_512,
    ),
    "Qwen2.5-32B": (
        ModelConfig(
            vocab_size=152064, width=5120, mlp_width=27648, num_layers=64, num_heads=40,
            num_kv_heads=8, head_dim=128, max_context=32768, qkv_bias=True,
        ),
        32_763_876_352,
    ),
    "Llama-3.3-70B": (
        ModelConfig(
            vocab_size=128256, width=8192, mlp_width=28672, num_layers=80, num_heads=64,
            num_kv_heads=8, head_dim=128, max_context=131072,
            rope=RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192),
        ),
        70_553_706_496,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_models_by_shape(name):
    """Published parameter counts, and the shapes of a training pass, without an array made."""
    config, count = FULL_SIZE[name]
    params = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == count == config.num_params

    def scores(params, tokens_BT):
        return transformer.logits(config, params, plain(config, params, tokens_BT, (1,)).hidden)

    out = jax.eval_shape(scores, params, jax.ShapeDtypeStruct((2, 64), jnp.int32))
    assert out.shape == (2, 64, config.vocab_size) and out.dtype == jnp.float32


def test_init_is_what_it_says():
    config = ModelConfig(
        vocab_size=64, width=32, mlp_width=64, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, max_context=32, dtype="bfloat16", **FEATURES,
    )  # fmt: skip
    params = transformer.init(config, jax.random.key(0))
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        assert x.dtype == jnp.float32
        if "norm" in name:
            assert np.all(x == 1)
        elif name.startswith("b_"):
            assert np.all(x == 0)
        else:
            assert abs(np.std(x) / 0.02 - 1) < 0.1, name
    w_q = params["layers"]["w_q"]
    assert not np.array_equal(w_q[0], w_q[1])


@pytest.mark.parametrize(
    "fields, message",
    (
        (dict(num_heads=3), "num_heads=3 is not a multiple of num_kv_heads=2"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(dtype="float16"), "dtype='float16'"),
        (dict(width=0), "width=0 must be at least 1"),
    ),
)
def test_bad_configs_are_refused(fields, message):
    sizes = dict(vocab_size=4, width=4, mlp_width=4, num_layers=1, num_heads=2, num_kv_heads=2)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**sizes, "head_dim": 4, "max_context": 8, **fields})
