"""Does the whole loop work? A two-layer byte model, from random weights, in under a minute.

Question: none of its own; the base of tests and ablations.
Command: python -m experiments.main --config=experiments/configs/tiny.py --workdir=runs/tiny
Expected: see EXPERIMENTS.md, "tiny".
`:smoke` does two RL steps.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"tiny.py:{arg} is unknown; use full or smoke")
    config = ConfigDict()
    config.steps = 2 if arg == "smoke" else 20
    config.seed = 0
    config.data = ConfigDict(
        {
            "tasks": {
                "chain_sum": {
                    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
                }
            },
            "size": 400,
            "eval_size": 20,
            "max_prompt_tokens": 128,
        }
    )
    config.policy = ConfigDict({"path": "", "width": 64, "num_layers": 2})
    config.reward = ConfigDict({"extractor": "whole", "num_workers": 1})
    config.rollout = ConfigDict(
        {
            "prompts": 8,
            "samples": 8,
            "max_new_tokens": 4,
            "rows": 32,
            "segment_rounds": 2,
            "shrink": 4,
        }
    )
    config.trainer = ConfigDict({"learning_rate": 1e-3, "micro_batch_tokens": 4096})
    config.evaluation = ConfigDict({"every": 10, "prompts": 20})
    config.warm_up = ConfigDict({"steps": 20 if arg == "smoke" else 300, "wrong": 0.3})
    return config
