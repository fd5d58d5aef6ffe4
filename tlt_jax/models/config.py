"""What a decoder-only transformer is: every field here changes the function it computes."""

import dataclasses

ROPE_KINDS = ("none", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` names how frequencies are stretched to longer contexts.

    linear: f / factor. llama3: Llama 3.1 release code. yarn: arXiv 2309.00071.
    Fields that a kind does not read keep their defaults.
    """

    theta: float = 10_000.0
    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: context length before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin; already resolved from mscale
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind={self.kind!r} is not supported; known: {ROPE_KINDS}")
        if self.kind in ("llama3", "yarn") and self.original_context <= 0:
            raise ValueError(
                f"rope kind={self.kind!r} needs original_context > 0, got {self.original_context}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Llama 2/3.x, Qwen2/2.5, Qwen3 (dense), SmolLM2 and relatives, described by their features.

    Parameter tree (`stacked` layout; `unstack_layers` gives one dict per layer instead):

        embed [V, D]                          head [V, D] (absent when `tied`)
        norm [D]
        layers: attn_norm [L, D]              mlp_norm [L, D]
                w_q [L, H, C, D]              w_k, w_v [L, K, C, D]      w_o [L, D, H, C]
                w_gate, w_up [L, F, D]        w_down [L, D, F]
                b_q [L, H, C], b_k, b_v [L, K, C]     with `qkv_bias`
                b_o [L, D]                            with `o_bias`
                b_gate, b_up [L, F], b_down [L, D]    with `mlp_bias`
                q_norm, k_norm [L, C]                 with `qk_norm`
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"  # of the arithmetic; master weights are float32 (or float64 in tests)
    remat: bool = False  # recompute each block in the backward pass instead of keeping it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"dtype={self.dtype!r}; use float32, bfloat16 or float64 (tests)")
        for name in ("vocab_size", "width", "mlp_width", "num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def num_params(self) -> int:
        """Weights, with the head counted once (a tied head is the embedding)."""
        c = self
        attn = c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        bias = c.head_dim * (c.num_heads + 2 * c.num_kv_heads) * c.qkv_bias + c.width * c.o_bias
        mlp = 3 * c.width * c.mlp_width + (2 * c.mlp_width + c.width) * c.mlp_bias
        norms = 2 * c.width + 2 * c.head_dim * c.qk_norm
        vocab = c.vocab_size * c.width * (1 if c.tied else 2)
        return c.num_layers * (attn + bias + mlp + norms) + vocab + c.width

    def check_split(self, *, tensor: int = 1, data: int = 1):
        """Raise ValueError for a size that cannot be split evenly: heads, mlp and vocabulary over
        `tensor` devices, the width of training weights over `data`."""
        for name in ("num_heads", "num_kv_heads", "mlp_width", "vocab_size"):
            if getattr(self, name) % tensor:
                raise ValueError(
                    f"mesh.tensor={tensor} does not divide the model's {name}="
                    f"{getattr(self, name)}; choose a divisor of it, or a random model's size so "
                    "that it does"
                )
        if self.width % data:
            raise ValueError(
                f"mesh.slices times mesh.fsdp, {data}, does not divide the model's width="
                f"{self.width}, over which training weights are split; choose a divisor of it"
            )
