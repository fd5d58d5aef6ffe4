"""Prompt files: what is read, and one clear sentence for what is not."""

import json

import pytest

from tlt_jax.rl.prompt_file import read_prompt_file

CHAT = [{"role": "user", "content": "hi"}]


def write(tmp_path, data):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_reads_prompts_and_messages_in_order_with_their_lines(tmp_path):
    lines = [
        json.dumps({"prompt": "a", "answer": "1", "level": 3}),
        "",
        json.dumps({"messages": CHAT}),
        "  ",
        json.dumps({"prompt": "a"}),
    ]
    first, chat, again = read_prompt_file(write(tmp_path, "\n".join(lines)))
    assert (first.line, first.prompt, first.messages, first.answer) == (1, "a", None, "1")
    assert first.fields["level"] == 3
    assert (chat.line, chat.prompt, chat.messages, chat.answer) == (3, None, tuple(CHAT), None)
    assert (again.line, again.prompt) == (5, "a")


def test_bom_crlf_and_line_separators_inside_strings(tmp_path):
    inside = "a\u2028b\x85c\u0085d"
    plain = [json.dumps({"prompt": p}, ensure_ascii=False) for p in (inside, "é")]
    data = b"\xef\xbb\xbf" + "\r\n".join(plain).encode() + b"\r\n"
    assert [record.prompt for record in read_prompt_file(write(tmp_path, data))] == [inside, "é"]


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"prompt": "a"', "broken JSON: .* at column"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        ('["prompt"]', "expected a JSON object, got list"),
        ("null", "expected a JSON object, got NoneType"),
        ("{}", "exactly one of the fields .* got no fields"),
        ('{"text": "a"}', r"exactly one of the fields .* got \['text'\]"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": null}', "'prompt' must be a string, got null"),
        ('{"prompt": 3}', "'prompt' must be a string, got 3"),
        ('{"prompt": ""}', "'prompt' is empty"),
        (r'{"prompt": "\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "answer": 42}', "'answer' must be a string, got 42"),
        ('{"messages": null}', "'messages' must be a list .* got None"),
        ('{"messages": []}', "'messages' must be a list of at least one"),
        ('{"messages": ["hi"]}', r"'messages\[0\]' must have the fields"),
        ('{"messages": [{"role": "user"}]}', r"'messages\[0\]' must have the fields"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            r"'messages\[0\].content' must be a string, got null",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"prompts.jsonl:3: .*{words}"):
        read_prompt_file(path)


@pytest.mark.parametrize("data", ["", "\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts(tmp_path, data):
    with pytest.raises(ValueError, match="prompts.jsonl holds no prompts"):
        read_prompt_file(write(tmp_path, data))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read_prompt_file(tmp_path / "nowhere.jsonl")
