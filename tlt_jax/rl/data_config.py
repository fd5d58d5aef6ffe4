"""The data section of a config."""

import dataclasses
from collections.abc import Mapping

from tlt_jax.rl.prompt_record import Columns
from tlt_jax.rl.tasks import Task, tasks_from

SLOT = "{question}"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where prompts come from: reasoning-gym `tasks`, or files (`read_prompt_file`).

    A text prompt of a file is used as it is, or with `chat` like the question of a task: as a user
    message made by `template`, after `system`. A prompt that is a list of messages is always a
    chat. Columns, splits and the subset are of files and data sets only.
    """

    tasks: tuple[Task, ...] = ()  # or a mapping (`tasks_from`), whose parts can be overridden
    train_file: str = ""
    eval_file: str = ""
    prompt_column: str = ""  # this and the next two: "" for the usual names (`Columns`)
    answer_column: str = ""
    source_column: str = ""
    train_split: str = ""  # of a data set; "" for its only one
    eval_split: str = ""
    subset: str = ""  # of a data set on the hub, where it has several
    chat: bool = False
    size: int = 1000  # training questions from tasks, in each stage of a curriculum
    eval_size: int = 64  # held-out prompts; of a file, its first ones
    seed: int = 0  # of the training questions and of their order
    eval_seed: int = 0  # of the held-out questions; never the questions of an equal `seed`
    system: str = ""  # system message before each question; "" for none
    template: str = SLOT  # user message; {question} is replaced
    max_prompt_tokens: int = 512
    drop_long: bool = False  # drop and count longer prompts; otherwise they are an error

    def __post_init__(self):
        if isinstance(self.tasks, Mapping):
            object.__setattr__(self, "tasks", tasks_from(self.tasks))
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if bool(self.tasks) == bool(self.train_file):
            raise ValueError(
                f"give either tasks or train_file, got tasks={[task.name for task in self.tasks]}, "
                f"train_file={self.train_file!r}"
            )
        if self.tasks:
            self._refuse_settings_of_files()
        elif not self.chat and (self.system or self.template != SLOT):
            raise ValueError(
                f"system={self.system!r} and template={self.template!r} make chats of text "
                "prompts; set chat=True, or leave them out"
            )
        if self.train_file and bool(self.eval_file) != bool(self.eval_size):
            raise ValueError(
                f"train_file with eval_size={self.eval_size} and eval_file={self.eval_file!r}: "
                "give an eval_file, or set eval_size=0"
            )
        if SLOT not in self.template:
            raise ValueError(f"template={self.template!r} must contain {SLOT}")
        for name, least in (("size", 1), ("eval_size", 0), ("max_prompt_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("seed", "eval_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")

    def _refuse_settings_of_files(self):
        columns = ("prompt_column", "answer_column", "source_column")
        for name in ("eval_file", *columns, "train_split", "eval_split", "subset", "chat"):
            if value := getattr(self, name):
                raise ValueError(f"{name}={value!r} goes with train_file, not with tasks")

    def columns(self) -> Columns:
        return Columns(self.prompt_column, self.answer_column, self.source_column)
