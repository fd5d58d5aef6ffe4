"""Steps that several traces share."""

from collections.abc import Iterable


def finish(steps: Iterable[str], answer: object) -> str:
    """The text of a trace: its steps, one a line, and the answer in tags."""
    return "\n".join([*steps, f"<answer>{answer}</answer>"])


def division(number: int, divisor: int) -> str:
    """Quotient and remainder of a division, as `17=3*5+2`."""
    quotient, rest = divmod(number, divisor)
    return f"{number}={quotient}*{divisor}+{rest}"
