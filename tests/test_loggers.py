"""Dashboards: the same numbers as metrics.jsonl, no point twice, and no run that they stop."""

import builtins
import math
import struct
import sys
import types
import warnings

import numpy as np
import pytest

from tlt_jax import loggers
from tlt_jax.loggers import make_logger

CONFIG = {"steps": 4, "data": {"tasks": ["gcd"]}}


def line(step, loss=0.5):
    return {
        "content/step": np.int64(step),
        "content/loss": np.float32(loss),
        "pace/rollout_tokens_per_second": None,
        "pace/logprob_gap_mean": math.nan,
    }


# TensorBoard


def records(path):
    """The payloads of an event file: length, its checksum, payload, its checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def shown(folder):
    """(tag, step, value) that TensorBoard shows: a session's start hides what is from its step on.

    The files in the order of their names, as TensorBoard reads them.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points, texts = [], []
    for path in sorted(folder.iterdir()):
        for record in records(path):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                points = [p for p in points if p[1] < event.step]
            for value in event.summary.value:
                if value.tag.endswith("/text_summary"):
                    texts.append(value.tensor.string_val[0].decode())
                else:
                    points.append((value.tag, event.step, value.simple_value))
    return points, texts


def test_tensorboard_has_every_finite_number_under_its_step(tmp_path):
    pytest.importorskip("tensorboardX")
    logger = make_logger("tensorboard", tmp_path, CONFIG, 0)
    logger.log(line(0, 0.25))
    logger.log(line(1, 0.5))
    logger.close()
    points, [text] = shown(tmp_path / "tensorboard")
    assert points == [("content/loss", 0, 0.25), ("content/loss", 1, 0.5)]
    assert '"steps": 4' in text and "gcd" in text


@pytest.mark.parametrize("purging", [True, False])
def test_a_resumed_run_shows_no_step_twice_in_tensorboard(tmp_path, monkeypatch, purging):
    writer = pytest.importorskip("tensorboardX.event_file_writer")
    seconds = iter(range(10**9, 10**9 + 100))
    monkeypatch.setattr(writer.time, "time", lambda: next(seconds))
    first = make_logger("tensorboard", tmp_path, CONFIG, 0)
    for step in range(4):
        first.log(line(step, 1.0))
    # Killed here: no close. The checkpoint was that of step 1.
    second = make_logger("tensorboard", tmp_path, CONFIG, 2 if purging else 9)
    for step in (2, 3, 4):
        second.log(line(step, 2.0))
    second.close()
    points, _ = shown(tmp_path / "tensorboard")
    values = [(step, value) for _, step, value in points]
    whole = [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert (values == whole) == purging


# Weights & Biases, by a module with its calls: init(project, name, dir, config, id, resume) gives a
# run with log(data, step, commit) and finish(). Steps it has are dropped, as W&B does.


class FakeRun:
    def __init__(self, history):
        self.history, self.finished = history, False

    def log(self, data, step=None, commit=None):
        assert commit, "an uncommitted step waits for the next one"
        if step > max(self.history, default=-1):
            self.history[step] = data

    def finish(self, exit_code=None, quiet=None):
        self.finished = True


class FakeWandB(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.calls, self.server, self.runs = [], {}, []

    def init(self, project=None, name=None, dir=None, config=None, id=None, resume=None):
        self.calls.append({"project": project, "name": name, "config": config, "id": id})
        assert resume == "allow"
        self.runs.append(FakeRun(self.server.setdefault(id, {})))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb_goes_on_with_the_run_it_began(wandb, tmp_path, monkeypatch):
    first = make_logger("wandb", tmp_path / "", CONFIG, 0)
    for step in range(4):
        first.log(line(step))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    second = make_logger("wandb", tmp_path, CONFIG, 2)
    for step in (2, 3, 4):
        second.log(line(step))
    second.close()
    [history] = wandb.server.values()
    assert history == {step: {"content/loss": 0.5} for step in range(5)}
    assert [call["project"] for call in wandb.calls] == ["tlt_jax", "mine"]
    assert {call["name"] for call in wandb.calls} == {tmp_path.name}
    assert wandb.calls[0]["config"] == CONFIG
    assert wandb.runs[1].finished
    # A run that starts over has nothing of what it had sent before.
    make_logger("wandb", tmp_path, CONFIG, 0).log(line(0))
    assert len(wandb.server) == 2


def test_wandb_that_cannot_start_is_refused_before_any_work(wandb, tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match=r"'wandb' cannot start \(RuntimeError: no API key"):
        make_logger("wandb", tmp_path, CONFIG, 0)


# All


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_named_with_the_way_out(tmp_path, monkeypatch, name, package):
    imported = builtins.__import__

    def missing(module, *args, **kwargs):
        if module.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return imported(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=rf"logger='{name}' needs .*pip install {package}, or set"):
        make_logger(name, tmp_path, CONFIG, 0)
    assert not list(tmp_path.iterdir())


def test_an_unknown_logger_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"logger='mlflow' is not known; use one of .*wandb"):
        make_logger("mlflow", tmp_path, CONFIG, 0)


@pytest.mark.parametrize("where", ["log", "finish"])
def test_a_failure_in_the_middle_is_one_warning(wandb, tmp_path, monkeypatch, where):
    def fails(*_, **__):
        raise ConnectionError("network is down")

    monkeypatch.setattr(FakeRun, where, fails)
    logger = make_logger("wandb", tmp_path, CONFIG, 0)
    with pytest.warns(UserWarning, match=r"logger='wandb' failed .*network is down") as seen:
        for step in range(3):
            logger.log(line(step))
        logger.close()
        logger.close()
    assert len(seen) == 1


def test_a_full_disk_is_one_warning_and_no_hang(tmp_path):
    """Of twenty lines, so that a bounded queue with a dead reader would have blocked."""
    pytest.importorskip("tensorboardX")
    logger = make_logger("tensorboard", tmp_path, CONFIG, 0)
    record_writer = logger._logger._writer._py_recordio_writer
    record_writer._writer.close()
    record_writer._writer = full = open("/dev/full", "wb", buffering=0)
    with pytest.warns(UserWarning, match="No space left") as seen:
        for step in range(20):
            logger.log(line(step))
        logger.close()
    full.close()
    assert len(seen) == 1


def test_no_logger_writes_nothing(tmp_path):
    logger = make_logger("", tmp_path, CONFIG, 0)
    with warnings.catch_warnings(action="error"):
        logger.log(line(0))
        logger.close()
    assert not list(tmp_path.iterdir())
    assert set(loggers.LOGGERS) == {"", *loggers.PACKAGES}
