"""Can SmolLM2-135M-Instruct be taught, within the hour on two cores, to answer in steps?

Supervised training on traces written by code, with the tasks of reasoner.py, which starts RL from
the result. What is asked of it: sharp (mean largest probability of .85 or more on its own responses
at temperature 1), a long tail (longest response five times the median), and right often enough for
RL to learn from, but far from always.
Command:  python -m experiments.cold_start --config=experiments/configs/cold_start.py \\
              --out=runs/reasoner
Expected: see EXPERIMENTS.md, "cold start".
`:smoke` teaches a small random byte model for some seconds.
"""

from ml_collections import ConfigDict

from experiments.configs import base, reasoner
from experiments.sft import ColdStartConfig


def get_config(arg: str = "full") -> ConfigDict:
    if arg not in ("full", "smoke"):
        raise ValueError(f"cold_start.py:{arg} is unknown; use full or smoke")
    if arg == "smoke":
        return base.settings_of(
            ColdStartConfig,
            data={**reasoner.BYTE_DATA, "size": 60},
            rl_data=reasoner.get_config("smoke").data.to_dict(),
            policy=reasoner.BYTES,
            row_tokens=1024,
            micro_batch_tokens=3072,
            learning_rate=3e-3,
            warmup_steps=2,
        )
    return base.settings_of(
        ColdStartConfig,
        data={**reasoner.DATA, "size": 3300},
        rl_data=reasoner.get_config().data.to_dict(),
        policy={"path": "smollm2"},
        learning_rate=3e-4,
    )
