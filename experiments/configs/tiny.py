"""Does the whole loop work? A two-layer byte model, from random weights, in about a minute.

Question: none of its own; the base of tests and ablations.
Command: python -m experiments.main --config=experiments/configs/tiny.py --workdir=runs/tiny
Expected: see EXPERIMENTS.md, "tiny".
`:smoke` does two RL steps.
"""

from ml_collections import ConfigDict

from experiments.configs import base

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"tiny.py:{arg} is unknown; use full or smoke")
    smoke = arg == "smoke"
    return base.get_config(
        steps=2 if smoke else 20,
        data={
            "tasks": {"chain_sum": {"params": SUMS}},
            "size": 400,
            "eval_size": 20,
            "max_prompt_tokens": 128,
        },
        policy={"path": ""},
        reward={"extractor": "whole", "num_workers": 1},
        rollout={
            "prompts": 8,
            "samples": 8,
            "max_new_tokens": 4,
            "segment_rounds": 2,
            "shrink": 4,
        },
        trainer={"learning_rate": 1e-3, "micro_batch_tokens": 4096},
        evaluation={"every": 10, "prompts": 20},
        warm_up={"steps": 20 if smoke else 300, "wrong": 0.3},
    )
