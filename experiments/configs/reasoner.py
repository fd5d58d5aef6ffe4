"""Placeholder."""

from ml_collections import ConfigDict

from experiments.configs import base

TASKS = {
    "chain_sum": {"weight": 1.5, "params": {"min_terms": 2, "max_terms": 6, "max_digits": 2}},
    "chain_sum_long": {"name": "chain_sum", "weight": 0.3,
                       "params": {"min_terms": 8, "max_terms": 14, "max_digits": 2}},
    "gcd": {"params": {"max_numbers": 3, "max_value": 100}},
    "lcm": {"weight": 0.7, "params": {"max_value": 20}},
    "base_conversion": {"params": {"max_base": 10, "min_value": 1, "max_value": 60}},
    "count_bits": {"params": {"max_n": 500}},
    "count_bits_long": {"name": "count_bits", "weight": 0.3, "params": {"min_n": 10000, "max_n": 1000000}},
    "letter_counting": {"params": {"min_words": 2, "max_words": 8}},
    "letter_counting_long": {"name": "letter_counting", "weight": 0.4, "params": {"min_words": 10, "max_words": 30}},
    "prime_factorization": {"params": {"max_value": 150}},
    "spell_backward": {"weight": 0.7, "params": {"max_word_len": 7}},
    "number_sorting": {"weight": 0.3, "params": {"max_numbers": 6, "max_decimals": 0}},
    "countdown": {"weight": 0.4, "params": {"min_numbers": 3, "max_numbers": 3, "max_value": 15, "min_target": 5, "max_target": 60, "operators": ("+", "-")}},
}
DATA = {
    "tasks": TASKS, "eval_size": 240, "system": "Think in steps.", "max_prompt_tokens": 256,
}
