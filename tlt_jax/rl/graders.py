"""Graders: from a response's text to a reward. Imported by reward workers, so free of jax."""

import dataclasses
import functools
import importlib
import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
# A sign counts only where no operand stands before it: the last number of "7-4" is 4.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)


def answer_tag(text: str) -> str | None:
    """Return what the last <answer>…</answer> holds, stripped; None without such a pair."""
    end = text.rfind(_ANSWER_CLOSE)
    start = text.rfind(_ANSWER_OPEN, 0, max(end, 0))
    return text[start + len(_ANSWER_OPEN) : end].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """Return the last integer or decimal of the text without thousands commas, or None."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").replace("−", "-") if found else None


def last_line(text: str) -> str | None:
    """Return the last line that is not blank, stripped, or None."""
    stripped = text.strip()
    return stripped.splitlines()[-1].strip() if stripped else None


def whole(text: str) -> str | None:
    """Return the whole text, stripped."""
    return text.strip()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "answer_tag": answer_tag,
    "last_number": last_number,
    "last_line": last_line,
    "whole": whole,
}
GRADERS = ("reasoning_gym", "exact")


@dataclasses.dataclass(frozen=True)
class Grader:
    """How responses are graded.

    name: "reasoning_gym" asks the scorer of the prompt's own task about the extracted answer;
    "exact" compares it with the prompt's `answer`; "module:function" calls that function with
    (text, entry), the text as it was generated, and takes the number it returns.
    No answer found is reward 0. So is a reasoning-gym score below 1, because scorers give crumbs
    for near misses and for format, which would rise by themselves; `partial` keeps them.
    """

    name: str = "reasoning_gym"
    extractor: str = "answer_tag"
    partial: bool = False

    def __post_init__(self):
        if self.extractor not in EXTRACTORS:
            raise ValueError(f"extractor={self.extractor!r} is unknown; known: {list(EXTRACTORS)}")
        module, colon, function = self.name.partition(":")
        if self.name not in GRADERS and not (colon and module and function):
            raise ValueError(
                f"grader={self.name!r} is unknown; known: {list(GRADERS)}, "
                "or 'module:function' for a function of (text, entry)"
            )
        if self.partial and self.name != "reasoning_gym":
            raise ValueError(f"partial=True means nothing to grader={self.name!r}; leave it False")


def check_entry(grader: Grader, entry: Mapping[str, Any]) -> None:
    """Raise ValueError if `entry` lacks what `grader` reads."""
    needed = {"reasoning_gym": ("task", "params", "item"), "exact": ("answer",)}
    for name in needed.get(grader.name, ()):
        if entry.get(name) is None:
            raise ValueError(
                f"grader={grader.name!r} needs {name!r} in a prompt's entry, which has "
                f"{sorted(entry)}; give the prompts that field or choose another grader"
            )


def resolve(grader: Grader, entry: Mapping[str, Any]) -> Callable[[str, dict], Any]:
    """Return the function of (text, entry) that grades, importing whatever it needs."""
    check_entry(grader, entry)
    extract = EXTRACTORS[grader.extractor]
    if grader.name == "exact":
        return functools.partial(_grade_exact, extract)
    if grader.name == "reasoning_gym":
        scorer = task_scorer(entry["task"], pickle.dumps(entry["params"]))
        return functools.partial(_grade_task, extract, scorer, grader.partial)
    module, _, function = grader.name.partition(":")
    return getattr(importlib.import_module(module), function)


@functools.cache
def task_scorer(name: str, params: bytes) -> Callable[[str, dict], float]:
    """Return `score_answer` of a reasoning-gym task with its parameters, which some scorers read.

    params: a pickled dict, so that it can be a cache key.
    """
    import reasoning_gym  # a second to import, and only reasoning-gym tasks need it

    return reasoning_gym.create_dataset(name, **pickle.loads(params), size=1, seed=0).score_answer


def _grade_exact(extract, text: str, entry: dict) -> float:
    return float(extract(text) == entry["answer"].strip())


def _grade_task(extract, scorer, partial: bool, text: str, entry: dict) -> Any:
    answer = extract(text)
    if answer is None:
        return 0.0
    score = scorer(answer, entry["item"])
    if partial or not isinstance(score, int | float) or not math.isfinite(score):
        return score  # what is no finite number is the worker's to refuse
    return 1.0 if score == 1 else 0.0
