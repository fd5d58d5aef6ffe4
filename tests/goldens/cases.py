"""The config.json of one tiny checkpoint per supported family and RoPE type, in both spellings."""

from pathlib import Path

FOLDER = Path(__file__).parent

_SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA = {**_SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN2 = {
    **_SIZES,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 1,
}
_QWEN3 = {
    **_QWEN2,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 8,
}

# The rows of a case are 40 and fewer tokens long, so that they pass this context.
_ORIGINAL = {"original_max_position_embeddings": 16}

CASES = {
    "llama_plain": {**_LLAMA, "rope_theta": 500.0},
    "llama_tied_bias": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "llama_linear": {
        **_LLAMA,
        "head_dim": 8,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "llama_llama3": {
        **_LLAMA,
        "head_dim": 8,
        "rope_theta": 300.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **_ORIGINAL,
        },
    },
    "llama_yarn": {
        **_LLAMA,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, **_ORIGINAL},
    },
    "llama_yarn_mscale": {
        **_LLAMA,
        "head_dim": 12,
        "rope_theta": 300.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 3.0,
            "beta_slow": 0.5,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
            **_ORIGINAL,
        },
    },
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True, "rope_theta": 1000.0},
    "qwen2_yarn": {
        **_QWEN2,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.3,
            "beta_fast": 4.0,
            **_ORIGINAL,
        },
    },
    "qwen3_plain": {**_QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3_bias_llama3": {
        **_QWEN3,
        "attention_bias": True,
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 2.0,
            **_ORIGINAL,
        },
    },
}
