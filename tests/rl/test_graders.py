"""Graders by name, run here as a reward worker runs them."""

import sys

import pytest

from tlt_jax.rl.graders import Grader, GraderError, check_entry, resolve


def grade(grader, text, entry):
    return resolve(grader, entry)(text, entry)


@pytest.mark.parametrize(
    "text, value",
    [("<answer> yes </answer>", 1.0), ("<answer>no</answer>", 0.0), ("yes", 0.0)],
)
def test_exact(text, value):
    assert grade(Grader("exact"), text, {"answer": "yes "}) == value


def test_each_grader_has_an_extractor_of_its_own_and_takes_others():
    seven = {"answer": "7"}
    assert grade(Grader("exact"), "7", seven) == 0.0
    assert grade(Grader("exact", "last_number"), "it is 7", seven) == 1.0
    assert grade(Grader("math"), r"\boxed{14/2}", seven) == 1.0
    assert grade(Grader("math", "answer_tag"), r"\boxed{14/2}", seven) == 0.0
    assert grade(Grader("math", "answer_tag"), "<answer>14/2</answer>", seven) == 1.0


@pytest.mark.parametrize("reference", ["B", "b", "(B)", "B) Paris", r"\boxed{B}"])
def test_multiple_choice(reference):
    grader, entry = Grader("multiple_choice"), {"answer": reference}
    check_entry(grader, entry)
    assert grade(grader, "Hm. The answer is (B).", entry) == 1.0
    assert grade(grader, "Hm. The answer is (A).", entry) == 0.0
    assert grade(grader, "Hm.", entry) == 0.0
    tagged = Grader("multiple_choice", "answer_tag")
    assert grade(tagged, "<answer>b</answer>", entry) == 1.0
    assert grade(tagged, "b", entry) == 0.0


def test_reasoning_gym_gives_nothing_for_near_misses_unless_asked():
    entry = {"task": "chain_sum", "params": {"max_terms": 3}, "item": {"answer": "12"}}
    texts = {
        "right": "<answer>12.0</answer>",
        "near": "<answer>it is 12</answer>",
        "wrong": "<answer>13</answer>",
        "bare": "12",
    }
    strict, soft = (
        {
            name: grade(Grader("reasoning_gym", partial=partial), text, entry)
            for name, text in texts.items()
        }
        for partial in (False, True)
    )
    zero = {"wrong": 0.0, "bare": 0.0}
    assert strict == {"right": 1.0, "near": 0.0} | zero
    assert soft == {"right": 1.0, "near": pytest.approx(2 / 8)} | zero


@pytest.mark.parametrize("places, value", [(3, 1.0), (6, 0.0)])
def test_reasoning_gym_scores_with_the_parameters_of_the_task(places, value):
    """This scorer's tolerance is a parameter of the task."""
    params = {"max_num_decimal_places": places}
    entry = {"task": "decimal_arithmetic", "params": params, "item": {"answer": "2.0"}}
    assert grade(Grader("reasoning_gym"), "<answer>2.001</answer>", entry) == value


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Grader("exakt"), r"'exakt' is unknown; known: \['reasoning_gym', 'exact', 'math"),
        (lambda: Grader("module:"), "is unknown"),
        (lambda: Grader("exact", "guess"), r"'guess' is unknown; known: \['answer_tag'"),
        (lambda: Grader("exact", partial=True), "partial=True means nothing to grader='exact'"),
        (lambda: Grader("m:f", "whole"), "extractor='whole' means nothing to grader='m:f'"),
        (lambda: check_entry(Grader("reasoning_gym"), {"answer": "1"}), "needs 'task'"),
        (lambda: check_entry(Grader("math"), {"answer": None}), "grader='math' needs 'answer'"),
        (
            lambda: check_entry(Grader("multiple_choice"), {"answer": "Paris"}),
            "needs an answer that is a letter, got 'Paris'",
        ),
    ],
)
def test_bad_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_grader_that_cannot_be_imported_is_one_short_sentence(tmp_path, monkeypatch):
    (tmp_path / "my_broken.py").write_text("\n1 / 0\n")
    (tmp_path / "my_hungry.py").write_text("import no_such_package\n")
    (tmp_path / "my_fine.py").write_text("def grade(text, entry):\n    return 1\n\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve(Grader("my_fine:grade"), {})("", {}) == 1
    for name, words in {
        "my_absent:grade": "no module 'my_absent'; put my_absent.py into the folder you start from",
        "my_absent.sub:grade": r"no module 'my_absent'; put my_absent/sub.py into the folder",
        "my_broken:grade": r"importing my_broken.py failed: ZeroDivision.*my_broken.py, line 2\)",
        "my_hungry:grade": "my_hungry.py imports 'no_such_package', which is not installed",
        "my_fine:grad": "my_fine.py has no function 'grad'",
        "my_fine:limit": "my_fine.py has no function 'limit'",
    }.items():
        with pytest.raises(GraderError, match=words) as caught:
            resolve(Grader(name), {})
        assert len(str(caught.value).replace(str(tmp_path), "")) < 160


def test_math_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(GraderError, match="needs the package math-verify .*requirements-extra.txt"):
        resolve(Grader("math"), {"answer": "1"})
