"""Does the whole loop work, and learn? A two-layer byte model, from random weights, in a minute.

Question: none of its own; the base of tests, sweeps and ablations. "Calculate 407." is answered by
407. The supervised phase teaches the model to read the number, and to ramble: to say it once or
more. RL teaches it to stop after the first time. So reward rises and responses become shorter.
Command: python -m experiments.main --config=experiments/configs/tiny.py --workdir=runs/tiny
Expected: see EXPERIMENTS.md, "tiny".
`:smoke` does two RL steps on one-digit numbers, which it hardly knows.
"""

from ml_collections import ConfigDict

from experiments.configs import base

NUMBERS = {
    "min_terms": 1,
    "max_terms": 1,
    "min_digits": 2,  # of the upper end of a range that begins at 0
    "max_digits": 4,
    "allow_parentheses": False,  # without it numbers are negative, too
}
SMOKE = {
    "steps": 2,
    "data.tasks.basic_arithmetic.params.min_digits": 1,
    "data.tasks.basic_arithmetic.params.max_digits": 1,
    "data.eval_size": 4,  # of eleven questions
    "rollout.prompts": 8,
    "rollout.max_new_tokens": 4,
    "evaluation.prompts": 4,
    "warm_up.steps": 20,
    "warm_up.rambling": 0.0,
}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"tiny.py:{arg} is unknown; use full or smoke")
    config = base.get_config(
        steps=40,
        data={
            "tasks": {"basic_arithmetic": {"params": NUMBERS}},
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
        evaluation={"every": 20, "prompts": 64},
        warm_up={"steps": 250, "learning_rate": 5e-3, "rambling": 0.6},
    )
    if arg == "smoke":
        config.update_from_flattened_dict(SMOKE)
    return config
