"""A short supervised phase for models that start from random weights.

It is the policy update with every advantage 1 and the current policy as the old one: the gradient
of -ratio at ratio 1 is that of the cross-entropy, here a mean over the batch's tokens. So there is
one training path, not two.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tlt_jax.models.tokenizer import Tokenizer
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.data import Example
from tlt_jax.rl.graders import is_task_entry
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy_trainer import PolicyTrainer

SUPERVISED = AlgorithmConfig("grpo", aggregation="token_mean")
MOST_TIMES = 4  # that one answer is said


@dataclasses.dataclass(frozen=True)
class WarmUpConfig:
    steps: int = 0  # 0: none
    batch: int = 32  # examples per step
    learning_rate: float = 3e-3
    rambling: float = 0.0  # chance, after each time an answer is said, that it is said once more
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.batch < 1 or not self.learning_rate > 0:
            raise ValueError(
                f"batch={self.batch} must be at least 1 and learning_rate={self.learning_rate} "
                "greater than 0"
            )
        if not 0 <= self.rambling < 1:
            raise ValueError(f"rambling={self.rambling} must lie in [0, 1)")


def supervised_samples(
    examples: Sequence[Example], tokenizer: Tokenizer, config: WarmUpConfig
) -> list[Sample]:
    """Prompt and reference answer (with its end-of-sequence token) of every example.

    With `rambling` r the answer is said n times, n geometric (mean 1 / (1 - r)) and at most
    MOST_TIMES: a model so taught knows the answer and stops after it with probability 1 - r, which
    RL can mend. Raises ValueError for an example without a reference answer.
    """
    rng = np.random.default_rng(config.seed)
    times = np.minimum(rng.geometric(1 - config.rambling, len(examples)), MOST_TIMES)
    samples = []
    for example, n in zip(examples, times):
        text = " ".join([_answer(example)] * n)
        ids = np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]], np.int32)
        samples.append(Sample(np.array(example.ids, np.int32), ids, 1.0, np.zeros(len(ids))))
    return samples


def _answer(example: Example) -> str:
    entry = example.entry["item"] if is_task_entry(example.entry) else example.entry
    answer = entry.get("answer")
    if not isinstance(answer, str):
        raise ValueError(
            f"the warm-up needs a reference answer, and {example.where}, {example.text[:60]!r}, "
            "has none; use a task with answers or set warm_up.steps=0"
        )
    return answer


def warm_up(
    trainer: PolicyTrainer,
    samples: Sequence[Sample],
    config: WarmUpConfig,
    on_step: Callable[[], None] = lambda: None,
):
    """Run the supervised steps on random batches; the trainer's state is what changes."""
    rng = np.random.default_rng([config.seed, 1])
    for _ in range(config.steps):
        chosen = rng.choice(len(samples), size=config.batch, replace=len(samples) < config.batch)
        trainer.update([samples[i] for i in chosen])
        on_step()
