"""metrics.jsonl: one line per RL step, its keys listed here.

Two kinds of keys. `content/…`: what was sampled and learnt; bit-identical between two runs of one
config under the fixed schedule. `pace/…`: what depends on clocks and machines.
"""

import json
import math
import numbers
import os
from collections.abc import Mapping

import numpy as np

from tlt_jax.atomic import LineFile

KEYS: dict[str, str] = {
    "content/step": "RL step, from 1; 0 is the untrained policy",
    "content/reward_mean": "mean reward of the validly graded responses",
    "content/reward_std": "population standard deviation of the same rewards",
    "content/loss": "policy loss of the update",
    "content/clip_fraction": "share of response tokens whose ratio was clipped; 0 with one step",
    "content/clip_fraction_low": "the same, at the lower bound of the ratio",
    "content/clip_fraction_high": "the same, at the upper bound",
    "content/importance_capped": "share of response tokens whose importance weight was truncated",
    "content/entropy": "mean entropy where there is a gradient, nats: advantage not 0, or a KL",
    "content/kl": "mean k3 estimate of the KL to the reference on the same, nats; 0 without one",
    "content/optimizer_steps": "optimizer steps made with the rollout",
    "content/grad_norm": "global gradient norm before clipping, mean over optimizer steps",
    "content/response_length_mean": "tokens per response, EOS included, mean",
    "content/response_length_max": "tokens of the longest response",
    "content/truncated_share": "share of responses that ended at the length limit",
    "content/valid_share": "share of responses whose grading succeeded",
    "content/zero_advantage_share": "share of responses with advantage 0: no gradient without a KL",
    "content/prompts": "prompts drawn; dynamic sampling draws more than it trains on",
    "content/tokens": "response tokens of the step",
    "content/learning_rate": "learning rate of the update",
    "content/eval_avg_at_k": "mean reward over all samples of the held-out prompts",
    "content/eval_pass_at_1": "share of those samples that are correct (reward at least 1)",
    "content/eval_pass_at_k": "chance that one of evaluation.k samples is correct, unbiased",
    "pace/step_seconds": "wall-clock seconds of the whole step",
    "pace/rollout_seconds": "seconds until the last response was sampled",
    "pace/idle_share": "share of rollout_seconds in which a slice had nothing to decode, mean",
    "pace/idle_share/*": "the same of the slice with that number",
    "pace/tail_share": "share of rollout_seconds after the first slice had nothing to decode",
    "pace/moved_responses": "responses started by another process than a fixed schedule's",
    "pace/barrier_seconds": "seconds that this process waited for others between its own work",
    "pace/update_seconds": "seconds of the policy update",
    "pace/reward_wait_seconds": "seconds waited for gradings after the last response",
    "pace/rollout_tokens_per_second": "response tokens / rollout_seconds",
    "pace/logprob_gap_mean": "mean |trainer - rollout log-prob| per token, nats",
    "pace/logprob_gap_max": "largest |trainer - rollout log-prob| of a token, nats",
    "pace/logprob_gap_outside": "share of tokens whose two probabilities differ by 10 %",
    "pace/peak_memory_gb": "most memory the process has held so far, gigabytes",
    "pace/compile_seconds": "seconds spent compiling during the step",
    "pace/reward_errors": "gradings that raised or whose worker died (a count)",
    "pace/reward_timeouts": "gradings killed at their deadline (a count)",
    "pace/reward_invalid": "gradings that returned no finite number (a count)",
    "pace/eval_reward_errors": "as pace/reward_errors, of the held-out evaluation; they count as 0",
    "pace/eval_reward_timeouts": "as pace/reward_timeouts, of the held-out evaluation",
    "pace/eval_reward_invalid": "as pace/reward_invalid, of the held-out evaluation",
    "pace/eval_seconds": "seconds of the held-out evaluation (evaluation steps)",
}
EVALUATION_KEYS = frozenset(key for key in KEYS if key.split("/")[1].startswith("eval_"))
NUMBERED_KEYS = frozenset(key for key in KEYS if key.endswith("/*"))  # any number in place of *
STEP_KEYS = frozenset(KEYS) - EVALUATION_KEYS - NUMBERED_KEYS


class MetricsWriter:
    """Appends lines to metrics.jsonl; each is on disk, whole, when `write` returns.

    position: of a file to be continued, what `position` returned then; later lines are cut.
    """

    def __init__(self, path: str | os.PathLike, position: int | None = None):
        self._file = LineFile(path, position)

    def position(self) -> int:
        """Where the next line begins, in bytes."""
        return self._file.size()

    def write(self, values: Mapping[str, float]) -> None:
        """Append one line: all of STEP_KEYS, EVALUATION_KEYS too if the step evaluated.

        A line of content/step and EVALUATION_KEYS alone is an evaluation outside of any step.
        Raises ValueError naming the key that is unknown, missing, not a number or, in content,
        not finite. A pace value that is not finite is written as null (a rate over no time).
        """
        keys = set(values)
        numbered = {key for key in keys if key not in KEYS and _template(key) in NUMBERED_KEYS}
        if unknown := sorted(keys - (set(KEYS) - NUMBERED_KEYS) - numbered):
            raise ValueError(f"unknown metric {unknown[0]!r}; add it to KEYS in tlt_jax/metrics.py")
        if keys != EVALUATION_KEYS | {"content/step"}:
            wanted = STEP_KEYS | (EVALUATION_KEYS if keys & EVALUATION_KEYS else set())
            if missing := sorted(wanted - keys):
                raise ValueError(f"the metrics line lacks {', '.join(missing)}")
        order = list(KEYS)
        ordered = sorted(keys, key=lambda key: (order.index(_template(key)), key))
        line = {key: _number(key, values[key]) for key in ordered}
        self._file.append(json.dumps(line, allow_nan=False) + "\n", sync=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The lines of a metrics file; a last one without line end (a crash tore it) is left out."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def _template(key: str) -> str:
    """The name in KEYS: "a/b/*" of "a/b/3"."""
    head, _, last = key.rpartition("/")
    return f"{head}/*" if last.isdecimal() else key


def _number(key: str, value) -> int | float | None:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"metric {key}={value!r} is a {type(value).__name__}; pass a Python or numpy number"
        )
    if math.isfinite(value):
        return value
    if key.startswith("content/"):
        raise ValueError(f"metric {key}={value} is not finite, so this step's content is broken")
    return None
