"""Model folders in the Hugging Face layout: config.json and safetensors, read and written."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tlt_jax import atomic
from tlt_jax.models import hf_config, weights
from tlt_jax.models.config import ModelConfig

NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}
NAMES |= {
    f"{kind}_{n}": f"model.layers.{{}}.self_attn.{n}_proj.{word}"
    for n in "qkvo"
    for kind, word in (("w", "weight"), ("b", "bias"))
}
NAMES |= {
    f"{kind}_{n}": f"model.layers.{{}}.mlp.{n}_proj.{word}"
    for n in ("gate", "up", "down")
    for kind, word in (("w", "weight"), ("b", "bias"))
}

# Old checkpoints carry the rotary frequencies, which follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

DOWNLOADED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "*.txt")


def resolve(path_or_id: str | os.PathLike) -> Path:
    """The local folder of a model: `path_or_id` itself, or the download of a Hugging Face id.

    Raises FileNotFoundError when it is neither a folder nor an id that can be fetched.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    name = str(path_or_id)
    if folder.exists() or isinstance(path_or_id, os.PathLike) or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"model folder {name!r} does not exist or is not a folder")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(DOWNLOADED)))
    except HFValidationError as e:
        raise FileNotFoundError(
            f"{name!r} is neither an existing folder nor a Hugging Face id (owner/name)"
        ) from e
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        raise FileNotFoundError(
            f"{name!r} is not an existing folder and could not be fetched as a Hugging Face id; "
            f"check its spelling, the network and your access ({type(e).__name__})"
        ) from e


def load(path_or_id: str | os.PathLike, dtype=np.float32) -> tuple[ModelConfig, dict]:
    """A model folder, or Hugging Face id, as (config, stacked tree of numpy arrays of `dtype`).

    `config.dtype`, that of the arithmetic, is left at float32. Raises FileNotFoundError for a
    folder, config.json or file of weights that is not there, and ValueError naming the field or
    tensor that is not supported, missing, misshapen or surplus, or the file that is damaged.
    """
    folder = resolve(path_or_id)
    config = read_config(folder)
    with contextlib.ExitStack() as stack:
        files = {}  # tensor name -> the open file that holds it
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, "np"))
            except SafetensorError as e:
                raise ValueError(f"{path} is damaged or truncated ({e}); fetch it again") from e
            files |= {name: file for name in file.keys() if not DERIVED.fullmatch(name)}
        if config.tied and NAMES["head"] in files:
            head, embed = (
                files[NAMES[n]].get_tensor(NAMES[n]) if NAMES[n] in files else None
                for n in ("head", "embed")
            )
            if embed is not None and not np.array_equal(head, embed):
                raise ValueError(
                    f"{folder}: tie_word_embeddings is true but {NAMES['head']!r} differs from "
                    f"{NAMES['embed']!r}; set it to false to use both"
                )
            del files[NAMES["head"]]
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        params = weights.stack(
            config,
            NAMES,
            found,
            lambda name, leaf: files[name].get_tensor(name),
            dtype=dtype,
            where=str(folder),
        )
    return config, params


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a folder; raises as `load` does."""
    return hf_config.parse(read_json(folder / "config.json"))


def read_json(path: Path) -> dict:
    """A JSON object; FileNotFoundError or ValueError name the file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{path.parent} has no {path.name}; is it a model folder?") from e
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}, not a JSON object")
    return fields


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise FileNotFoundError(
            f"{folder} has neither {single.name} nor {index.name}; other formats are not read"
        )
    weight_map = read_json(index).get("weight_map")
    if not weight_map:
        raise ValueError(f"{index} has no 'weight_map'")
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing, though {index.name} lists it")
    return paths


def save(folder, config: ModelConfig, params: dict, *, tokenizer=None, dtype=None) -> None:
    """Write a folder that transformers loads: config, safetensors and the tokenizer's files.

    `dtype` None keeps the arrays as they are, so that loading gives the same bits. The folder is
    written beside its place and renamed into it; raises FileExistsError when it holds anything.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; remove it or name another")
    fields = hf_config.render(config)
    tensors = weights.unstack(config, NAMES, params, dtype)
    # transformers 5 reads this spelling too; older readers know no other.
    fields["torch_dtype"] = str(tensors[NAMES["embed"]].dtype)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        eos = list(tokenizer.eos_ids)
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
        ids["bos_token_id"] = tokenizer.bos_id
        ids["pad_token_id"] = tokenizer.pad_id
    # No pad id in config.json: torch would freeze that row of the embedding.
    fields |= {**ids, "pad_token_id": None}

    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    draft.mkdir(parents=True)
    try:
        if tokenizer is not None:
            tokenizer.save(draft)
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
        (draft / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        atomic.sync_folder(draft)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
