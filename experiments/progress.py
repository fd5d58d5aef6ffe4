"""What a run shows on the terminal: a bar for what is under way, a line per finished step."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TerminalProgress:
    """Lines go to standard output; the bar appears only where that is a terminal."""

    def __init__(self, steps: int):
        self.console = Console(highlight=False, soft_wrap=True)
        self.steps = steps
        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        hidden = not self.console.is_terminal  # else it leaves an empty line
        self.bar = Progress(*columns, console=self.console, transient=True, disable=hidden)
        self.task = self.bar.add_task("start", total=None)

    def __enter__(self) -> "TerminalProgress":
        self.bar.start()
        return self

    def __exit__(self, *exc_info):
        self.bar.stop()

    def start(self, what: str, total: int):
        self.bar.reset(self.task, description=what, total=total)

    def advance(self):
        self.bar.advance(self.task)

    def step(self, line: dict):
        self.console.print(step_line(line, self.steps))


def step_line(line: dict, steps: int) -> str:
    """One metrics line for people."""
    parts = [f"step {line['content/step']:>3}/{steps}"]
    if "content/reward_mean" in line:
        parts += [
            f"reward {line['content/reward_mean']:.3f}",
            f"length {line['content/response_length_mean']:.1f}",
            f"grad {line['content/grad_norm']:.2f}",
            f"rollout {line['pace/rollout_seconds']:.1f} s",
            f"update {line['pace/update_seconds']:.1f} s",
            f"step {line['pace/step_seconds']:.1f} s",
        ]
    if "content/eval_avg_at_k" in line:
        parts.append(f"held-out reward {line['content/eval_avg_at_k']:.3f}")
    return "  ".join(parts)
