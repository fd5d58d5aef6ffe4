"""Reading and writing Hugging Face folders: same bits back, and one clear sentence when not."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.goldens.cases import CASES
from tlt_jax.models import hf, hf_config, transformer, weights
from tlt_jax.models.config import ModelConfig, RopeConfig

TINY = ModelConfig(
    vocab_size=20,
    width=16,
    mlp_width=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_context=64,
)


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    flat = {k: rng.normal(size=s).astype(np.float32) for k, s in weights.shapes(config).items()}
    layers = {k: flat.pop(k) for k in list(flat) if "layers" in hf.NAMES[k]}
    return {**flat, "layers": layers}


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.fixture
def folder(tmp_path):
    hf.save(tmp_path / "m", TINY, random_params(TINY))
    return tmp_path / "m"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "rope": RopeConfig(5e5, "linear", 3.0)},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_eps": 1e-6},
        {"qkv_bias": True, "rope": RopeConfig(1e6, "llama3", 8.0, 32, 1.5, 5.0)},
        {
            "qk_norm": True,
            "rope": RopeConfig(
                1e6,
                "yarn",
                4.0,
                32,
                beta_fast=20.0,
                beta_slow=2.0,
                attention_factor=1.138,
                truncate=False,
            ),
        },
        {"qk_norm": True, "qkv_bias": True, "o_bias": True},
    ],
)
def test_save_load_save_gives_the_same_bits(tmp_path, changes):
    config = ModelConfig(**{**vars(TINY), **changes})
    params = random_params(config)
    hf.save(tmp_path / "a", config, params)
    read, again = hf.load(tmp_path / "a")
    assert read == config
    assert_same_bits(again, params)
    hf.save(tmp_path / "b", read, again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"], "drafts must not stay"


def test_bfloat16_and_float64(tmp_path):
    params = random_params(TINY)
    hf.save(tmp_path / "m", TINY, params, dtype="bfloat16")
    _, narrow = hf.load(tmp_path / "m", dtype="bfloat16")
    _, wide = hf.load(tmp_path / "m", dtype=np.float64)
    as_saved = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    assert_same_bits(narrow, as_saved)
    assert_same_bits(wide, jax.tree.map(lambda x: x.astype(np.float64), as_saved))


def test_shapes_are_those_of_the_transformer():
    config = ModelConfig(**{**vars(TINY), "tied": True, "qkv_bias": True, "qk_norm": True})
    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    assert weights.shapes(config) == {
        k: x.shape for k, x in {**params, **params["layers"]}.items() if k != "layers"
    }
    assert config.num_params == sum(x.size for x in jax.tree.leaves(params))


def test_sharded_folder(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, value) in enumerate(sorted(tensors.items())):
        shards[("a.safetensors", "b.safetensors")[i % 2]][name] = value
    for name, part in shards.items():
        save_file(part, folder / name)
    index = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _, params = hf.load(folder)
    assert_same_bits(params, random_params(TINY))

    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors is missing"):
        hf.load(folder)


def test_derived_tensors_are_tolerated(tmp_path):
    config = ModelConfig(**{**vars(TINY), "tied": True})
    params = random_params(config)
    hf.save(tmp_path / "m", config, params)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        tensors["lm_head.weight"] = params["embed"]

    edit_tensors(tmp_path / "m", add)
    assert_same_bits(hf.load(tmp_path / "m")[1], params)

    edit_tensors(tmp_path / "m", lambda t: t.update({"lm_head.weight": params["embed"] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight' differs"):
        hf.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((24, 15), "f4")}),
            r"'model.layers.1.mlp.up_proj.weight' has shape \(24, 15\), its config says \(24, 16\)",
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.zeros((24, 16), "f4")}),
            "has tensor 'model.layers.3.mlp.up_proj.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(24, "f4")}),
            "has tensor 'model.layers.0.self_attn.q_proj.bias'",
        ),
    ],
)
def test_tensors_that_do_not_fit(folder, change, message):
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


@pytest.mark.parametrize("keep", [0.5, 0.99, 0.001])
def test_truncated_safetensors(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or truncated"):
        hf.load(folder)


def test_folders_that_are_no_models(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no config\.json"):
        hf.load(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hf.load(tmp_path / "nothing")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        hf.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hf.load(folder)


def test_names_that_cannot_be_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'owner/nothing' is not an existing folder and"):
        hf.load("owner/nothing")
    with pytest.raises(FileNotFoundError, match="neither an existing folder nor a Hugging Face id"):
        hf.load("a/b/c")


def test_save_refuses_what_it_would_spoil(folder, tmp_path):
    with pytest.raises(FileExistsError, match="is not empty"):
        hf.save(folder, TINY, random_params(TINY))
    params = random_params(TINY)
    params["layers"]["w_q"] = params["layers"]["w_q"][:2]
    with pytest.raises(ValueError, match=r"params\['w_q'\] has shape"):
        hf.save(tmp_path / "b", TINY, params)
    params = random_params(TINY)
    del params["layers"]["w_up"]
    with pytest.raises(ValueError, match=r"missing \['w_up'\]"):
        hf.save(tmp_path / "b", TINY, params)
    no_family = ModelConfig(**{**vars(TINY), "o_bias": True})
    with pytest.raises(ValueError, match="no transformers family"):
        hf.save(tmp_path / "b", no_family, random_params(no_family))
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "nothing half-written"


LLAMA, QWEN2 = CASES["llama_plain"], CASES["qwen2_tied"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | {"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"num_experts": 8}, "'num_experts'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "'quantization_config'"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
        (LLAMA | {"attention_multiplier": 0.1}, "'attention_multiplier'"),
        (LLAMA | {"sliding_window": 16}, "sliding_window=16 is in use"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved=True"),
        (LLAMA | {"vocab_size": None}, "needs 'vocab_size'"),
        (LLAMA | {"num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' needs 'factor'"),
        (LLAMA | {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            LLAMA
            | {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "disagree",
        ),
        (QWEN2 | {"use_sliding_window": True}, "sliding_window=8 is in use"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "is in use"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        (QWEN2 | {"mlp_bias": True}, "mlp_bias=true"),
        (QWEN2 | {"num_key_value_heads": None}, "needs 'num_key_value_heads'"),
        (QWEN2 | {"dual_chunk_attention_config": {}}, "'dual_chunk_attention_config'"),
        (QWEN2 | {"use_mrope": True}, "use_mrope=True"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        hf_config.parse(fields)


def test_switched_off_settings_are_accepted():
    off = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}
    parsed = hf_config.parse(QWEN2 | off | {"use_mrope": False, "quantization_config": None})
    assert parsed == hf_config.parse(QWEN2)


def test_yarn_attention_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

    def factor(**more):
        return hf_config.parse(LLAMA | {"rope_scaling": yarn | more}).rope.attention_factor

    assert factor() == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    assert factor(attention_factor=0.75) == 0.75
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=0.707) == factor(), "one mscale alone is not read"
    assert factor(factor=0.5) == 1.0


def test_original_context_falls_back_to_the_context():
    yarn = {"rope_type": "yarn", "factor": None}
    parsed = hf_config.parse(LLAMA | {"rope_scaling": yarn})
    assert (parsed.rope.original_context, parsed.rope.factor) == (64, 1.0)
    parsed = hf_config.parse(LLAMA | {"rope_scaling": yarn, "original_max_position_embeddings": 16})
    assert (parsed.rope.original_context, parsed.rope.factor) == (16, 4.0)


def test_fields_of_published_configs_are_known():
    """Every field that the configs of SmolLM2, Llama 3.2 and R1-Distill-Qwen-1.5B carry."""
    smollm2 = LLAMA | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    assert hf_config.parse(smollm2).rope == RopeConfig(500.0)
    llama = LLAMA | {
        "head_dim": 6,
        "eos_token_id": [1, 2, 3],
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }
    assert hf_config.parse(llama).rope == RopeConfig(500.0, "llama3", 32.0, 8192, 1.0, 4.0)
    r1 = QWEN2 | {"use_mrope": False, "attention_dropout": 0.0, "sliding_window": 4096}
    assert hf_config.parse(r1).qkv_bias
