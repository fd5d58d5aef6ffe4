"""Questions from reasoning-gym: a training mixture and a held-out set, both reproducible."""

import dataclasses
import itertools
from collections.abc import Mapping, Set
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """One reasoning-gym task of a mixture.

    weight: its share of the questions, relative to the other tasks. params: of the task's own
    configuration, as a mapping or as pairs; kept as sorted pairs.
    """

    name: str
    weight: float = 1.0
    params: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        pairs = dict(self.params)
        object.__setattr__(self, "params", tuple(sorted(pairs.items())))
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"task {self.name!r}: weight={self.weight} must be positive")
        for name in sorted({"seed", "size"} & set(pairs)):
            raise ValueError(f"task {self.name!r}: set {name} of the data section, not of a task")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, the task that it is of, and the entry its reward needs."""

    text: str
    task: str
    entry: dict[str, Any]  # task, params (the keywords of the scorer), item (as generated)


def draw_questions(
    tasks: tuple[Task, ...], size: int, seed: int, *, domain: int, excluded: Set[str] = frozenset()
) -> list[Question]:
    """Return `size` questions, in task order, none with a text in `excluded`.

    Each task's share is rounded by `split_by_weight`. A (seed, domain) shares its questions with no
    other, unless the task has so few that they recur. Raises ValueError for an unknown task or
    parameter, and if a task has too few questions outside of `excluded`.
    """
    questions = []
    for index, (task, count) in enumerate(zip(tasks, split_by_weight(tasks, size))):
        tries = 10 * count + 1000
        dataset = _dataset(task, tries, _task_seed(domain, seed, index))
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


def split_by_weight(tasks: tuple[Task, ...], size: int) -> list[int]:
    """Return counts that sum to `size`, proportional to the weights up to rounding."""
    weights = np.array([task.weight for task in tasks], np.float64)
    shares = size * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: size - counts.sum()]] += 1
    return counts.tolist()


def _task_seed(domain: int, seed: int, index: int) -> int:
    """Return a seed of reasoning-gym for one task of a mixture.

    Hashed, because the package seeds question i by seed + i: seeds 0 and 1 would share nearly all.
    """
    return int(np.random.SeedSequence([domain, seed, index]).generate_state(1)[0] >> 1)


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
