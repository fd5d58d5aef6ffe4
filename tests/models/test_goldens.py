"""Logits of every supported family and RoPE type against transformers' (tests/goldens)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.goldens.cases import CASES, FOLDER
from tlt_jax.models import hf, layers, transformer


def read_golden(name):
    golden = dict(np.load(FOLDER / f"{name}.npz"))
    state = {k.removeprefix("w:"): w for k, w in golden.items() if k.startswith("w:")}
    return str(golden["config"]), state, golden["tokens"], golden["lengths"], golden["logits"]


def write_folder(folder, config, state):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file(state, folder / "model.safetensors")
    return folder


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, params, tokens_BT, lengths_B):
    B, T = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    segments_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
    mask_BTT = layers.causal_mask(segments_BT)
    out = transformer.forward(config, params, tokens_BT, positions_BT, mask_BTT)
    return transformer.logits(config, params, out.hidden)


def largest_difference(ours_BTV, theirs_BTV, lengths_B):
    return max(np.abs(ours_BTV[b, :n] - theirs_BTV[b, :n]).max() for b, n in enumerate(lengths_B))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    config_json, state, tokens, lengths, logits = read_golden(name)
    assert json.loads(config_json) == CASES[name], "run python -m tests.goldens.make_goldens"
    config, params = hf.load(write_folder(tmp_path / "m", config_json, state))
    ours = our_logits(config, params, tokens, lengths)
    assert largest_difference(ours, logits, lengths) <= 1e-4


def broken(config, params, name):
    """Wrong readings of a checkpoint that the goldens must notice."""
    rope = config.rope
    if name == "rope type":
        config = dataclasses.replace(config, rope=dataclasses.replace(rope, kind="none"))
    elif name == "theta":
        config = dataclasses.replace(config, rope=dataclasses.replace(rope, theta=301.0))
    elif name == "attention factor":
        factor = dataclasses.replace(rope, attention_factor=1.0)
        config = dataclasses.replace(config, rope=factor)
    elif name == "truncation":
        config = dataclasses.replace(config, rope=dataclasses.replace(rope, truncate=True))
    elif name == "heads":
        w = params["layers"]["w_k"]
        params = {**params, "layers": {**params["layers"], "w_k": w[:, ::-1]}}
    return config, params


@pytest.mark.parametrize("name", ["rope type", "theta", "attention factor", "truncation", "heads"])
def test_a_wrong_reading_is_noticed(name, tmp_path):
    config_json, state, tokens, lengths, logits = read_golden("llama_yarn_mscale")
    config, params = hf.load(write_folder(tmp_path / "m", config_json, state))
    ours = our_logits(*broken(config, params, name), tokens, lengths)
    assert largest_difference(ours, logits, lengths) > 1e-3
