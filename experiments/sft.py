"""The supervised phase before RL: questions with worked solutions, and the training on them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from experiments.traces import TRACES
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.data import question_example
from tlt_jax.rl.data_config import DataConfig
from tlt_jax.rl.optimizer import TrainerConfig
from tlt_jax.rl.packing import Sample, first_fit_decreasing
from tlt_jax.rl.policy import Policy, PolicyConfig
from tlt_jax.rl.policy_trainer import PolicyTrainer
from tlt_jax.rl.tasks import QuestionSets, Task, draw_sets
from tlt_jax.spec.noise import EVALUATE

COLD_START = 100  # domain of the questions' seed; those of RL are small (`spec/noise.py`)


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
    """What is taught, to which model, and how.

    data: `size` questions of `tasks`, drawn with `seed`; what RL with this data section would hold
    out is never drawn. rl_data: the data section that RL does have, whose held-out questions are
    left out too. An update is `rows` rows of `row_tokens` tokens, filled with as many samples as
    fit. AdamW; the learning rate rises over `warmup_steps` updates and falls linearly to zero.
    """

    data: DataConfig
    rl_data: DataConfig
    policy: PolicyConfig = PolicyConfig()
    epochs: int = 1
    rows: int = 3
    row_tokens: int = 384  # a question whose prompt and trace exceed this is left out, and counted
    micro_batch_tokens: int = 2048
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    weight_decay: float = 0.0
    seed: int = 0  # of the order, and of random weights

    def __post_init__(self):
        for name in ("epochs", "rows", "row_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.data.train_file:
            raise ValueError(
                f"data.train_file={self.data.train_file!r}: traces are written for the questions "
                "of data.tasks; give those"
            )
        for task in self.data.tasks:
            if task.name not in TRACES:
                raise ValueError(
                    f"no traces are written for task {task.name!r}; known: {sorted(TRACES)}"
                )
        if self.row_tokens > self.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_tokens={self.micro_batch_tokens} is less than one row of "
                f"row_tokens={self.row_tokens}"
            )
        self.trainer(total_steps=self.warmup_steps + 1)

    def trainer(self, total_steps: int) -> TrainerConfig:
        return TrainerConfig(
            learning_rate=self.learning_rate,
            schedule="linear",
            warmup_steps=self.warmup_steps,
            total_steps=total_steps,
            weight_decay=self.weight_decay,
            micro_batch_tokens=self.micro_batch_tokens,
        )


def taught_samples(config: ColdStartConfig, start: Policy) -> tuple[list[Sample], int]:
    """Prompt and trace, with its end-of-sequence token, of every question that a row holds.

    Of a curriculum the last stage is taught. Also returns how many are left out. Raises ValueError
    as `load_prompts` does, and where nothing is left.
    """
    data = config.data
    tasks = [task.at(math.inf) for task in data.tasks]
    sets = _draw(data, tasks, data.size)
    [questions] = sets.training.values()
    held_out = {q.text for q in _draw(config.rl_data, config.rl_data.tasks, 1).held_out}
    questions = [question for question in questions if question.text not in held_out]
    samples = []
    for question in questions:
        example = question_example(data, start.tokenizer, question, since=0)
        if example is None:  # too long, and data.drop_long
            continue
        trace = TRACES[question.task](question.entry["item"])
        ids = np.array([*start.tokenizer.encode(trace), start.tokenizer.eos_ids[0]], np.int32)
        # Rollout log-probs of 0: the trainer's mean gap to them is the mean negative log-prob.
        samples.append(Sample(np.array(example.ids, np.int32), ids, 1.0, np.zeros(len(ids))))
    fitting = [s for s in samples if s.tokens <= config.row_tokens]
    if not fitting:
        raise ValueError(
            f"none of {len(questions)} prompts with their traces fits into row_tokens="
            f"{config.row_tokens}; raise it or make the tasks easier"
        )
    return fitting, len(questions) - len(fitting)


def _draw(data: DataConfig, tasks: Sequence[Task], size: int) -> QuestionSets:
    """Questions to teach, `size` of them, and those that RL with this data section holds out."""
    return draw_sets(
        tasks,
        size=size,
        seed=data.seed,
        domain=COLD_START,
        eval_size=data.eval_size,
        eval_seed=data.eval_seed,
        eval_domain=EVALUATE,
    )


def updates(samples: Sequence[Sample], config: ColdStartConfig) -> Iterator[list[Sample]]:
    """Batches of every epoch, in random order: each as many samples as its rows hold."""
    for epoch in range(config.epochs):
        batch: list[Sample] = []
        for i in np.random.default_rng([config.seed, epoch]).permutation(len(samples)):
            sizes = [s.tokens for s in (*batch, samples[i])]
            if len(first_fit_decreasing(sizes, config.row_tokens)) > config.rows:
                yield batch
                batch = []
            batch.append(samples[i])
        yield batch


def train(
    config: ColdStartConfig,
    start: Policy,
    batches: Sequence[Sequence[Sample]],
    on_update: Callable[[float], None],
) -> dict:
    """Train on every batch once -> parameters. on_update gets each loss, in nats per token.

    It is the policy update with every advantage 1 and the current policy as the old one, whose
    gradient is that of the cross-entropy. `start.params` are consumed.
    """
    trainer = PolicyTrainer(
        start.model,
        config.trainer(total_steps=len(batches)),
        AlgorithmConfig("grpo"),
        start.params,
        row_tokens=config.row_tokens,
        samples=config.rows,
        max_new_tokens=config.row_tokens,
    )
    for batch in batches:
        on_update(trainer.update(list(batch))["logp_gap_mean"])
    return jax.device_get(trainer.state.params)
