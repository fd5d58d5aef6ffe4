"""Prompt files: what is read, and one clear sentence for what is not."""

import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tlt_jax.rl.prompt_file import read_prompt_file, source_name
from tlt_jax.rl.prompt_record import Columns

CHAT = [{"role": "user", "content": "hi"}]


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0, "split": "train"},
}


def write(tmp_path, data, name="prompts.jsonl"):
    path = tmp_path / name
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
    assert (first.prompt, first.messages, first.answer) == ("a", None, "1")
    assert first.fields["level"] == 3 and first.source is None
    assert (chat.prompt, chat.messages, chat.answer) == (None, tuple(CHAT), None)
    assert again.prompt == first.prompt
    assert [r.where.split(":")[-1] for r in (first, chat, again)] == ["1", "3", "5"]


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
        ("{}", "exactly one of the columns .* got none"),
        ('{"text": "a"}', r"exactly one of the columns .* got \['text'\]; .* as prompt_column"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": null}', "'prompt' must be a string or a list .* got null"),
        ('{"prompt": 3}', "'prompt' must be a string or a list .* got 3"),
        ('{"prompt": [null]}', r"'prompt\[0\]' must have the fields"),
        ('{"prompt": ""}', "'prompt' is empty"),
        (r'{"prompt": "\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "answer": 4.2}', "'answer' must be a string, got 4.2"),
        ('{"prompt": "a", "answer": true}', "'answer' must be a string, got true"),
        ('{"prompt": "a", "answer": ["1"]}', r"'answer' must be a string, got \["),
        ('{"prompt": "a", "data_source": 3}', "'data_source' must be a string, got 3"),
        ('{"prompt": "a", "reward_model": "5"}', "'reward_model' must hold style and"),
        ('{"prompt": "a", "reward_model": {"style": "model"}}', "learned reward"),
        (
            '{"prompt": "a", "reward_model": {"ground_truth": 0.5}}',
            "'reward_model.ground_truth' must be a string, got 0.5",
        ),
        ('{"messages": null}', "'messages' must be a list .* got null"),
        ('{"messages": "hi"}', "'messages' must be a list .* got \"hi\""),
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
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist; .* hf:OWNER/NAME"):
        read_prompt_file(tmp_path / "nowhere.jsonl")


def test_a_file_of_an_unknown_kind(tmp_path):
    with pytest.raises(ValueError, match=r"kind '.txt' cannot be read, only \['.jsonl'"):
        read_prompt_file(write(tmp_path, "{}", "prompts.txt"))
    with pytest.raises(ValueError, match="is one file: it has no split='train'"):
        read_prompt_file(write(tmp_path, '{"prompt": "a"}'), split="train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "data set"])
def test_the_columns_of_verl(tmp_path, kind):
    rows = [VERL, VERL | {"reward_model": {"style": "rule", "ground_truth": "7"}}]
    path = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    first, second = read_prompt_file(path)
    assert first.messages == tuple(VERL["prompt"]) and first.prompt is None
    assert (first.answer, second.answer) == ("5", "7")
    assert first.source == "openai/gsm8k"
    assert first.fields["extra_info"] == VERL["extra_info"]


def test_answers_that_only_a_grader_of_ones_own_can_read_stay_in_the_fields(tmp_path):
    row = VERL | {"reward_model": {"style": "rule", "ground_truth": {"target": ["a", "b"]}}}
    [record] = read_prompt_file(write(tmp_path, json.dumps(row)))
    assert record.answer is None
    assert record.fields["reward_model"]["ground_truth"]["target"] == ["a", "b"]


def test_columns_of_other_names(tmp_path):
    path = write(
        tmp_path, json.dumps({"question": "2 + 3?", "prompt": "x", "solution": 5, "of": "s"})
    )
    columns = Columns(prompt="question", answer="solution", source="of")
    [record] = read_prompt_file(path, columns)
    assert (record.prompt, record.answer, record.source) == ("2 + 3?", "5", "s")
    for missing in (Columns(prompt="q"), Columns(answer="q"), Columns(source="q")):
        with pytest.raises(ValueError, match="jsonl:1: there is no column 'q', only .*'question'"):
            read_prompt_file(path, missing)


def test_csv(tmp_path):
    lines = ["prompt,answer,level", '"a, ""b""\u2028\r\nc",007,', "", "d,,3"]
    data = b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n"
    first, second = read_prompt_file(write(tmp_path, data, "prompts.csv"))
    assert first.prompt == 'a, "b"\u2028\r\nc'
    assert (first.answer, first.fields["level"]) == ("007", None)
    assert (second.prompt, second.answer, second.fields["level"]) == ("d", None, "3")
    assert (first.where[-5:], second.where[-5:]) == ("csv:2", "csv:5")
    long = "x" * 3_000_000
    [record] = read_prompt_file(write(tmp_path, f"prompt\n{long}\n", "prompts.csv"))
    assert record.prompt == long


@pytest.mark.parametrize(
    "data, words",
    [
        (b"prompt,answer\na,1\nb,2,3\n", "csv:3: 3 cells, but the header has 2"),
        (b"prompt,answer\na\n", "csv:2: 1 cells"),
        (b"prompt,answer\na,1\n,2\n", "csv:3: 'prompt' must be a string or .* got null"),
        (b'prompt\na\n"b\nc\n', "csv:3: broken CSV: unexpected end of data; check the quotes"),
        (b'prompt\n"a"b\n', "csv:2: broken CSV"),
        (b"prompt\na\nb\xff\n", "csv:3: not UTF-8"),
        (b"prompt,prompt\na,b\n", "csv:1: the header needs a distinct name"),
        (b"question\na\n", r"csv:2: expected exactly one of the columns .* got \['question'\]"),
        (b"prompt\n", "csv holds no prompts"),
        (b"", "csv holds no prompts"),
    ],
)
def test_bad_csv(tmp_path, data, words):
    with pytest.raises(ValueError, match=words):
        read_prompt_file(write(tmp_path, data, "prompts.csv"))


def parquet(tmp_path, columns):
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet(tmp_path):
    chats = [[{"role": "user", "content": "é", "name": None}], None]
    path = parquet(tmp_path, {"messages": chats, "prompt": [None, "raw"], "answer": [1, None]})
    chat, raw = read_prompt_file(path)
    assert chat.messages == ({"role": "user", "content": "é"},)  # a null field is not there
    assert (chat.answer, raw.prompt, raw.answer) == ("1", "raw", None)
    many = [str(i) for i in range(600)]  # several batches
    records = read_prompt_file(parquet(tmp_path, {"prompt": many}))
    assert [r.prompt for r in records] == many and records[-1].where.endswith("row 600")


def broken_text():
    good = pyarrow.array([b"a", b"b", b"\xff"], pyarrow.binary())
    return pyarrow.StringArray.from_buffers(3, *good.buffers()[1:])


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"prompt": ["a", None]}, "row 2: 'prompt' must be a string or a list .* got null"),
        ({"prompt": [[{"role": "user", "content": "a"}], [None]]}, r"row 2: 'prompt\[0\]' must"),
        (
            {"prompt": [[{"role": "user", "content": None}]]},
            r"row 1: 'prompt\[0\].content' must be a string, got null",
        ),
        ({"prompt": [[]]}, r"row 1: 'prompt' must be .* got \[\]"),
        ({"prompt": [b"a"]}, "row 1: 'prompt' must be a string or"),
        ({"prompt": [1.5]}, "row 1: 'prompt' must be a string or a list .* got 1.5"),
        ({"question": ["a"]}, r"row 1: expected exactly one of .* got \['question'\]"),
        ({"prompt": pyarrow.array([], pyarrow.string())}, "parquet holds no prompts"),
        ({"prompt": broken_text()}, "row 3: not UTF-8"),
    ],
)
def test_bad_parquet(tmp_path, columns, words):
    with pytest.raises(ValueError, match=words):
        read_prompt_file(parquet(tmp_path, columns))


@pytest.mark.parametrize("data", [b"", b"prompt\na\n", b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_what_is_no_parquet(tmp_path, data):
    with pytest.raises(ValueError, match="prompts.parquet cannot be read as Parquet"):
        read_prompt_file(write(tmp_path, data, "prompts.parquet"))


def test_data_sets_with_splits(tmp_path):
    splits = {n: datasets.Dataset.from_dict({"prompt": [n, "x"]}) for n in ("train", "test")}
    path = tmp_path / "saved"
    datasets.DatasetDict(splits).save_to_disk(path)
    records = read_prompt_file(path, split="test")
    assert [r.prompt for r in records] == ["test", "x"]
    assert records[1].where == f"{path} (test), row 2"
    for split in ("", "dev"):
        with pytest.raises(
            ValueError, match=rf"no split='{split}'; choose one of \['train', 'test"
        ):
            read_prompt_file(path, split=split)
    with pytest.raises(ValueError, match="no subset='main'"):
        read_prompt_file(path, split="test", subset="main")


def test_a_hub_data_set_is_its_own_source():
    """So that gsm8k from the hub is graded as gsm8k in verl's files is."""
    assert source_name("hf:openai/gsm8k") == "openai/gsm8k"
    assert source_name("some/prompts.jsonl") == "some/prompts.jsonl"


def test_a_folder_of_files_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, "prompt\na\nb\n", "train.csv")
    assert [r.prompt for r in read_prompt_file(folder)] == ["a", "b"]
    with pytest.raises(ValueError, match="no split='test'; choose one of"):
        read_prompt_file(folder, split="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: datasets cannot load it"):
        read_prompt_file(tmp_path / "empty")


@pytest.mark.parametrize("kind, package", [("parquet", "pyarrow"), ("data set", "datasets")])
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, kind, package):
    path = tmp_path / f"prompts.{kind}"
    path.mkdir() if kind == "data set" else path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet" if kind == "parquet" else package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package} .*requirements-extra.txt"):
        read_prompt_file(path)
