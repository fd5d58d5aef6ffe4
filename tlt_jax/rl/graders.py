"""Graders: from a response's text to a reward. Imported by reward workers, so free of jax."""

import dataclasses
import functools
import importlib
import math
import numbers
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tlt_jax.rl.extractors import EXTRACTORS, choice
from tlt_jax.rl.math_grader import grade_math

# Each grader with the extractor it uses where none is chosen.
GRADERS = {
    "reasoning_gym": "answer_tag",
    "exact": "answer_tag",
    "math": "final_answer",
    "multiple_choice": "whole",
}
_NEEDED = {"reasoning_gym": ("task", "params", "item")}  # in an entry; of the others the answer


class GraderError(ValueError):
    """A grader that cannot grade; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class Grader:
    """How responses are graded.

    name: "reasoning_gym" asks the scorer of the prompt's own task about the extracted answer;
    "exact" compares it with the prompt's `answer`, "math" its value (`grade_math`),
    "multiple_choice" the letter it chooses (`choice`); "module:function" calls that function with
    (text, entry), the text as it was generated, and takes the number it returns.
    extractor: "" for the grader's own (`GRADERS`). No answer found is reward 0. So is a
    reasoning-gym score below 1, because scorers give crumbs for near misses and for format, which
    would rise by themselves; `partial` keeps them.
    """

    name: str
    extractor: str = ""
    partial: bool = False

    def __post_init__(self):
        if self.extractor and self.extractor not in EXTRACTORS:
            raise ValueError(f"extractor={self.extractor!r} is unknown; known: {list(EXTRACTORS)}")
        module, colon, function = self.name.partition(":")
        if self.name not in GRADERS and not (colon and module and function):
            raise ValueError(
                f"grader={self.name!r} is unknown; known: {list(GRADERS)}, "
                "or 'module:function' for a function of (text, entry)"
            )
        if self.extractor and self.name not in GRADERS:
            raise ValueError(
                f"extractor={self.extractor!r} means nothing to grader={self.name!r}, which gets "
                "the whole text; leave it out"
            )
        if self.partial and self.name != "reasoning_gym":
            raise ValueError(f"partial=True means nothing to grader={self.name!r}; leave it False")


def is_task_entry(entry: Mapping[str, Any]) -> bool:
    """Whether a prompt is a question of a reasoning-gym task."""
    return all(entry.get(name) is not None for name in _NEEDED["reasoning_gym"])


def check_entry(grader: Grader, entry: Mapping[str, Any]) -> None:
    """Raise GraderError if `entry` lacks what `grader` reads."""
    if grader.name not in GRADERS:
        return
    for name in _NEEDED.get(grader.name, ("answer",)):
        if entry.get(name) is None:
            raise GraderError(
                f"grader={grader.name!r} needs {name!r} in a prompt's entry, which has "
                f"{sorted(entry)}; give the prompts that field or choose another grader"
            )
    if grader.name == "multiple_choice" and choice(entry["answer"]) is None:
        raise GraderError(
            f"grader='multiple_choice' needs an answer that is a letter, got {entry['answer']!r}"
        )


def resolve(grader: Grader, entry: Mapping[str, Any]) -> Callable[[str, dict], Any]:
    """Return the function of (text, entry) that grades, importing whatever it needs.

    Raises GraderError for what cannot be imported and for an entry that lacks something.
    """
    if grader.name not in GRADERS:
        return _imported(grader.name)
    check_entry(grader, entry)
    extract = EXTRACTORS[grader.extractor or GRADERS[grader.name]]
    if grader.name == "reasoning_gym":
        scorer = task_scorer(entry["task"], pickle.dumps(entry["params"]))
        return functools.partial(_grade_task, extract, scorer, grader.partial)
    if grader.name == "math":
        try:
            import math_verify  # noqa: F401  to load it before the deadline of an answer begins
        except ImportError as error:
            raise GraderError(
                f"grader='math' needs the package math-verify ({error}); install it with "
                "pip install -r requirements-extra.txt"
            ) from None
        return functools.partial(grade_math, extract)
    if grader.name == "multiple_choice":
        return functools.partial(_grade_choice, extract)
    return functools.partial(_grade_exact, extract)


@functools.cache
def task_scorer(name: str, params: bytes) -> Callable[[str, dict], float]:
    """Return `score_answer` of a reasoning-gym task with its parameters, which some scorers read.

    params: a pickled dict, so that it can be a cache key.
    """
    import reasoning_gym  # a second to import, and only reasoning-gym tasks need it

    return reasoning_gym.create_dataset(name, **pickle.loads(params), size=1, seed=0).score_answer


def _imported(name: str) -> Callable[[str, dict], Any]:
    module, _, function = name.partition(":")
    file = module.replace(".", "/") + ".py"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (module + ".").startswith(f"{error.name}."):
            raise GraderError(f"{file} imports {error.name!r}, which is not installed") from None
        raise GraderError(
            f"there is no module {error.name!r}; put {file} into the folder you start from, or "
            "into an installed package"
        ) from None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise GraderError(f"importing {file} failed: {error!r} ({where})") from None
    if not callable(grade := getattr(found, function, None)):
        raise GraderError(f"{found.__file__} has no function {function!r}")
    return grade


def _grade_exact(extract, text: str, entry: dict) -> float:
    return float(extract(text) == entry["answer"].strip())


def _grade_choice(extract, text: str, entry: dict) -> float:
    answer = extract(text)
    return float(answer is not None and choice(answer) == choice(entry["answer"]))


def _grade_task(extract, scorer, partial: bool, text: str, entry: dict) -> Any:
    answer = extract(text)
    if answer is None:
        return 0.0
    score = scorer(answer, entry["item"])
    if partial or not isinstance(score, numbers.Real) or not math.isfinite(score):
        return score  # what is no finite number is the worker's to refuse
    return 1.0 if score == 1 else 0.0
