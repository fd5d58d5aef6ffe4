"""Traces are right: by reasoning-gym's own scorer, by their own arithmetic, and by hand."""

import re

import pytest
import reasoning_gym

from experiments.traces import TRACES
from tlt_jax.rl.extractors import answer_tag
from tlt_jax.rl.graders import Grader, resolve

PARAMS = {  # wider than any recipe; where it is empty, the defaults of the task
    "base_conversion": {"min_value": 1, "max_base": 36},
    "chain_sum": {"max_terms": 12, "allow_negation": True},
    "gcd": {"max_numbers": 5},
    "letter_counting": {"min_words": 1, "max_words": 40},
    "prime_factorization": {"max_value": 20000},
    "spell_backward": {"max_word_len": 10},
    "word_sorting": {"min_words": 1, "max_words": 15},
}
EQUATION = re.compile(r"^([-+*/\d]+)=([-+*\d]+)", re.MULTILINE)
BY_HAND = [
    (
        "base_conversion",
        {"decimal_value": 13, "source_repr": "1101", "source_base": 2, "target_base": 5}
        | {"target_repr": "23"},
        "1,101\n1*2+1=3,01\n3*2+0=6,1\n6*2+1=13\n13=2*5+3:3\n2=0*5+2:23\n<answer>23</answer>",
    ),
    (
        "base_conversion",
        {"decimal_value": 27, "source_repr": "27", "source_base": 10, "target_base": 16}
        | {"target_repr": "1b"},
        "27=1*16+11:b\n1=0*16+1:1b\n<answer>1b</answer>",
    ),
    ("chain_sum", {"expression": "4 - 1 + 7 - 12"}, "3+7-12\n10-12\n<answer>-2</answer>"),
    ("chain_sum", {"expression": "-4 - -1"}, "<answer>-3</answer>"),
    ("count_bits", {"number": 6}, "6:0\n3:1\n1:2\n<answer>2</answer>"),
    ("gcd", {"numbers": [12, 18]}, "18=1*12+6\n12=2*6+0\n<answer>6</answer>"),
    (
        "letter_counting",
        {"target_letter": "h", "span": ["Hut", "Bach"]},
        "h1 u t\nb a c h2\n<answer>2</answer>",
    ),
    (
        "prime_factorization",
        {"number": 42},
        "42=21*2+0\n21=10*2+1\n21=7*3+0\n7<9\n<answer>2 × 3 × 7</answer>",
    ),
    ("prime_factorization", {"number": 2}, "2<4\n<answer>2</answer>"),
    ("spell_backward", {"word": "sun"}, "s u n\nn u s\n<answer>nus</answer>"),
    (
        "word_sorting",
        {"transformed_words": ["b", "a", "C", "b"], "direction": "descending"},
        "b\nb a\nb a C\nb b a C\n<answer>b, b, a, C</answer>",
    ),
]


@pytest.mark.parametrize("task", TRACES)
def test_every_trace_is_right_and_a_changed_answer_is_not(task):
    params = PARAMS.get(task, {})
    grade = resolve(Grader("reasoning_gym"), {"task": task, "params": params, "item": {}})
    lengths = set()
    for item in reasoning_gym.create_dataset(task, **params, size=300, seed=3):
        text = TRACES[task](item)
        assert grade(text, {"item": item}) == 1.0, (item["question"], text)
        wrong = text.replace("<answer>", "<answer>7")
        assert grade(wrong, {"item": item}) == 0.0, (item["question"], wrong)
        lengths.add(len(text))
    assert len(lengths) > 5  # they vary with the problem


@pytest.mark.parametrize("task", ["base_conversion", "gcd", "prime_factorization"])
def test_every_equation_of_a_trace_holds(task):
    equations = 0
    for item in reasoning_gym.create_dataset(task, **PARAMS[task], size=100, seed=5):
        for left, right in EQUATION.findall(TRACES[task](item)):
            assert eval(left) == eval(right), (item["question"], left, right)
            equations += 1
    assert equations > 100


def test_a_sum_keeps_its_value_from_line_to_line():
    for item in reasoning_gym.create_dataset("chain_sum", **PARAMS["chain_sum"], size=100, seed=5):
        *lines, answer = TRACES["chain_sum"](item).splitlines()
        values = {eval(line.replace("--", "+").replace("+-", "-")) for line in lines}
        assert values <= {int(answer_tag(answer))}


@pytest.mark.parametrize("task, metadata, expected", BY_HAND)
def test_by_hand(task, metadata, expected):
    assert TRACES[task]({"metadata": metadata}) == expected


def test_every_task_is_worked_by_hand():
    assert {task for task, *_ in BY_HAND} == set(TRACES)


def test_a_question_without_a_right_answer_is_refused():
    zero = {"decimal_value": 0, "source_repr": "", "source_base": 3, "target_base": 7}
    with pytest.raises(ValueError, match="min_value"):
        TRACES["base_conversion"]({"metadata": zero | {"target_repr": ""}})
