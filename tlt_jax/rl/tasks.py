"""Questions from reasoning-gym: a training mixture and a held-out set, both reproducible."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from tlt_jax.rl import fixed_hashing


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a curriculum: up to draw `until` of the training stream, or to the end."""

    params: tuple[tuple[str, Any], ...]
    until: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "params", _pairs(self.params))


@dataclasses.dataclass(frozen=True)
class Task:
    """One reasoning-gym task of a mixture.

    weight: its share of the questions, relative to the other tasks. params: of the task's own
    configuration, as a mapping or as pairs; kept as sorted pairs. stages: a curriculum, each stage
    laying its params over these.
    """

    name: str
    weight: float = 1.0
    params: tuple[tuple[str, Any], ...] = ()
    stages: tuple[Stage, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "params", _pairs(self.params))
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"task {self.name!r}: weight={self.weight} must be positive")
        for params in (self.params, *(stage.params for stage in self.stages)):
            for name in sorted({"seed", "size"} & set(dict(params))):
                raise ValueError(
                    f"task {self.name!r}: set {name} of the data section, not of a task"
                )
        ends = [0, *(stage.until for stage in self.stages[:-1])]
        rising = all(b is not None and a < b for a, b in zip(ends, ends[1:]))
        if self.stages and not (rising and self.stages[-1].until is None):
            raise ValueError(
                f"task {self.name!r}: every stage but the last needs a larger `until` than the one "
                f"before, and the last none, got {[stage.until for stage in self.stages]}"
            )

    def at(self, draw: float) -> "Task":
        """Return the task as it is at a draw of the training stream; `math.inf` for its end."""
        for stage in self.stages:
            if stage.until is None or draw < stage.until:
                params = dict(self.params) | dict(stage.params)
                return dataclasses.replace(self, params=tuple(params.items()), stages=())
        return self


def starts(tasks: Sequence[Task]) -> list[int]:
    """Return the draws at which a stage of any of the tasks begins; the first is 0."""
    ends = {stage.until for task in tasks for stage in task.stages}
    return sorted({0} | (ends - {None}))


def tasks_from(specs: Mapping[str, Any]) -> tuple[Task, ...]:
    """Return the tasks that a section describes: label -> {name (the label), weight, params,
    stages: a list of {until, params}}. Raises ValueError naming what is no such thing."""
    return tuple(_task(label, spec) for label, spec in specs.items())


def _task(label: str, spec: Any) -> Task:
    where = f"tasks.{label}"
    fields = {"name": label} | _section(where, spec, ("name", "weight", "params", "stages"))
    if not _is_number(weight := fields.get("weight", 1.0)):
        raise ValueError(f"{where}.weight={weight!r} must be a number")
    if not isinstance(stages := fields.pop("stages", ()), list | tuple):
        raise ValueError(f"{where}.stages={stages!r} must be a list of stages")
    made = (_stage(f"{where}.stages[{i}]", stage) for i, stage in enumerate(stages))
    return Task(**fields, stages=tuple(made))


def _stage(where: str, spec: Any) -> Stage:
    fields = _section(where, spec, ("until", "params"))
    until = fields.get("until")
    if until is not None and (isinstance(until, bool) or not isinstance(until, int)):
        raise ValueError(f"{where}.until={until!r} must be a number of draws")
    return Stage(**{"params": {}} | fields)


def _section(where: str, spec: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("params", {}), Mapping):
        raise ValueError(f"{where}={spec!r} must be a section with some of {known}")
    if unknown := sorted(set(spec) - set(known)):
        raise ValueError(f"{where}.{unknown[0]} is no known setting; known here: {known}")
    return dict(spec)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pairs(params: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(dict(params).items()))


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, the task that it is of, and the entry its reward needs."""

    text: str
    task: str
    entry: dict[str, Any]  # task, params (the keywords of the scorer), item (as generated)


@dataclasses.dataclass(frozen=True)
class QuestionSets:
    """Held-out questions, and the training questions of each stage by the draw it begins at."""

    held_out: list[Question]
    training: dict[int, list[Question]]


def draw_sets(
    tasks: Sequence[Task],
    *,
    size: int,
    seed: int,
    domain: int,
    eval_size: int,
    eval_seed: int,
    eval_domain: int,
) -> QuestionSets:
    """Draw the questions of a run: `eval_size` held out, of the last stage of a curriculum, and
    `size` in each stage, none of which has the text of one held out.

    The same in every process: reasoning-gym's own draws depend on Python's hash seed in some tasks.
    Raises ValueError as `draw_questions` does.
    """
    args = (tuple(tasks), size, seed, domain, eval_size, eval_seed, eval_domain)
    return fixed_hashing.call(_draw_sets, *args)


def _draw_sets(tasks, size, seed, domain, eval_size, eval_seed, eval_domain) -> QuestionSets:
    final = [task.at(math.inf) for task in tasks]
    held_out = draw_questions(final, eval_size, eval_seed, domain=eval_domain)
    texts = frozenset(question.text for question in held_out)
    begins = starts(tasks)
    training = {
        begin: draw_questions(
            [task.at(begin) for task in tasks],
            min(size, end - begin),  # more would never be drawn
            seed,
            domain=domain,
            stage=stage,
            excluded=texts,
        )
        for stage, (begin, end) in enumerate(zip(begins, [*begins[1:], math.inf]))
    }
    return QuestionSets(held_out, training)


def draw_questions(
    tasks: Sequence[Task],
    size: int,
    seed: int,
    *,
    domain: int,
    stage: int = 0,
    excluded: Set[str] = frozenset(),
) -> list[Question]:
    """Return `size` questions of tasks without stages, in their order, no text in `excluded`.

    Each task's share is rounded by `split_by_weight`. A (seed, domain, stage) shares its questions
    with no other, unless the task has so few that they recur. Raises ValueError for an unknown task
    or parameter, and if a task has too few questions outside of `excluded`.
    """
    questions = []
    for index, (task, count) in enumerate(zip(tasks, split_by_weight(tasks, size))):
        tries = 10 * count + 1000
        dataset = _dataset(task, tries, _task_seed(domain, seed, index, stage))
        drawn = (_question(task, dataset[i]) for i in range(tries))
        fresh = (question for question in drawn if question.text not in excluded)
        found = list(itertools.islice(fresh, count))
        if len(found) < count:
            raise ValueError(
                f"task {task.name!r}: only {len(found)} of {count} questions differ from those "
                f"held out, after {tries} tries; lower eval_size, or widen the task's params"
            )
        questions += found
    return questions


def split_by_weight(tasks: Sequence[Task], size: int) -> list[int]:
    """Return counts that sum to `size`, proportional to the weights up to rounding."""
    weights = np.array([task.weight for task in tasks], np.float64)
    shares = size * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: size - counts.sum()]] += 1
    return counts.tolist()


def _task_seed(domain: int, seed: int, index: int, stage: int) -> int:
    """Return a seed of reasoning-gym for one task of a mixture.

    Hashed, because the package seeds question i by seed + i: seeds 0 and 1 would share nearly all.
    """
    return int(np.random.SeedSequence([domain, seed, index, stage]).generate_state(1)[0] >> 1)


def _dataset(task: Task, size: int, seed: int):
    import reasoning_gym  # a second to import, for those who train on it only
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        raise ValueError(f"task {task.name!r} is unknown to reasoning-gym; known: {list(DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[task.name][1])}
    for name, _ in task.params:
        if name not in known:
            raise ValueError(
                f"task {task.name!r} has no parameter {name!r}; known: {sorted(known)}"
            )
    params = dict(task.params)
    try:
        return reasoning_gym.create_dataset(task.name, **params, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task.name!r} refuses its params {params}: {error}") from error


def _question(task: Task, item: Mapping[str, Any]) -> Question:
    entry = {"task": task.name, "params": dict(task.params), "item": dict(item)}
    return Question(item["question"], task.name, entry)
