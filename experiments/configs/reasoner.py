"""Does RL make a model that answers in steps better, and how long is the tail of its rollouts?

GRPO from the folder that the cold start makes (cold_start.py, here beside), on the same tasks:
short questions and long ones of each, so that lengths spread as those of reasoning models do.
Command:  python -m experiments.cold_start --config=experiments/configs/cold_start.py \\
              --out=runs/reasoner
          python -m experiments.main --config=experiments/configs/reasoner.py --workdir=DIR
Expected: see EXPERIMENTS.md, "reasoner".
`:smoke` does two steps with a small random byte model, which needs no cold start.
"""

from ml_collections import ConfigDict

from experiments.configs import base

TASKS = {
    "chain_sum": {"weight": 1.5, "params": {"min_terms": 2, "max_terms": 6, "max_digits": 2}},
    "chain_sum_long": {
        "name": "chain_sum",
        "weight": 0.3,
        "params": {"min_terms": 8, "max_terms": 14, "max_digits": 2},
    },
    "gcd": {"params": {"max_numbers": 3, "max_value": 100}},
    "lcm": {"weight": 0.7, "params": {"max_value": 20}},
    "base_conversion": {"params": {"max_base": 10, "min_value": 1, "max_value": 60}},
    "count_bits": {"params": {"max_n": 500}},
    "count_bits_long": {
        "name": "count_bits",
        "weight": 0.3,
        "params": {"min_n": 10000, "max_n": 1000000},
    },
    "letter_counting": {"params": {"min_words": 2, "max_words": 8}},
    "letter_counting_long": {
        "name": "letter_counting",
        "weight": 0.4,
        "params": {"min_words": 10, "max_words": 30},
    },
    "prime_factorization": {"params": {"max_value": 150}},
    "spell_backward": {"weight": 0.7, "params": {"max_word_len": 7}},
    "number_sorting": {"weight": 0.3, "params": {"max_numbers": 6, "max_decimals": 0}},
    "countdown": {
        "weight": 0.4,
        "params": {
            "min_numbers": 3,
            "max_numbers": 3,
            "max_value": 15,
            "min_target": 5,
            "max_target": 60,
            "operators": ("+", "-"),
        },
    },
}
DATA = {
    "tasks": TASKS,
    "eval_size": 240,
    "system": "Think in steps.",
    "max_prompt_tokens": 256,
}
BYTES = {"path": "", "max_context": 2048}  # a random model, for whose prompts a letter is a token
BYTE_DATA = DATA | {"eval_size": 26, "max_prompt_tokens": 1024}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"reasoner.py:{arg} is unknown; use full or smoke")
    smoke = arg == "smoke"
    return base.get_config(
        steps=2 if smoke else 40,
        data={**(BYTE_DATA if smoke else DATA), "size": 26 if smoke else 2000},
        policy=BYTES if smoke else {"path": "runs/reasoner"},
        reward={"extractor": "answer_tag"},
        rollout={
            "prompts": 2 if smoke else 16,
            "samples": 2 if smoke else 8,
            "max_new_tokens": 16 if smoke else 512,
            "shrink": 4,
        },
        trainer={"learning_rate": 5e-6, "micro_batch_tokens": 2048},
        evaluation={"every": 10, "prompts": 2 if smoke else 120},
    )
