"""Grading in worker processes: every way to fail, and what becomes of the workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tlt_jax.rl.graders import Grader
from tlt_jax.rl.rewards import RewardPool, Score, count_statuses, require_some_ok

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
    with RewardPool(2, 2, deadline_s=1.0) as pool:
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
        ("missing", "", "error", "sample_graders.py has no function 'missing'"),
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


def hanging_seconds(pool, hanging):
    """Seconds to grade 50 quick answers and, before them, `hanging` others."""
    start = time.monotonic()
    for i in range(hanging):
        pool.submit(i, sample("hangs"), "", {})
    for _ in range(50):
        pool.submit("quick", sample("length"), "", {})
    scores = [score for _, score in pool.drain()]
    assert count_statuses(scores) == {"ok": 50, "error": 0, "timeout": hanging, "invalid": 0}
    return time.monotonic() - start


def test_hanging_answers_wait_for_their_deadlines_side_by_side():
    """Without spares one after the other, which is what spares are there for."""
    with RewardPool(1, 5, deadline_s=1.0) as pool:
        assert 1.0 <= hanging_seconds(pool, 5) < 3.0  # a spare for each takes some time to start
    with RewardPool(1, 0, deadline_s=0.6) as pool:
        assert hanging_seconds(pool, 3) >= 3 * 0.6


def test_waiting_spares_do_not_add_to_those_at_work():
    with RewardPool(1, 2, deadline_s=8.0) as pool:
        for name in ("pause", "pause", "length"):  # a pause gives way, for others wait
            pool.submit(name, sample(name), "", {})
        pool.drain()
        for i in range(6):
            pool.submit(i, sample("naps"), "", {})
        begun = sorted(score.value for _, score in pool.drain())
        assert all(b - a >= 0.05 for a, b in zip(begun, begun[1:]))


def test_a_slow_answer_is_stopped_while_others_wait():
    """And its deadline, of the time that it runs, with it."""
    for waiting in (0, 20):
        with RewardPool(1, 1, deadline_s=1.5) as pool:
            grade(pool, "pid")
            pool.submit("slow", sample("works"), "", {})
            for i in range(waiting):
                pool.submit(i, sample("naps"), "", {})  # a twentieth of a second each
            order = [key for key, score in pool.drain() if score.status == "ok"]
        assert len(order) == waiting + 1 and order[-1] == "slow"
    with RewardPool(1, 1, deadline_s=1.5) as pool:
        pool.submit("slow", sample("works"), "", {})
        for i in range(40):
            pool.submit(i, sample("naps"), "", {})
        assert dict(pool.drain())["slow"].value > 1.5  # stopped for about two seconds


def test_workers_load_no_array_library_and_keep_their_pipe_to_themselves(pool):
    assert "jax" in sys.modules  # here, by conftest
    assert grade(pool, "heavy_modules").value == 0
    if sys.platform == "linux":
        assert grade(pool, "first_to_die").value == 1000
    assert grade(pool, "prints_and_reads").value == 0


def test_an_entry_that_cannot_be_pickled_is_refused_at_once(pool):
    with pytest.raises(Exception, match="pickle"):
        pool.submit("key", sample("length"), "", {"f": lambda: None})
    assert pool.drain() == []


def test_load_refuses_a_grader_that_cannot_work(pool):
    pool.load(sample("raises"), {})  # loads, though every grading will fail
    with pytest.raises(ValueError, match="does not work: there is no module 'no_such_module'; put"):
        pool.load(Grader("no_such_module:f"), {})
    with pytest.raises(ValueError, match="needs 'answer'"):
        pool.load(Grader("exact"), {"prompt": "x"})


def test_close_kills_at_once_and_refuses_more():
    pool = RewardPool(2, 0, deadline_s=60.0)
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
        pool = RewardPool(3, 0, deadline_s=0.8)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_dies_with_a_killed_parent():
    script = textwrap.dedent("""
        import time
        from tlt_jax.rl.graders import Grader
        from tlt_jax.rl.rewards import RewardPool
        pool = RewardPool(1, 1, deadline_s=10.0)
        for name in ("hangs", *["pause"] * 100):
            pool.submit(0, Grader(f"tests.rl.sample_graders:{name}"), "", {})
        time.sleep(100)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    end, states = time.monotonic() + 20, {}
    while "T" not in states.values():
        assert time.monotonic() < end, f"no worker was stopped: {states}"
        time.sleep(0.05)
        found = Path(f"/proc/{parent.pid}/task").glob("*/children")
        pids = [int(pid) for file in found for pid in file.read_text().split()]
        states = {pid: process_state(pid) for pid in pids}
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert len(states) == 2 and wait_until_gone(list(states), 10)


def process_state(pid):
    """R, S, T (stopped), …; "" where there is no such process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_trivial_gradings_pass_500_per_second(pool):
    grade(pool, "length")
    start = time.monotonic()
    for i in range(500):
        pool.submit(i, sample("length"), "text", {})
    pool.drain()
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    "settings, words",
    [
        ((0, 0, 1.0), "num_workers=0"),
        ((1, -1, 1.0), "spare_workers=-1"),
        ((1, 0, 0.0), "deadline_s=0.0"),
        ((1, 0, float("nan")), "deadline_s=nan"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        RewardPool(*settings)


def test_a_step_without_one_grading_stops():
    failed = Score(None, "error", "KeyError: 'x'")
    require_some_ok([failed, Score(0.0, "ok", "")], "step 3")
    with pytest.raises(RuntimeError, match=r"step 3: none of 2 .*'error': 2.*KeyError"):
        require_some_ok([failed, failed], "step 3")
