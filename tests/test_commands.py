"""The commands as a user meets them: what they write, and the sentence for what they refuse."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import generate, main
from experiments.configs import tiny
from experiments.examples import own_loop
from tests.reference import full_pass
from tests.spec.tiny import model as random_model
from tlt_jax import metrics
from tlt_jax.config import Config, from_dict
from tlt_jax.events import read_events
from tlt_jax.models import hf, pretrained, tokenizer

CONTEXT, NEW = 64, 5
LINES = (
    b'\xef\xbb\xbf{"prompt": "2 + 3 = "}\r\n'
    b"\r\n"
    b'{"messages": [{"role": "user", "content": "hi"}]}\r\n'
    b'{"prompt": "2 + 3 = "}'
)
FIELDS = ["prompt", "member", "token_ids", "log_probs", "text", "finish_reason"]
ROOT = Path(__file__).parents[1]
CPU = {**os.environ, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of random weights that reads and writes bytes."""
    text = tokenizer.byte_tokenizer()
    config, params = random_model(
        "float32", vocab_size=text.vocab_size, max_context=CONTEXT, tied=True
    )
    path = tmp_path_factory.mktemp("model") / "bytes"
    hf.save(path, config, jax.device_get(params), tokenizer=text)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_bytes(LINES)
    return path


def run_generate(model, prompts, out, **settings):
    flags.FLAGS.mark_as_parsed()
    # Few programs, so that little is compiled.
    given = {"samples": 2, "max_new_tokens": NEW, "rows": 4, **settings}
    with flagsaver.flagsaver(model=str(model), prompts=str(prompts), out=str(out), **given):
        generate.main(["generate"])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def sampled(folder, prompts, tmp_path_factory):
    return run_generate(folder, prompts, tmp_path_factory.mktemp("out") / "a.jsonl")


def encoded(text):
    prompt = text.encode("2 + 3 = ")
    return [prompt, text.chat([{"role": "user", "content": "hi"}]), prompt]


def test_generate_writes_a_line_per_response_in_order(folder, sampled):
    text = pretrained.load(folder).tokenizer
    places = [(line["prompt"], line["member"]) for line in sampled]
    assert places == [(p, m) for p in range(3) for m in range(2)]
    for line in sampled:
        assert list(line) == FIELDS
        assert 1 <= len(line["token_ids"]) == len(line["log_probs"]) <= NEW
        assert line["text"] == text.decode(line["token_ids"])
        stopped = line["token_ids"][-1] in text.eos_ids
        assert line["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(line["token_ids"]) == NEW
    # Two draws of one prompt, and two members of one draw, are samples of their own.
    assert len({tuple(line["token_ids"]) for line in sampled}) == 6


def test_log_probs_are_those_of_a_pass_over_the_whole_text(folder, sampled):
    found = pretrained.load(folder)
    asked = encoded(found.tokenizer)
    texts = [[*asked[line["prompt"]], *line["token_ids"]] for line in sampled]
    tokens_NT = np.zeros((len(texts), CONTEXT), np.int32)
    for i, ids in enumerate(texts):
        tokens_NT[i, : len(ids)] = ids
    lengths_N = np.array([len(ids) for ids in texts], np.int32)
    logits_NTV, _ = full_pass(found.config, found.params, tokens_NT, lengths_N)
    log_probs_NTV = np.asarray(jax.nn.log_softmax(logits_NTV, axis=-1))
    for i, line in enumerate(sampled):
        first = len(texts[i]) - len(line["token_ids"])
        expected = [log_probs_NTV[i, first + t - 1, x] for t, x in enumerate(line["token_ids"])]
        np.testing.assert_allclose(line["log_probs"], expected, atol=1e-4)


def test_the_same_seed_repeats_and_another_differs(folder, prompts, sampled, tmp_path):
    again = run_generate(folder, prompts, tmp_path / "again.jsonl")
    other = run_generate(folder, prompts, tmp_path / "other.jsonl", seed=1)
    assert again == sampled
    assert [x["token_ids"] for x in other] != [x["token_ids"] for x in sampled]


def test_temperature_0_is_greedy_and_the_end_token_stops(folder, tmp_path):
    """Layers that add nothing, and an embedding along one axis, the end token's the longest."""
    found = pretrained.load(folder)
    params = jax.tree.map(np.array, found.params)
    params["layers"] = jax.tree.map(np.zeros_like, params["layers"])
    params["embed"] = np.zeros_like(params["embed"])
    params["embed"][:, 0] = 1
    params["embed"][found.tokenizer.eos_ids[0], 0] = 2
    params["norm"] = np.ones_like(params["norm"])
    hf.save(tmp_path / "stops", found.config, params, tokenizer=found.tokenizer)
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "x"}\n')
    lines = run_generate(tmp_path / "stops", file, tmp_path / "out.jsonl", temperature=0.0)
    assert [line["token_ids"] for line in lines] == [[found.tokenizer.eos_ids[0]]] * 2
    assert {line["finish_reason"] for line in lines} == {"stop"}
    assert lines[0]["text"] == ""


@pytest.mark.parametrize(
    "content, words",
    [
        ("", r"prompts\.jsonl holds no prompts"),
        ("\r\n\r\n", r"prompts\.jsonl holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', r"prompts\.jsonl:2: broken JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', r"prompts\.jsonl:3: .*'prompt', 'messages'"),
        ('{"prompt": "a"}\n{"prompt": "%s"}\n' % ("b" * 62), r"jsonl:2: 62 tokens and.*of 64;"),
    ],
)
def test_generate_refuses_a_prompt_file_by_line(folder, tmp_path, content, words):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(content)
    with pytest.raises(SystemExit, match=words):
        run_generate(folder, file, out)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"max_new_tokens": 0}, r"max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 64}, r"jsonl:1: 8 tokens and --max_new_tokens=64 exceed .* of 64;"),
        ({"temperature": -1.0}, r"temperature=-1\.0 must be finite and >= 0"),
        ({"temperature": float("nan")}, r"temperature=nan must be finite"),
        ({"top_p": 0.0}, r"top_p=0\.0 must lie in"),
        ({"top_k": -1}, r"top_k=-1 must be >= 0"),
    ],
)
def test_generate_refuses_a_setting_by_name(folder, prompts, tmp_path, settings, words):
    with pytest.raises(SystemExit, match=words):
        run_generate(folder, prompts, tmp_path / "out.jsonl", **settings)
    assert not list(tmp_path.iterdir())


def test_generate_names_the_line_whose_messages_the_chat_template_refuses(folder, tmp_path):
    found = pretrained.load(folder)
    found.tokenizer.fast.chat_template = "{{ raise_exception('roles must alternate') }}"
    hf.save(tmp_path / "strict", found.config, found.params, tokenizer=found.tokenizer)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(SystemExit, match=r"jsonl:2: .*template refuses .*: roles must alternate"):
        run_generate(tmp_path / "strict", file, tmp_path / "out.jsonl")


def no_folder(good, bad):
    return r"bad' does not exist"


def no_config(good, bad):
    bad.mkdir()
    # The tokenizer alone; a model folder without config.json.
    for path in good.glob("*token*"):
        (bad / path.name).write_bytes(path.read_bytes())
    return r"has no config\.json"


def truncated(good, bad):
    bad.mkdir()
    for path in good.iterdir():
        data = path.read_bytes()
        keep = len(data) // 2 if path.suffix == ".safetensors" else len(data)
        (bad / path.name).write_bytes(data[:keep])
    return r"model\.safetensors is damaged or truncated"


@pytest.mark.parametrize("spoil", [no_folder, no_config, truncated])
def test_generate_refuses_a_model_by_its_file(folder, prompts, tmp_path, spoil):
    words = spoil(folder, tmp_path / "bad")
    with pytest.raises(SystemExit, match=words):
        run_generate(tmp_path / "bad", prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_refuses_a_gguf_of_another_family(prompts, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bad.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SystemExit, match=r"bad\.gguf: GGUF family 'mamba' is not supported"):
        run_generate(tmp_path / "bad.gguf", prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_keeps_an_existing_file_and_names_a_place_it_cannot_write(
    folder, prompts, tmp_path
):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(SystemExit, match=r"--out=.*out\.jsonl exists; choose another file"):
        run_generate(folder, prompts, out)
    assert out.read_text() == "precious"
    for bad in (out / "below.jsonl", tmp_path / "missing" / "out.jsonl"):
        with pytest.raises(SystemExit, match=r"--out=.* cannot be written: .*; choose another"):
            run_generate(folder, prompts, bad)
    with pytest.raises(SystemExit, match=r"nowhere\.jsonl does not exist"):
        run_generate(folder, tmp_path / "nowhere.jsonl", tmp_path / "new.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


# experiments.main


@pytest.fixture
def parse(monkeypatch):
    """Parse a command line as `main` does; the flags that ml_collections adds are taken back."""

    def parse(*arguments):
        argv = ["main", *arguments]
        monkeypatch.setattr(sys, "argv", argv)  # ml_collections reads it there
        return main.parse_flags(argv)

    yield parse
    for name in [n for n in flags.FLAGS if n.startswith("config.")]:
        delattr(flags.FLAGS, name)


TINY = "--config=experiments/configs/tiny.py:smoke"


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--config.rollout.rowz=1", r'no such setting: rowz\. Did you mean "rows"'),
        ("--config.data.tasks.gcd.weight=1", r"no such setting: gcd \("),
        ("--config.rollout.rows=many", r"--config\.rollout\.rows=many: .*'many'"),
        ("--config.policy.remat=maybe", r"--config\.policy\.remat=maybe"),
        ("--config.rollout=3", r"--config\.rollout=3: .*not a dict"),
        ("--stepz=3", r"Unknown command line flag 'stepz'"),
        ("--config=experiments/configs/tiny.py:smok", r"tiny\.py:smok is unknown; use full or"),
        ("--config=experiments/configs/none.py", r"none\.py"),
    ],
)
def test_main_refuses_a_command_line_in_one_sentence(parse, argument, words):
    with pytest.raises(SystemExit, match=r"^wrong command line: .*" + words) as stop:
        parse(*((TINY, argument) if "--config=" not in argument else (argument,)))
    assert "\n" not in str(stop.value)


def test_an_override_reaches_the_config(parse):
    parse(
        TINY, "--config.rollout.rows=5", "--config.data.tasks.basic_arithmetic.params.max_terms=3"
    )
    config = from_dict(Config, main.CONFIG.value)
    assert config.rollout.rows == 5
    assert dict(config.data.tasks[0].params)["max_terms"] == 3


def test_main_refuses_a_workdir_that_cannot_be_written_or_is_in_use(tmp_path):
    (tmp_path / "file").touch()
    for bad in ("file", "file/run"):
        with pytest.raises(SystemExit, match=r"--workdir=.* cannot be written: .*; choose another"):
            main.hold(tmp_path / bad)
    with main.hold(tmp_path / "run"):
        with pytest.raises(SystemExit, match="is in use by another process"):
            main.hold(tmp_path / "run")
    main.hold(tmp_path / "run").close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "policy", "checkpoints"])
def test_main_refuses_a_workdir_that_is_no_run(tmp_path, name):
    """Also one of which only the policy is left: it would be overwritten at the end of the run."""
    config = from_dict(Config, tiny.get_config("smoke"))
    (tmp_path / name).mkdir()
    with pytest.raises(
        SystemExit, match=rf"holds {name} and no config\.json.*choose another folder"
    ):
        main.prepare_workdir(tmp_path, config)


def test_main_goes_on_with_the_same_config_only(tmp_path):
    config = from_dict(Config, tiny.get_config("smoke"))
    other = dataclasses.replace(config, seed=7)
    main.prepare_workdir(tmp_path, other)
    (tmp_path / "metrics.jsonl").touch()  # a start that failed leaves no line
    main.prepare_workdir(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match=r"another config: seed: 0 there, 7 here\. Go on with"):
        main.prepare_workdir(tmp_path, other)
    main.prepare_workdir(tmp_path, dataclasses.replace(config, steps=9))
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["config"]["steps"] == 9 and len(record["starts"]) == 2


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=CPU,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_tiny_run_from_the_command_line(tmp_path):
    done = command("experiments.main", TINY, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    written = {"config.json", "metrics.jsonl", "events.jsonl", "trace.json", "policy", "DONE"}
    written |= {"checkpoints", ".lock"}
    assert {p.name for p in run.iterdir()} == written
    record = json.loads((run / "config.json").read_text())
    assert record["config"]["steps"] == 2 and record["config"]["data"]["tasks"]
    [start] = record["starts"]
    assert start["versions"]["jax"] == jax.__version__
    assert len((start["git_commit"] or "0" * 40).removesuffix("-dirty")) == 40
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["content/step"] for line in lines] == [0, 1, 2]
    expected = metrics.STEP_KEYS | metrics.EVALUATION_KEYS | {"pace/idle_share/0"}
    assert set(lines[-1]) == expected
    names = {event["name"] for event in read_events(run / "events.jsonl")}
    assert {"decode", "update"} <= names
    assert {"decode", "update"} <= {
        event["name"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]
    }
    pretrained.load(run / "policy")
    assert done.stdout.startswith("step   0/2")
    assert "step   2/2" in done.stdout and "2 RL steps in" in done.stdout
    assert "held-out reward" in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("experiments.main", TINY, "--workdir=/dev/null/run"), "--workdir=/dev/null/run cannot"),
        (
            ("experiments.generate", "--model=/none", "--prompts=/none", "--out=/none"),
            "/none does not exist",
        ),
    ],
)
def test_a_refusal_is_one_line_on_standard_error(arguments, words):
    done = command(*arguments)
    assert done.returncode == 1 and not done.stdout
    assert words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# The example


def test_the_example_loop_is_short_and_works_with_any_model(folder, capsys):
    assert len(Path(own_loop.__file__).read_text().splitlines()) <= 40
    found = pretrained.load(folder)
    roomy = dataclasses.replace(found.config, max_context=128)
    own_loop.main(dataclasses.replace(found, config=roomy))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8
    assert sorted(line[:3] for line in lines[2:]) == [f"{d} {m}" for d in (0, 1) for m in range(4)]
