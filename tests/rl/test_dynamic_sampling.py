"""Dynamic sampling: what is trained on depends on scores and draw order, never on the clock."""

import itertools
import json

import numpy as np
import pytest

from tests.rl import sample_graders
from tests.rl.test_loop import Silent, smoke
from tlt_jax.rl import loop
from tlt_jax.rl import run as run_module
from tlt_jax.rl.data import Prompt
from tlt_jax.rl.dynamic_sampling import DynamicSampling, informative
from tlt_jax.rl.rewards import Score
from tlt_jax.rl.workers import Decoding

SAMPLES, WANTED = 3, 4


def score(value):
    return Score(value, "ok", "") if value is not None else Score(None, "timeout", "")


def sampler(max_batches=50):
    counter = itertools.count()

    def take(n):
        example = dict(ids=(1,), text="", source="", entry={}, where="")
        return [Prompt(**example, draw=next(counter), domain=0) for _ in range(n)]

    return DynamicSampling(take, WANTED, SAMPLES, max_batches)


def world(seed, share):
    """All scores there would be, by (draw, member); `share` of the groups are informative."""
    rng = np.random.default_rng(seed)
    scores = {}
    for draw in range(400):
        values = [1.0] * SAMPLES
        if rng.random() < share:
            values[rng.integers(SAMPLES)] = 0.0
        elif rng.random() < 0.3:
            values[0] = None
        scores |= {(draw, m): score(v) for m, v in enumerate(values)}
    return scores


def play(truth, order_seed, every):
    """Scores arrive in a random order, `every` so many are shown -> (batches, chosen)."""
    rng = np.random.default_rng(order_seed)
    decide = sampler()
    known, waiting = {}, [(p.draw, m) for p in decide.drawn for m in range(SAMPLES)]
    while waiting:
        for _ in range(min(every, len(waiting))):
            key = waiting.pop(rng.integers(len(waiting)))
            known[key] = truth[key]
        waiting += [(p.draw, m) for p in decide.more(known) for m in range(SAMPLES)]
    return decide.batches, decide.chosen(known)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_order_of_arrival_changes_nothing(share):
    for seed in range(20):
        truth = world(seed, share)
        eager = [play(truth, order, every=1) for order in range(5)]
        patient = play(truth, 0, every=10**6)
        assert all(outcome == patient for outcome in eager)


def test_the_first_informative_groups_by_draw_are_chosen():
    truth = world(3, 0.3)
    batches, chosen = play(truth, 0, every=7)
    groups = [[truth[d, m] for m in range(SAMPLES)] for d in range(400)]
    wanted = [d for d, group in enumerate(groups) if informative(group)][:WANTED]
    assert chosen == set(wanted)
    assert batches == wanted[-1] // WANTED + 1


def test_at_the_limit_the_first_others_fill_up():
    decide = sampler(max_batches=2)
    assert [p.draw for p in decide.more({(d, m): score(1.0) for d in range(4) for m in range(3)})]
    known = {(d, m): score(1.0) for d in range(8) for m in range(3)} | {(6, 0): score(0.0)}
    known |= {(1, m): score(None) for m in range(3)}
    assert decide.more(known) == []
    assert decide.chosen(known) == {6, 0, 2, 3}


def test_a_failed_grading_makes_no_group_informative():
    assert not informative([score(1.0), score(None), score(1.0)])
    assert informative([score(1.0), score(None), score(0.0)])


class Immediate:
    """A reward pool without processes, whose scores are there at once."""

    def __init__(self, *_):
        self.scores = []

    def load(self, *_):
        pass

    def submit(self, key, grader, text, entry):
        self.scores.append((key, score(sample_graders.often_one(text, entry))))

    def poll(self):
        scores, self.scores = self.scores, []
        return scores

    drain = poll

    def close(self):
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")

    added_live = {}  # by run: whether rows were live when prompts were added
    queued, decoding = Decoding.queued, []

    def spied(self, share):
        if self in decoding:  # not the first prompts of a rollout
            live = any(session.live for session in self.sessions)
            added_live.setdefault(current[0], []).append(live)
        decoding.append(self)
        queued(self, share)

    def run(name, **changes):
        (folder / name).mkdir()
        current[0] = name
        settings = {
            "reward.grader": f"{sample_graders.__name__}:often_one",
            "reward.extractor": "",
            "rollout.max_new_tokens": 16,
            **changes,
        }
        loop.train(smoke(**settings), folder / name, Silent())
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    dynamic, current = {"algorithm.name": "dapo"}, [""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "queued", spied)
        patch.setattr(run_module, "RewardPool", Immediate)
        return {
            "plain": run("plain"),
            "fixed": run("fixed", **dynamic),
            "fast": run("fast", schedule="fast", **dynamic),
            "added_live": added_live,
        }


def test_a_run_draws_on_until_enough_groups_tell(runs):
    steps = [line for line in runs["fixed"] if line["content/step"] > 0]
    assert any(line["content/prompts"] > 4 for line in steps)
    assert all(line["content/prompts"] % 4 == 0 for line in steps)
    assert all(line["content/prompts"] == 4 for line in runs["plain"] if line["content/step"])


def test_only_the_fast_schedule_adds_prompts_while_rows_are_live(runs):
    assert "plain" not in runs["added_live"]
    assert not any(runs["added_live"]["fixed"])
    assert any(runs["added_live"]["fast"])


def test_fast_and_fixed_schedules_have_the_same_content(runs):
    """Tokens, rewards and draws; losses up to the rounding of another batch shape."""
    for a, b in zip(runs["fixed"], runs["fast"], strict=True):
        for key in (k for k in a if k.startswith("content/")):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), key
        for key in ("content/tokens", "content/reward_mean", "content/prompts"):
            assert a.get(key) == b.get(key)
