"""One prompt of a file: from the named values of a line or row to a checked record."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

PROMPT_COLUMNS = ("prompt", "messages")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns of a prompt file; "" takes the usual ones.

    prompt: `prompt` or `messages`, a text or a list of {role, content}. answer: `answer`, or verl's
    `reward_model.ground_truth`. source: `data_source`.
    """

    prompt: str = ""
    answer: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """One line or row of a prompt file: exactly one of `prompt` and `messages` is set."""

    where: str  # the file and the line or row in it, from 1
    prompt: str | None  # a text
    messages: tuple[dict[str, str], ...] | None  # {"role", "content"}, for the chat template
    answer: str | None
    source: str | None  # the data set it is of, where the file says so
    fields: dict[str, Any]  # all columns, for graders that read more

    @property
    def text(self) -> str:
        """What is asked, as one text; equal for equal prompts."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


def make_record(where: str, fields: Mapping[str, Any], columns: Columns) -> PromptRecord:
    """Return the record of one line or row. Raises ValueError, without `where`, for a bad one."""
    name = columns.prompt or _prompt_column(fields)
    value = _column(fields, name)
    prompt = messages = None
    if name != "messages" and isinstance(value, str):
        prompt = _text(name, value)
        if not prompt:
            raise ValueError(f"'{name}' is empty; a response needs something to follow")
    else:
        messages = _messages(name, value)
    source = _column(fields, columns.source) if columns.source else fields.get("data_source")
    if source is not None:
        source = _text(columns.source or "data_source", source)
    return PromptRecord(
        where, prompt, messages, _answer(fields, columns.answer), source or None, dict(fields)
    )


def _prompt_column(fields: Mapping[str, Any]) -> str:
    there = [name for name in PROMPT_COLUMNS if name in fields]
    filled = [name for name in there if fields[name] is not None]
    if len(there) == 1 or len(filled) == 1:
        return (filled or there)[0]
    raise ValueError(
        f"expected exactly one of the columns {list(PROMPT_COLUMNS)}, got "
        f"{sorted(fields) or 'none'}; rename one, or name it as prompt_column"
    )


def _answer(fields: Mapping[str, Any], column: str) -> str | None:
    if column:
        return _answer_text(column, _column(fields, column))
    if fields.get("answer") is not None or fields.get("reward_model") is None:
        return _answer_text("answer", fields.get("answer"))
    model = fields["reward_model"]
    if not isinstance(model, Mapping):
        raise ValueError(f"'reward_model' must hold style and ground_truth, got {model!r:.60}")
    if model.get("style") == "model":
        raise ValueError("reward_model.style='model' asks for a learned reward, which is not here")
    truth = model.get("ground_truth")
    if isinstance(truth, list | Mapping):
        return None  # of a shape that only the user's own grader knows; it is in the fields
    return _answer_text("reward_model.ground_truth", truth)


def _answer_text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # the one number type with one way to write it
    return _text(name, value)


def _column(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"there is no column '{name}', only {sorted(fields)}")
    return fields[name]


def _messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        kind = "a list of at least one message"
        kind = kind if name == "messages" else f"a string or {kind}"
        raise ValueError(f"'{name}' must be {kind}, got {_shown(value)}")
    return tuple(_message(f"{name}[{index}]", message) for index, message in enumerate(value))


def _message(name: str, value: Any) -> dict[str, str]:
    fields = dict(value) if isinstance(value, Mapping) else {}
    # Tables give every message the columns of all: one without a value is not there.
    there = {key for key, given in fields.items() if given is not None}
    if not {"role", "content"} <= set(fields) or there - {"role", "content"}:
        raise ValueError(f"'{name}' must have the fields 'role' and 'content' and no others")
    return {key: _text(f"{name}.{key}", fields[key]) for key in ("role", "content")}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{name}' must be a string, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"'{name}' holds half a surrogate pair, which is no text") from None
    return value


def _shown(value: Any) -> str:
    return f"{json.dumps(value, default=repr):.60}"
