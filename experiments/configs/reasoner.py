"""Does RL make a model that answers in steps better, and how long is the tail of its rollouts?

GRPO from the folder that the cold start makes (cold_start.py, here beside), on those of its tasks
that it sometimes gets right: where all answers of a group are wrong there is nothing to learn.
Most questions need few steps and some need many, so that lengths spread as those of reasoning
models do.
Command:  python -m experiments.cold_start --config=experiments/configs/cold_start.py \\
              --out=runs/reasoner
          python -m experiments.main --config=experiments/configs/reasoner.py --workdir=DIR
Expected: see EXPERIMENTS.md, "reasoner".
`:smoke` does two steps with a small random byte model, which needs no cold start.
"""

from ml_collections import ConfigDict

from experiments.configs import base

TASKS = {
    "chain_sum": {"weight": 1.7, "params": {"min_terms": 3, "max_terms": 6, "max_digits": 1}},
    "gcd": {"weight": 1.5, "params": {"max_value": 50}},
    "count_bits": {"weight": 1.2, "params": {"max_n": 255}},
    "prime_factorization": {"weight": 0.8, "params": {"max_value": 100}},
    "letter_counting": {"weight": 1.2, "params": {"min_words": 2, "max_words": 10}},
    "letter_counting_long": {
        "name": "letter_counting",
        "weight": 0.45,
        "params": {"min_words": 15, "max_words": 40},
    },
    "base_conversion": {
        "weight": 0.5,
        "params": {"max_base": 4, "min_value": 1, "max_value": 50},
    },
    "spell_backward": {"weight": 1.2, "params": {"min_word_len": 4, "max_word_len": 8}},
    "word_sorting": {"weight": 0.7, "params": {"min_words": 3, "max_words": 7}},
    "word_sorting_long": {
        "name": "word_sorting",
        "weight": 0.2,
        "params": {"min_words": 8, "max_words": 12},
    },
}
RL_WEIGHTS = {
    "chain_sum": 1.5,
    "gcd": 2.0,
    "count_bits": 0.5,
    "prime_factorization": 0.7,
    "letter_counting_long": 0.3,
}
DATA = {
    "tasks": TASKS,
    "eval_size": 240,
    "system": "Think in steps.",
    "max_prompt_tokens": 160,
}
BYTES = {"path": "", "max_context": 2048}  # a random model, for whose prompts a letter is a token
BYTE_DATA = DATA | {"eval_size": 26, "max_prompt_tokens": 1024}


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"reasoner.py:{arg} is unknown; use full or smoke")
    smoke = arg == "smoke"
    steps = 2 if smoke else 140
    return base.get_config(
        steps=steps,
        data={
            **(BYTE_DATA if smoke else DATA),
            "tasks": {
                name: TASKS[name] | {"weight": weight} for name, weight in RL_WEIGHTS.items()
            },
            "size": 26 if smoke else 2000,
        },
        policy=BYTES if smoke else {"path": "runs/reasoner"},
        reward={"extractor": "answer_tag"},
        rollout={
            "prompts": 2 if smoke else 16,
            "samples": 2 if smoke else 8,
            "max_new_tokens": 16 if smoke else 512,
            "shrink": 4,
        },
        trainer={
            "learning_rate": 4e-5,
            "schedule": "linear",
            "warmup_steps": 1 if smoke else 4,
            "total_steps": steps,
            "micro_batch_tokens": 2048,
        },
        evaluation={"every": 35, "prompts": 2 if smoke else 240, "samples": 2},
    )
