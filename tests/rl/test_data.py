"""Examples from tasks and files."""

import collections
import dataclasses
import json
import pickle

import pytest

from tlt_jax.rl.data import load_prompts
from tlt_jax.rl.data_config import DataConfig
from tlt_jax.rl.tasks import Stage, Task, draw_questions, split_by_weight
from tlt_jax.spec.noise import TRAIN


class ByteTokenizer:
    """A token per byte; a chat wraps each message in two marks. Counts what it encodes."""

    longest_token = 1

    def __init__(self):
        self.characters = 0

    def encode(self, text):
        self.characters += len(text)
        return list(text.encode())

    def chat(self, messages):
        ids = []
        for message in messages:
            ids += [256, *self.encode(message["role"] + ":" + message["content"]), 257]
        return ids

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()


SUMS = Task("chain_sum", params={"max_terms": 3, "max_digits": 2})
HARD = {"max_terms": 6, "max_digits": 3}
BASIC = Task("basic_arithmetic", weight=2.0)


def config(**changes):
    return DataConfig(**({"tasks": (SUMS,), "size": 30, "eval_size": 10} | changes))


def load(**changes):
    return load_prompts(config(**changes), ByteTokenizer())


def texts(examples):
    return [example.text for example in examples]


def test_the_same_config_gives_the_same_examples_and_a_seed_others():
    assert load() == load()
    base, other = load(), load(seed=1)
    # The package seeds question i by seed + i: taken as they are, seeds 0 and 1 would share 29.
    assert len(set(texts(base.train)) & set(texts(other.train))) < 5
    assert texts(base.held_out) == texts(other.held_out)
    assert texts(load(eval_seed=1).held_out) != texts(base.held_out)


def test_examples_hold_the_templated_chat_and_all_that_grading_needs():
    data = load(system="Be brief.", template="Q: {question}\nUse {braces}.")
    example = data.train[0]
    asked = f"system:Be brief.user:Q: {example.text}\nUse {{braces}}."
    assert ByteTokenizer().decode(example.ids) == asked
    assert example.ids.count(256) == 2 and load().train[0].ids.count(256) == 1
    assert example.source == "chain_sum"
    assert example.entry["params"] == {"max_terms": 3, "max_digits": 2}
    assert example.entry["item"]["question"] == example.text
    assert pickle.loads(pickle.dumps(example)) == example


def test_no_held_out_question_is_trained_on():
    small = Task("chain_sum", params={"max_terms": 2, "max_digits": 1})  # 200 questions in all
    data = load(tasks=(small,), size=300, eval_size=40)
    held = set(texts(data.held_out))
    free = {q.text for q in draw_questions((small,), 300, 0, domain=TRAIN)}
    assert held & free  # the rule has something to do
    assert len(data.train) == 300 and len(data.held_out) == 40
    assert not held & set(texts(data.train))
    with pytest.raises(ValueError, match="'chain_sum': only 0 of 300 questions differ"):
        load(tasks=(small,), size=300, eval_size=3000)


def test_mixtures_follow_their_weights():
    tasks = (SUMS, BASIC, dataclasses.replace(SUMS, weight=0.5))
    assert split_by_weight(tasks, 7) == [2, 4, 1]
    for size in range(50):
        counts = split_by_weight(tasks, size)
        assert sum(counts) == size
        assert all(abs(n - size * w / 3.5) < 1 for n, w in zip(counts, (1, 2, 0.5)))
    data = load(tasks=(SUMS, BASIC), size=30, eval_size=9)
    count = collections.Counter(example.source for example in data.train)
    assert count == {"chain_sum": 10, "basic_arithmetic": 20}
    assert collections.Counter(e.source for e in data.held_out) == {
        "chain_sum": 3,
        "basic_arithmetic": 6,
    }
    # The same task twice has different questions.
    twice = draw_questions((SUMS, SUMS), 40, 0, domain=TRAIN)
    assert [q.text for q in twice[:20]] != [q.text for q in twice[20:]]


def test_tasks_can_be_a_mapping():
    spec = {"easy": {"name": "chain_sum", "params": {"max_terms": 2}}, "basic_arithmetic": {}}
    assert config(tasks=spec).tasks == (
        Task("chain_sum", params=(("max_terms", 2),)),
        Task("basic_arithmetic"),
    )


STAGED = {
    "chain_sum": {
        "params": {"min_digits": 1, "max_digits": 1, "max_terms": 2},
        "stages": [{"until": 12}, {"until": 30, "params": {"max_terms": 4}}, {"params": HARD}],
    },
    "basic_arithmetic": {},
}


def test_a_curriculum_gives_each_stage_questions_of_its_own():
    data = load(tasks=STAGED, size=20, eval_size=10)
    counts = collections.Counter((e.since, e.source) for e in data.train)
    # A stage shorter than `size` has no more questions than draws.
    assert counts == {(s, t): n // 2 for s, n in ((0, 12), (12, 18), (30, 20)) for t in STAGED}
    params = {e.since: e.entry["params"] for e in data.train if e.source == "chain_sum"}
    assert {s: p["max_terms"] for s, p in params.items()} == {0: 2, 12: 4, 30: 6}
    assert params[12]["max_digits"] == 1 and params[30]["max_digits"] == 3
    # Held out are questions of the last stage, and no stage trains on them.
    assert {e.entry["params"]["max_terms"] for e in data.held_out if "chain" in e.source} == {6}
    assert not set(texts(data.held_out)) & set(texts(data.train))
    # The other task draws new questions in each stage; all up to the first is as without stages.
    plain = [e for e in data.train if e.source == "basic_arithmetic"]
    assert not {e.text for e in plain if e.since == 0} & {e.text for e in plain if e.since == 30}
    first = load(tasks={**STAGED, "chain_sum": {"params": STAGED["chain_sum"]["params"]}}, size=12)
    assert [e.ids for e in data.train if e.since == 0] == [e.ids for e in first.train]


def test_stages_follow_each_other():
    early, late = Stage({"max_terms": 2}, until=5), Stage({"max_terms": 9})
    task = Task("chain_sum", stages=(early, late))
    assert [dict(task.at(draw).params)["max_terms"] for draw in (0, 4, 5, 99)] == [2, 2, 9, 9]
    assert task.at(0).stages == ()
    for wrong in (
        (late, early),
        (early,),
        (early, early, late),
        (late, late),
        (Stage({}, 0), late),
    ):
        with pytest.raises(ValueError, match="every stage but the last needs a larger `until`"):
            Task("chain_sum", stages=wrong)


@pytest.mark.parametrize(
    "stages, words",
    [
        ({"until": 3}, "stages={'until': 3} must be a list"),
        ([3], r"stages\[0\]=3 must be a section"),
        ([{"til": 3}], r"stages\[0\].til is no known setting; known here: \('until', 'params'\)"),
        ([{"until": 1.5}], r"stages\[0\].until=1.5 must be a number of draws"),
        ([{"params": {"seed": 3}}], "set seed of the data section"),
        ([{"until": 5}, {"params": {"max_term": 3}}], "has no parameter 'max_term'"),
    ],
)
def test_bad_stages(stages, words):
    with pytest.raises(ValueError, match=words):
        load(tasks={"chain_sum": {"stages": stages}})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tasks": (Task("chain_som"),)}, "'chain_som' is unknown to reasoning-gym; known"),
        (
            {"tasks": (Task("chain_sum", params={"max_term": 2}),)},
            "'chain_sum' has no parameter 'max_term'; known: .*'max_terms'",
        ),
        (
            {"tasks": (Task("chain_sum", params={"min_terms": 9}),)},
            "'chain_sum' refuses its params .*max_terms must be",
        ),
        ({"tasks": ()}, "either tasks or train_file"),
        ({"train_file": "x"}, "either tasks or train_file"),
        ({"eval_file": "x"}, "goes with train_file"),
        ({"tasks": (), "train_file": "x"}, "give an eval_file, or set eval_size=0"),
        ({"template": "{q}"}, "must contain {question}"),
        ({"chat": True}, "chat=True goes with train_file"),
        ({"prompt_column": "q"}, "prompt_column='q' goes with train_file"),
        ({"tasks": (), "train_file": "x", "eval_size": 0, "system": "s"}, "set chat=True"),
        ({"size": 0}, "size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"max_prompt_tokens": 40}, "tokens, more than max_prompt_tokens=40; .*drop_long=True: St"),
        (
            {"max_prompt_tokens": 5, "drop_long": True},
            "no training prompts remain: .* 40 prompts are longer",
        ),
    ],
)
def test_bad_settings(changes, words):
    with pytest.raises(ValueError, match=words):
        load(**changes)


@pytest.mark.parametrize("params", [{"seed": 1}, {"size": 5}])
def test_a_task_does_not_set_what_the_data_section_sets(params):
    with pytest.raises(ValueError, match="of the data section"):
        Task("chain_sum", params=params)


def test_long_prompts_are_dropped_and_counted_on_request():
    lengths = [len(example.ids) for example in load().train + load().held_out]
    limit = sorted(lengths)[20]
    data = load(max_prompt_tokens=limit, drop_long=True)
    assert data.num_too_long == sum(length > limit for length in lengths) > 0
    assert sorted(len(e.ids) for e in data.train + data.held_out) == [
        length for length in sorted(lengths) if length <= limit
    ]


def test_files(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    train.write_text(
        "\n".join(
            json.dumps(line)
            for line in (
                {"prompt": "a b", "answer": "1"},
                {"messages": chat, "level": 2},
                {"prompt": "a b"},
            )
        )
    )
    held.write_text("\n".join(json.dumps({"prompt": p}) for p in ("c", "d", "a b", "e")))
    data = load(tasks=(), train_file=str(train), eval_file=str(held), eval_size=2)
    tokenizer = ByteTokenizer()
    [example] = data.train  # the others are in the evaluation file, if beyond its first two
    assert list(example.ids) == tokenizer.chat(chat) and example.entry["level"] == 2
    assert data.num_overlapping == 2
    assert texts(data.held_out) == ["c", "d"]
    whole = load(tasks=(), train_file=str(train), eval_size=0)
    assert [list(e.ids) for e in whole.train] == [
        tokenizer.encode("a b"),
        tokenizer.chat(chat),
        tokenizer.encode("a b"),
    ]
    assert whole.train[0].entry["answer"] == "1" and whole.held_out == ()
    with pytest.raises(ValueError, match="no training prompts remain: 3 prompts"):
        load(tasks=(), train_file=str(train), eval_file=str(train))


def lines(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def load_file(path, **changes):
    return load(**({"tasks": (), "train_file": path, "eval_size": 0} | changes))


def test_columns_and_chats_of_files(tmp_path):
    row = {"question": "2 + 3?", "solution": "5", "data_source": "sums"}
    path = lines(tmp_path / "a.jsonl", row, row)
    names = {"prompt_column": "question", "answer_column": "solution"}
    chat = {"chat": True, "system": "Be brief.", "template": "Q: {question}"}
    first, second = load_file(path, **names, **chat).train
    assert ByteTokenizer().decode(first.ids) == "system:Be brief.user:Q: 2 + 3?"
    assert (first.source, first.text, first.entry["answer"]) == ("sums", "2 + 3?", "5")
    assert (first.where, second.where) == (f"{path}:1", f"{path}:2")
    [raw, _] = load_file(path, **names, source_column="solution").train
    assert ByteTokenizer().decode(raw.ids) == "2 + 3?" and raw.source == "5"
    path = lines(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    assert load_file(path, chat=True).train[0].source == path
    with pytest.raises(
        ValueError, match="b.jsonl:1: the prompt is a list of messages, which system"
    ):
        load_file(path, **chat)


def test_a_text_that_cannot_fit_is_not_encoded(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"prompt": "x" * 3_000_000}, {"prompt": "ab"})
    tokenizer = ByteTokenizer()
    limits = {"tasks": (), "train_file": path, "eval_size": 0, "max_prompt_tokens": 9}
    data = load_prompts(config(**limits, drop_long=True), tokenizer)
    assert texts(data.train) == ["ab"] and data.num_too_long == 1
    assert tokenizer.characters == 2
    with pytest.raises(
        ValueError, match="a.jsonl:1: a prompt has 3000000 characters, which cannot"
    ):
        load_file(path, max_prompt_tokens=9)
    # Just under the bound only the tokenizer can tell.
    path = lines(tmp_path / "b.jsonl", {"prompt": "x" * 36})
    with pytest.raises(ValueError, match="a prompt has 36 tokens, more than max_prompt_tokens=9"):
        load_file(path, max_prompt_tokens=9)
