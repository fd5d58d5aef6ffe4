"""Settings: wrong ones are refused by name before any work is done."""

import importlib
import pathlib

import pytest
from ml_collections import ConfigDict

from tlt_jax.config import Config, from_dict, to_dict

NO_RUNS = ("base", "cold_start")  # the latter describes no RL run; see test_cold_start.py
CONFIGS = sorted(
    p.stem for p in pathlib.Path("experiments/configs").glob("[a-z]*.py") if p.stem not in NO_RUNS
)


def load(name: str, arg: str = "smoke") -> ConfigDict:
    return importlib.import_module(f"experiments.configs.{name}").get_config(arg)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("arg", ["smoke", "full"])
def test_every_config_file_is_valid(name, arg):
    config = from_dict(Config, load(name, arg))
    assert config == from_dict(Config, load(name, arg))
    assert to_dict(config)["steps"] == config.steps


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_names_every_setting(name):
    """So that any of them can be overridden on the command line."""
    config = from_dict(Config, load(name))
    named = load(name).to_dict()
    for section, value in to_dict(config).items():
        if isinstance(value, dict):
            assert set(named[section]) == set(value)
        assert section in named


def test_parts_of_a_task_can_be_overridden():
    config = load("tiny")
    for name, value in {"weight": 2.0, "params.max_terms": 3}.items():
        config.update_from_flattened_dict({f"data.tasks.basic_arithmetic.{name}": value})
    [task] = from_dict(Config, config).data.tasks
    assert (task.weight, dict(task.params)["max_terms"]) == (2.0, 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_argument_of_a_config_file_lists_the_known(name):
    with pytest.raises(ValueError, match="smoke or full|full or smoke"):
        load(name, "smok")


def edited(changes: dict) -> dict:
    # Plain dictionaries, because a ConfigDict has type checks of its own.
    config = load("tiny").to_dict()
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[key] = value
    return config


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"stepz": 3}, TypeError, r"config\.stepz is no known setting; known here: .*steps"),
        ({"trainer.learning_rat": 1e-3}, TypeError, r"config\.trainer\.learning_rat is no known"),
        ({"steps": 2.5}, TypeError, r"config\.steps=2\.5 must be of type int, not float"),
        ({"seed": True}, TypeError, r"config\.seed=True must be of type int, not bool"),
        ({"reward.extractor": 3}, TypeError, r"config\.reward\.extractor=3 must be of type str"),
        ({"steps": 0}, ValueError, r"steps=0 must be at least 1"),
        ({"trainer.schedule": "step"}, ValueError, r"config\.trainer: schedule='step'"),
        ({"rollout.temperature": 0.0}, ValueError, r"rollout\.temperature=0: all responses"),
        ({"rollout.top_p": 0.9}, ValueError, r"rollout\.top_p=0\.9.*top_p=1, top_k=0"),
        ({"evaluation.prompts": 1000}, ValueError, r"evaluation\.prompts=1000.*data\.eval_size"),
        ({"reward.extractor": "guess"}, ValueError, r"extractor='guess' is unknown; known:"),
        ({"warm_up.rambling": 1.0}, ValueError, r"rambling=1\.0 must lie in \[0, 1\)"),
        ({"policy.dtype": "float16"}, ValueError, r"dtype='float16'"),
        ({"seed": 2**32}, ValueError, r"seed=4294967296 must lie in \[0, 2\^32\)"),
        ({"rollout.samples": 1}, ValueError, r"rollout\.samples=1: .*at least 2"),
        ({"evaluation.prompts": -1}, ValueError, r"prompts=-1 must be at least 0"),
        ({"data.tasks": {"gcd": {"wieght": 2}}}, ValueError, r"tasks\.gcd\.wieght is no known"),
        ({"data.tasks": {"gcd": {"weight": "x"}}}, ValueError, r"gcd\.weight='x' must be a number"),
        ({"data.tasks": {"gcd": 3}}, ValueError, r"tasks\.gcd=3 must be a section"),
    ],
)
def test_wrong_settings_are_refused_by_name(change, error, words):
    with pytest.raises(error, match=words):
        from_dict(Config, edited(change))


def test_a_section_that_is_no_section_and_a_missing_key():
    with pytest.raises(TypeError, match=r"config\.trainer must be a section, got 3"):
        from_dict(Config, {**load("tiny").to_dict(), "trainer": 3})
    without = load("tiny").to_dict()
    del without["steps"]
    with pytest.raises(TypeError, match=r"config\.steps is missing"):
        from_dict(Config, without)
