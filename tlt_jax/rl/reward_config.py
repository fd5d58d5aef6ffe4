"""The reward section of a config: which grader judges which prompt."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tlt_jax.rl.data import Example
from tlt_jax.rl.graders import Grader, GraderError, check_entry, is_task_entry
from tlt_jax.rl.rewards import check_pool

AUTO = "auto"
# Data sources that verl's files name and whose answers are mathematics.
MATH_SOURCES = (
    "openai/gsm8k",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "HuggingFaceH4/aime_2024",
    "aime*",
    "math",
    "math_dapo*",
    "numina_*",
)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The graders (see `Grader` for name, extractor and partial) and their workers.

    A prompt of a source in `by_source` has the grader given there; any other prompt `grader`, where
    "auto" means "reasoning_gym" for questions of its tasks and "math" for `MATH_SOURCES`. A name
    with "*" at its end stands for all sources that begin so.
    """

    grader: str = AUTO
    extractor: str = ""  # "" for the grader's own
    partial: bool = False
    by_source: tuple[tuple[str, Grader], ...] = ()  # or a mapping, or pairs: source, {grader, …}
    num_workers: int = 2
    spare_workers: int = 4  # go on where an answer takes a fortieth of the deadline
    deadline_s: float = 10.0  # per answer, loading of the grader excluded

    def __post_init__(self):
        given = self.by_source
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "by_source", tuple(_pair(pair) for pair in pairs))
        check_pool(self.num_workers, self.spare_workers, self.deadline_s)
        Grader(
            "reasoning_gym" if self.grader == AUTO else self.grader, self.extractor, self.partial
        )

    def grader_of(self, example: Example) -> Grader:
        """Return the grader of a prompt. Raises GraderError if there is none for its source."""
        graders = dict(self.by_source)
        if (listed := _listed(example.source, graders)) is not None:
            return graders[listed]
        name = self.grader
        if name == AUTO:
            if is_task_entry(example.entry):
                name = "reasoning_gym"
            elif _listed(example.source, MATH_SOURCES) is not None:
                name = "math"
            else:
                raise GraderError(
                    f"no grader is known for the data source {example.source!r}; set reward.grader "
                    "for all of them, or reward.by_source for this one"
                )
        return Grader(name, self.extractor, self.partial)

    def check(self, examples: Iterable[Example]) -> list[Example]:
        """Return one example per source and grader, for `RewardPool.load`.

        Raises GraderError that lists the sources without a grader, or names the first example that
        lacks what its grader reads.
        """
        first: dict[tuple[str, Grader], Example] = {}
        unknown: dict[str, GraderError] = {}
        for example in examples:
            try:
                grader = self.grader_of(example)
            except GraderError as error:
                unknown.setdefault(example.source, error)
                continue
            try:
                check_entry(grader, example.entry)
            except GraderError as error:
                raise GraderError(f"{example.where}, {example.text:.60}: {error}") from None
            first.setdefault((example.source, grader), example)
        if len(unknown) == 1:
            raise next(iter(unknown.values()))
        if unknown:
            raise GraderError(
                f"no grader is known for the data sources {sorted(unknown)}; set reward.grader for "
                "all of them, or reward.by_source for each"
            )
        return list(first.values())


def _pair(pair: Any) -> tuple[str, Grader]:
    """A source and its grader. A config file needs pairs where the name of a source has a dot."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"by_source holds {pair!r}; give pairs of a source and its grader")
    source, spec = pair
    return source, spec if isinstance(spec, Grader) else _grader(source, spec)


def _grader(source: str, spec: Any) -> Grader:
    known = ("grader", "extractor", "partial")
    where = f"by_source.{source}"
    if not isinstance(spec, Mapping) or not spec.get("grader"):
        raise ValueError(f"{where}={spec!r} must be a section with grader, and some of {known[1:]}")
    if unknown := sorted(set(spec) - set(known)):
        raise ValueError(f"{where}.{unknown[0]} is no known setting; known here: {known}")
    settings = dict(spec)
    try:
        return Grader(settings.pop("grader"), **settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _listed(source: str, names: Iterable[str]) -> str | None:
    """Return the name that stands for a source: itself, or else the longest beginning of it."""
    fitting = [n for n in names if n == source or n.endswith("*") and source.startswith(n[:-1])]
    return max(fitting, key=lambda n: (n == source, len(n)), default=None)
