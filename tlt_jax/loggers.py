"""Dashboards beside metrics.jsonl: TensorBoard or Weights & Biases, by one setting.

metrics.jsonl is the record of a run and is always written; a dashboard is a copy that may fail.
"""

import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tlt_jax import atomic

TENSORBOARD_FOLDER, WANDB_ID = "tensorboard", "wandb_id.txt"


class Logger(Protocol):
    """Where metrics lines go besides metrics.jsonl."""

    def log(self, line: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_logger(name: str, workdir: Path, config: Mapping, first_step: int) -> Logger:
    """The logger `name`, one of LOGGERS; "" does nothing.

    config: nested dictionaries of the run's settings, shown on the dashboard. first_step: the
    content/step of the first line to come. Points from there on that an earlier process of this run
    left are replaced (TensorBoard) or stay in place of the new ones (W&B); none appears twice.
    Raises ValueError, naming the way out, where the package is missing or the logger cannot start.
    Once started, a failure is a warning and the run goes on without the logger.
    """
    if name not in LOGGERS:
        raise ValueError(f"logger={name!r} is not known; use one of {tuple(LOGGERS)}")
    try:
        logger = LOGGERS[name](workdir, config, first_step)
    except ImportError as error:
        raise ValueError(
            f"logger={name!r} needs a package that cannot be imported ({error}): "
            f"pip install {PACKAGES[name]}, or set logger='' for metrics.jsonl alone"
        ) from None
    except Exception as error:
        raise ValueError(
            f"logger={name!r} cannot start ({type(error).__name__}: {error}); mend that, or set "
            "logger='' for metrics.jsonl alone"
        ) from error
    return _Forgiving(name, logger)


class _Forgiving:
    """A logger whose failure costs the run nothing: it is reported once, then left alone."""

    def __init__(self, name: str, logger: Logger):
        self._name, self._logger = name, logger

    def log(self, line: Mapping[str, float]) -> None:
        self._try(lambda logger: logger.log(line))

    def close(self) -> None:
        self._try(lambda logger: logger.close())
        self._logger = _Silent()

    def _try(self, action) -> None:
        try:
            action(self._logger)
        except Exception as error:
            self._logger = _Silent()
            warnings.warn(
                f"logger={self._name!r} failed ({type(error).__name__}: {error}); the run goes on "
                "without it, and metrics.jsonl has everything",
                stacklevel=3,
            )


class _Silent:
    def __init__(self, *_):
        pass

    def log(self, line: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard:
    """Event files in workdir/tensorboard, one for each start of the run.

    Through tensorboardX's event writer and not its SummaryWriter: that one has a thread which ends
    when the disk is full, and a queue that would then block the run for ever.
    """

    def __init__(self, workdir: Path, config: Mapping, first_step: int):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event = summary, Event
        folder = workdir / TENSORBOARD_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # The time in a file's name counts seconds; the process id keeps two starts apart.
        self._writer = event_file_writer.EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # What SummaryWriter(purge_step=…) writes: readers drop what they have from this step on.
        start = SessionLog(status=SessionLog.START)
        self._write(first_step, session_log=start)
        settings = json.dumps(config, indent=2).replace("\n", "\n    ")  # Markdown for code
        self._write(first_step, summary=summary.text("config", f"    {settings}"))
        self._writer.flush()

    def log(self, line: Mapping[str, float]) -> None:
        for name, value in _points(line):
            self._write(line["content/step"], summary=self._summary.scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **what) -> None:
        self._writer.write_event(self._event(step=int(step), wall_time=time.time(), **what))


class _WandB:
    """A run of Weights & Biases whose id, kept in workdir/wandb_id.txt, a resumed run goes on with.

    W&B's steps only ever increase: it drops, with a warning, the steps that a resumed run repeats.
    The project is $WANDB_PROJECT, else tlt_jax; the other WANDB_… variables work as W&B says.
    """

    def __init__(self, workdir: Path, config: Mapping, first_step: int):
        import wandb

        path = workdir / WANDB_ID
        if first_step > 0 and path.exists():
            run_id = path.read_text(encoding="utf-8").strip()
        else:  # of a run that starts over the old points are not the new ones
            run_id = uuid.uuid4().hex
            atomic.write_text(path, run_id + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tlt_jax"),
            name=workdir.name,
            dir=str(workdir),
            config=dict(config),
            id=run_id,
            resume="allow",
        )

    def log(self, line: Mapping[str, float]) -> None:
        # Without `commit` the last step would wait for the next one, and be lost in a crash.
        self._run.log(dict(_points(line)), step=int(line["content/step"]), commit=True)

    def close(self) -> None:
        self._run.finish()


def _points(line: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a line but its step; a null of metrics.jsonl is no point."""
    for name, value in line.items():
        if name != "content/step" and value is not None and math.isfinite(value):
            yield name, float(value)


LOGGERS = {"": _Silent, "tensorboard": _TensorBoard, "wandb": _WandB}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
