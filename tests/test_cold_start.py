"""The cold start: what it teaches, that it learns, and that its folder is finished or not there."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from absl import flags

from experiments import cold_start as command
from experiments import sft
from experiments.configs import cold_start as cold_start_config
from experiments.configs import reasoner
from experiments.traces import TRACES
from tests.reference import full_pass
from tlt_jax.config import Config, from_dict
from tlt_jax.models import pretrained
from tlt_jax.models.tokenizer import byte_tokenizer
from tlt_jax.rl import policy, tasks
from tlt_jax.rl.data import load_prompts
from tlt_jax.spec import noise

SUMS = {"chain_sum": {"params": {"min_terms": 3, "max_terms": 4, "max_digits": 1}}}


def small(**changes) -> sft.ColdStartConfig:
    """The smoke recipe with one task and short rows; `changes` are of its sections' settings."""
    values = cold_start_config.get_config("smoke").to_dict()
    values |= {"row_tokens": 256, "micro_batch_tokens": 768}
    values["data"] |= {"tasks": SUMS, "size": 24, "eval_size": 4}
    for name, value in changes.items():
        section, _, setting = name.partition("__")
        if setting:
            values[section][setting] = value
        else:
            values[name] = value
    return from_dict(sft.ColdStartConfig, values)


def start_of(config):
    return policy.load(config.policy, jax.random.key(config.seed))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a small cold start, its config, and what it printed."""
    config, out = small(epochs=8), tmp_path_factory.mktemp("cold") / "deep" / "reasoner"
    command.cold_start(config, out)
    return config, out


def test_the_recipe_knows_the_data_of_rl():
    for variant in ("full", "smoke"):
        taught = from_dict(sft.ColdStartConfig, cold_start_config.get_config(variant))
        assert taught.rl_data == from_dict(Config, reasoner.get_config(variant)).data
        known = {(task.name, task.params) for task in taught.data.tasks}
        assert {(task.name, task.params) for task in taught.rl_data.tasks} < known
        assert {task.name for task in taught.data.tasks} <= set(TRACES)


def test_what_rl_holds_out_is_not_taught():
    config = small(data__size=150, data__eval_size=40)
    tokenizer = byte_tokenizer()
    start = policy.Policy(None, {}, tokenizer)
    samples, _ = sft.taught_samples(config, start)
    held_out = {tuple(e.ids) for e in load_prompts(config.data, tokenizer).held_out}
    prompts = {tuple(s.prompt.tolist()) for s in samples}
    assert len(held_out) > 30 and not held_out & prompts
    # A seed of its own: with that of RL the same questions would come.
    assert sft.COLD_START not in (noise.TRAIN, noise.EVALUATE, noise.GENERATE)
    rl = {tuple(e.ids) for e in load_prompts(config.data, tokenizer).train}
    assert len(rl & prompts) < len(rl) / 2


@pytest.mark.parametrize("eval_size", [40, 0])
def test_what_rl_on_other_data_holds_out_is_not_taught(eval_size):
    """Its draws differ from those of the cold start's own section; 0: then they are taught."""
    few = {"chain_sum": {"params": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}}
    own = {"data__tasks": few, "data__size": 100, "data__eval_size": 4}
    config = small(**own, rl_data__tasks=few, rl_data__eval_size=eval_size, rl_data__eval_seed=7)
    samples, _ = sft.taught_samples(config, policy.Policy(None, {}, byte_tokenizer()))
    prompts = {tuple(s.prompt.tolist()) for s in samples}
    rl = dataclasses.replace(config.rl_data, eval_size=40, size=1)
    held_out = {e.ids for e in load_prompts(rl, byte_tokenizer()).held_out}
    assert len(held_out) > 15 and len(prompts) > 10
    assert bool(held_out & prompts) == (eval_size == 0)


def test_held_out_questions_would_be_taught_without_the_exclusion(monkeypatch):
    # One-digit sums of two terms are few enough to recur.
    few = {"chain_sum": {"params": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}}
    config = small(data__tasks=few, data__size=150, data__eval_size=40)
    tokenizer = byte_tokenizer()
    held_out = {tuple(e.ids) for e in load_prompts(config.data, tokenizer).held_out}

    def prompts():
        samples, _ = sft.taught_samples(config, policy.Policy(None, {}, tokenizer))
        return {tuple(s.prompt.tolist()) for s in samples}

    assert not held_out & prompts()
    draw = tasks.draw_questions

    def careless(*args, excluded=frozenset(), **kwargs):
        return draw(*args, **kwargs)

    monkeypatch.setattr(tasks, "draw_questions", careless)
    monkeypatch.setattr(tasks.fixed_hashing, "call", lambda function, *args: function(*args))
    assert held_out & prompts()


def test_a_sample_is_the_prompt_of_rl_and_its_trace_with_the_end():
    config, tokenizer = small(), byte_tokenizer()
    samples, left_out = sft.taught_samples(config, policy.Policy(None, {}, tokenizer))
    assert (len(samples), left_out) == (24, 0)
    for sample in samples:
        prompt, response = (
            tokenizer.decode(ids, specials=True) for ids in (sample.prompt, sample.response)
        )
        assert prompt.startswith("<|im_start|>system\nThink in steps.<|im_end|>")
        assert prompt.endswith("<|im_start|>assistant\n")
        assert response.endswith("</answer><|im_end|>")
        assert sample.response[-1] in tokenizer.eos_ids and np.all(sample.advantages == 1)


def test_updates_have_every_sample_once_an_epoch_and_fill_their_rows():
    config, tokenizer = small(epochs=2), byte_tokenizer()
    samples, _ = sft.taught_samples(config, policy.Policy(None, {}, tokenizer))
    batches = list(sft.updates(samples, config))
    place = {id(s): i for i, s in enumerate(samples)}
    order = [place[id(s)] for batch in batches for s in batch]
    assert sorted(order[:24]) == sorted(order[24:]) == list(range(24)) and order[:24] != order[24:]
    room = config.rows * config.row_tokens
    assert all(0 < sum(s.tokens for s in batch) <= room for batch in batches)
    again = [s for batch in sft.updates(samples, config) for s in batch]
    assert [place[id(s)] for s in again] == order


def test_it_learns_and_the_folder_loads(made):
    config, out = made
    record = json.loads((out / command.RECORD).read_text())
    losses = record["result"]["losses"]
    # Bytes that are guessed blindly cost log(259) = 5.6 nats.
    assert losses[0] > 4 and losses[-1] < losses[0] / 2
    found, start = pretrained.load(out), start_of(config)
    assert found.config == start.model
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found.params, start.params)
    assert min(jax.tree.leaves(moved)) > 0
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_the_loss_told_is_the_cross_entropy_of_the_responses():
    config = small(warmup_steps=0)
    start = start_of(config)
    samples, _ = sft.taught_samples(config, start)
    batch = samples[:2]
    logits = [
        np.asarray(reference_logits(start, [*s.prompt, *s.response]), np.float64) for s in batch
    ]
    nats = [
        -(z - np.log(np.exp(z).sum(-1, keepdims=True)))[
            np.arange(len(s.prompt) - 1, s.tokens - 1), s.response
        ]
        for s, z in zip(batch, logits)
    ]
    told = []
    sft.train(config, start, [batch], told.append)
    np.testing.assert_allclose(told, [np.concatenate(nats).mean()], rtol=1e-5)


def reference_logits(start, ids):
    logits, _ = full_pass(
        start.model, start.params, np.array([ids], np.int32), np.array([len(ids)], np.int32)
    )
    return logits[0]


def test_the_same_recipe_is_not_trained_again(made, monkeypatch, capsys):
    config, out = made
    before = (out / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(command, "train", lambda *a: pytest.fail("trained again"))
    command.cold_start(config, out)
    assert "nothing to do" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"learning_rate": 1e-3}, "config.learning_rate: 0.003 there, 0.001 here"),
        ({"data__size": 23}, "tokens_taught"),
        ({"seed": 1}, "weights_before"),
    ],
)
def test_another_recipe_is_refused_with_what_differs(made, changes, said, monkeypatch):
    _, out = made
    monkeypatch.setattr(command, "train", lambda *a: pytest.fail("trained"))
    with pytest.raises(ValueError, match=said):
        command.cold_start(small(epochs=8, **changes), out)


def test_a_changed_trace_is_another_recipe(made, monkeypatch):
    config, out = made
    monkeypatch.setitem(sft.TRACES, "chain_sum", lambda item: "<answer>1</answer>")
    with pytest.raises(ValueError, match="tokens_taught"):
        command.cold_start(config, out)


@pytest.mark.parametrize("broken", ["train", "save", "record"])
def test_an_interrupted_run_leaves_nothing_and_starts_over(broken, tmp_path, monkeypatch):
    config, out = small(), tmp_path / "reasoner"

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        place = {
            "train": (command, "train"),
            "save": (command.hf, "save_file"),
            "record": (command.atomic, "write_json"),
        }[broken]
        patch.setattr(*place, die)
        with pytest.raises(KeyboardInterrupt):
            command.cold_start(config, out)
    assert not out.exists()
    # What a kill leaves behind is less tidy than what an exception does.
    (tmp_path / ".reasoner.draft" / "model").mkdir(exist_ok=True)
    (tmp_path / ".reasoner.draft" / "model" / "config.json").write_text("{")
    command.cold_start(config, out)
    assert (out / command.RECORD).is_file() and list(tmp_path.iterdir()) == [out]


def test_two_at_a_time_are_refused(tmp_path):
    out = tmp_path / "reasoner"
    _, lock = command.draft_of(out)
    with pytest.raises(ValueError, match="is being made by another process"):
        command.cold_start(small(), out)
    lock.close()
    command.draft_of(out)[1].close()


def test_what_stands_in_the_way_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", lambda *a: pytest.fail("trained"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for out, said in (
        (other, "holds something and no cold_start.json"),
        (file, "holds something and no cold_start.json"),
        (file / "below", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=said):
            command.cold_start(small(), out)
    assert (other / "notes.txt").read_text() == file.read_text() == "mine"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"data__tasks": {"dice": {}}}, "no traces are written for task 'dice'; known: .'base_"),
        (
            {"data__train_file": "a.jsonl", "data__tasks": {}, "data__chat": True}
            | {"data__eval_size": 0},
            "data.train_file='a.jsonl'",
        ),
        ({"row_tokens": 1024}, "micro_batch_tokens=768 is less than one row"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be greater than 0"),
    ],
)
def test_bad_settings_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        small(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"row_tokens": 60}, "none of 24 prompts with their traces fits into row_tokens=60"),
        ({"data__max_prompt_tokens": 99}, "more than max_prompt_tokens=99"),
        ({"warmup_steps": 50}, "24 traces fill [0-9]+ updates, no more than warmup_steps=50"),
        ({"policy__max_context": 128}, "row_tokens=256 exceeds the model's context of 128"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        command.cold_start(small(**changes), tmp_path / "out")


def test_long_traces_are_left_out_and_counted():
    tokenizer = byte_tokenizer()
    start = policy.Policy(None, {}, tokenizer)
    samples, _ = sft.taught_samples(small(), start)
    longest = max(s.tokens for s in samples)
    kept, left_out = sft.taught_samples(small(row_tokens=longest - 1), start)
    assert left_out == sum(s.tokens == longest for s in samples) == 24 - len(kept) > 0


def test_the_command_tells_in_one_sentence(tmp_path, monkeypatch):
    config = "--config=experiments/configs/cold_start.py:smoke"
    nowhere = f"--config.policy.path={tmp_path / 'nowhere'}"
    monkeypatch.setattr(sys, "argv", ["cold_start", config, nowhere])  # ml_collections reads it
    try:
        with pytest.raises(SystemExit, match="nowhere"):
            command.main([config, f"--out={tmp_path / 'out'}", nowhere])
    finally:
        for name in [n for n in flags.FLAGS if n.startswith("config.")]:
            delattr(flags.FLAGS, name)
