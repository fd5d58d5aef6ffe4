"""The rollout benchmark on a tiny random model: it must count, name and convert correctly."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments.bench import limits, rollout, worker
from tlt_jax.models import gguf, hf, tokenizer, transformer
from tlt_jax.models.config import ModelConfig

TINY = ModelConfig(
    vocab_size=259,
    width=32,
    mlp_width=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=512,
    tied=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    params = jax.tree.map(np.asarray, transformer.init(TINY, jax.random.key(0)))
    hf.save(path, TINY, params, tokenizer=tokenizer.byte_tokenizer())
    return path


def test_bench_prints_one_json_object(folder, capsys):
    """Forced rows all reach the limit; a decoder that is not there is named; profiles add up."""
    flags = ["--json", "--against=llama.cpp", f"--llama_python={sys.executable}"]
    sizes = ["--repetitions=1", "--max_new_tokens=8", "--samples=1", "--rows=2,1"]
    rollout.main([f"--model={folder}", *flags, *sizes])
    result = json.loads(capsys.readouterr().out)
    assert "llama.cpp is not installed" in result["absent"]["llama.cpp"]
    forced = next(r for r in result["rollout"] if r["work"] == "forced")
    assert forced["mean_length"] == 8 and forced["ours_is_times_faster"] == 1
    for step, rows in zip(result["steps"], (2, 1)):
        assert step["rows"] == rows and step["seconds"] > step["limit"] > 0
        assert any(name.startswith("products") for name in step["profile"])
        assert "sampling" in step["profile"]


def test_limit_counts_each_weight_once():
    """Worked by hand: 10 bytes/s and 1 operation/s make products the bound; the reverse, memory."""
    used = TINY.num_params
    slow = limits.Machine(bandwidth=1e12, product_rate=1.0)
    assert limits.limit(TINY, slow, rows=3, committed=5) == (2 * used * 3, "products")
    narrow = limits.Machine(bandwidth=1.0, product_rate=1e12)
    cache = 3 * 5 * (2 * 2) * 2 * 8  # rows, tokens, (k and v) x layers, heads, width
    assert limits.limit(TINY, narrow, rows=3, committed=5) == (4 * (used + cache), "memory")


def test_gguf_for_llama_cpp_holds_the_same_weights(tmp_path):
    params = jax.tree.map(np.asarray, transformer.init(TINY, jax.random.key(1)))
    rollout.write_gguf(tmp_path / "m.gguf", TINY, params)
    reader = gguf.open_file(tmp_path / "m.gguf")
    config, back = gguf.read_model(reader, "m.gguf", np.float32)
    assert (config.num_heads, config.rope.theta) == (TINY.num_heads, TINY.rope.theta)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_lengths_end_with_the_first_end_token():
    assert worker.length_of([5, 2, 7, 2, 2], [2, 9]) == 2
    assert worker.length_of([5, 6, 7], [2]) == 3
    assert worker.length_of([5, 6, 7], []) == 3


def test_ratio_is_taken_within_repetitions():
    """A machine that slows down between repetitions must not change who is faster."""
    ours = [rollout.Run(1.0, [100]), rollout.Run(10.0, [100]), rollout.Run(2.0, [100])]
    other = [rollout.Run(2.0, [100]), rollout.Run(20.0, [100]), rollout.Run(4.0, [100])]
    rows = rollout.summarise({("w", rollout.OURS): ours, ("w", "x"): other})
    assert rows[1]["ours_is_times_faster"] == 2.0
