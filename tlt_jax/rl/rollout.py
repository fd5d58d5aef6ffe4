"""One rollout: prompts to graded responses, grading while the tail still decodes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from tlt_jax.events import EventLog
from tlt_jax.models.tokenizer import Tokenizer
from tlt_jax.rl.data import Prompt
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.rewards import RewardPool, Score
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Group, Response, Sampling


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts: int = 8  # per step
    samples: int = 8  # responses to each prompt
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    rows: int = 32  # decoded together
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

    def engine_config(self, max_prompt_tokens: int) -> EngineConfig:
        return EngineConfig.fit(
            rows=self.rows,
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
    graded: list[Graded]  # by draw, then member: never in the order of completion
    seconds: float  # of sampling
    reward_wait_seconds: float  # of waiting for scores with nothing left to sample


def rollout(
    engine: Engine,
    params: dict,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    run_key: jax.Array,
    tokenizer: Tokenizer,
    grader_of: Callable[[Prompt], Grader],
    pool: RewardPool,
    events: EventLog,
    on_finish: Callable[[], None] = lambda: None,
    more: More | None = None,
    eager: bool = False,
) -> Rollout:
    """Sample `samples` responses to each prompt and grade them as they finish.

    params: published weights (`transformer.decode_layout`). on_finish is called once per finished
    response, for a progress bar. more: asked for further prompts when everything is graded, and
    with `eager` also while the tail decodes, as soon as scores come in.
    """
    by_draw = {p.draw: p for p in prompts}

    def groups_of(prompts: Sequence[Prompt]) -> list[Group]:
        return [Group(p.ids, p.draw, samples, p.domain) for p in prompts]

    start, waited = events.now(), 0.0
    with events.span("compile"):
        session = engine.start(params, groups_of(prompts), sampling=sampling, run_key=run_key)
    done: dict[Key, tuple[Response, str]] = {}
    scores: dict[Key, Score] = {}

    def add_more() -> bool:
        prompts = more(scores) if more is not None else []
        by_draw.update({p.draw: p for p in prompts})
        session.add(groups_of(prompts))
        return bool(prompts)

    while True:
        while not session.done:
            began = events.now()
            session.dispatch()
            rows, live = len(session.rows), session.live
            for response in session.collect():
                prompt = by_draw[response.group.draw]
                text = tokenizer.decode(response.tokens)
                key = (response.group.draw, response.member)
                done[key] = (response, text)
                pool.submit(key, grader_of(prompt), text, prompt.entry)
                on_finish()
            events.add("decode", began, events.now(), worker=0, rows=rows, live=live)
            if eager and (fresh := pool.poll()):
                scores.update(fresh)
                add_more()
        sampled = events.now()
        with events.span("reward wait"):
            scores.update(pool.drain())
        waited += events.now() - sampled
        if not add_more():
            break
    graded = [Graded(by_draw[k[0]], *done[k], scores[k]) for k in sorted(done)]
    return Rollout(graded, events.now() - start - waited, waited)
