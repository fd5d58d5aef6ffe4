"""The RL loop: rollout, rewards, advantages, policy update, publish; and held-out evaluation.

Read `train` from top to bottom to see one step.
"""

import dataclasses
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from tlt_jax.config import Config
from tlt_jax.rl import evaluate
from tlt_jax.rl.dynamic_sampling import DynamicSampling
from tlt_jax.rl.judged import Judged
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy_trainer import NonFiniteError, PolicyTrainer
from tlt_jax.rl.rewards import count_statuses, require_some_ok
from tlt_jax.rl.rollout import Rollout
from tlt_jax.rl.run import Progress, Run, peak_memory_gb
from tlt_jax.sharding import distributed
from tlt_jax.sharding.publish import Published

GAP_ALARM = 0.01  # share of tokens whose two probabilities may differ by more than 10 %


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a finished run hands back: its metrics lines and where its time went."""

    lines: list[dict]
    seconds: float
    compile_seconds: float
    program_table: str
    weights: str  # hash of the published weights, the same in every process
    trained_tokens: list[int]  # response tokens that the devices of each process trained on


def train(config: Config, workdir: Path, progress: Progress) -> Summary:
    """Run all steps of `config`, or those still missing, writing everything into `workdir`.

    The same call goes on with a run that was interrupted, from its newest checkpoint, to the same
    content. Raises ValueError for a workdir of another config, NonFiniteError (naming the step) for
    a NaN or infinite loss or gradient, RuntimeError where not one response of a step could be
    graded, CheckpointError where a checkpoint is damaged or cannot be written.
    """
    began = time.monotonic()
    run = Run(config, workdir, progress)
    try:
        run.load_graders()
        run.reopen()
        run.meet("start")
        trainer, done = run.start()
        run.meet("first publish")
        published = run.publish(trainer, done)
        if run.saved is None:
            if run.held_out:
                run.record({"content/step": 0, **_evaluation(run, published)})
            if config.checkpoint.every and (config.warm_up.steps or run.reference is not None):
                run.save(trainer, 0)
        for step in range(done + 1, config.steps + 1):
            published = _step(run, trainer, published, step)
            if config.checkpoint.every and (
                step % config.checkpoint.every == 0 or step == config.steps
            ):
                run.save(trainer, step)
        run.checkpoints.wait()
        with run.events.span("save policy"):
            run.save_policy(trainer)
        weights, tokens = run.finish(published, trainer)
        return Summary(
            run.lines,
            time.monotonic() - began,
            run.compiling.seconds,
            run.workers.table(),
            weights,
            tokens,
        )
    finally:
        run.close()


def _step(run: Run, trainer: PolicyTrainer, published: Published, step: int) -> Published:
    """One RL step: rollout, advantages, update, publish, evaluation where due, record."""
    config, events = run.config, run.events
    began, compiled = events.now(), run.compiling.seconds
    judged = _judged_rollout(run, published, step)
    require_some_ok(judged.scores, f"step {step}")

    met = run.meet(f"update {step}")
    updating = events.now()
    with events.span("update"):
        samples = _samples(run, trainer, judged)
        update = _update(run, trainer, samples, step)
    update_seconds = events.now() - updating
    published = run.publish(trainer, step)
    due = step % config.evaluation.every == 0 or step == config.steps
    evaluation = _evaluation(run, published) if due else {}
    run.record(
        {
            "content/step": step,
            **_content(judged, samples, update),
            "pace/update_seconds": update_seconds,
            "pace/barrier_seconds": judged.rollout.barrier_seconds + met,
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


def _judged_rollout(run: Run, published: Published, step: int) -> Judged:
    """The graded responses of a step, and which of them are trained on."""
    config = run.config
    n, samples = config.rollout.prompts, config.rollout.samples
    batches = config.algorithm.max_sampling_rounds  # 1 without dynamic sampling
    sampler = DynamicSampling(run.stream.take, n, samples, batches)
    done = _rollout(
        run,
        published,
        sampler.drawn,
        samples,
        config.rollout.sampling(),
        f"step {step}",
        more=sampler.more,
        history=run.history,
    )
    scores = {(g.prompt.draw, g.response.member): g.score for g in done.graded}
    return Judged.of(done, sampler.chosen(scores))


def _samples(run: Run, trainer: PolicyTrainer, judged: Judged) -> list[Sample]:
    """The responses to train on, with all that the algorithm reads of them."""
    algorithm = run.config.algorithm
    samples, kl = judged.samples(), None
    if algorithm.needs_reference:
        references = trainer.log_probs(samples, run.reference)
        if algorithm.kl_in_reward:
            kl = [p - r for p, r in zip(trainer.log_probs(samples), references)]
        samples = [dataclasses.replace(s, reference_logp=r) for s, r in zip(samples, references)]
    advantages = judged.advantages(algorithm, run.config.rollout.max_new_tokens, kl)
    return [dataclasses.replace(s, advantages=a) for s, a in zip(samples, advantages)]


def _update(run: Run, trainer: PolicyTrainer, samples: list[Sample], step: int) -> dict:
    """The policy update, waited for. Raises NonFiniteError that says what is left to go on from."""
    try:
        update = trainer.update(samples)
    except NonFiniteError as error:
        run.checkpoints.wait()
        saved = run.checkpoints.steps()
        start = run.config.policy.path or "random"
        good = (
            f"the checkpoint of step {saved[-1]}" if saved else f"those it started from ({start})"
        )
        raise NonFiniteError(
            f"RL step {step}: {error}. The last good weights are {good}. The same command would "
            "come here again: lower trainer.learning_rate in a new folder, or check the model's "
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


def _content(judged: Judged, samples: list[Sample], update: dict) -> dict:
    rewards = judged.rewards_N[judged.valid_N]
    with_advantage = sum(bool(np.any(s.advantages)) for s in samples)
    responses, lengths = [g.response for g in judged.rollout.graded], judged.lengths_N
    return {
        "content/reward_mean": rewards.mean(),
        "content/reward_std": rewards.std(),
        **{
            f"content/{name}": update[name]
            for name in (
                "loss",
                "grad_norm",
                "learning_rate",
                "clip_fraction",
                "clip_fraction_low",
                "clip_fraction_high",
                "importance_capped",
                "entropy",
                "kl",
                "optimizer_steps",
            )
        },
        "content/response_length_mean": lengths.mean(),
        "content/response_length_max": int(lengths.max()),
        "content/truncated_share": np.mean([r.finish_reason == "length" for r in responses]),
        "content/valid_share": judged.valid_N.mean(),
        "content/zero_advantage_share": 1 - with_advantage / len(responses),
        "content/prompts": len({g.prompt.draw for g in judged.rollout.graded}),
        "content/tokens": int(lengths.sum()),
    }


def _rollout_pace(judged: Judged) -> dict:
    rollout, statuses = judged.rollout, count_statuses(judged.scores)
    tokens = sum(len(g.response.tokens) for g in rollout.graded)
    return {
        "pace/rollout_seconds": rollout.seconds,
        "pace/idle_share": np.mean(rollout.idle_shares),
        **{f"pace/idle_share/{i}": share for i, share in enumerate(rollout.idle_shares)},
        "pace/tail_share": rollout.tail_share,
        "pace/moved_responses": rollout.moved,
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
    scores = [g.score for g in done.graded]
    require_some_ok(scores, f"the evaluation with the policy of step {published.version}")
    measured, statuses = evaluate.held_out_measures(done, config.k), count_statuses(scores)
    return {
        **{f"content/eval_{name}": x for name, x in measured.items()},
        "pace/eval_reward_errors": statuses["error"],
        "pace/eval_reward_timeouts": statuses["timeout"],
        "pace/eval_reward_invalid": statuses["invalid"],
        "pace/eval_seconds": run.events.now() - began,
    }


def _rollout(
    run: Run, published: Published, prompts, samples: int, sampling, what: str, **options
) -> Rollout:
    run.progress.start(what, len(prompts) * samples // distributed.count())
    with run.events.span("rollout", version=published.version):
        return run.sampler.rollout(
            [published.view(i) for i in run.slices],
            prompts,
            samples=samples,
            sampling=sampling,
            on_finish=run.progress.advance,
            **options,
        )
