"""What goes into the engine and what comes out: token ids in, token ids out."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are sampled. temperature 0 is greedy; top_p 1 and top_k 0 keep everything."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0 (0: greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; 0 keeps every token")


@dataclasses.dataclass(frozen=True)
class Group:
    """One draw of a prompt, answered by `members` samples.

    (domain, draw, member) identifies a response for ever: it keys the noise, so two groups with
    the same domain and draw in one run sample the same tokens from the same prompt.
    """

    prompt: tuple[int, ...]  # token ids
    draw: int  # global draw counter
    members: int
    domain: int  # noise.TRAIN, noise.EVALUATE or noise.GENERATE
    sampling: Sampling | None = None  # None: as the call that the group is handed to says


@dataclasses.dataclass(frozen=True)
class Response:
    """One finished response. The end-of-sequence token, when sampled, is its last token."""

    group: Group
    member: int
    tokens: np.ndarray  # [n] int32
    log_probs: np.ndarray  # [n] float32 (float64 in tests), see `sampling.sample`
    finish_reason: str  # "stop": an end-of-sequence token; "length": the limit
    features: np.ndarray | None  # [n, taps, D]: the hidden states that predicted each token
