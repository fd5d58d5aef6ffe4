"""config.json of a Hugging Face folder <-> ModelConfig.

Every field is either read, required to have the one value that we compute, or known to leave the
logits alone; any other field is refused by name, because a setting that is silently ignored gives
fluent but wrong text. The meaning of the fields is that of transformers 5 (configuration_llama.py,
configuration_qwen2.py, configuration_qwen3.py, modeling_rope_utils.py).
"""

import math

from tlt_jax.models.config import ModelConfig, RopeConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Fields that leave the logits alone: bookkeeping, training and generation defaults, token ids.
IGNORED = frozenset(
    """
    _name_or_path name_or_path architectures model_type transformers_version tokenizer_class
    torch_dtype dtype is_llama_config transformers.js_config prefix task_specific_params
    unsloth_fixed unsloth_version _attn_implementation attn_implementation
    _attn_implementation_autoset _commit_hash finetuning_task problem_type id2label label2id
    num_labels return_dict output_attentions output_hidden_states torchscript use_bfloat16
    tf_legacy_loss chunk_size_feed_forward gradient_checkpointing
    initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout dropout
    use_cache pretraining_tp max_window_layers
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
)

# Fields that would change the function, with the only value that is computed here.
FIXED = {
    "rope_interleaved": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "is_causal": True,
}


def parse(fields: dict) -> ModelConfig:
    """The ModelConfig that a config.json describes.

    Raises ValueError naming the field: a size that is missing, a family, activation, attention or
    rotary embedding that is not supported, or a field whose effect is not known here.
    """
    family = fields.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(f"model_type={family!r} is not supported; use one of {set(ARCHITECTURES)}")
    architectures = fields.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise ValueError(
            f"architectures={architectures} is not supported for model_type={family!r}; "
            f"only {ARCHITECTURES[family]} is"
        )
    left = {k: v for k, v in fields.items() if v is not None}

    def need(name: str) -> int:
        if name not in left:
            raise ValueError(f"config.json of a {family} model needs {name!r}")
        return int(left.pop(name))

    heads, width, layers = (
        need(n) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    kv_heads = heads
    if family != "llama" or "num_key_value_heads" in left:
        kv_heads = need("num_key_value_heads")
    if family == "qwen3" or "head_dim" in left:
        head_dim = need("head_dim")
    elif width % heads:
        raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    else:
        head_dim = width // heads
    max_context = need("max_position_embeddings")

    activation = left.pop("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; only 'silu' is")
    _refuse_sliding_window(left, family, layers)
    mlp_bias = bool(left.pop("mlp_bias", False))
    if mlp_bias and family != "llama":
        raise ValueError(f"mlp_bias=true is not supported for model_type={family!r}")
    # Qwen2 has biases on q, k, v and never on the output, whatever the field says.
    attention_bias = bool(left.pop("attention_bias", False))
    config = ModelConfig(
        vocab_size=need("vocab_size"),
        width=width,
        mlp_width=need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=float(left.pop("rms_norm_eps", 1e-6)),
        rope=_parse_rope(left, max_context),
        tied=bool(left.pop("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
    )
    for name, value in FIXED.items():
        given = left.pop(name, value)
        if given != value:
            raise ValueError(f"{name}={given!r} is not supported; only {value!r} is")
    unknown = {k: v for k, v in left.items() if k not in IGNORED}
    if unknown:
        name, value = next(iter(unknown.items()))
        raise ValueError(
            f"config.json field {name!r} (= {_short(value)}) is not known here and may change the "
            "model; if it does not, delete it from config.json or add it to IGNORED in "
            "tlt_jax/models/hf_config.py"
        )
    return config


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_sliding_window(left: dict, family: str, layers: int):
    # Qwen2 and Qwen3 configs ship a window that is switched off; their defaults apply when absent.
    on = left.pop("use_sliding_window", family == "llama")
    window = left.pop("sliding_window", None if family == "llama" else 4096)
    first = left.pop("max_window_layers", 0 if family == "llama" else 28)
    kinds = left.pop("layer_types", None)
    if kinds is None:
        used = bool(on) and window is not None and first < layers
        kinds = ["sliding_attention" if used else "full_attention"]
    for kind in kinds:
        if kind == "sliding_attention":
            raise ValueError(f"sliding_window={window} is in use and not supported")
        if kind != "full_attention":
            raise ValueError(f"layer_types has {kind!r}; only 'full_attention' is supported")


def _parse_rope(left: dict, max_context: int) -> RopeConfig:
    """RoPE settings in the older spelling (rope_theta, rope_scaling) or the newer one."""
    old, new = left.pop("rope_scaling", None) or {}, left.pop("rope_parameters", None) or {}
    if old and new and old != new:
        raise ValueError(f"rope_scaling={old} and rope_parameters={new} disagree; keep one")
    scaling = dict(old or new)
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    theta = left.pop("rope_theta", 10_000.0)
    theta = float(scaling.pop("rope_theta", theta))
    partial = scaling.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")

    def need(name: str):
        if name not in scaling:
            raise ValueError(f"rope_type={kind!r} needs {name!r}")
        return scaling.pop(name)

    # transformers lets the top-level field win over the one in the dictionary.
    outer = left.pop("original_max_position_embeddings", None)
    if kind in ("llama3", "yarn"):
        inner = scaling.pop("original_max_position_embeddings", None)
        original = int(outer or inner or max_context)
    if kind == "default":
        rope = RopeConfig(theta)
    elif kind == "linear":
        rope = RopeConfig(theta, "linear", float(need("factor")))
    elif kind == "llama3":
        rope = RopeConfig(
            theta,
            "llama3",
            float(need("factor")),
            original,
            low_freq_factor=float(need("low_freq_factor")),
            high_freq_factor=float(need("high_freq_factor")),
        )
    elif kind == "yarn":
        factor = need("factor")
        factor = float(max_context / original if factor is None else factor)
        rope = RopeConfig(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=float(scaling.pop("beta_fast", None) or 32),
            beta_slow=float(scaling.pop("beta_slow", None) or 1),
            attention_factor=yarn_attention_factor(
                factor,
                scaling.pop("attention_factor", None),
                scaling.pop("mscale", None),
                scaling.pop("mscale_all_dim", None),
            ),
            truncate=bool(scaling.pop("truncate", True)),
        )
    else:
        raise ValueError(
            f"rope_type={kind!r} is not supported; use default, linear, llama3 or yarn"
        )
    if scaling:
        raise ValueError(f"rope_type={kind!r} does not read {sorted(scaling)}; remove it")
    return rope


def yarn_attention_factor(
    factor: float, given=None, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What yarn multiplies cos and sin by: 0.1 ln(factor) + 1 unless the config says otherwise.

    arXiv 2309.00071, equation 22 (there as a temperature of the scores, which is its square). Two
    mscales divide, as in DeepSeek's configs.
    """
    if given is not None:
        return float(given)

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def family_of(config: ModelConfig) -> str:
    """The model_type whose transformers class computes this configuration.

    Raises ValueError when none does.
    """
    c = config
    if c.qk_norm:
        family, same = "qwen3", c.qkv_bias == c.o_bias and not c.mlp_bias
    elif c.qkv_bias and not c.o_bias:
        family, same = "qwen2", not c.mlp_bias
    else:
        # LlamaConfig refuses an uneven width even when head_dim is explicit.
        family, same = "llama", c.qkv_bias == c.o_bias and c.width % c.num_heads == 0
    if not same:
        raise ValueError(
            f"no transformers family has qk_norm={c.qk_norm}, qkv_bias={c.qkv_bias}, "
            f"o_bias={c.o_bias}, mlp_bias={c.mlp_bias}, width={c.width}, num_heads={c.num_heads} "
            "together; see family_of"
        )
    return family


def render(config: ModelConfig) -> dict:
    """The config.json fields of a configuration; `parse` gives it back (dtype and remat aside).

    RoPE is written in the older spelling, which transformers 4 and 5, SGLang and vLLM all read.
    """
    c, family = config, family_of(config)
    fields = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tied,
        "rope_theta": c.rope.theta,
        "rope_scaling": _render_rope(c.rope),
    }
    if family != "qwen2":
        fields["attention_bias"] = c.qkv_bias
    if family == "llama":
        fields["mlp_bias"] = c.mlp_bias
    else:
        fields["use_sliding_window"] = False
    return fields


def _render_rope(rope: RopeConfig) -> dict | None:
    if rope.kind == "none":
        return None
    fields = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return fields
    fields["original_max_position_embeddings"] = rope.original_context
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[rope.kind]
    return fields | {name: getattr(rope, name) for name in names}
