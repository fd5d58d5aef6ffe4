"""Prompts: from tasks or files, through the tokenizer, into a resumable stream of draws."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tlt_jax.rl.prompt_file import PromptRecord, read_prompt_file
from tlt_jax.rl.tasks import Question, Task, draw_questions
from tlt_jax.spec.noise import EVALUATE, TRAIN

_SLOT = "{question}"


class Tokenizer(Protocol):
    """What this module asks of a tokenizer."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where prompts come from: reasoning-gym `tasks`, or JSONL files (`read_prompt_file`)."""

    tasks: tuple[Task, ...] = ()  # or a mapping: label -> {name (the label), weight, params}
    train_file: str = ""
    eval_file: str = ""
    size: int = 1000  # training questions from tasks
    eval_size: int = 64  # held-out prompts; of a file, its first ones
    seed: int = 0  # of the training questions and of their order
    eval_seed: int = 0  # of the held-out questions; never the questions of an equal `seed`
    system: str = ""  # system message before each question; "" for none
    template: str = _SLOT  # user message; {question} is replaced
    max_prompt_tokens: int = 512
    drop_long: bool = False  # drop and count longer prompts; otherwise they are an error

    def __post_init__(self):
        if isinstance(self.tasks, Mapping):
            named = tuple(_named_task(label, spec) for label, spec in self.tasks.items())
            object.__setattr__(self, "tasks", named)
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if bool(self.tasks) == bool(self.train_file):
            raise ValueError(
                f"give either tasks or train_file, got tasks={[task.name for task in self.tasks]}, "
                f"train_file={self.train_file!r}"
            )
        if self.tasks and self.eval_file:
            raise ValueError(f"eval_file={self.eval_file!r} goes with train_file, not with tasks")
        if self.train_file and bool(self.eval_file) != bool(self.eval_size):
            raise ValueError(
                f"train_file with eval_size={self.eval_size} and eval_file={self.eval_file!r}: "
                "give an eval_file, or set eval_size=0"
            )
        if _SLOT not in self.template:
            raise ValueError(f"template={self.template!r} must contain {_SLOT}")
        for name, least in (("size", 1), ("eval_size", 0), ("max_prompt_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("seed", "eval_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


def _named_task(label: str, spec: Any) -> Task:
    known = ("name", "weight", "params")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("params", {}), Mapping):
        raise ValueError(f"tasks.{label}={spec!r} must be a section with some of {known}")
    if unknown := sorted(set(spec) - set(known)):
        raise ValueError(f"tasks.{label}.{unknown[0]} is no known setting; known here: {known}")
    weight = spec.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"tasks.{label}.weight={weight!r} must be a number")
    return Task(**{"name": label} | dict(spec))


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt of a dataset, before it is drawn."""

    ids: tuple[int, ...]
    text: str  # the question, or the prompt or messages of the file
    task: str  # name of the reasoning-gym task, or of the file
    entry: dict[str, Any]  # what the reward needs; picklable


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One draw of an example. The samples' noise is a function of (domain, draw, member, t)."""

    draw: int  # counts every draw of its stream, also of an example drawn before
    domain: int
    ids: tuple[int, ...]
    text: str
    task: str
    entry: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PromptData:
    """The training and the held-out examples, and how many were left out of them."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    num_too_long: int
    num_overlapping: int  # lines of train_file left out because eval_file has them too


def load_prompts(config: DataConfig, tokenizer: Tokenizer) -> PromptData:
    """Make the examples that `config` describes. No training prompt has the text of a held-out one.

    The held-out set is chosen first, so that runs of different `seed` are compared on the same one.
    Raises ValueError for a bad task or file, a prompt longer than max_prompt_tokens (unless
    drop_long), or a set left without prompts.
    """
    if config.tasks:
        held_out, train = _task_examples(config, tokenizer)
        num_overlapping = 0
    else:
        held_out = _file_examples(config.eval_file, tokenizer) if config.eval_file else []
        excluded = {example.text for example in held_out}
        held_out = held_out[: config.eval_size]
        lines = _file_examples(config.train_file, tokenizer)
        train = [example for example in lines if example.text not in excluded]
        num_overlapping = len(lines) - len(train)
    num_before = len(train) + len(held_out)
    train, held_out = (_drop_long(config, examples) for examples in (train, held_out))
    num_too_long = num_before - len(train) - len(held_out)
    if not train or (config.eval_size and not held_out):
        raise ValueError(
            f"no {'held-out' if train else 'training'} prompts remain: {num_overlapping} lines of "
            f"train_file are also in eval_file, and {num_too_long} prompts are longer than "
            f"max_prompt_tokens={config.max_prompt_tokens}"
        )
    return PromptData(tuple(train), tuple(held_out), num_too_long, num_overlapping)


def _task_examples(config: DataConfig, tokenizer: Tokenizer) -> tuple[list[Example], list[Example]]:
    held_out = draw_questions(config.tasks, config.eval_size, config.eval_seed, domain=EVALUATE)
    texts = frozenset(question.text for question in held_out)
    train = draw_questions(config.tasks, config.size, config.seed, domain=TRAIN, excluded=texts)
    return tuple(
        [_question_example(config, tokenizer, question) for question in questions]
        for questions in (held_out, train)
    )


def _question_example(config: DataConfig, tokenizer: Tokenizer, question: Question) -> Example:
    messages = [{"role": "system", "content": config.system}] if config.system else []
    content = config.template.replace(_SLOT, question.text)
    ids = tokenizer.chat([*messages, {"role": "user", "content": content}])
    return Example(tuple(ids), question.text, question.task, question.entry)


def _file_examples(path: str, tokenizer: Tokenizer) -> list[Example]:
    return [record_example(record, path, tokenizer) for record in read_prompt_file(path)]


def record_example(record: PromptRecord, path: str, tokenizer: Tokenizer) -> Example:
    """Return the example of one line of a prompt file: `prompt` as it is, `messages` as a chat.

    Raises ValueError naming the line whose messages the chat template refuses.
    """
    if record.prompt is not None:
        ids, text = tokenizer.encode(record.prompt), record.prompt
    else:
        try:
            ids = tokenizer.chat(record.messages)
        except ValueError as error:
            raise ValueError(f"{path}:{record.line}: {error}") from None
        text = "\n".join(f"{message['role']}: {message['content']}" for message in record.messages)
    return Example(tuple(ids), text, path, record.fields)


def _drop_long(config: DataConfig, examples: list[Example]) -> list[Example]:
    limit = config.max_prompt_tokens
    for example in examples:
        if len(example.ids) > limit and not config.drop_long:
            raise ValueError(
                f"a prompt of {example.task!r} has {len(example.ids)} tokens, more than "
                f"max_prompt_tokens={limit}; raise that or set drop_long=True: {example.text:.80}"
            )
    return [example for example in examples if len(example.ids) <= limit]


class PromptStream:
    """An endless, resumable stream over examples; each prompt it gives has a draw of its own.

    Epoch e visits every example once, in an order that only (seed, e) determines, or in the given
    order without `shuffle`. Two streams with equal examples and state give equal prompts.
    """

    def __init__(
        self, examples: Sequence[Example], *, seed: int, domain: int, shuffle: bool = True
    ):
        if not examples:
            raise ValueError("a prompt stream needs at least one example")
        self._examples = tuple(examples)
        self._seed, self._domain, self._shuffle = seed, domain, shuffle
        self._draw = 0
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self._fingerprint = self._hash_examples()

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, across epoch ends."""
        prompts = []
        for _ in range(n):
            if self._position == len(self._examples):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            example = self._examples[self._order[self._position]]
            fields = {field.name: getattr(example, field.name) for field in _EXAMPLE_FIELDS}
            prompts.append(Prompt(draw=self._draw, domain=self._domain, **fields))
            self._draw += 1
            self._position += 1
        return prompts

    def state(self) -> dict[str, int | str]:
        """Return what `restore` needs, as a flat JSON value."""
        return {
            "draw": self._draw,
            "epoch": self._epoch,
            "position": self._position,
            "examples": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if that was on other examples."""
        if state["examples"] != self._fingerprint:
            raise ValueError(
                "the saved data position belongs to other prompts, another seed or another domain; "
                "resume with the data settings of the saved run, or start a new workdir"
            )
        self._draw, self._epoch = int(state["draw"]), int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        count = len(self._examples)
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng([self._seed, self._epoch]).permutation(count)

    def _hash_examples(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self._domain} {self._shuffle}".encode())
        for example in self._examples:
            digest.update(np.array([len(example.ids), *example.ids], np.int64).tobytes())
        return digest.hexdigest()[:16]


_EXAMPLE_FIELDS = dataclasses.fields(Example)
