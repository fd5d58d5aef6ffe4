"""The RL loop: rollout, rewards, advantages, policy update, publish; and held-out evaluation.

Read `train` from top to bottom to see one step.
"""

import dataclasses
import functools
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from tlt_jax.compile_clock import CompileClock
from tlt_jax.config import Config
from tlt_jax.events import EventLog
from tlt_jax.metrics import MetricsWriter
from tlt_jax.models import hf, hf_config, transformer
from tlt_jax.rl import evaluate, policy
from tlt_jax.rl.advantages import group_advantages
from tlt_jax.rl.data import Prompt, load_prompts
from tlt_jax.rl.packing import BatchShape, Sample
from tlt_jax.rl.policy_trainer import NonFiniteError, PolicyTrainer
from tlt_jax.rl.prompt_stream import PromptStream
from tlt_jax.rl.rewards import RewardPool, Score, count_statuses, require_some_ok
from tlt_jax.rl.rollout import Rollout, rollout
from tlt_jax.rl.warm_up import supervised_samples, warm_up
from tlt_jax.sharding.publish import Published, publish
from tlt_jax.spec import noise
from tlt_jax.spec.engine import Engine

GAP_ALARM = 0.01  # share of tokens whose two probabilities may differ by more than 10 %
PACKED_ROW_TOKENS = 256  # longer rows save little: attention is computed over the whole row


class Progress(Protocol):
    """What a run tells the terminal as it goes."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def step(self, line: dict) -> None: ...


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a finished run hands back: its metrics lines and where its time went."""

    lines: list[dict]
    seconds: float
    compile_seconds: float
    program_table: str


class Run:
    """Everything that lives as long as a run; `train` drives it."""

    def __init__(self, config: Config, workdir: Path, progress: Progress):
        self.config, self.workdir, self.progress = config, workdir, progress
        policy_key, sampling_key = jax.random.split(jax.random.key(config.seed))
        self.run_key = sampling_key
        self.policy = policy.load(config.policy, policy_key)
        self.data = load_prompts(config.data, self.policy.tokenizer)
        if left_out := self.data.num_too_long + self.data.num_overlapping:
            warnings.warn(
                f"{left_out} prompts are left out: {self.data.num_too_long} longer than data."
                f"max_prompt_tokens, {self.data.num_overlapping} in both files",
                stacklevel=2,
            )
        self.stream = PromptStream(self.data.train, seed=config.data.seed, domain=noise.TRAIN)
        held_out = self.data.held_out[: config.evaluation.prompts]
        self.held_out: list[Prompt] = []
        if held_out:
            stream = PromptStream(held_out, seed=0, domain=noise.EVALUATE, shuffle=False)
            self.held_out = stream.take(len(held_out))
        longest = max(len(e.ids) for e in (*self.data.train, *self.data.held_out))
        self.engine = Engine(
            self.policy.model, config.rollout.engine_config(longest), self.policy.tokenizer.eos_ids
        )
        # A training row holds the longest sample, or a whole group where that is still short.
        rollouts = config.rollout
        self.per_step = rollouts.prompts * rollouts.samples
        group = longest + rollouts.samples * rollouts.max_new_tokens
        self.row_tokens = max(longest + rollouts.max_new_tokens, min(group, PACKED_ROW_TOKENS))
        self.layout = functools.partial(transformer.decode_layout, self.policy.model)
        self._check(longest)
        reward = config.reward
        self.graded = reward.check((*self.data.train, *self.data.held_out))
        self.pool = RewardPool(reward.num_workers, reward.spare_workers, reward.deadline_s)
        self.metrics = MetricsWriter(workdir / "metrics.jsonl")
        self.events = EventLog(workdir / "events.jsonl")
        self.compiling = CompileClock()
        self.lines: list[dict] = []

    def _check(self, longest: int):
        """Refuse now what would stop the run later, after work that would be lost."""
        hf_config.render(self.policy.model)
        new = self.config.rollout.max_new_tokens
        if longest + new > (context := self.policy.model.max_context):
            raise ValueError(
                f"the longest prompt ({longest} tokens) and rollout.max_new_tokens={new} exceed "
                f"the model's context of {context}; lower max_new_tokens, or set "
                f"data.max_prompt_tokens={max(1, context - new)} with data.drop_long=True"
            )
        budget = self.config.trainer.micro_batch_tokens
        BatchShape.within(budget, self.row_tokens, self.per_step)

    def close(self):
        self.pool.close()
        self.metrics.close()
        self.events.close()
        self.compiling.close()

    def record(self, line: dict):
        self.metrics.write(line)
        self.events.flush()
        self.lines.append(line)
        self.progress.step(line)


def train(config: Config, workdir: Path, progress: Progress) -> Summary:
    """Run all steps of `config`, writing metrics, events and the final policy into `workdir`.

    Raises NonFiniteError (naming the step) for a NaN or infinite loss or gradient, and
    RuntimeError where not one response of a step could be graded.
    """
    began = time.monotonic()
    run = Run(config, workdir, progress)
    try:
        for example in run.graded:
            run.pool.load(config.reward.grader_of(example), example.entry)
        trainer = _warmed_up_trainer(run)
        published = publish(run.layout, trainer.state.params, 0)
        if run.held_out:
            run.record({"content/step": 0, **_evaluation(run, published)})
        for step in range(1, config.steps + 1):
            published = _step(run, trainer, published, step)
        with run.events.span("save policy"):
            params = jax.device_get(trainer.state.params)
            hf.save(workdir / "policy", run.policy.model, params, tokenizer=run.policy.tokenizer)
        return Summary(
            run.lines, time.monotonic() - began, run.compiling.seconds, run.engine.pool.table()
        )
    finally:
        run.close()


def _warmed_up_trainer(run: Run) -> PolicyTrainer:
    """A trainer with fresh optimizer state, after the supervised phase where there is one."""
    config, params = run.config, run.policy.params
    warm = config.warm_up
    if warm.steps:
        samples = supervised_samples(run.data.train, run.policy.tokenizer, warm)
        longest = max(s.tokens for s in samples)
        supervised = dataclasses.replace(
            config.trainer,
            learning_rate=warm.learning_rate,
            schedule="constant",
            warmup_steps=0,
            weight_decay=0.0,
        )
        teacher = PolicyTrainer(
            run.policy.model, supervised, params, row_tokens=longest, samples=warm.batch
        )
        run.progress.start("warm-up", warm.steps)
        with run.events.span("warm-up"):
            warm_up(teacher, samples, warm, run.progress.advance)
        params = teacher.state.params
    return PolicyTrainer(
        run.policy.model,
        config.trainer,
        params,
        row_tokens=run.row_tokens,
        samples=run.per_step,
        temperature=config.rollout.temperature,
    )


@dataclasses.dataclass(frozen=True)
class Judged:
    """A graded rollout as arrays, one entry per response, in the rollout's order."""

    rollout: Rollout
    scores: list[Score]
    valid_N: np.ndarray  # bool: graded successfully
    rewards_N: np.ndarray  # float64, NaN where not valid
    advantages_N: np.ndarray  # float64, 0 where not valid

    @classmethod
    def of(cls, rollout: Rollout) -> "Judged":
        scores = [g.score for g in rollout.graded]
        valid_N = np.array([s.status == "ok" for s in scores])
        rewards_N = np.array([s.value if s.status == "ok" else np.nan for s in scores])
        groups_N = np.array([g.prompt.draw for g in rollout.graded])
        return cls(
            rollout, scores, valid_N, rewards_N, group_advantages(rewards_N, groups_N, valid_N)
        )

    def samples(self) -> list[Sample]:
        """What the update trains on: the validly graded responses."""
        return [
            Sample(
                np.array(g.prompt.ids, np.int32),
                g.response.tokens,
                advantage,
                g.response.log_probs,
                group=g.prompt.draw,
            )
            for g, advantage, valid in zip(self.rollout.graded, self.advantages_N, self.valid_N)
            if valid
        ]


def _step(run: Run, trainer: PolicyTrainer, published: Published, step: int) -> Published:
    """One RL step: rollout, advantages, update, publish, evaluation where due, record."""
    config, events = run.config, run.events
    began, compiled = events.now(), run.compiling.seconds
    prompts = run.stream.take(config.rollout.prompts)
    done = _rollout(
        run, published, prompts, config.rollout.samples, config.rollout.sampling(), f"step {step}"
    )
    judged = Judged.of(done)
    require_some_ok(judged.scores, step)

    updating = events.now()
    with events.span("update"):
        update = _update(run, trainer, judged, step)
    update_seconds = events.now() - updating
    with events.span("publish", version=step):
        published = publish(run.layout, trainer.state.params, step)
    due = step % config.evaluation.every == 0 or step == config.steps
    evaluation = _evaluation(run, published) if due else {}
    run.record(
        {
            "content/step": step,
            **_content(judged, update),
            "pace/update_seconds": update_seconds,
            "pace/logprob_gap_mean": update["logp_gap_mean"],
            "pace/logprob_gap_max": update["logp_gap_max"],
            "pace/logprob_gap_outside": update["logp_gap_outside"],
            "pace/peak_memory_gb": peak_memory_gb(),
            **_rollout_pace(judged),
            "pace/compile_seconds": run.compiling.seconds - compiled,
            "pace/step_seconds": events.now() - began,
            **evaluation,
        }
    )
    return published


def _update(run: Run, trainer: PolicyTrainer, judged: Judged, step: int) -> dict:
    """The policy update, waited for. Raises NonFiniteError that says what is left to go on from."""
    try:
        update = trainer.update(judged.samples())
    except NonFiniteError as error:
        start = run.config.policy.path or "random"
        raise NonFiniteError(
            f"RL step {step}: {error}. Nothing was saved of this run; the last good weights are "
            f"those it started from ({start}). Lower trainer.learning_rate, or check the model's "
            "weights"
        ) from error
    jax.block_until_ready(trainer.state)
    if update["logp_gap_outside"] > GAP_ALARM:
        warnings.warn(
            f"RL step {step}: {update['logp_gap_outside']:.1%} of the tokens have a trainer "
            "probability more than 10 % off the one they were sampled with; are the published "
            "weights those of the trainer?",
            stacklevel=2,
        )
    return update


def _content(judged: Judged, update: dict) -> dict:
    rewards = judged.rewards_N[judged.valid_N]
    responses = [g.response for g in judged.rollout.graded]
    lengths = np.array([len(r.tokens) for r in responses])
    return {
        "content/reward_mean": rewards.mean(),
        "content/reward_std": rewards.std(),
        "content/loss": update["loss"],
        "content/clip_fraction": update["clip_fraction"],
        "content/grad_norm": update["grad_norm"],
        "content/learning_rate": update["learning_rate"],
        "content/response_length_mean": lengths.mean(),
        "content/response_length_max": int(lengths.max()),
        "content/truncated_share": np.mean([r.finish_reason == "length" for r in responses]),
        "content/valid_share": judged.valid_N.mean(),
        "content/zero_advantage_share": np.mean(judged.advantages_N == 0),
        "content/tokens": int(lengths.sum()),
    }


def _rollout_pace(judged: Judged) -> dict:
    rollout, statuses = judged.rollout, count_statuses(judged.scores)
    tokens = sum(len(g.response.tokens) for g in rollout.graded)
    return {
        "pace/rollout_seconds": rollout.seconds,
        "pace/reward_wait_seconds": rollout.reward_wait_seconds,
        "pace/rollout_tokens_per_second": tokens / rollout.seconds,
        "pace/reward_errors": statuses["error"],
        "pace/reward_timeouts": statuses["timeout"],
        "pace/reward_invalid": statuses["invalid"],
    }


def _evaluation(run: Run, published: Published) -> dict:
    if not run.held_out:
        return {}
    config = run.config.evaluation
    began = run.events.now()
    sampling = dataclasses.replace(run.config.rollout.sampling(), temperature=config.temperature)
    with run.events.span("evaluate"):
        done = _rollout(run, published, run.held_out, config.samples, sampling, "evaluation")
    return {
        "content/eval_accuracy": evaluate.accuracy(done),
        "pace/eval_seconds": run.events.now() - began,
    }


def _rollout(run: Run, published, prompts, samples: int, sampling, what: str) -> Rollout:
    run.progress.start(what, len(prompts) * samples)
    with run.events.span("rollout", version=published.version):
        return rollout(
            run.engine,
            published.params,
            prompts,
            samples=samples,
            sampling=sampling,
            run_key=run.run_key,
            tokenizer=run.policy.tokenizer,
            grader_of=run.config.reward.grader_of,
            pool=run.pool,
            events=run.events,
            on_finish=run.progress.advance,
        )


def peak_memory_gb() -> float:
    """The most memory that this process has held, gigabytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
