"""Does the whole loop work? A two-layer byte model, from random weights, in under a minute.

Question: none of its own; the base of tests, sweeps and ablations. The task is to read a number of
one to four digits out of a sentence and to stop after it: short prompts, answers of uneven length,
and a reward that GRPO raises within seconds.
Command: python -m experiments.main --config=experiments/configs/tiny.py --workdir=runs/tiny
Expected: see EXPERIMENTS.md, "tiny".
`:smoke` does two RL steps.
"""

from ml_collections import ConfigDict

from experiments.configs import base

# "Calculate 407." is answered by 407: sums of a single term.
NUMBERS = {
    "min_terms": 1,
    "max_terms": 1,
    "min_digits": 2,
    "max_digits": 4,
    "allow_parentheses": False,
}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"tiny.py:{arg} is unknown; use full or smoke")
    smoke = arg == "smoke"
    return base.get_config(
        steps=2 if smoke else 40,
        data={
            "tasks": {"basic_arithmetic": {"params": NUMBERS}},
            "size": 1000,
            "eval_size": 64,
            "max_prompt_tokens": 64,
        },
        policy={"path": "", "head_dim": 32, "num_kv_heads": 4, "mlp_width": 64},
        reward={"extractor": "whole", "num_workers": 1},
        rollout={
            "prompts": 16,
            "samples": 8,
            "max_new_tokens": 16,
            "segment_rounds": 2,
            "shrink": 4,
        },
        trainer={"learning_rate": 5e-4},
        evaluation={"every": 20, "prompts": 20 if smoke else 64},
        warm_up={"steps": 20 if smoke else 250, "learning_rate": 5e-3, "rambling": 0.6},
    )
