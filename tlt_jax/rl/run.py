"""What lives as long as a run, and how it starts: resumed, from given weights, or from nothing."""

import dataclasses
import functools
import hashlib
import json
import resource
import shutil
import sys
import warnings
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import atomic
from tlt_jax.checkpoint import CheckpointError, Checkpoints
from tlt_jax.compile_clock import CompileClock
from tlt_jax.config import Config, differences, to_dict
from tlt_jax.events import EventLog, all_events_files, events_file, to_chrome_trace
from tlt_jax.loggers import make_logger
from tlt_jax.metrics import MetricsWriter, read_metrics
from tlt_jax.models import hf, hf_config, transformer
from tlt_jax.rl import policy
from tlt_jax.rl.data import load_prompts
from tlt_jax.rl.evaluate import held_out_prompts
from tlt_jax.rl.length_history import LengthHistory
from tlt_jax.rl.packing import BatchShape
from tlt_jax.rl.policy_trainer import PolicyTrainer, TrainState
from tlt_jax.rl.prompt_stream import PromptStream, fingerprint
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.rollout import Sampler
from tlt_jax.rl.warm_up import SUPERVISED, supervised_samples, warm_up
from tlt_jax.rl.workers import Workers
from tlt_jax.sharding import distributed
from tlt_jax.sharding.mesh import data_shards, local_slices, make_mesh, slice_mesh
from tlt_jax.sharding.publish import Published, publish
from tlt_jax.spec import noise
from tlt_jax.spec.engine import Engine

PACKED_ROW_TOKENS = 256  # longer rows save little: attention is computed over the whole row
METRICS, TRACE, DONE = "metrics.jsonl", "trace.json", "DONE"
# Settings that a resumed run may change. Another mesh gives the same content up to rounding.
MAY_CHANGE = ("steps", "checkpoint", "logger", "mesh", "distributed")


class Progress(Protocol):
    """What a run tells the terminal as it goes."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def step(self, line: dict) -> None: ...


@dataclasses.dataclass(frozen=True)
class Saved:
    """Where an earlier process left this run."""

    step: int
    record: dict  # see `Run.save`


class Run:
    """Everything that lives as long as a run; `loop.train` drives it.

    A workdir with checkpoints of the same config is gone on with: `saved` is where. Raises
    ValueError for whatever would stop the run later, CheckpointError for a damaged checkpoint.
    """

    def __init__(self, config: Config, workdir: Path, progress: Progress):
        self.config, self.workdir, self.progress = config, workdir, progress
        self.checkpoints = Checkpoints(workdir / policy.CHECKPOINTS, config.checkpoint)
        self.saved = _saved(self.checkpoints, config)
        if self.saved is None and (workdir / DONE).exists():
            raise ValueError(
                f"{workdir} holds a finished run without checkpoints, so there is nothing to go on "
                "from; choose another folder"
            )
        policy_key, self.run_key = jax.random.split(jax.random.key(config.seed))
        self.policy = policy.load(config.policy, policy_key)
        self.data = load_prompts(config.data, self.policy.tokenizer)
        if left_out := self.data.num_too_long + self.data.num_overlapping:
            warnings.warn(
                f"{left_out} prompts are left out: {self.data.num_too_long} longer than data."
                f"max_prompt_tokens, {self.data.num_overlapping} in both files",
                stacklevel=2,
            )
        if (found := len(self.data.held_out)) < (wanted := config.evaluation.prompts):
            warnings.warn(
                f"there are {found} held-out prompts and evaluation.prompts={wanted}: all used",
                stacklevel=2,
            )
        self.stream = PromptStream(self.data.train, seed=config.data.seed, domain=noise.TRAIN)
        self.held_out = held_out_prompts(self.data, config.evaluation.prompts)
        longest = max(len(e.ids) for e in (*self.data.train, *self.data.held_out))
        self.mesh = make_mesh(config.mesh)
        self.policy.model.check_split(tensor=config.mesh.tensor, data=data_shards(self.mesh))
        self.slices = local_slices(self.mesh)
        shapes = config.rollout.engine_config(longest, config.mesh.fsdp)
        self.workers = Workers(
            [
                Engine(
                    self.policy.model,
                    shapes,
                    self.policy.tokenizer.eos_ids,
                    slice_mesh(self.mesh, i),
                )
                for i in self.slices
            ],
            first=self.slices[0],
            total=config.mesh.slices,
        )
        # A training row holds the longest sample, or a whole group where that is still short.
        rollouts = config.rollout
        self.per_step = rollouts.prompts * rollouts.samples
        group = longest + rollouts.samples * rollouts.max_new_tokens
        self.row_tokens = max(longest + rollouts.max_new_tokens, min(group, PACKED_ROW_TOKENS))
        self.layout = functools.partial(transformer.decode_layout, self.policy.model)
        self._check(longest)
        # One example per source and grader: what the pool tries out before any work.
        self.graded = config.reward.check((*self.data.train, *self.data.held_out))
        position = 0
        if self.saved is not None:
            record, position = self.saved.record, self.saved.record["metrics_bytes"]
            self.stream.restore(record["data"])
            if record["held_out"] != fingerprint(self.held_out):
                raise ValueError(
                    "the held-out prompts are not those that this run was evaluated on before; "
                    "bring back the file they came from, or start a new workdir"
                )
            self.run_key = jax.random.wrap_key_data(np.array(record["run_key"], np.uint32))
        self.reference: dict | None = None  # weights of the policy that a KL is taken to
        self.history: LengthHistory | None = None
        if config.rollout.longest_first:
            self.history = LengthHistory(self.saved and self.saved.record["lengths"])
        if distributed.count() > 1:
            # What lies in files: other weights or prompts would be mixed without a sound.
            distributed.agree(
                "what they start from",
                {
                    "newest checkpoint": self.saved and self.saved.step,
                    "weights": tree_hash(self.policy.params),
                    "training prompts": fingerprint(self.data.train),
                    "held-out prompts": fingerprint(self.held_out),
                    "64-bit mode": jax.config.jax_enable_x64,
                },
            )
        # From here on files are open and, last, processes run. One process keeps the records.
        self.leads = distributed.index() == 0
        first = 0 if self.saved is None else self.saved.step + 1
        logger = config.logger if self.leads else ""
        self.logger = make_logger(logger, workdir, to_dict(config), first)
        self.metrics = MetricsWriter(workdir / METRICS, position) if self.leads else None
        self.lines = read_metrics(workdir / METRICS) if self.leads else []
        self.events = EventLog(events_file(workdir, distributed.index()))
        self.compiling = CompileClock()
        reward = config.reward
        self.pool = RewardPool(reward.num_workers, reward.spare_workers, reward.deadline_s)
        self.sampler = Sampler(
            self.workers,
            run_key=self.run_key,
            tokenizer=self.policy.tokenizer,
            grader_of=reward.grader_of,
            pool=self.pool,
            events=self.events,
            fixed=config.schedule == "fixed",
        )

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

    def load_graders(self):
        """Try every grader in a worker. Raises GraderError for one that cannot work."""
        for example in self.graded:
            self.pool.load(self.config.reward.grader_of(example), example.entry)

    def start(self) -> tuple[PolicyTrainer, int]:
        """The trainer and the RL steps behind it. In this order of precedence: the newest
        checkpoint of the workdir; the weights of `policy.path`; random ones. The supervised phase
        follows the latter two. The reference policy of a KL is the one before the first step."""
        trainer = self._trainer(self.policy.params)
        if self.saved is not None:
            with self.events.span("restore", step=self.saved.step):
                trainer.state = _state(
                    self.checkpoints.restore(self.saved.step, _parts(trainer.state))
                )
                if self.config.algorithm.needs_reference:
                    self.checkpoints.record(0)  # refuses a damaged one
                    like = {policy.PART: trainer.state.params}
                    self.reference = self.checkpoints.restore(0, like)[policy.PART]
            return trainer, self.saved.step
        if self.config.warm_up.steps:
            trainer = self._trainer(self._warmed_up())
        if self.config.algorithm.needs_reference:
            self.reference = jax.tree.map(jnp.copy, trainer.state.params)
        return trainer, 0

    def _trainer(self, params: dict) -> PolicyTrainer:
        return PolicyTrainer(
            self.policy.model,
            self.config.trainer,
            self.config.algorithm,
            params,
            row_tokens=self.row_tokens,
            samples=self.per_step,
            max_new_tokens=self.config.rollout.max_new_tokens,
            temperature=self.config.rollout.temperature,
            mesh=self.mesh,
        )

    def _warmed_up(self) -> dict:
        """The weights after the supervised phase."""
        warm = self.config.warm_up
        samples = supervised_samples(self.data.train, self.policy.tokenizer, warm)
        supervised = dataclasses.replace(
            self.config.trainer,
            learning_rate=warm.learning_rate,
            schedule="constant",
            warmup_steps=0,
            weight_decay=0.0,
        )
        longest = max(s.tokens for s in samples)
        teacher = PolicyTrainer(
            self.policy.model,
            supervised,
            SUPERVISED,
            self.policy.params,
            row_tokens=longest,
            samples=warm.batch,
            max_new_tokens=max(len(s.response) for s in samples),
            mesh=self.mesh,
        )
        self.progress.start("warm-up", warm.steps)
        with self.events.span("warm-up"):
            warm_up(teacher, samples, warm, self.progress.advance)
        return teacher.state.params

    def meet(self, name: str) -> float:
        """Wait for the other processes, as a span; returns the seconds that took. Before a program
        of all devices, whose collectives do not wait long."""
        began = self.events.now()
        with self.events.span("barrier"):
            distributed.barrier(name)
        return self.events.now() - began

    def publish(self, trainer: PolicyTrainer, version: int) -> Published:
        with self.events.span("publish", version=version):
            return publish(self.mesh, self.layout, trainer.state.params, version)

    def record(self, line: dict):
        """Write the metrics line of a step, and what happened in it."""
        self.events.flush()
        if not self.leads:
            return
        self.metrics.write(line)
        self.logger.log(line)
        self.lines.append(line)
        self.progress.step(line)

    def save(self, trainer: PolicyTrainer, step: int):
        """Start a checkpoint of everything that the steps after `step` depend on.

        Always after the step's metrics line: a run that dies between the two repeats the step.
        """
        record = {
            "config": to_dict(self.config),
            "data": self.stream.state(),
            "held_out": fingerprint(self.held_out),
            "run_key": np.asarray(jax.random.key_data(self.run_key)).tolist(),
            "metrics_bytes": self.metrics.position() if self.leads else None,
            "lengths": self.history and self.history.state(),
        }
        with self.events.span("checkpoint", step=step):
            # Step 0 is the reference policy, where there is one: it stays.
            keep = step == 0 and self.reference is not None
            self.checkpoints.save(step, _parts(trainer.state), record, keep=keep)

    def reopen(self):
        """Take away what says that the run is finished: it had fewer steps, or was killed there."""
        if not self.leads:
            return
        (self.workdir / DONE).unlink(missing_ok=True)
        for folder in (self.workdir / policy.FINAL, *self.workdir.glob(f".{policy.FINAL}.*.tmp")):
            shutil.rmtree(folder, ignore_errors=True)

    def save_policy(self, trainer: PolicyTrainer):
        """Write the trained policy as a folder in the Hugging Face layout."""
        self.meet("save policy")
        params = trainer.host_params()
        if self.leads:
            folder = self.workdir / policy.FINAL
            hf.save(folder, self.policy.model, params, tokenizer=self.policy.tokenizer)

    def finish(self, published: Published, trainer: PolicyTrainer) -> tuple[str, list[int]]:
        """Say that nothing is left to do, once everything else is written.

        Returns the hash of the published weights, and how many response tokens each process's
        devices trained on. Raises RuntimeError where processes ended with different weights.
        """
        mine = tree_hash(published.view(self.slices[0])), trainer.tokens_here
        hashes, tokens = zip(*distributed.exchange("weights", mine))
        if len(set(hashes)) > 1:
            raise RuntimeError(f"the processes ended with different weights: {hashes}")
        self.events.flush()
        self.meet("finish")
        if self.leads:
            files = all_events_files(self.workdir)
            to_chrome_trace(files, self.workdir / TRACE)
            done = {"steps": self.config.steps, "weights": hashes[0]}
            atomic.write_json(self.workdir / DONE, done)
        return hashes[0], list(tokens)

    def close(self):
        """Stop the workers and close the files; a checkpoint under way is finished first.

        What fails here is a warning: the error that ended the run is the one to be seen.
        """
        closing = [
            self.pool.close,
            self.checkpoints.wait,
            self.logger.close,
            self.events.close,
            self.compiling.close,
        ]
        if self.metrics is not None:
            closing.append(self.metrics.close)
        for close in closing:
            try:
                close()
            except (CheckpointError, OSError) as error:
                warnings.warn(f"at the end of the run: {error}", stacklevel=2)


def _parts(state: TrainState) -> dict:
    """The parts of a checkpoint; weights apart, because another run may start from them alone."""
    return {policy.PART: state.params, "optimizer": [state.opt_state, state.step]}


def _state(parts: dict) -> TrainState:
    return TrainState(parts[policy.PART], *parts["optimizer"])


def _saved(checkpoints: Checkpoints, config: Config) -> Saved | None:
    """The newest checkpoint. Raises ValueError where it is one of another config."""
    if not (steps := checkpoints.steps()):
        return None
    step, record = steps[-1], checkpoints.record(steps[-1])
    if different := differences(record["config"], to_dict(config), MAY_CHANGE):
        raise ValueError(
            f"{checkpoints.folder} holds a run of another config: {'; '.join(different)}. Go on "
            f"with its settings (only {', '.join(MAY_CHANGE)} may change), or choose another folder"
        )
    if step > config.steps:
        raise ValueError(
            f"{checkpoints.folder} holds a run of {step} steps, more than steps={config.steps}; "
            "raise steps, or choose another folder"
        )
    return Saved(step, record)


def tree_hash(tree: dict) -> str:
    """A hash of the bytes of arrays that this process can read."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).data)
    return digest.hexdigest()[:16]


def finished_steps(workdir: Path) -> int | None:
    """Steps of the finished run in a folder; None where there is none (see `Run.finish`)."""
    path = workdir / DONE
    return json.loads(path.read_text(encoding="utf-8"))["steps"] if path.exists() else None


def peak_memory_gb() -> float:
    """The most memory that this process has held, gigabytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
