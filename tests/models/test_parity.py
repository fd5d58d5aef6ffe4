"""Live against torch and transformers: folders, and SmolLM2's weights, tokens, greedy text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.goldens.cases import CASES
from tests.models.test_goldens import largest_difference, our_logits
from tlt_jax.models import (
    gguf,
    hf,
    hf_config,
    kv_cache,
    layers,
    pretrained,
    rope,
    transformer,
    weights,
)

pytestmark = pytest.mark.parity

PROMPTS = (
    "What is 12 + 30?",
    "Name three fruits.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into French.",
    "Count from 1 to 10.",
    "Why is the sky blue?",
    "Sort these numbers: 9, 4, 7, 1.",
    "Complete: The quick brown fox",
    "What is the capital of Italy?",
    "Give a short Python function that reverses a string.",
)
NEW = 64
TEXTS = (
    "Hello, world!  Two  spaces\tand\ttabs\n\n\nthree lines \r\n",
    "3.14159 x 2,000 = 6283.18; 1234567890 007",
    "naïve café Ångström Übergröße ﬁ ½ ²",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and a zero\u200bwidth space, nbsp\u00a0here",
    "def f(x):\n    return {'a': x**2}  # it's they'll WE'RE",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
)


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def smollm2():
    return pretrained.load("smollm2")


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_we_save(name, tmp_path, transformers):
    """Fresh random weights of each case: we write the folder, both sides compute its logits."""
    from tests.goldens import make_goldens

    config = hf_config.parse(CASES[name])
    key = jax.random.key(int.from_bytes(np.random.default_rng().bytes(4)))
    params = transformer.init(config, key)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
    noise = [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
    params = jax.tree.unflatten(treedef, [x + n for x, n in zip(leaves, noise)])
    hf.save(tmp_path / "m", config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    tokens = make_goldens.tokens_of(0, config.vocab_size)
    theirs = make_goldens.logits_of(model.eval(), tokens)
    ours = our_logits(config, params, tokens, np.array(make_goldens.LENGTHS))
    assert largest_difference(ours, theirs, make_goldens.LENGTHS) <= 1e-4


@pytest.mark.parametrize("name", CASES)
def test_we_load_what_transformers_saves(name, tmp_path, transformers):
    """The config.json that transformers writes means the same as the one that it read."""
    from tests.goldens import make_goldens

    model = make_goldens.random_model(CASES[name], 0)
    model.save_pretrained(tmp_path / "m")
    config, params = hf.load(tmp_path / "m")
    assert config == hf_config.parse(CASES[name])
    tokens = make_goldens.tokens_of(1, config.vocab_size)
    ours = our_logits(config, params, tokens, np.array(make_goldens.LENGTHS))
    theirs = make_goldens.logits_of(model, tokens)
    assert largest_difference(ours, theirs, make_goldens.LENGTHS) <= 1e-4


def test_an_outer_original_context_wins(transformers):
    fields = {**CASES["llama_yarn"], "original_max_position_embeddings": 32}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{k: v for k, v in fields.items() if k != "model_type"})
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = hf_config.parse(fields)
    np.testing.assert_allclose(
        rope.frequencies(ours.rope, ours.head_dim), theirs.numpy(), rtol=1e-6
    )
    assert ours.rope.attention_factor == pytest.approx(factor)


def test_gguf_weights_equal_those_of_transformers(smollm2, transformers):
    torch = pytest.importorskip("torch")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # The reader behind from_pretrained(gguf_file=...), which itself needs `accelerate`.
    path = str(gguf.find_smollm2())
    config = load_gguf_checkpoint(path)["config"]
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    ours = weights.unstack(smollm2.config, hf.NAMES, smollm2.params)
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(np.array_equal(ours[k], theirs[k].numpy()) for k in ours)


def test_gguf_tokenizer_against_the_conversion_of_transformers(smollm2, transformers):
    """Same ids, except that theirs keeps the default splitting of digits; ours splits each one,
    as the file's pre-tokenizer `smollm` says."""
    path = gguf.find_smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ours = smollm2.tokenizer.encode(text)
        assert smollm2.tokenizer.decode(ours, specials=True) == text
        if not any(c.isnumeric() for c in text):
            assert ours == theirs.encode(text), text


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _extend(config, params, tokens_BT, cache, count_B):
    """Append `count_B` of the tokens to the cache; the greedy next token and its lead."""
    B, T = tokens_BT.shape
    positions_BT = cache.length[:, None] + jnp.arange(T)[None]
    real_BT = jnp.arange(T)[None] < count_B[:, None]
    mask_BTT = layers.causal_mask(real_BT.astype(jnp.int32))
    out = transformer.forward(config, params, tokens_BT, positions_BT, mask_BTT, cache)
    last_BD = jnp.take_along_axis(out.hidden, (count_B - 1)[:, None, None], axis=1)[:, 0]
    slots_BT = jnp.where(real_BT, positions_BT, cache.slots)
    cache = kv_cache.write(cache, out.kv, jnp.arange(B), slots_BT)
    top, ids = jax.lax.top_k(transformer.logits(config, params, last_BD), 2)
    return ids[:, 0], top[:, 0] - top[:, 1], cache.replace(length=cache.length + count_B)


def _greedy(config, params, prompts):
    params = transformer.unstack_layers(jax.tree.map(jnp.asarray, params))
    lengths = np.array([len(p) for p in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, p in zip(tokens, prompts):
        row[: len(p)] = p
    slots = -(-(lengths.max() + NEW) // kv_cache.TILE) * kv_cache.TILE
    cache = kv_cache.empty(config, len(prompts), int(slots))
    steps, count = [], jnp.asarray(lengths)
    for _ in range(NEW):
        best, lead, cache = _extend(config, params, tokens, cache, count)
        steps.append((np.asarray(best), np.asarray(lead)))
        tokens, count = best[:, None], jnp.ones(len(prompts), jnp.int32)
    return np.stack([s[0] for s in steps], 1), np.stack([s[1] for s in steps], 1)


def test_smollm2_greedy_continuations(smollm2, transformers, tmp_path, capsys):
    """64 tokens for 10 prompts, from the folder that we write; a difference must be a tie."""
    torch = pytest.importorskip("torch")
    hf.save(tmp_path / "m", smollm2.config, smollm2.params, tokenizer=smollm2.tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    saved = pretrained.load(tmp_path / "m")
    assert saved.config == smollm2.config
    assert saved.tokenizer.eos_ids == smollm2.tokenizer.eos_ids
    prompts = [saved.tokenizer.chat([{"role": "user", "content": p}]) for p in PROMPTS]
    ours_BT, lead_BT = _greedy(smollm2.config, smollm2.params, prompts)
    ties = []
    for b, prompt in enumerate(prompts):
        with torch.no_grad():
            out = model.generate(torch.as_tensor([prompt]), do_sample=False, max_new_tokens=NEW)
        theirs = out[0, len(prompt) :].tolist()
        ours = ours_BT[b, : len(theirs)].tolist()
        if ours != theirs:
            t = next(i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y)
            ties.append((b, t, float(lead_BT[b, t])))
        else:
            assert len(theirs) == NEW or theirs[-1] in smollm2.tokenizer.eos_ids
    with capsys.disabled():
        print(f"\ngreedy: {len(prompts) - len(ties)} of {len(prompts)} equal, ties: {ties}")
    assert all(lead < 1e-3 for _, _, lead in ties), ties
    assert len(ties) <= 1
