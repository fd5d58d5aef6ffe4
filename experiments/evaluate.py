"""Evaluate a policy on a config's held-out prompts, task by task:

    python -m experiments.evaluate --config=experiments/configs/quickstart.py --samples=8 \\
        --model=runs/quickstart/policy --out=evaluation.json

pass@1, pass@k and avg@k with their standard errors over prompts, lengths of the responses, and how
sharp the policy is on them: the largest probability and the entropy of its next token, averaged
over all response tokens, at the sampling temperature (greedy sampling: at 1). Without --model it is
the config's policy before any training. Prompts and noise are those of the evaluations in training,
so a run's policy with the run's config repeats its last one. Settings can be overridden as in
`experiments.main`.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from experiments import main as training
from experiments.progress import TerminalProgress
from experiments.report import as_text
from tlt_jax import atomic
from tlt_jax.config import Config, from_dict
from tlt_jax.models import layers, transformer
from tlt_jax.models.sharpness import sharpness
from tlt_jax.rl import packing
from tlt_jax.rl.evaluate import measures, prompt_rewards
from tlt_jax.rl.rollout import Graded
from tlt_jax.rl.run import Progress, Run
from tlt_jax.sharding.publish import publish

PERCENTILES = (0, 10, 25, 50, 75, 90, 99, 100)
MEASURES = ("pass_at_1", "pass_at_k", "avg_at_k")


@functools.partial(jax.jit, static_argnames=("model", "temperature", "chunk"))
def batch_sharpness(model, params, batch: packing.PackedBatch, temperature: float, chunk: int):
    """`sharpness` [N], [N] at the places of a micro-batch whose logits score a response token."""
    mask_BTT = layers.causal_mask(batch.segments, batch.prefixes)
    out = transformer.forward(model, params, batch.tokens, batch.positions, mask_BTT)
    hidden_ND = out.hidden.reshape(-1, model.width)[batch.at]
    return sharpness(model, params, hidden_ND, temperature=temperature, chunk=chunk)


def response_sharpness(run: Run, graded: Sequence[Graded], temperature: float) -> np.ndarray:
    """Largest probability and entropy at every response token -> [2, tokens], by a pass over each
    prompt with its responses; the tokens of one response after those of the other."""
    samples = [
        packing.Sample(
            np.array(g.prompt.ids, np.int32),
            g.response.tokens,
            0.0,
            g.response.log_probs,
            group=g.prompt.draw,
        )
        for g in graded
    ]
    config = run.config.trainer
    shape = packing.BatchShape.within(config.micro_batch_tokens, run.row_tokens, len(samples))
    batches = packing.pack(samples, shape, packed=True)
    found = [
        batch_sharpness(run.policy.model, run.policy.params, b, temperature, config.head_chunk)
        for b in batches
    ]
    return np.stack(
        [
            np.concatenate(packing.unpack(batches, [np.array(f[i]) for f in found], len(samples)))
            for i in (0, 1)
        ]
    )


def describe(graded: Sequence[Graded], sharp: np.ndarray, k: int) -> dict:
    """The figures of some prompts' responses. sharp: [2, tokens], as `response_sharpness` gives."""
    each = [measures(rewards_M, k) for rewards_M in prompt_rewards(graded).values()]
    lengths = np.array([len(g.response.tokens) for g in graded])
    figures: dict = {"prompts": len(each), "responses": len(graded)}
    for name in MEASURES:
        values = np.array([m[name] for m in each])
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        figures[name] = {
            "mean": float(values.mean()),
            "standard_error": None if error is None else float(error),
        }
    figures["length_percentiles"] = {
        str(p): float(x) for p, x in zip(PERCENTILES, np.percentile(lengths, PERCENTILES))
    }
    figures["length_max_over_median"] = float(lengths.max() / np.median(lengths))
    figures["truncated_share"] = float(
        np.mean([g.response.finish_reason == "length" for g in graded])
    )
    figures["grading_failures"] = sum(g.score.status != "ok" for g in graded)
    figures["mean_largest_probability"], figures["mean_entropy"] = map(
        float, sharp.mean(axis=1, dtype=np.float64)
    )
    return figures


def evaluate(config: Config, progress: Progress) -> dict:
    """Figures of each task and "overall", with what was evaluated.

    Raises ValueError where there are no held-out prompts, and as a training run would.
    """
    if config.evaluation.prompts == 0 or config.data.eval_size == 0:
        raise ValueError(
            f"evaluation.prompts={config.evaluation.prompts}, data.eval_size="
            f"{config.data.eval_size}: there is nothing to evaluate on; raise both"
        )
    settings = config.evaluation
    sampling = dataclasses.replace(config.rollout.sampling(), temperature=settings.temperature)
    # A run that does not train: what it would check and load is what is wanted here.
    with tempfile.TemporaryDirectory() as folder:
        run = Run(dataclasses.replace(config, logger=""), Path(folder), progress)
        try:
            run.load_graders()
            progress.start("evaluation", len(run.held_out) * settings.samples)
            published = publish(run.mesh, run.layout, run.policy.params, 0)
            graded = run.sampler.rollout(
                [published.view(i) for i in run.slices],
                run.held_out,
                samples=settings.samples,
                sampling=sampling,
                on_finish=progress.advance,
            ).graded
        finally:
            run.close()
    sharp = response_sharpness(run, graded, settings.temperature or 1.0)
    tokens = np.repeat(np.arange(len(graded)), [len(g.response.tokens) for g in graded])
    figures = {}
    for task in dict.fromkeys(g.prompt.source for g in graded):
        here = np.array([g.prompt.source == task for g in graded])
        some = [g for g, kept in zip(graded, here) if kept]
        figures[task] = describe(some, sharp[:, here[tokens]], settings.k)
    return {
        "policy": config.policy.path,
        "samples": settings.samples,
        "k": settings.k,
        "temperature": settings.temperature,
        "tasks": figures,
        "overall": describe(graded, sharp, settings.k),
    }


def as_tables(found: dict) -> str:
    """The figures for people: ± is one standard error over prompts."""
    scores = ["task", "prompts", "pass@1", f"pass@{found['k']}", f"avg@{found['samples']}"]
    scores += ["truncated", "largest p", "entropy"]
    lengths = [
        "response length",
        "min",
        *(f"{p} %" for p in PERCENTILES[1:-1]),
        "max",
        "max/median",
    ]
    score_rows, length_rows = [], []
    for task, f in {**found["tasks"], "overall": found["overall"]}.items():
        measured = [(f[name]["mean"], f[name]["standard_error"]) for name in MEASURES]
        shares = ["truncated_share", "mean_largest_probability", "mean_entropy"]
        score_rows.append([task, str(f["prompts"]), *measured, *((f[s], None) for s in shares)])
        percentiles = [f"{x:.0f}" for x in f["length_percentiles"].values()]
        length_rows.append([task, *percentiles, f"{f['length_max_over_median']:.1f}"])
    failures = found["overall"]["grading_failures"]
    note = f"\n{failures} gradings failed and count as wrong\n" if failures else ""
    return as_text(scores, score_rows) + "\n" + as_text(lengths, length_rows) + note


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and the flags of `experiments.main` that make the config."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "experiments.evaluate", None, __doc__, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="config file, PATH or PATH:ARGUMENT")
    parser.add_argument("--model", help="smollm2, a folder, a Hugging Face id or a .gguf file")
    parser.add_argument("--samples", type=int, help="responses to each prompt (the config's)")
    parser.add_argument("--k", type=int, help="of pass@k (samples, if given, or the config's)")
    parser.add_argument("--out", type=Path, help="JSON file to write; must not exist")
    given, rest = parser.parse_known_args(argv)
    if wrong := [x for x in rest if not x.startswith("--config.") or "=" not in x]:
        parser.error(f"unknown argument {wrong[0]}; settings are given as --config.NAME=VALUE")
    return given, [f"--config={given.config}", *rest]


def asked_for(config: Config, given: argparse.Namespace) -> Config:
    """The config with what the command line says of the evaluation."""
    evaluation = config.evaluation
    samples = evaluation.samples if given.samples is None else given.samples
    k = (evaluation.k if given.samples is None else samples) if given.k is None else given.k
    policy = config.policy
    if given.model is not None:
        policy = dataclasses.replace(policy, path=given.model)
    evaluation = dataclasses.replace(evaluation, samples=samples, k=k)
    return dataclasses.replace(config, evaluation=evaluation, policy=policy)


def main(argv: Sequence[str]):
    given, config_flags = parse(argv)
    training.parse_flags(["evaluate", *config_flags])
    try:
        config = asked_for(from_dict(Config, training.CONFIG.value), given)
        if given.out is not None:
            if given.out.exists():
                raise ValueError(f"--out={given.out} exists; choose another file or remove it")
            atomic.check_writable(given.out)
        with TerminalProgress(config.steps) as progress:
            found = evaluate(config, progress)
        if given.out is not None:
            atomic.write_json(given.out, found)
    except (OSError, TypeError, ValueError, RuntimeError, FloatingPointError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    print(as_tables(found), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
