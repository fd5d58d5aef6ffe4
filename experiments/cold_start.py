"""Teach a model to answer in steps, before RL:

    python -m experiments.cold_start --config=experiments/configs/cold_start.py --out=runs/reasoner

Draws questions, writes a worked solution of each (`experiments/traces`), trains on the solutions
(`experiments/sft.py`) and writes a folder in the Hugging Face layout, with cold_start.json:
the recipe and what it cost. A folder that holds the same recipe is left as it is, at once. The
folder appears whole, when all is done; a run that was killed starts over.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import jax
import numpy as np

from experiments import main as training
from experiments.sft import ColdStartConfig, taught_samples, train, updates
from tlt_jax import atomic
from tlt_jax.config import differences, from_dict, to_dict
from tlt_jax.models import hf, hf_config
from tlt_jax.rl import policy
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy import Policy
from tlt_jax.rl.policy_trainer import NonFiniteError

RECORD = "cold_start.json"
PRINT_EVERY = 10  # updates


def recipe(config: ColdStartConfig, start: Policy, samples: Sequence[Sample]) -> dict:
    """What the result is a function of: the settings, the tokens taught and the weights before.

    The tokens stand for whatever made them: traces, questions, chat template, tokenizer.
    """
    taught, weights = hashlib.sha256(), hashlib.sha256()
    for sample in samples:
        for part in (sample.prompt, sample.response):
            taught.update(np.array([len(part), *part], np.int64).tobytes())
    for path, leaf in jax.tree_util.tree_leaves_with_path(start.params):
        weights.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        weights.update(np.ascontiguousarray(leaf).data)
    return {
        "config": to_dict(config),
        "tokens_taught": taught.hexdigest(),
        "weights_before": weights.hexdigest(),
    }


def finished(out: Path, wanted: dict) -> bool:
    """Whether `out` holds the result of this recipe. Raises ValueError for anything else in it."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / RECORD).is_file():
        raise ValueError(
            f"--out={out} holds something and no {RECORD}; choose another folder or remove it"
        )
    found = hf.read_json(out / RECORD).get("recipe")
    if not isinstance(found, dict):
        raise ValueError(f"{out / RECORD} holds no recipe; choose another folder or remove it")
    if different := differences(found, wanted):
        raise ValueError(
            f"--out={out} holds the result of another recipe: {'; '.join(different)}. Choose "
            "another folder, or remove this one"
        )
    return True


def draft_of(out: Path) -> tuple[Path, IO]:
    """A folder beside `out` to work in, and the open file that locks it for this process.

    What a killed run left there is removed. Raises ValueError where it cannot be made, and where
    another process works in it.
    """
    draft = out.absolute().with_name(f".{out.name}.draft")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        lock = open(draft / ".lock", "w")
    except OSError as error:
        raise ValueError(
            f"--out={out} cannot be written: {error.strerror}; choose another place"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"--out={out} is being made by another process; wait for it or stop it first"
        ) from None
    shutil.rmtree(draft / "model", ignore_errors=True)
    return draft, lock


def cold_start(config: ColdStartConfig, out: Path):
    """Make the model of `config` in the folder `out`, unless it is there."""
    start = policy.load(config.policy, jax.random.key(config.seed))
    hf_config.render(start.model)  # what cannot be saved is refused before it is trained
    if config.row_tokens > start.model.max_context:
        raise ValueError(
            f"row_tokens={config.row_tokens} exceeds the model's context of "
            f"{start.model.max_context}; lower it"
        )
    samples, left_out = taught_samples(config, start)
    wanted = recipe(config, start, samples)
    if finished(out, wanted):
        print(f"{out} holds the result of this recipe; nothing to do")
        return
    batches = list(updates(samples, config))
    if len(batches) <= config.warmup_steps:
        raise ValueError(
            f"{len(samples)} traces fill {len(batches)} updates, no more than warmup_steps="
            f"{config.warmup_steps}; raise data.size or epochs, or lower warmup_steps"
        )
    draft, lock = draft_of(out)
    with lock:
        work = {
            "traces": len(samples),
            "traces_left_out": left_out,
            "updates": len(batches),
            "tokens": sum(s.tokens for batch in batches for s in batch),
            "tokens_taught": sum(len(s.response) for batch in batches for s in batch),
        }
        filled = work["tokens"] / (len(batches) * config.rows * config.row_tokens)
        print(
            ", ".join(f"{name} {n}" for name, n in work.items()), f"(rows filled to {filled:.0%})"
        )
        progress = Progress(len(batches))
        params = train(config, start, batches, progress.advance)
        result = {**work, "minutes": progress.minutes(), "losses": progress.losses}
        hf.save(draft / "model", start.model, params, tokenizer=start.tokenizer)
        atomic.write_json(draft / "model" / RECORD, {"recipe": wanted, "result": result})
        os.replace(draft / "model", out)
        shutil.rmtree(draft)
    print(f"written {out} after {result['minutes']:.1f} minutes")


class Progress:
    """The losses so far, and a line of text every few updates."""

    def __init__(self, updates: int):
        self.updates, self.losses, self._began = updates, [], time.monotonic()

    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def advance(self, loss: float):
        self.losses.append(loss)
        done, recent = len(self.losses), self.losses[-PRINT_EVERY:]
        if done % PRINT_EVERY == 0 or done in (1, self.updates):
            print(
                f"update {done:4d} of {self.updates}  loss {sum(recent) / len(recent):.4f}  "
                f"{self.minutes():.1f} of about {self.minutes() / done * self.updates:.0f} minutes",
                flush=True,
            )


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and the flags of `experiments.main` that make the config."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "experiments.cold_start", None, __doc__, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="config file, PATH or PATH:ARGUMENT")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    given, rest = parser.parse_known_args(argv)
    if wrong := [x for x in rest if not x.startswith("--config.") or "=" not in x]:
        parser.error(f"unknown argument {wrong[0]}; settings are given as --config.NAME=VALUE")
    return given, [f"--config={given.config}", *rest]


def main(argv: Sequence[str]):
    given, config_flags = parse(argv)
    training.parse_flags(["cold_start", *config_flags])
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        cold_start(from_dict(ColdStartConfig, training.CONFIG.value), given.out)
    except (TypeError, ValueError, OSError, NonFiniteError) as error:
        # What users can mend comes as one sentence; anything else keeps its traceback.
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
