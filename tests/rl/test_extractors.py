"""Extractors: tables of what they find, and texts that are made to be hard."""

import time

import pytest

from tlt_jax.rl.extractors import EXTRACTORS, choice


@pytest.mark.parametrize(
    "extractor, text, answer",
    [
        ("answer_tag", "a <answer>1</answer> b <answer> 2\n</answer> c", "2"),
        ("answer_tag", "<answer>1</answer> <answer>2", "1"),
        ("answer_tag", "</answer> 1 <answer>", None),
        ("answer_tag", "42", None),
        ("last_number", "So 3 + 4 = 7.", "7"),
        ("last_number", "x = -4", "-4"),
        ("last_number", "x = −4", "-4"),
        ("last_number", "7-4", "4"),
        ("last_number", "about 1,234,567.50 in all", "1234567.50"),
        ("last_number", "1,2,34", "34"),
        ("last_number", "it is 12,3456", "3456"),
        ("last_number", "none", None),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", " \n ", None),
        ("whole", " a b\n", "a b"),
        ("boxed", r"so \boxed{42}.", "42"),
        ("boxed", r"\boxed{1} or \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1,2\}} \fbox {3}", "3"),
        ("boxed", r"\boxed{\boxed{3}}", "3"),
        ("boxed", r"the set { \boxed{3} }} }", "3"),
        ("boxed", r"\boxed{1} \boxed{2", "1"),
        ("boxed", r"\boxed{\}", None),
        ("boxed", "boxed{3}", None),
        ("final_answer", "so\n#### 18", "18"),
        ("final_answer", "#### $1,234.50 in all", "$1,234.50"),
        ("final_answer", "#### -5", "-5"),
        ("final_answer", "#### Step 1", None),
        ("final_answer", r"\boxed{1} #### 2 <answer>3</answer>", "3"),
        ("final_answer", r"<answer>3</answer> #### 2 \boxed{1}", "1"),
        ("final_answer", r"\boxed{1}. The answer is correct.", "1"),
        ("final_answer", "The answer is 42. Because 3 < 4.", "42"),
        ("final_answer", "The answer is 3.5.", "3.5"),
        ("final_answer", "**Answer:** 42 apples\nHm.", "42 apples"),
        ("final_answer", "**Answer**: **42**", "42"),
        ("final_answer", "Final Answer:\n$42$", "$42$"),
        ("final_answer", "The answer is 1. No, the answer\nis: 2", "2"),
        ("final_answer", "answer 5", None),
        ("final_answer", "42", None),
        ("final_answer", "", None),
    ],
)
def test_extractors(extractor, text, answer):
    assert EXTRACTORS[extractor](text) == answer


@pytest.mark.parametrize(
    "text, letter",
    [
        *[(t, "B") for t in ("B", "b", "(B)", "(b)", "[B]", "( b )", "B)", "B.", "**B**", "$B$")],
        *[(t, "B") for t in ("B) Paris", "b) Paris", "B. A dog", "B: Paris", "B) one or A", "B\n")],
        *[(t, "B") for t in ("Option B", "choice (B)", r"\text{B}", r"$\textbf{(B)}$")],
        ("Long thoughts. The answer is B.", "B"),
        ("The correct answer is (b) because it rains", "B"),
        ("The answer is A because it rains", "A"),
        ("the answer is a cat", None),
        ("The answer is I think B", None),
        ("answer is option C", "C"),
        ("**Answer:** D", "D"),
        ("Answer: d", "D"),
        ("A or B? <answer>C</answer>", "C"),
        (r"First (A), but no: \boxed{\text{(J)}}", "J"),
        (r"\boxed{B}, so the answer is A.", "B"),
        ("A cat", None),
        ("I think B", None),
        ("Both", None),
        ("A's", None),
        ("K", None),
        ("", None),
        ("The answer is not B", None),
        ("Answer: A or B", None),
        ("Answer: A, B", None),
        ("(A) and (C)", None),
        ("(a)/(b)", None),
        ("A/B", None),
        ("A-B", None),
        ("B because", None),  # without a mark only the letter itself
    ],
)
def test_choice(text, letter):
    assert choice(text) == letter


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", "{", "}", "####", "#### 1,", "answer is ", "answer: ", "<answer>", "*", "(", "−"],
)
def test_a_long_text_takes_no_longer_per_character_than_a_short_one(piece):
    """A pattern that goes back and forth would take minutes for these."""
    text = piece * (300_000 // len(piece))
    start = time.monotonic()
    for extract in (*EXTRACTORS.values(), choice):
        extract(text)
    assert time.monotonic() - start < 5
