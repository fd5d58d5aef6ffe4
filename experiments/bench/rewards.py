"""Grading mathematics in the reward pool: throughput, and what answers that never end cost.

    python -m experiments.bench.rewards [--json] [--answers=500] [--hanging=5] [--deadline=10]

The answers are right and wrong ones in other forms than their references, so that math-verify and
SymPy have to work. The hanging ones make SymPy compute 9^{9^{9}}. They stand evenly among the
others or, the worst place, behind them; `delay` is the time beyond that without them, in deadlines.
Without spare workers each has to wait until those before it are killed.
"""

import argparse
import json
import random
import time

from tlt_jax.rl.graders import Grader
from tlt_jax.rl.rewards import RewardPool, count_statuses

SETTLE_S = 5.0  # for the spares to have loaded the grader too; a run compiles for longer
HANGING = (r"Thus \boxed{9^{9^{9}}}.", "7")


def answers(count: int, seed: int = 0) -> list[tuple[str, str, float]]:
    """(response, reference, reward) of `count` answers of several kinds, half of them wrong."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        kinds = [
            (rf"\frac{{{a * c}}}{{{b * c}}}", rf"\frac{{{a}}}{{{b}}}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
            (f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}".replace("+-", "-")),
            (f"{a * 1000 + b:,}", f"{a * 1000 + b}.0"),
            (rf"\left({a}, \frac{{{b * c}}}{{{c}}}\right)", f"({a}, {b})"),
            (rf"\{{{a}, {a + b}\}}", rf"\{{{a + b}, {a}\}}"),
        ]
        answer, reference = kinds[i % len(kinds)]
        right = rng.random() < 0.5
        response = f"Let us see. Thus \\boxed{{{answer if right else answer + '+1'}}}."
        made.append((response, reference, float(right)))
    return made


def with_hanging(made: list, count: int, at: str) -> list[tuple[str, str, float | None]]:
    """The answers with `count` hanging ones (reward None) among them or behind them."""
    hanging = (*HANGING, None)
    if at == "end":
        return [*made, *[hanging] * count]
    mixed = list(made)
    for i in range(count):
        mixed.insert(i * len(made) // count + i, hanging)
    return mixed


def measure(work: list, workers: int, spares: int, deadline: float) -> dict:
    """Seconds from the first answer submitted to the last score; loading is done before."""
    grader = Grader("math")
    with RewardPool(workers, spares, deadline) as pool:
        pool.load(grader, {"answer": "1"})
        time.sleep(SETTLE_S)
        for i in range(4 * workers):
            pool.submit(i, grader, rf"\boxed{{{i}+1}}", {"answer": "1"})
        pool.drain()
        start = time.perf_counter()
        for i, (response, reference, _) in enumerate(work):
            pool.submit(i, grader, response, {"answer": reference})
        submitted = time.perf_counter() - start
        scores = dict(pool.drain())
        seconds = time.perf_counter() - start
    expected = [reward for *_, reward in work]
    disagreeing = sum(scores[i].value not in (reward, None) for i, reward in enumerate(expected))
    return {
        "seconds": seconds,
        "submit_seconds": submitted,
        "answers_per_second": sum(reward is not None for reward in expected) / seconds,
        "statuses": count_statuses(scores.values()),
        "disagreeing": disagreeing,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--hanging", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--spares", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    made = answers(args.answers)
    spread, last = (with_hanging(made, args.hanging, at) for at in ("spread", "end"))
    results = {
        "none hanging": measure(made, args.workers, args.spares, args.deadline),
        "spread": measure(spread, args.workers, args.spares, args.deadline),
        "at the end": measure(last, args.workers, args.spares, args.deadline),
        "spread, no spares": measure(spread, args.workers, 0, args.deadline),
    }
    for result in results.values():
        beyond = result["seconds"] - results["none hanging"]["seconds"]
        result["delay_in_deadlines"] = beyond / args.deadline
    if args.json:
        print(json.dumps(results))
        return
    print(
        f"{args.answers} answers through math-verify, {args.hanging} more that hang, "
        f"{args.workers} workers, {args.spares} spares, deadline {args.deadline:g} s"
    )
    print(f"{'hanging':<20}{'seconds':>9}{'per second':>12}{'delay':>8}  statuses")
    for name, r in results.items():
        statuses = ", ".join(f"{n} {status}" for status, n in r["statuses"].items() if n)
        print(
            f"{name:<20}{r['seconds']:>9.1f}{r['answers_per_second']:>12.0f}"
            f"{r['delay_in_deadlines']:>8.2f}  {statuses}, {r['disagreeing']} not as expected"
        )


if __name__ == "__main__":
    main()
