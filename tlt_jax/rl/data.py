"""Prompts: from tasks or files, through the tokenizer, to training and held-out examples."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tlt_jax.rl.data_config import SLOT, DataConfig
from tlt_jax.rl.prompt_file import read_prompt_file, source_name
from tlt_jax.rl.prompt_record import PromptRecord
from tlt_jax.rl.tasks import Question, draw_sets, starts
from tlt_jax.spec.noise import EVALUATE, TRAIN

# Times that a text may shrink before it is split into tokens: Unicode's NFC form has up to 3 times
# fewer bytes, and chat templates leave out white space and parts of earlier answers.
_SHRINKAGE = 4


class Tokenizer(Protocol):
    """What this module asks of a tokenizer. longest_token: characters of its longest token."""

    longest_token: int

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt of a data set, before it is drawn."""

    ids: tuple[int, ...]
    text: str  # the question, or the prompt or messages of the file
    source: str  # reasoning-gym task; or what the file names as data source, or the file
    entry: dict[str, Any]  # what the reward needs; picklable
    where: str  # for messages: the task, or the file and line or row
    since: int = 0  # draw at which the stage of its curriculum begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Example):
    """One draw of an example. The samples' noise is a function of (domain, draw, member, t)."""

    draw: int  # counts every draw of its stream, also of an example drawn before
    domain: int


@dataclasses.dataclass(frozen=True)
class PromptData:
    """The training and the held-out examples, and how many were left out of them."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    num_too_long: int
    num_overlapping: int  # prompts of train_file left out because eval_file has them too


def load_prompts(config: DataConfig, tokenizer: Tokenizer) -> PromptData:
    """Make the examples that `config` describes. No training prompt has the text of a held-out one.

    The held-out set is chosen first, so that runs of different `seed` are compared on the same one.
    Of a curriculum it has the last stage. Raises ValueError for a bad task or file, a prompt longer
    than max_prompt_tokens (unless drop_long), or a set left without prompts.
    """
    num_overlapping = 0
    if config.tasks:
        held_out, train = _task_examples(config, tokenizer)
    else:
        held_out, excluded = [], set()
        if config.eval_file:
            records = _records(config, config.eval_file, config.eval_split)
            excluded = {record.text for record in records}
            held_out = _file_examples(
                config, config.eval_file, records[: config.eval_size], tokenizer
            )
        records = _records(config, config.train_file, config.train_split)
        fresh = [record for record in records if record.text not in excluded]
        num_overlapping = len(records) - len(fresh)
        train = _file_examples(config, config.train_file, fresh, tokenizer)
        # One may be written as a text there and as messages here.
        known = {example.ids for example in held_out if example is not None}
        other = [example for example in train if example is None or example.ids not in known]
        num_overlapping, train = num_overlapping + len(train) - len(other), other
    num_before = len(train) + len(held_out)
    train, held_out = ([e for e in examples if e is not None] for examples in (train, held_out))
    num_too_long = num_before - len(train) - len(held_out)
    missing = {0, *(starts(config.tasks))} - {example.since for example in train}
    if missing or (config.eval_size and not held_out):
        raise ValueError(
            f"no {'training' if missing else 'held-out'} prompts remain: {num_overlapping} prompts "
            f"of train_file are also in eval_file, and {num_too_long} prompts are longer than "
            f"max_prompt_tokens={config.max_prompt_tokens}"
        )
    return PromptData(tuple(train), tuple(held_out), num_too_long, num_overlapping)


def encode_record(record: PromptRecord, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt of a file: a text as it is, messages as a chat.

    Raises ValueError naming the line whose messages the chat template refuses.
    """
    if record.prompt is not None:
        return tokenizer.encode(record.prompt)
    try:
        return tokenizer.chat(record.messages)
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from None


def _task_examples(config: DataConfig, tokenizer: Tokenizer) -> tuple[list, list]:
    """Held-out and training examples; None for one that is too long and may be dropped."""
    sets = draw_sets(
        config.tasks,
        size=config.size,
        seed=config.seed,
        domain=TRAIN,
        eval_size=config.eval_size,
        eval_seed=config.eval_seed,
        eval_domain=EVALUATE,
    )
    held_out = [question_example(config, tokenizer, q, 0) for q in sets.held_out]
    train = [
        question_example(config, tokenizer, q, begin)
        for begin, questions in sets.training.items()
        for q in questions
    ]
    return held_out, train


def question_example(
    config: DataConfig, tokenizer: Tokenizer, question: Question, since: int
) -> Example | None:
    where = f"task {question.task!r}"
    asked = PromptRecord(where, None, _chat(config, question.text), None, None, {})
    ids = _ids(config, tokenizer, asked, question.text)
    if ids is None:
        return None
    return Example(ids, question.text, question.task, question.entry, where, since)


def _chat(config: DataConfig, text: str) -> tuple[dict[str, str], ...]:
    system = [{"role": "system", "content": config.system}] if config.system else []
    return (*system, {"role": "user", "content": config.template.replace(SLOT, text)})


def _records(config: DataConfig, path: str, split: str) -> list[PromptRecord]:
    return read_prompt_file(path, config.columns(), split=split, subset=config.subset)


def _file_examples(
    config: DataConfig, path: str, records: Sequence[PromptRecord], tokenizer: Tokenizer
) -> list[Example | None]:
    source = source_name(path)
    examples: list[Example | None] = []
    for record in records:
        ids = _ids(config, tokenizer, _asked(config, record), record.text)
        entry = record.fields | ({} if record.answer is None else {"answer": record.answer})
        example = Example(ids or (), record.text, record.source or source, entry, record.where)
        examples.append(None if ids is None else example)
    return examples


def _asked(config: DataConfig, record: PromptRecord) -> PromptRecord:
    """Return the record with what is to be encoded: with `chat`, messages made of its text."""
    if record.prompt is not None:
        if not config.chat:
            return record
        return dataclasses.replace(record, prompt=None, messages=_chat(config, record.prompt))
    if config.system or config.template != SLOT:
        raise ValueError(
            f"{record.where}: the prompt is a list of messages, which system={config.system!r} and "
            f"template={config.template!r} do not change; leave them out"
        )
    return record


def _ids(
    config: DataConfig, tokenizer: Tokenizer, asked: PromptRecord, text: str
) -> tuple[int, ...] | None:
    """Return the ids of what is asked, made of `text`; None for what is too long and dropped.

    A text that cannot fit whatever its ids are is not encoded: that takes seconds per million
    characters.
    """
    limit = config.max_prompt_tokens
    if (characters := len(text)) > _SHRINKAGE * tokenizer.longest_token * limit:
        found = f"{characters} characters, which cannot fit into"
    else:
        ids = encode_record(asked, tokenizer)
        if len(ids) <= limit:
            return tuple(ids)
        found = f"{len(ids)} tokens, more than"
    if config.drop_long:
        return None
    raise ValueError(
        f"{asked.where}: a prompt has {found} max_prompt_tokens={limit}; raise that or set "
        f"drop_long=True: {text:.80}"
    )
