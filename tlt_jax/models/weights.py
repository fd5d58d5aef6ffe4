"""Between the named per-layer matrices of a file and the stacked parameter tree.

A file format is a table `names` from leaf to tensor name, in which "{}" stands for the layer.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf of the stacked tree, by leaf name; those of layers start with L."""
    config = dataclasses.replace(config, dtype="float32")
    tree = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    flat = {**tree, **tree["layers"]}
    del flat["layers"]
    return {leaf: x.shape for leaf, x in flat.items()}


def file_shape(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one layer's tensor as files hold it, heads and head width merged."""
    if leaf == "w_o":
        return shape[0], math.prod(shape[1:])
    if leaf in ("w_q", "w_k", "w_v"):
        return math.prod(shape[:-1]), shape[-1]
    if leaf in ("b_q", "b_k", "b_v"):
        return (math.prod(shape),)
    return shape


def _slots(config: ModelConfig, names: dict[str, str]) -> Iterator[tuple]:
    """(tensor name, leaf, layer or None, shape of one layer) of everything the model needs."""
    for leaf, shape in shapes(config).items():
        if "{}" not in names[leaf]:
            yield names[leaf], leaf, None, shape
            continue
        for i in range(config.num_layers):
            yield names[leaf].format(i), leaf, i, shape[1:]


def stack(
    config: ModelConfig,
    names: dict[str, str],
    found: dict[str, tuple[int, ...]],
    read: Callable[[str, str], np.ndarray],
    *,
    dtype,
    where: str,
) -> dict:
    """The parameter tree of numpy arrays of `dtype`, filled one tensor at a time.

    found: shapes of the tensors that the file holds. read(tensor name, leaf) gives one of them.
    Everything is checked before the first is read: raises ValueError naming a tensor of `where`
    that is missing, misshapen or not part of the model.
    """
    slots = list(_slots(config, names))
    for name, leaf, _, shape in slots:
        want = file_shape(leaf, shape)
        if name not in found:
            raise ValueError(f"{where} lacks tensor {name!r} of shape {want}; is it complete?")
        if tuple(found[name]) != want:
            raise ValueError(
                f"{where}: tensor {name!r} has shape {tuple(found[name])}, its config says {want}"
            )
    surplus = sorted(set(found) - {name for name, *_ in slots})
    if surplus:
        raise ValueError(
            f"{where} has tensor {surplus[0]!r} ({len(surplus)} such), which its config does not "
            "describe; the model would differ without it"
        )
    params, inside = {}, {}
    for name, leaf, i, shape in slots:
        value = read(name, leaf).reshape(shape)
        if i is None:
            params[leaf] = value.astype(dtype)
            continue
        if i == 0:
            inside[leaf] = np.empty((config.num_layers, *shape), dtype)
        inside[leaf][i] = value
    return {**params, "layers": inside}


def unstack(config: ModelConfig, names: dict[str, str], params: dict, dtype=None) -> dict:
    """Tensors by file name, as files hold them; `dtype` None keeps each array's own.

    Raises ValueError when the tree is not that of `config`.
    """
    want = shapes(config)
    leaves = {**params, **params["layers"]}
    del leaves["layers"]
    _same_keys(want, leaves)
    tensors = {}
    for leaf, shape in want.items():
        value = np.asarray(leaves[leaf])
        if value.shape != shape:
            raise ValueError(f"params[{leaf!r}] has shape {value.shape}, config says {shape}")
        value = value if dtype is None else value.astype(dtype)
        if "{}" not in names[leaf]:
            tensors[names[leaf]] = value
            continue
        for i in range(config.num_layers):
            one = value[i].reshape(file_shape(leaf, shape[1:]))
            tensors[names[leaf].format(i)] = np.ascontiguousarray(one)
    return tensors


def _same_keys(want: Iterable[str], given: Iterable[str]):
    lacking, extra = sorted(set(want) - set(given)), sorted(set(given) - set(want))
    if lacking or extra:
        raise ValueError(f"params do not fit the config: missing {lacking}, surplus {extra}")
