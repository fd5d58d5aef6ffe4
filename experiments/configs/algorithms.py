"""Do the algorithms by name all train `tiny`, and to the same reward as GRPO?

Six algorithms, three seeds each (of the sampling and of the data), otherwise as tiny.py. Two
mini-batches per rollout, so that ratios leave 1 and clipping matters.
Command:  python -m experiments.sweep --config=experiments/configs/algorithms.py --workdir=DIR
          python -m experiments.report DIR --format=markdown
Expected: see EXPERIMENTS.md, "algorithms"; less than 20 minutes on two cores.
"""

from ml_collections import ConfigDict

from experiments.configs import tiny
from experiments.points import product, zip_

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "reinforce++_baseline")
SEEDS = range(3)


def get_config(arg: str = "full") -> ConfigDict:
    config = tiny.get_config(arg)
    config.algorithm.mini_batches = 2
    return config


def sweep():
    seeds = zip_({"seed": SEEDS, "data.seed": SEEDS})
    return product({"algorithm.name": ALGORITHMS}, seeds)
