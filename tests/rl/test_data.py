"""Examples from tasks and files, and the resumable stream over them."""

import collections
import dataclasses
import json
import pickle

import pytest

from tlt_jax.rl.data import DataConfig, Example, PromptStream, load_prompts
from tlt_jax.rl.tasks import Task, draw_questions, split_by_weight
from tlt_jax.spec.noise import EVALUATE, TRAIN


class ByteTokenizer:
    """A token per byte; a chat wraps each message in two marks."""

    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        ids = []
        for message in messages:
            ids += [256, *self.encode(message["role"] + ":" + message["content"]), 257]
        return ids

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()


SUMS = Task("chain_sum", params={"max_terms": 3, "max_digits": 2})
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
    assert example.task == "chain_sum"
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
    count = collections.Counter(example.task for example in data.train)
    assert count == {"chain_sum": 10, "basic_arithmetic": 20}
    assert collections.Counter(e.task for e in data.held_out) == {
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
        ({"size": 0}, "size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"max_prompt_tokens": 5}, "more than max_prompt_tokens=5; .*drop_long=True: State the"),
        ({"max_prompt_tokens": 5, "drop_long": True}, "no training prompts remain: .* 40 prompts"),
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
    with pytest.raises(ValueError, match="no training prompts remain: 3 lines"):
        load(tasks=(), train_file=str(train), eval_file=str(train))


def examples(n, offset=0):
    return [Example((i + offset, 1), f"text {i % 3}", "task", {"i": i}) for i in range(n)]


def stream(n=7, seed=0, domain=TRAIN, **kwargs):
    return PromptStream(examples(n), seed=seed, domain=domain, **kwargs)


def test_each_epoch_visits_every_example_once_in_an_order_of_its_own():
    taken = stream().take(21)
    epochs = [tuple(p.ids[0] for p in taken[i : i + 7]) for i in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len(set(epochs)) == 3
    assert [p.draw for p in taken] == list(range(21))
    assert all(p.domain == TRAIN and p.entry == {"i": p.ids[0]} for p in taken)
    assert stream(seed=1).take(7) != taken[:7]


def test_how_prompts_are_asked_for_does_not_matter():
    whole = stream().take(30)
    parts = stream()
    assert [p for n in (1, 0, 9, 7, 13) for p in parts.take(n)] == whole


@pytest.mark.parametrize("cut", range(0, 16))
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(cut):
    whole = stream().take(30)
    first = stream()
    first.take(cut)
    state = json.loads(json.dumps(first.state()))
    resumed = stream()
    resumed.take(3)
    resumed.restore(state)
    assert resumed.take(30 - cut) == whole[cut:]


def test_without_shuffling_the_order_is_the_given_one_and_draws_still_count():
    evaluation = stream(domain=EVALUATE, shuffle=False)
    first, second = evaluation.take(7), evaluation.take(7)
    assert [p.ids[0] for p in first] == [p.ids[0] for p in second] == list(range(7))
    assert [p.draw for p in first + second] == list(range(14))
    assert {p.domain for p in first} == {EVALUATE}


@pytest.mark.parametrize(
    "other",
    [
        lambda: stream(n=8),
        lambda: stream(seed=1),
        lambda: stream(domain=EVALUATE),
        lambda: PromptStream(examples(7, offset=1), seed=0, domain=TRAIN),
    ],
)
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(ValueError, match="belongs to other prompts"):
        other().restore(stream().state())


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="at least one example"):
        PromptStream([], seed=0, domain=TRAIN)
