"""Equality of mathematical answers, right and wrong; and what would hang is the pool's to end."""

import time

import pytest

from tlt_jax.rl.extractors import final_answer, whole
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.math_grader import LONGEST_ANSWER, grade_math
from tlt_jax.rl.rewards import RewardPool, count_statuses

EQUAL = [
    ("18", "18"),
    ("7.0", "7"),
    ("07", "7"),
    (r"\frac{1}{2}", "0.5"),
    ("1/2", r"\dfrac12"),
    ("-0.75", r"-\frac34"),
    ("−5", "-5"),
    ("1,234", "1234"),
    (r"10\,000", "10000"),
    ("$18", "18"),
    (r"\$18", "18"),
    ("18 dollars", "18"),
    (r"3 \text{ cm}", "3"),
    (r"90^\circ", "90"),
    (r"18\%", "18"),
    (r"50\%", "0.5"),
    ("x = 5", "5"),
    (r"x \in [1,2]", "[1,2]"),
    ("2^{10}", "1024"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(1,2)", "(1, 2)"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3,\pi/2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("3, 42", "42, 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\text{Monday}", "Monday"),
    ("no solution", "No solution."),
]
DIFFERENT = [
    ("4", "5"),
    ("0.33", "1/3"),
    (r"\pi", "3.14"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("3 or 42", "42"),
    ("1 2", "12"),
    ("Pairs", "Paris"),
    ("x", "5"),
    ("", "5"),
    ("{{{", "5"),
    (r"\frac{1}{", "5"),
    ("9/0", "5"),
    ("1e400", "5"),
    ("\\" * 50, "5"),
    ("\x00\ud7ff", "5"),
    ("1" * (LONGEST_ANSWER + 1), "1" * (LONGEST_ANSWER + 1)),
]


@pytest.mark.parametrize(
    "answer, reference, value", [(*p, 1.0) for p in EQUAL] + [(*p, 0.0) for p in DIFFERENT]
)
def test_equality(answer, reference, value):
    assert grade_math(whole, answer, {"answer": reference}) == value


@pytest.mark.parametrize(
    "text, reference, value",
    [
        (r"Thus \boxed{\frac{1}{2}}.", "0.5", 1.0),
        ("So 9 * 2 = 18.\n#### 18", "He makes 9 * 2 = $18.\n#### 18", 1.0),
        ("The answer is 18 dollars.", "#### 18", 1.0),
        (r"The answer is $\frac12$.", r"Hence \boxed{\frac{1}{2}}.", 1.0),
        (r"\boxed{18} \boxed{19}", "18", 0.0),
        ("Answer: 18 or 19", "18", 0.0),
        ("18", "18", 0.0),  # no mark
        (r"\boxed{18", "18", 0.0),
    ],
)
def test_final_answers_of_responses_and_of_whole_solutions(text, reference, value):
    assert grade_math(final_answer, text, {"answer": reference}) == value


def test_what_never_ends_costs_its_deadline_and_hostile_texts_nothing():
    math, deadline = Grader("math"), 4.0
    hanging = [r"\boxed{9^{9^{9}}}", r"\boxed{\sum_{k=1}^{10^9} \sin(k)}"]
    hostile = [
        r"\boxed{" * 100_000,
        "{" * 1_000_000,
        r"\boxed{" + "9" * 1_000_000 + "}",
        "\\" * 999,
    ]
    right = [rf"\boxed{{{i} + {7 - i}}}" for i in range(30)]
    with RewardPool(1, 4, deadline_s=deadline) as pool:
        pool.load(math, {"answer": "7"})
        start = time.monotonic()
        for text in hanging + hostile + right:
            pool.submit(text, math, text, {"answer": "7"})
        scores = dict(pool.drain())
        took = time.monotonic() - start
    assert [scores[text].status for text in hanging] == ["timeout"] * 2
    assert [scores[text].value for text in hostile] == [0.0] * 4
    assert [scores[text].value for text in right] == [1.0] * 30
    assert count_statuses(scores.values())["timeout"] == 2
    assert took >= deadline
