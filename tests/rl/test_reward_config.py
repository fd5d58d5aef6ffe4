"""Which grader a prompt gets, by the source of its data."""

import pytest

from tlt_jax.config import from_dict
from tlt_jax.rl.data import Example
from tlt_jax.rl.graders import Grader, GraderError
from tlt_jax.rl.reward_config import RewardConfig

TASK = {"task": "chain_sum", "params": {}, "item": {"answer": "1"}}


def example(source, where="file:1", **entry):
    return Example((1,), "What?", source, entry or {"answer": "1"}, where)


@pytest.mark.parametrize(
    "source, grader",
    [
        ("openai/gsm8k", Grader("math")),
        ("lighteval/MATH", Grader("math")),
        ("DigitalLearningGmbH/MATH-lighteval", Grader("math")),
        ("HuggingFaceH4/aime_2024", Grader("math")),
        ("aime2025", Grader("math")),
        ("math_dapo_reasoning", Grader("math")),
    ],
)
def test_the_names_that_verl_knows_need_no_setting(source, grader):
    assert RewardConfig().grader_of(example(source)) == grader


def test_questions_of_tasks_are_graded_by_their_task():
    config = RewardConfig(extractor="last_number", partial=True)
    grader = config.grader_of(example("chain_sum", **TASK))
    assert grader == Grader("reasoning_gym", "last_number", True)


def test_a_source_can_have_a_grader_of_its_own():
    by_source = {
        "openai/gsm8k": {"grader": "exact", "extractor": "last_number"},
        "quiz*": {"grader": "multiple_choice"},
        "quiz/hard*": {"grader": "my.module:grade"},
        "quiz/harder": {"grader": "math"},
    }
    config = from_dict(RewardConfig, {"grader": "exact", "by_source": by_source})
    assert config == from_dict(RewardConfig, {"grader": "exact", "by_source": by_source})
    for source, grader in {
        "openai/gsm8k": Grader("exact", "last_number"),
        "quiz": Grader("multiple_choice"),
        "quiz/hard": Grader("my.module:grade"),
        "quiz/harder": Grader("math"),
        "quiz/hardest": Grader("my.module:grade"),
        "other": Grader("exact"),
        "lighteval/MATH": Grader("exact"),  # a grader that was chosen is for all others
    }.items():
        assert config.grader_of(example(source)) == grader


def test_check_gives_one_example_of_each_source_or_lists_those_without_a_grader():
    config = RewardConfig()
    known = [example("openai/gsm8k", f"file:{i}") for i in range(3)]
    task = example("chain_sum", "task", **TASK)
    assert config.check([*known, task]) == [known[0], task]
    with pytest.raises(GraderError, match="for the data source 'b'; set reward.grader .*by_source"):
        config.check([*known, example("b"), example("b")])
    with pytest.raises(GraderError, match=r"for the data sources \['a', 'b'\]; set reward.grader"):
        config.check([example("b"), *known, example("a")])
    bad = example("openai/gsm8k", "file:7", question="What?")
    with pytest.raises(GraderError, match="file:7, What?.*grader='math' needs 'answer'"):
        config.check([*known, bad])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"grader": "exakt"}, "grader='exakt' is unknown"),
        ({"extractor": "guess"}, "extractor='guess' is unknown"),
        ({"grader": "math", "partial": True}, "partial=True means nothing"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"spare_workers": -1}, "spare_workers=-1"),
        ({"deadline_s": 0.0}, "deadline_s=0.0"),
        ({"by_source": {"a": "math"}}, "by_source.a='math' must be a section with grader"),
        ({"by_source": {"a": {"extractor": "boxed"}}}, "by_source.a=.* a section with grader"),
        ({"by_source": {"a": {"grader": "math", "x": 1}}}, "by_source.a.x is no known setting"),
        ({"by_source": {"a": {"grader": "exakt"}}}, "by_source.a: grader='exakt' is unknown"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        RewardConfig(**settings)
