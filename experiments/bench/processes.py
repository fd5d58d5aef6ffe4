"""Two processes on one rollout against two that know nothing of each other, each on its own core.

    python -m experiments.bench.processes --model=smollm2 [--json]

Questions: (a) With every response forced to one length, what share of the tokens per second of two
independent copies does a pair of processes reach that samples one batch twice as large? Fixed
schedule, a barrier before and an exchange of all responses after. (b) At natural lengths, how long
is each idle, how many responses does the one that runs dry first take over (schedule fast), and
what does starting the longest of the previous epoch first gain? All runs are pinned, warm and in
turn, in an order that alternates. About 10 minutes on 2 CPU cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from experiments.bench.rollout import QUESTIONS
from tlt_jax.events import EventLog
from tlt_jax.models import transformer
from tlt_jax.rl.data import Prompt
from tlt_jax.rl.graders import Grader
from tlt_jax.rl.length_history import LengthHistory
from tlt_jax.rl.policy import PolicyConfig, load
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.rollout import Rollout, Sampler
from tlt_jax.rl.workers import Workers
from tlt_jax.sharding import distributed
from tlt_jax.sharding.distributed import DistributedConfig
from tlt_jax.sharding.mesh import MeshConfig, local_slices, make_mesh, slice_mesh
from tlt_jax.sharding.publish import publish
from tlt_jax.spec import noise
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Sampling

COPIES = 2
# name: (share one rollout, forced lengths, schedule, longest first)
RUNS = {
    "independent": (False, True, "fixed", False),
    "pair": (True, True, "fixed", False),
    "natural, fixed": (True, False, "fixed", False),
    "natural, fast": (True, False, "fast", False),
    "natural, fast, longest first": (True, False, "fast", True),
}
TIME_LIMIT_S = 900.0


def work(given: argparse.Namespace) -> dict:
    """The rollouts of one process -> their figures."""
    joint, forced, schedule, longest_first = RUNS[given.worker]
    if not joint:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[given.copy]})
    policy = load(PolicyConfig(path=given.model), jax.random.key(0))
    prompts = [tuple(policy.tokenizer.chat([{"role": "user", "content": q}])) for q in QUESTIONS]
    shapes = EngineConfig.fit(
        rows=given.rows,
        prompt_tokens=max(map(len, prompts)),
        new_tokens=given.tokens,
        shrink=4,
    )
    mesh = make_mesh(MeshConfig(slices=distributed.count()))
    [here] = local_slices(mesh)
    eos = () if forced else policy.tokenizer.eos_ids
    engine = Engine(policy.model, shapes, eos, slice_mesh(mesh, here))
    layout = transformer.decode_layout
    published = publish(mesh, lambda p: layout(policy.model, p), policy.params, 0)
    history = LengthHistory() if longest_first else None
    folder = Path(given.folder)
    with (
        RewardPool(1, 0, deadline_s=10.0) as pool,
        EventLog(folder / f"{given.worker}.{given.copy}.jsonl") as events,
    ):
        sampler = Sampler(
            Workers([engine], here, distributed.count()),
            run_key=jax.random.key(0),
            tokenizer=policy.tokenizer,
            grader_of=lambda prompt: Grader("exact"),
            pool=pool,
            events=events,
            fixed=schedule == "fixed",
        )

        def rollout(number: int) -> Rollout:
            meet(folder, given, number, joint)
            count = given.prompts * distributed.count()
            drawn = [
                Prompt(
                    ids=prompts[i % len(prompts)],
                    text="",
                    source="",
                    entry={"answer": ""},
                    where="",
                    draw=number * count + i,
                    domain=noise.GENERATE,
                )
                for i in range(count)
            ]
            return sampler.rollout(
                [published.view(here)],
                drawn,
                samples=given.samples,
                sampling=Sampling(given.tokens),
                history=history,
            )

        rollout(0)  # compiles, and fills the history
        done = [rollout(1 + i) for i in range(given.repetitions)]
    found = {
        "seconds": [r.seconds for r in done],
        "tokens": [sum(len(g.response.tokens) for g in r.graded) for r in done],
        "idle_shares": [r.idle_shares for r in done],
        "tail_share": [r.tail_share for r in done],
        "moved": [r.moved for r in done],
    }
    return found


def meet(folder: Path, given: argparse.Namespace, number: int, joint: bool):
    """Have independent copies start their rollouts together, as a barrier does with a pair."""
    if joint:
        return
    mine = f"{given.start}.{number}"
    (folder / f"{mine}.{given.copy}").touch()
    end = time.monotonic() + TIME_LIMIT_S
    while not all((folder / f"{mine}.{i}").exists() for i in range(COPIES)):
        if time.monotonic() > end:
            raise SystemExit(f"the other copy did not come to rollout {number}")
        time.sleep(0.001)


def start(name: str, given: argparse.Namespace, folder: Path, number: int) -> list[dict]:
    """Run the processes of one run and return the figures of each."""
    joint = RUNS[name][0]
    options = [
        f"--{key}={getattr(given, key)}"
        for key in ("model", "rows", "prompts", "samples", "tokens", "repetitions")
    ]
    command = [sys.executable, "-m", "experiments.bench.processes", *options]
    command += [f"--worker={name}", f"--folder={folder}", f"--start={number}"]
    if joint:
        launch = [sys.executable, "-m", "experiments.launch", f"--processes={COPIES}", "--pin"]
        commands = [[*launch, f"--logs={folder}/logs{number}", "--", *command]]
    else:
        commands = [[*command, f"--copy={i}"] for i in range(COPIES)]
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    outputs = [process.communicate(timeout=TIME_LIMIT_S)[0] for process in running]
    for process, output in zip(running, outputs):
        if process.returncode:
            raise SystemExit(f"{name} ended with status {process.returncode}: {output[-2000:]}")
    return [json.loads(p.read_text()) for p in sorted(folder.glob(f"result.{number}.*"))]


def summary(results: dict[str, list[list[dict]]]) -> dict:
    """Medians over all repetitions of all starts."""

    def rate(name: str) -> float:
        """Tokens per second of all copies together."""
        each = []
        for copies in results[name]:
            for i in range(len(copies[0]["seconds"])):
                if RUNS[name][0]:  # every process knows all responses, and when the last one ended
                    each.append(copies[0]["tokens"][i] / copies[0]["seconds"][i])
                else:
                    each.append(sum(c["tokens"][i] / c["seconds"][i] for c in copies))
        return statistics.median(each)

    found = {}
    for name in results:
        first = [copies[0] for copies in results[name]]
        found[name] = {
            "tokens_per_second": rate(name),
            "idle_share": statistics.median(
                statistics.mean(shares) for c in first for shares in c["idle_shares"]
            ),
            "tail_share": statistics.median(x for c in first for x in c["tail_share"]),
            "moved": statistics.median(x for c in first for x in c["moved"]),
        }
    return found


def main(argv: list[str]):
    parser = argparse.ArgumentParser("experiments.bench.processes", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8, help="decoded together by one process")
    parser.add_argument("--prompts", type=int, default=8, help="of one copy; a pair has twice that")
    parser.add_argument("--samples", type=int, default=2, help="responses to each")
    parser.add_argument("--tokens", type=int, default=64, help="most of a response, or all have it")
    parser.add_argument("--repetitions", type=int, default=3, help="rollouts per start")
    parser.add_argument("--starts", type=int, default=2, help="of the processes of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name in ("worker", "folder", "start"):  # of the processes that this command starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--copy", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        given.copy = given.copy if given.copy is not None else int(os.environ["TLT_INDEX"])
        path = Path(given.folder) / f"result.{given.start}.{given.copy}"
        with distributed.together(DistributedConfig()):
            path.write_text(json.dumps(work(given)))
        return
    if len(os.sched_getaffinity(0)) < COPIES:
        raise SystemExit(f"{COPIES} copies need a core each; this machine gives {os.cpu_count()}")
    results: dict[str, list[list[dict]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        for i in range(given.starts):
            for name in list(RUNS)[:: 1 if i % 2 == 0 else -1]:
                results[name].append(start(name, given, Path(folder), number))
                number += 1
    found = summary(results)
    found["pair_over_independent"] = (
        found["pair"]["tokens_per_second"] / found["independent"]["tokens_per_second"]
    )
    if given.json:
        print(json.dumps(found))
        return
    print(f"{'run':<32}{'tokens/s':>10}{'idle':>8}{'tail':>8}{'moved':>8}")
    for name in RUNS:
        f = found[name]
        print(
            f"{name:<32}{f['tokens_per_second']:>10.1f}{f['idle_share']:>8.1%}"
            f"{f['tail_share']:>8.1%}{f['moved']:>8.0f}"
        )
    print(f"pair / independent: {found['pair_over_independent']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
