"""metrics.jsonl: the agreed keys, whole lines, no NaN."""

import json

import numpy as np
import pytest

from tlt_jax.metrics import EVALUATION_KEYS, KEYS, NUMBERED_KEYS, STEP_KEYS, MetricsWriter


def line(step=1, **changes):
    values = dict.fromkeys(STEP_KEYS, 0.5) | {"content/step": step}
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_line_has_exactly_the_keys_listed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    evaluated = dict.fromkeys(EVALUATION_KEYS, 0.25)
    with MetricsWriter(path) as writer:
        writer.write({"content/step": 0} | evaluated)
        writer.write(line(1))
        writer.write(line(2) | evaluated)
    alone, plain, full = read(path)
    assert set(alone) == EVALUATION_KEYS | {"content/step"}
    assert set(plain) == STEP_KEYS
    assert list(full) == [key for key in KEYS if key not in NUMBERED_KEYS]
    assert all(key.split("/")[0] in ("content", "pace") for key in KEYS)
    assert all(KEYS.values())


def test_some_keys_are_numbered(tmp_path):
    path = tmp_path / "metrics.jsonl"
    shares = {"pace/idle_share/0": 0.25, "pace/idle_share/11": 0.75}
    with MetricsWriter(path) as writer:
        writer.write(line(1) | shares)
        for wrong in ("pace/idle_share/*", "pace/idle_share/x", "pace/tail_share/1"):
            with pytest.raises(ValueError, match="unknown metric"):
                writer.write(line(2) | {wrong: 0.5})
    [got] = read(path)
    assert {key: got[key] for key in shares} == shares and set(got) == STEP_KEYS | set(shares)


def test_numbers_survive_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(line(np.int64(7), content__loss=np.float32(0.1), pace__step_seconds=0.1))
    [got] = read(path)
    assert (got["content/step"], got["pace/step_seconds"]) == (7, 0.1)
    assert np.float32(got["content/loss"]) == np.float32(0.1)


@pytest.mark.parametrize(
    "values, words",
    [
        (line(content__los=1.0), "unknown metric 'content/los'"),
        ({k: v for k, v in line().items() if k != "content/loss"}, "lacks content/loss"),
        (line(content__eval_avg_at_k=0.5), "lacks content/eval_pass_at_1.*pace/eval_seconds"),
        (line(content__loss=float("nan")), "content/loss=nan is not finite"),
        (line(content__grad_norm=np.float32("inf")), "content/grad_norm=inf is not finite"),
        (line(content__loss="0.5"), "is a str"),
        (line(content__loss=None), "is a NoneType"),
        (line(content__loss=True), "is a bool"),
        (line(content__loss=np.ones(2)), "is a ndarray"),
    ],
)
def test_refused_lines_write_nothing(tmp_path, values, words):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(line())
        before = path.read_bytes()
        with pytest.raises(ValueError, match=words):
            writer.write(values)
    assert path.read_bytes() == before


def test_pace_that_is_not_finite_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(line(pace__rollout_tokens_per_second=float("inf")))
    assert read(path)[0]["pace/rollout_tokens_per_second"] is None


@pytest.mark.parametrize("torn", ['{"content/step": 2, "conte', "x" * 200_000])
def test_a_torn_last_line_is_cut_and_whole_lines_are_kept(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(line(1))
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    with MetricsWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.write(line(2))
    assert [got["content/step"] for got in read(path)] == [1, 2]
    path.write_text(torn)
    MetricsWriter(path).close()
    assert path.read_bytes() == b""
