r"""Whether a mathematical answer equals the reference, by math-verify and SymPy.

Some expressions take for ever (9^{9^{9}}). math-verify would stop itself by a signal, which fails
off the main thread and turns into a silent 0; its own limits are off, and `RewardPool` kills the
process at the deadline instead.
"""

import functools
import logging
import re
from collections.abc import Callable

from tlt_jax.rl.extractors import final_answer

LONGEST_ANSWER = 2000  # characters; no reference comes near, and parsing takes seconds beyond
_TEXT = re.compile(r"\\(?:text|textbf|mbox|mathrm)\s?\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?:begin|end)\s?\{[a-z*]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?!or\b|and\b)[A-Za-z]{2,}")
_OWN_DELIMITERS = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")


def grade_math(extract: Callable[[str], str | None], text: str, entry: dict) -> float:
    r"""Return 1.0 if the answer that `extract` finds in `text` equals entry["answer"], else 0.0.

    The reference may be a whole solution: then its final answer counts. Equal is what is the same
    text up to spaces and LaTeX's text commands, or the same value: 1/2 and 0.5, but not 1/3 and
    0.33; 18 \% is both 18 and 0.18. An answer that cannot be parsed is wrong.
    """
    reference = final_answer(entry["answer"]) or entry["answer"].strip()
    answer = extract(text)
    if not answer or len(answer) > LONGEST_ANSWER:
        return 0.0
    if _plain(answer) == _plain(reference):
        return 1.0
    from math_verify import verify  # half a second to import, and an optional package

    return float(verify(_parsed_reference(reference), _parsed(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=64)  # the members of a group have one reference
def _parsed_reference(reference: str) -> list:
    return _parsed(reference)


def _parsed(answer: str) -> list:
    """Return math-verify's readings of an answer, none for what is no mathematics.

    It takes what is in a box for LaTeX and picks a number out of what is not. So a bare formula is
    put into a box, while prose ("18 dollars"), which would be read as a product of letters, is not.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its limits are off
    answer = answer.rstrip(".")
    prose = _WORD.search(_COMMAND.sub(" ", _TEXT.sub(" ", answer)))
    if not prose and not _OWN_DELIMITERS.search(answer):
        answer = rf"\boxed{{{answer}}}"
    return parse(answer, parsing_timeout=None)


def _plain(answer: str) -> str:
    text = _TEXT.sub(r"\1", answer).removesuffix(".")
    return re.sub(r"\\[,;! ]|\$|(?<![0-9])\s+|\s+(?![0-9])", "", text).casefold()
