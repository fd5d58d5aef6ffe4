"""Longest first: by what was seen at the last visit, unknown prompts in the middle."""

import json

from tlt_jax.rl.data import Prompt
from tlt_jax.rl.length_history import LengthHistory


def prompt(i, draw=0):
    return Prompt(ids=(1, i), text="", source="", entry={}, where="", draw=draw, domain=0)


def test_the_longest_of_the_last_visit_come_first():
    history = LengthHistory()
    prompts = [prompt(i) for i in range(4)]
    assert history.longest_first(prompts) == prompts  # nothing is known
    history.update([(prompts[0], 10), (prompts[0], 20), (prompts[1], 90), (prompts[2], 30)])
    # 15, 90, 30; the unknown one counts as their mean, 45
    assert history.longest_first(prompts) == [prompts[i] for i in (1, 3, 2, 0)]
    history.update([(prompt(1, draw=7), 5)])  # another draw of a known prompt
    assert history.longest_first(prompts)[-1] == prompts[1]


def test_its_state_makes_an_equal_one():
    history = LengthHistory()
    history.update([(prompt(i), 10 * i) for i in range(5)])
    again = LengthHistory(json.loads(json.dumps(history.state())))
    prompts = [prompt(i) for i in (3, 9, 0, 4)]
    assert again.longest_first(prompts) == history.longest_first(prompts) != prompts
