"""Placeholder."""

from ml_collections import ConfigDict

from experiments.configs import base
from experiments.configs.reasoner import DATA
from experiments.sft import ColdStartConfig


def get_config(arg: str = "full") -> ConfigDict:
    return base.settings(ColdStartConfig, data={**DATA, "size": 3000})
