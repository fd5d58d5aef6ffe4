"""Small models and request sets that the engine's tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import full_pass
from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.spec import noise
from tlt_jax.spec.request import Group

EOS = (3, 7)


def model(dtype="float64", seed=0, **fields) -> tuple[ModelConfig, dict]:
    """A model of random weights (stacked), large enough that its distributions are neither flat
    nor sharp: embeddings and layers of deviation 0.3, a head of 0.5, norms around 1."""
    sizes = dict(vocab_size=48, width=16, mlp_width=32, num_layers=2, num_heads=4, num_kv_heads=2)
    config = ModelConfig(**{**sizes, "head_dim": 8, "max_context": 256, **fields}, dtype=dtype)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        x = rng.normal(0, 0.5 if name == "head" else 0.3, leaf.shape)
        return jnp.asarray(x + 1 if "norm" in name else x, dtype)

    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    return config, jax.tree_util.tree_map_with_path(fill, shapes)


def requests(count: int, *, longest: int, vocab: int, seed: int = 0, members=(1, 2, 3, 5)):
    """Groups of several sizes whose draws are shuffled; a fifth of the prompts is one token."""
    rng = np.random.default_rng(seed)
    groups = []
    for draw in range(count):
        n = 1 if draw % 5 == 0 else int(rng.integers(2, longest + 1))
        prompt = tuple(int(t) for t in rng.integers(0, vocab, n))
        groups.append(Group(prompt, draw, int(rng.choice(members)), noise.TRAIN))
    return [groups[i] for i in rng.permutation(count)]


def rows_of(groups):
    """(prompts, uids) of every member, as the reference takes them."""
    pairs = [(g, m) for g in groups for m in range(g.members)]
    return [g.prompt for g, _ in pairs], [(g.domain, g.draw, m) for g, m in pairs]


def teacher_forced(config, params, responses, *, width, taps=()):
    """Log-probs [n, V] at temperature 1 and features [n, taps, D] at the places that predicted
    each response's tokens, from one pass without a cache."""
    tokens_NT = np.zeros((len(responses), width), np.int32)
    length_N = np.zeros(len(responses), np.int32)
    for i, r in enumerate(responses):
        text = [*r.group.prompt, *r.tokens]
        tokens_NT[i, : len(text)], length_N[i] = text, len(text)
    logits_NTV, features = full_pass(config, params, tokens_NT, length_N, taps)
    log_probs = np.asarray(jax.nn.log_softmax(logits_NTV, axis=-1))
    spans = [slice(len(r.group.prompt) - 1, length_N[i] - 1) for i, r in enumerate(responses)]
    rows = [log_probs[i, span] for i, span in enumerate(spans)]
    if not taps:
        return rows, None
    return rows, [np.asarray(features)[i, span] for i, span in enumerate(spans)]
