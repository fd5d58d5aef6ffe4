"""Presets, what they refuse, the command line, and the KL in the reward."""

import dataclasses
import json

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from experiments.configs import tiny
from tlt_jax.config import Config, from_dict, to_dict
from tlt_jax.rl import advantages, loss
from tlt_jax.rl.algorithm import PRESETS, AlgorithmConfig, assign_advantages


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_concrete_and_survives_a_file(name):
    config = AlgorithmConfig(name)
    assert None not in dataclasses.astuple(config)
    assert hash(config) == hash(AlgorithmConfig(name))
    again = from_dict(AlgorithmConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config


def test_presets_are_what_their_papers_say():
    def of(name, *settings):
        return tuple(getattr(AlgorithmConfig(name), s) for s in settings)

    parts = ("advantage", "ratio", "aggregation")
    assert of("grpo", *parts) == ("group", "token", "token_mean")
    assert of("dr_grpo", *parts) == ("group_mean", "token", "constant")
    assert of("dapo", *parts, "clip_low", "clip_high") == (
        *("group", "token", "token_mean", 0.2, 0.28),
    )
    assert of("dapo", "dynamic_sampling", "max_sampling_rounds") == (True, 10)
    assert of("rloo", *parts) == ("leave_one_out", "token", "constant")
    assert of("gspo", *parts, "clip_low", "clip_high") == (
        *("group", "sequence", "sequence_mean", 3e-4, 4e-4),
    )
    assert of("reinforce++", *parts) == ("batch", "token", "token_mean")
    assert of("reinforce++_baseline", *parts) == ("batch_baseline", "token", "token_mean")
    assert not any(AlgorithmConfig(name).needs_reference for name in PRESETS)
    assert len({AlgorithmConfig(name) for name in PRESETS}) == len(PRESETS)


def test_where_a_preset_puts_its_kl():
    for name, kl, where in [
        ("grpo", "k3", "loss"),
        ("rloo", "k1", "reward"),
        ("reinforce++", "k1", "reward"),
        ("reinforce++_baseline", "k2", "loss"),
    ]:
        config = AlgorithmConfig(name, kl_coef=0.1)
        assert config.needs_reference
        assert (config.kl, config.kl_in) == (kl, where)
        assert config.kl_in_loss == (where == "loss") and config.kl_in_reward != config.kl_in_loss
        assert config.loss_settings()["kl_coef"] == (0.1 if where == "loss" else 0.0)


def test_what_is_given_wins_over_the_preset():
    config = AlgorithmConfig(
        "dapo", clip_high=0.3, dynamic_sampling=False, epochs=2, mini_batches=3
    )
    assert (config.clip_low, config.clip_high, config.optimizer_steps) == (0.2, 0.3, 6)
    assert config.max_sampling_rounds == 1


def test_the_command_line_fills_what_the_config_file_leaves_open(monkeypatch):
    settings = ("name=dapo", "clip_high=0.3", "epochs=2", "dynamic_sampling=False", "kl=k2")
    command = ["program", "--config=experiments/configs/tiny.py"]
    command += [f"--config.algorithm.{setting}" for setting in settings]
    monkeypatch.setattr("sys.argv", command)  # ml_collections looks there for overrides
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(command)
    config = from_dict(Config, values.config).algorithm
    assert config == AlgorithmConfig(
        "dapo", clip_high=0.3, epochs=2, dynamic_sampling=False, kl="k2"
    )
    assert from_dict(Config, tiny.get_config()).algorithm == AlgorithmConfig("grpo")


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(name="ppo"), "name='ppo' is not known; use one of grpo, dr_grpo, dapo"),
        (dict(advantage="gae"), "advantage='gae' .* group, group_mean, leave_one_out"),
        (dict(ratio="group"), "ratio='group' .* token, sequence"),
        (dict(aggregation="mean"), "aggregation='mean' .* token_mean, sequence_mean, constant"),
        (dict(kl="k4"), "kl='k4' .* k1, k2, k3"),
        (dict(kl_in="both"), "kl_in='both' .* loss, reward"),
        (dict(clip_low=-0.1), "clip_low=-0.1"),
        (dict(kl_coef=float("nan")), "kl_coef=nan"),
        (dict(epochs=0), "epochs=0 must be at least 1"),
        (dict(mini_batches=0), "mini_batches=0"),
        (dict(dual_clip=1.0), "dual_clip=1.0 must be greater than 1"),
        (dict(importance_cap=0.5), "importance_cap=0.5 must be at least 1"),
        (dict(kl="k3", kl_in="reward", kl_coef=0.1), "kl='k3' in the reward"),
        (dict(max_sampling_rounds=3), "dynamic_sampling=False and max_sampling_rounds=3"),
        (dict(dynamic_sampling=True, max_sampling_rounds=1), "at least 2 rounds"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        AlgorithmConfig(**settings)


def edited(**changes):
    config = tiny.get_config("smoke")
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return from_dict(Config, config)


@pytest.mark.parametrize("name", PRESETS)
def test_one_response_per_prompt_is_refused_where_responses_are_compared(name):
    changes = dict(algorithm__name=name, rollout__samples=1)
    if name == "reinforce++":
        assert edited(**changes).rollout.samples == 1
        changes["algorithm__dynamic_sampling"] = True
    with pytest.raises(ValueError, match=r"samples=1: algorithm '.*' .* at least 2"):
        edited(**changes)


def test_settings_that_do_not_fit_the_rollout():
    with pytest.raises(ValueError, match="mini_batches=9 is more than rollout.prompts=8"):
        edited(algorithm__mini_batches=9)
    with pytest.raises(
        ValueError, match="overlong_buffer=5 is longer than rollout.max_new_tokens=4"
    ):
        edited(algorithm__overlong_buffer=5)


# --- advantages of a rollout ---

REWARDS = np.array([1.0, 0.0, np.nan, 0.0, 2.0])
GROUPS = np.array([0, 0, 0, 5, 5])
VALID = np.array([True, True, False, True, True])
LENGTHS = np.array([3, 1, 2, 2, 4])
KL = [np.array([0.5, -0.25, 1.0]), np.array([2.0]), np.full(2, np.nan), np.zeros(2), np.ones(4)]
ROLLOUT = (REWARDS, GROUPS, VALID, LENGTHS)


@pytest.mark.parametrize("estimator", advantages.ESTIMATORS)
def test_without_a_kl_the_estimator_is_all_there_is(estimator):
    config = AlgorithmConfig(advantage=estimator, kl_coef=0.1)  # in the loss
    got = assign_advantages(config, *ROLLOUT)
    assert got == advantages.ESTIMATORS[estimator](*ROLLOUT).tolist()
    assert got[2] == 0


@pytest.mark.parametrize("estimator", ["group", "group_mean", "leave_one_out", "batch_baseline"])
def test_a_kl_in_the_reward_is_taken_off_the_whole_response(estimator):
    config = AlgorithmConfig(advantage=estimator, kl="k1", kl_coef=0.1, kl_in="reward")
    rewards = np.array([1 - 0.125, -0.2, np.nan, 0.0, 2 - 0.4])
    want = advantages.ESTIMATORS[estimator](rewards, GROUPS, VALID, LENGTHS)
    np.testing.assert_allclose(assign_advantages(config, *ROLLOUT, KL), want, atol=1e-12)


def test_reinforce_plus_plus_gives_tokens_the_return_that_comes_after_them():
    got = assign_advantages(AlgorithmConfig("reinforce++", kl_coef=0.1), *ROLLOUT, KL)
    returns = [[1 - 0.125, 1 - 0.075, 1 - 0.1], [-0.2], [0, 0], [2 - 0.4, 2 - 0.3, 1.8, 1.9]]
    tokens = [x for row in returns for x in row]
    mean, std = np.mean(tokens), np.std(tokens, ddof=1)
    for i, row in zip([0, 1, 3, 4], returns):
        np.testing.assert_allclose(got[i], (np.array(row) - mean) / (std + 1e-6), atol=1e-12)
    assert got[2].tolist() == [0, 0]


def test_bad_kl_is_named():
    config = AlgorithmConfig("rloo", kl_coef=0.1)
    with pytest.raises(ValueError, match="KL of every response is needed"):
        assign_advantages(config, *ROLLOUT)
    with pytest.raises(ValueError, match="KL of every response is not used"):
        assign_advantages(AlgorithmConfig(), *ROLLOUT, KL)
    with pytest.raises(ValueError, match="kl has 4 entries for 5"):
        assign_advantages(config, *ROLLOUT, KL[:4])
    with pytest.raises(ValueError, match="kl of response 1 must be 1 finite"):
        assign_advantages(config, *ROLLOUT, [KL[0], np.array([np.nan]), *KL[2:]])
    with pytest.raises(ValueError, match="kl of response 0 must be 3 finite"):
        assign_advantages(config, *ROLLOUT, [np.zeros(2), *KL[1:]])


def test_every_part_is_used_by_a_preset_or_is_an_alternative():
    used = {AlgorithmConfig(name).advantage for name in PRESETS}
    assert used == set(advantages.ESTIMATORS)
    assert {AlgorithmConfig(name).ratio for name in PRESETS} == set(loss.RATIOS)
    assert {AlgorithmConfig(name).aggregation for name in PRESETS} == set(loss.AGGREGATIONS)
    assert {AlgorithmConfig(name).kl for name in PRESETS} == set(loss.KL_ESTIMATORS)
