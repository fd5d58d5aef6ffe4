"""Prompt files: one JSON object per line, with `prompt` or `messages` and optionally `answer`."""

import dataclasses
import json
import os
from typing import Any


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """One line of a prompt file: exactly one of `prompt` and `messages` is set."""

    line: int  # in the file, from 1
    prompt: str | None  # used as it is
    messages: tuple[dict[str, str], ...] | None  # {"role", "content"}, for the chat template
    answer: str | None
    fields: dict[str, Any]  # the whole object, for graders that read more


def read_prompt_file(path: str | os.PathLike) -> list[PromptRecord]:
    """Read a UTF-8 JSONL prompt file, in file order; duplicates are kept.

    A byte order mark, CRLF line ends and blank lines are tolerated. Raises ValueError naming file
    and line for whatever is not as described in `PromptRecord`, and for a file without prompts.
    """
    records = []
    # In binary, because text mode also splits at characters that may stand inside JSON strings.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                try:
                    records.append(_parse(number, line))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    if not records:
        raise ValueError(f"{path} holds no prompts; it needs a JSON object with 'prompt' per line")
    return records


def _parse(number: int, line: bytes) -> PromptRecord:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("broken JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError(
            "expected exactly one of the fields 'prompt' and 'messages', got "
            f"{sorted(fields) or 'no fields'}"
        )
    prompt = messages = answer = None
    if "prompt" in fields:
        prompt = _text("prompt", fields["prompt"])
        if not prompt:
            raise ValueError("'prompt' is empty; a response needs something to follow")
    else:
        messages = _messages(fields["messages"])
    if "answer" in fields:
        answer = _text("answer", fields["answer"])
    return PromptRecord(number, prompt, messages, answer, fields)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"'messages' must be a list of at least one message, got {value!r:.60}")
    for index, message in enumerate(value):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"'{name}' must have the fields 'role' and 'content' and no others")
        for field in ("role", "content"):
            _text(f"{name}.{field}", message[field])
    return tuple(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{name}' must be a string, got {json.dumps(value):.60}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"'{name}' holds half a surrogate pair, which is no text")
    return value
