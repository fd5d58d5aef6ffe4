"""One rollout: prompts to graded responses, grading while the tail still decodes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tlt_jax.events import EventLog
from tlt_jax.models.tokenizer import Tokenizer
from tlt_jax.rl.data import Prompt
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.length_history import LengthHistory
from tlt_jax.rl.rewards import RewardPool, Score
from tlt_jax.rl.shares import FixedQueue, SharedQueue
from tlt_jax.rl.workers import Decoding, Workers
from tlt_jax.sharding import distributed
from tlt_jax.spec.engine import EngineConfig
from tlt_jax.spec.queue import Queue
from tlt_jax.spec.request import Group, Response, Sampling


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts: int = 8  # per step
    samples: int = 8  # responses to each prompt
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    rows: int = 32  # decoded together, on each slice
    longest_first: bool = False  # start prompts whose responses were long in the previous epoch
    shrink: int = 2  # as rows finish the batch is divided by this; larger means fewer programs
    segment_rounds: int = 4  # tokens per row between two looks by the host

    def __post_init__(self):
        for name in ("prompts", "samples", "rows", "segment_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.shrink < 2:
            raise ValueError(f"shrink={self.shrink} must be at least 2")
        self.sampling()

    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    def engine_config(self, max_prompt_tokens: int, fsdp: int = 1) -> EngineConfig:
        """fsdp: devices of a slice that share its rows."""
        return EngineConfig.fit(
            rows=self.rows,
            row_multiple=fsdp,
            prompt_tokens=max_prompt_tokens,
            new_tokens=self.max_new_tokens,
            shrink=self.shrink,
            segment_rounds=self.segment_rounds,
        )


Key = tuple[int, int]  # draw of the prompt, member of its group
More = Callable[[Mapping[Key, Score]], Sequence[Prompt]]


@dataclasses.dataclass(frozen=True)
class Graded:
    prompt: Prompt
    response: Response
    text: str
    score: Score


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The responses of all processes; the same on each of them."""

    graded: list[Graded]  # by draw, then member: never in the order of completion
    seconds: float  # of sampling, until the last worker had nothing left
    reward_wait_seconds: float  # of this process for scores with nothing left to sample
    barrier_seconds: float  # of this process for the others
    idle_shares: list[float]  # of `seconds`, by slice
    tail_share: float  # of `seconds`, after the first slice had nothing left
    moved: int  # responses that another process started than a fixed schedule would have


@dataclasses.dataclass
class _Part:
    """What one process does of a round of sampling, which ends when nothing waits or decodes."""

    began: float  # seconds on this process's own clock
    share: int = 0  # responses that a fixed schedule would have it start
    done: dict[Key, tuple[Response, str]] = dataclasses.field(default_factory=dict)
    scores: dict[Key, Score] = dataclasses.field(default_factory=dict)
    # Of each worker, in seconds after `began`: when it had nothing left, and before that was idle.
    dry: list[float] = dataclasses.field(default_factory=list)
    gaps: list[list[tuple[float, float]]] = dataclasses.field(default_factory=list)


class Sampler:
    """Makes the rollouts of a run, on the workers of all processes.

    fixed: content does not depend on the clock (`coordinator.py`, `shares.py`).
    """

    def __init__(
        self,
        workers: Workers,
        *,
        run_key: jax.Array,
        tokenizer: Tokenizer,
        grader_of: Callable[[Prompt], Grader],
        pool: RewardPool,
        events: EventLog,
        fixed: bool,
    ):
        self.workers, self.run_key, self.tokenizer = workers, run_key, tokenizer
        self.grader_of, self.pool, self.events, self.fixed = grader_of, pool, events, fixed
        self.rollouts = 0

    def rollout(
        self,
        params: Sequence[dict],
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        on_finish: Callable[[], None] = lambda: None,
        more: More | None = None,
        history: LengthHistory | None = None,
    ) -> Rollout:
        """Sample `samples` responses to each prompt and grade them as they finish.

        params: published weights (`transformer.decode_layout`), as each slice of this process holds
        them. Every process passes the same prompts and gets the same result. on_finish: called once
        per response that this process finished. more: asked for further prompts when everything is
        graded; with a schedule by the clock and one process also while the tail decodes, as soon as
        scores come in. history: start the longest expected first, and note how long they were.
        """
        self.rollouts += 1
        queue = self._queue(sampling)
        eager = not self.fixed and distributed.count() == 1
        by_draw: dict[int, Prompt] = {}
        scores: dict[Key, Score] = {}
        done: dict[Key, tuple[Response, str]] = {}
        rounds: list[list[_Part]] = []
        decoding: Decoding | None = None

        def put(prompts: Sequence[Prompt]) -> int:
            by_draw.update({p.draw: p for p in prompts})
            ordered = prompts if history is None else history.longest_first(prompts)
            return queue.put(
                queue.known([Group(p.ids, p.draw, samples, p.domain) for p in ordered])
            )

        waited = met = 0.0
        while prompts:
            name = f"rollout {self.rollouts}.{len(rounds)}"
            met += self._timed("barrier", distributed.barrier, name)[0]
            part = _Part(self.events.now())
            part.share = put(prompts)
            if decoding is None:
                decoding = Decoding(
                    self.workers,
                    params,
                    queue,
                    self.run_key,
                    share=part.share,
                    fixed=self.fixed,
                    events=self.events,
                )
            else:
                decoding.queued(part.share)
            for finished in decoding.run():
                for response in finished:
                    prompt = by_draw[response.group.draw]
                    key = (response.group.draw, response.member)
                    part.done[key] = response, self.tokenizer.decode(response.tokens)
                    self.pool.submit(key, self.grader_of(prompt), part.done[key][1], prompt.entry)
                    on_finish()
                if eager and more is not None and (fresh := self.pool.poll()):
                    part.scores.update(fresh)
                    if extra := more(scores | part.scores):
                        part.share += put(extra)
                        decoding.queued(len(queue))
            part.dry = [t - part.began for t in decoding.coordinator.idle_since()]
            part.gaps = [
                [(t0 - part.began, t1 - part.began) for t0, t1 in spans if t0 >= part.began]
                for spans in decoding.coordinator.idle_spans()
            ]
            seconds, scored = self._timed("reward wait", self.pool.drain)
            part.scores.update(scored)
            waited += seconds
            seconds, parts = self._timed("barrier", distributed.exchange, name, part)
            met += seconds
            rounds.append(parts)
            self._note_idle(part, max(max(p.dry) for p in parts))
            for p in parts:
                done.update(p.done)
                scores.update(p.scores)
            prompts = more(scores) if more is not None else []
        graded = [Graded(by_draw[k[0]], *done[k], scores[k]) for k in sorted(done)]
        if history is not None:
            history.update((g.prompt, len(g.response.tokens)) for g in graded)
        return Rollout(graded, reward_wait_seconds=waited, barrier_seconds=met, **_pace(rounds))

    def _timed(self, name: str, function: Callable, *args) -> tuple[float, Any]:
        """(seconds, result) of a call, which is a span too."""
        began = self.events.now()
        with self.events.span(name):
            result = function(*args)
        return self.events.now() - began, result

    def _queue(self, sampling: Sampling) -> Queue:
        check = self.workers.engines[0].check
        index, count = distributed.index(), distributed.count()
        if self.fixed or count == 1:
            return FixedQueue(check, sampling, index, count)
        return SharedQueue(check, sampling, index, count, f"rollout {self.rollouts}")

    def _note_idle(self, part: _Part, seconds: float):
        """The spans in which workers of this process had nothing to do and others had."""
        for i, (dry, gaps) in enumerate(zip(part.dry, part.gaps)):
            for start, end in (*gaps, (dry, seconds)):
                if start < end:
                    start, end = part.began + start, part.began + end
                    self.events.add("idle", start, end, worker=self.workers.first + i)


def _pace(rounds: list[list[_Part]]) -> dict:
    """The figures of a rollout: each round ends when the last worker has nothing left."""
    ends = [max(max(p.dry) for p in parts) for parts in rounds]
    dry = [[t for p in parts for t in p.dry] for parts in rounds]  # by round, then slice
    gaps = [[sum(t1 - t0 for t0, t1 in g) for p in parts for g in p.gaps] for parts in rounds]
    total = sum(ends) or 1.0
    idle = [
        sum(end - t + gap for end, t, gap in zip(ends, *each)) / total
        for each in zip(zip(*dry), zip(*gaps))
    ]
    tail = sum(end - min(each) for end, each in zip(ends, dry)) / total
    moved = sum(max(0, len(p.done) - p.share) for parts in rounds for p in parts)
    return {"seconds": sum(ends), "idle_shares": idle, "tail_share": tail, "moved": moved}
