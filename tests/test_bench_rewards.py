"""The reward benchmark: its answers are graded as it says, and the hanging ones hang."""

import json

import pytest

from experiments.bench import rewards


@pytest.mark.slow
def test_bench_prints_one_json_object(capsys):
    sizes = ["--answers=24", "--hanging=2", "--deadline=4", "--workers=1", "--spares=2"]
    rewards.main(["--json", *sizes])
    result = json.loads(capsys.readouterr().out)
    for name, run in result.items():
        hanging = 0 if name == "none hanging" else 2
        assert run["statuses"] == {"ok": 24, "error": 0, "timeout": hanging, "invalid": 0}
        assert run["disagreeing"] == 0
    assert result["none hanging"]["delay_in_deadlines"] == 0
    assert result["spread, no spares"]["seconds"] >= 2 * 4


def test_hanging_answers_stand_where_asked():
    made = rewards.answers(10)
    assert {reward for *_, reward in made} == {0.0, 1.0}
    spread = rewards.with_hanging(made, 2, "spread")
    assert [i for i, answer in enumerate(spread) if answer[2] is None] == [0, 6]
    assert [answer for answer in spread if answer[2] is not None] == made
    assert [answer[2] for answer in rewards.with_hanging(made, 2, "end")[-3:]][1:] == [None, None]
