r"""Extractors: from a response's text to its final answer, or None. Each is linear in the text.

Three marks name a final answer: \boxed{…} (or \fbox), `#### 18` (gsm8k's; a number only) and the
tags <answer>…</answer>. Of a text without them, "answer is …" or "Answer: …" up to the end of the
sentence or line does. The last one counts, so that answering many times is no advantage.
"""

import re
from collections.abc import Callable

_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
# A sign counts only where no operand stands before it: the last number of "7-4" is 4.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+(?!\w))?"
)
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s{0,9}\{)|\\.|[{}]", re.DOTALL)
# A number that goes on as a fraction, power, product or ratio is taken whole.
_HASHES = re.compile(
    r"####[ \t]{0,9}([-−+]?\$?[-−]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"(?:[ \t]{0,9}[/^:*×][ \t]{0,9}[-−0-9({\\][^\n#]*)?)"
)
_ANSWER_IS = re.compile(r"(?i)\banswer[*_]{0,3}(?:\s{1,9}is\b[*_]{0,3}:?|\s{0,9}:)[*_\s]{0,9}")
_END = re.compile(r"\n|\.(?=\s|$)")

# What may stand before a chosen letter: "option", and marks of Markdown and LaTeX.
_BEFORE = (
    r"(?:(?:option|choice|answer)\s{1,9})?[*_$\s]{0,9}(?:\\(?:text|textbf|mathrm)\{)?[*_]{0,2}"
)
_CHOICE = re.compile(
    rf"(?i){_BEFORE}(?:[(\[]\s?([A-J])\s?[)\]]|([A-J])(?=\s{{0,9}}(?:[).:,\]}}*_$]|$)))"
)
_CAPITAL = re.compile(rf"(?i:{_BEFORE})([A-HJ])(?![\w'-])")
_OTHER = re.compile(
    r"[)\].:}*_$\s]{0,9}(?:,|/|&|(?i:\bor\b|\band\b))[*_$\s]{0,9}(?:[(\[]\s?[A-Ja-j]|[A-J])(?![\w'])"
)


def answer_tag(text: str) -> str | None:
    """Return what the last <answer>…</answer> holds, stripped; None without such a pair."""
    found = _last_tag(text)
    return None if found is None else found[1]


def last_number(text: str) -> str | None:
    """Return the last integer or decimal of the text without thousands commas, or None."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").replace("−", "-") if found else None


def last_line(text: str) -> str | None:
    """Return the last line that is not blank, stripped, or None."""
    stripped = text.strip()
    return stripped.splitlines()[-1].strip() if stripped else None


def whole(text: str) -> str | None:
    """Return the whole text, stripped."""
    return text.strip()


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{…} holds, stripped; one without its end does not count."""
    found = _last_boxed(text)
    return None if found is None else found[1]


def final_answer(text: str) -> str | None:
    """Return what the last mark names (see above), stripped, or None without a mark."""
    marks = (_last_boxed(text), _last_hashes(text), _last_tag(text))
    found = [mark for mark in marks if mark is not None]
    return max(found)[1] if found else _last_sentence(text)


def choice(text: str) -> str | None:
    r"""Return the letter, A to J, that the text chooses, in upper case, or None.

    It is the letter that the final answer begins with, or, without a mark, the whole text. It
    stands in brackets, or before punctuation or the end: "(b)", "B", "b) Paris", "**B**",
    "option B", "\text{B}". After a mark a capital may be followed by words, "B because …". "A cat",
    "a cat" and "I think" are no choices, nor is a letter with a second joined to it, "A or B".
    """
    marked = final_answer(text)
    answer = text.strip() if marked is None else marked
    found = _CHOICE.match(answer) or (None if marked is None else _CAPITAL.match(answer))
    if found is None or _OTHER.match(answer, found.end()):
        return None
    return next(letter for letter in found.groups() if letter).upper()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "answer_tag": answer_tag,
    "last_number": last_number,
    "last_line": last_line,
    "whole": whole,
    "boxed": boxed,
    "final_answer": final_answer,
}

_Mark = tuple[int, str]  # where it begins, and the answer it names


def _last_tag(text: str) -> _Mark | None:
    end = text.rfind(_TAG_CLOSE)
    start = text.rfind(_TAG_OPEN, 0, max(end, 0))
    return (start, text[start + len(_TAG_OPEN) : end].strip()) if start >= 0 else None


def _last_boxed(text: str) -> _Mark | None:
    found, opened = None, []  # of each brace not yet closed: (its box or -1, where its content is)
    for brace in _BRACES.finditer(text):
        if brace[1] or brace[0] == "{":
            opened.append((brace.start() if brace[1] else -1, brace.end()))
        elif brace[0] == "}" and opened:
            start, inside = opened.pop()
            if start >= 0 and (found is None or start > found[0]):  # of nested ones the inner
                found = start, text[inside : brace.start()].strip()
    return found


def _last_hashes(text: str) -> _Mark | None:
    found = [(mark.start(), mark[1].strip()) for mark in _HASHES.finditer(text)]
    return found[-1] if found else None


def _last_sentence(text: str) -> str | None:
    if not (marks := list(_ANSWER_IS.finditer(text))):
        return None
    start = marks[-1].end()
    end = _END.search(text, start)
    return text[start : end.start() if end else None].strip().strip("*_").strip()
