"""Can GRPO teach a real language model something in minutes on a laptop?

SmolLM2-135M-Instruct on one-digit sums. Sampled at temperature 1 the untrained model mostly
rambles; asked greedily it often knows. The reward is 1 for a right last number, else 0.
Command:  make train  (or: python -m experiments.main --config=experiments/configs/quickstart.py
          --workdir=DIR). `:smoke` does two small steps.
Expected: see EXPERIMENTS.md, "quickstart".
"""

from ml_collections import ConfigDict

from experiments.configs import base

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"quickstart.py:{arg} is unknown; use full or smoke")
    smoke = arg == "smoke"
    return base.get_config(
        steps=2 if smoke else 24,
        data={
            "tasks": {"chain_sum": {"params": SUMS}},
            "size": 256,
            "eval_size": 32,
            "system": "Answer with the number only.",
            "max_prompt_tokens": 48,
        },
        policy={"path": "smollm2"},
        reward={"extractor": "last_number"},
        rollout={"prompts": 2 if smoke else 12, "samples": 8, "max_new_tokens": 16, "shrink": 4},
        trainer={"learning_rate": 2e-5, "warmup_steps": 1, "micro_batch_tokens": 1024},
        evaluation={"every": 8, "prompts": 8 if smoke else 32},
    )
