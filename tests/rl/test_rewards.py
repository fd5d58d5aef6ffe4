"""Grading in worker processes: every way to fail, and what becomes of the workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tlt_jax.rl.graders import EXTRACTORS, Grader, check_entry
from tlt_jax.rl.rewards import (
    RewardConfig,
    RewardPool,
    Score,
    count_statuses,
    require_some_ok,
)

ROOT = Path(__file__).parents[2]


def sample(name):
    return Grader(f"tests.rl.sample_graders:{name}")


def is_running(pid):
    """A process that is dead but not yet waited for does not run."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def wait_until_gone(pids, seconds):
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def pool():
    with RewardPool(2, deadline_s=1.0) as pool:
        yield pool


def grade(pool, name, text="", **entry):
    pool.submit("key", sample(name), text, entry)
    [(key, score)] = pool.drain()
    assert key == "key"
    return score


def test_results_come_under_their_keys(pool):
    for i in range(200):
        pool.submit((i, "x"), sample("length"), "a" * i, {"scale": 2})
    results = pool.drain()
    assert {key: score.value for key, score in results} == {(i, "x"): 2.0 * i for i in range(200)}
    assert {score.status for _, score in results} == {"ok"}
    assert pool.poll() == pool.drain() == []


def test_submit_and_poll_do_not_wait(pool):
    start = time.monotonic()
    pool.submit("key", sample("pid"), "", {})
    assert pool.poll() == []
    assert time.monotonic() - start < 0.15
    results = []
    while not results:
        assert time.monotonic() - start < 10
        results = pool.poll()
        time.sleep(0.01)
    assert [key for key, _ in results] == ["key"]


def test_a_long_text_goes_through(pool):
    assert grade(pool, "length", "é" * 3_000_000).value == 3_000_000


@pytest.mark.parametrize(
    "name, text, status, words",
    [
        ("raises", "", "error", "no such part"),
        ("leaves", "", "error", "SystemExit"),
        ("dies", "", "error", "worker died (exit status -11)"),
        ("hangs", "", "timeout", "deadline of 1.0 s"),
        ("hangs_with_the_lock", "", "timeout", "deadline of 1.0 s"),
        ("missing", "", "error", "could not load the grader"),
        ("returns", "nan", "invalid", "returned nan"),
        ("returns", "inf", "invalid", "returned inf"),
        ("returns", "huge", "invalid", "returned inf"),
        ("returns", "none", "invalid", "NoneType"),
        ("returns", "text", "invalid", "str"),
        ("returns", "list", "invalid", "list"),
        ("returns", "complex", "invalid", "complex"),
    ],
)
def test_failures_are_told_apart_and_the_pool_goes_on(pool, name, text, status, words):
    score = grade(pool, name, text)
    assert (score.value, score.status) == (None, status)
    assert words in score.detail
    assert [grade(pool, "length", "abc") for _ in range(3)] == [Score(3.0, "ok", "")] * 3


@pytest.mark.parametrize("text, value", [("true", 1.0), ("int", 2.0)])
def test_real_numbers_become_floats(pool, text, value):
    score = grade(pool, "returns", text)
    assert score == Score(value, "ok", "") and type(score.value) is float


def test_the_deadline_is_per_answer_and_kills_what_the_grader_started(pool, tmp_path):
    pid_file = tmp_path / "pid"
    start = time.monotonic()
    assert grade(pool, "hangs_with_a_child", pid_file=str(pid_file)).status == "timeout"
    assert 1.0 <= time.monotonic() - start < 5
    assert wait_until_gone([int(pid_file.read_text())], 5)


def test_one_hanging_answer_does_not_hold_up_the_others(pool):
    pool.submit("slow", sample("hangs"), "", {})
    for i in range(50):
        pool.submit(i, sample("length"), "", {})
    results = pool.drain()
    assert results[-1][0] == "slow"
    assert count_statuses(score for _, score in results) == {
        "ok": 50,
        "error": 0,
        "timeout": 1,
        "invalid": 0,
    }


def test_workers_load_no_array_library_and_keep_their_pipe_to_themselves(pool):
    assert "jax" in sys.modules  # here, by conftest
    assert grade(pool, "heavy_modules").value == 0
    assert grade(pool, "prints_and_reads").value == 0


def test_an_entry_that_cannot_be_pickled_is_refused_at_once(pool):
    with pytest.raises(Exception, match="pickle"):
        pool.submit("key", sample("length"), "", {"f": lambda: None})
    assert pool.drain() == []


def test_load_refuses_a_grader_that_cannot_work(pool):
    pool.load(sample("raises"), {})  # loads, though every grading will fail
    with pytest.raises(ValueError, match="no_such_module"):
        pool.load(Grader("no_such_module:f"), {})
    with pytest.raises(ValueError, match="needs 'answer'"):
        pool.load(Grader("exact"), {"prompt": "x"})


def test_close_kills_at_once_and_refuses_more():
    pool = RewardPool(2, deadline_s=60.0)
    pool.submit(0, sample("pid"), "", {})
    pool.submit(1, sample("pid"), "", {})
    pids = [int(score.value) for _, score in pool.drain()]
    assert len(set(pids)) == 2
    for i in range(5):
        pool.submit(i, sample("hangs"), "", {})
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 5
    assert wait_until_gone(pids, 1)
    with pytest.raises(ValueError, match="closed"):
        pool.submit(0, sample("length"), "", {})


def test_workers_die_with_a_killed_parent():
    """Idle, asleep, or in a C call that never lets another thread run."""
    # No main guard: the workers must not run the caller's main module again.
    script = textwrap.dedent("""
        import time
        from tlt_jax.rl.graders import Grader
        from tlt_jax.rl.rewards import RewardPool
        pool = RewardPool(3, deadline_s=0.8)
        grader = "tests.rl.sample_graders:"
        for i in range(3):
            pool.submit(i, Grader(grader + "pid"), "", {})
        print(*(int(score.value) for _, score in pool.drain()), flush=True)
        pool.submit(3, Grader(grader + "hangs"), "", {})
        pool.submit(4, Grader(grader + "hangs_with_the_lock"), "", {})
        time.sleep(0.4)
        print("busy", flush=True)
        time.sleep(100)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert parent.stdout.readline() == "busy\n"
    assert len(set(pids)) == 3 and all(is_running(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pids, 10)


def test_trivial_gradings_pass_500_per_second(pool):
    grade(pool, "length")
    start = time.monotonic()
    for i in range(500):
        pool.submit(i, sample("length"), "text", {})
    pool.drain()
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    "extractor, text, answer",
    [
        ("answer_tag", "a <answer>1</answer> b <answer> 2\n</answer> c", "2"),
        ("answer_tag", "<answer>1</answer> <answer>2", "1"),
        ("answer_tag", "</answer> 1 <answer>", None),
        ("answer_tag", "42", None),
        ("last_number", "So 3 + 4 = 7.", "7"),
        ("last_number", "x = -4", "-4"),
        ("last_number", "x = −4", "-4"),
        ("last_number", "7-4", "4"),
        ("last_number", "about 1,234,567.50 in all", "1234567.50"),
        ("last_number", "1,2,34", "34"),
        ("last_number", "it is 12,3456", "3456"),
        ("last_number", "none", None),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", " \n ", None),
        ("whole", " a b\n", "a b"),
    ],
)
def test_extractors(extractor, text, answer):
    assert EXTRACTORS[extractor](text) == answer


@pytest.mark.parametrize(
    "text, value",
    [("<answer> yes </answer>", 1.0), ("<answer>no</answer>", 0.0), ("yes", 0.0)],
)
def test_exact(pool, text, value):
    pool.submit(0, Grader("exact"), text, {"answer": "yes "})
    assert pool.drain() == [(0, Score(value, "ok", ""))]


def test_reasoning_gym_gives_nothing_for_near_misses_unless_asked(pool):
    entry = {"task": "chain_sum", "params": {"max_terms": 3}, "item": {"answer": "12"}}
    graders = {False: Grader(), True: Grader(partial=True)}
    texts = {
        "right": "<answer>12.0</answer>",
        "near": "<answer>it is 12</answer>",
        "wrong": "<answer>13</answer>",
        "bare": "12",
    }
    for partial, grader in graders.items():
        for name, text in texts.items():
            pool.submit((partial, name), grader, text, entry)
    got = {key: score.value for key, score in pool.drain()}
    strict = {(False, "right"): 1.0, (False, "near"): 0.0}
    soft = {(True, "right"): 1.0, (True, "near"): pytest.approx(2 / 8)}
    zero = {(p, name): 0.0 for p in graders for name in ("wrong", "bare")}
    assert got == strict | soft | zero


@pytest.mark.parametrize("places, value", [(3, 1.0), (6, 0.0)])
def test_reasoning_gym_scores_with_the_parameters_of_the_task(pool, places, value):
    """This scorer's tolerance is a parameter of the task."""
    params = {"max_num_decimal_places": places}
    entry = {"task": "decimal_arithmetic", "params": params, "item": {"answer": "2.0"}}
    pool.submit(0, Grader(), "<answer>2.001</answer>", entry)
    assert pool.drain() == [(0, Score(value, "ok", ""))]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Grader("exakt"), r"'exakt' is unknown; known: \['reasoning_gym', 'exact'\]"),
        (lambda: Grader("module:"), "is unknown"),
        (lambda: Grader(extractor="boxed"), r"'boxed' is unknown; known: \['answer_tag'"),
        (lambda: Grader("exact", partial=True), "partial=True means nothing"),
        (lambda: RewardConfig(extractor="boxed"), "unknown"),
        (lambda: RewardConfig(num_workers=0), "num_workers=0"),
        (lambda: RewardConfig(deadline_s=0.0), "deadline_s=0.0"),
        (lambda: RewardPool(1, float("nan")), "deadline_s=nan"),
        (lambda: check_entry(Grader(), {"answer": "1"}), "needs 'task'"),
    ],
)
def test_bad_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_step_without_one_grading_stops():
    failed = Score(None, "error", "KeyError: 'x'")
    require_some_ok([failed, Score(0.0, "ok", "")], 3)
    with pytest.raises(RuntimeError, match=r"step 3: none of 2 .*'error': 2.*KeyError"):
        require_some_ok([failed, failed], 3)
