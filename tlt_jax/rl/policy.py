"""The model that a run trains: pretrained, or random weights of a given size."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from tlt_jax.checkpoint import CheckpointConfig, Checkpoints
from tlt_jax.models import pretrained, tokenizer, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.tokenizer import Tokenizer

CHECKPOINTS, FINAL = "checkpoints", "policy"  # folders of a run
PART = "policy"  # of a checkpoint: the weights
BYTES = 259  # ids of the byte tokenizer


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """path: `smollm2`, a folder, a Hugging Face id or a .gguf file; or the folder of a run, for its
    final weights, or while it has none those of its newest checkpoint; or one of its checkpoints.
    Empty for random weights.

    The sizes are those of a random model, which reads and writes bytes.
    """

    path: str = "smollm2"
    dtype: str = "float32"  # of the arithmetic; master weights are float32
    remat: bool = False  # recompute activations in the backward pass
    width: int = 64
    mlp_width: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_context: int = 512
    vocab_size: int = BYTES  # more where tensor-parallel devices have to divide it: unused rows

    def __post_init__(self):
        # The sizes are checked, and the dtype, by the description of a random model.
        self.random_model()
        if self.vocab_size < BYTES:
            raise ValueError(
                f"policy.vocab_size={self.vocab_size} must be at least {BYTES}: the bytes and "
                "what begins, ends and fills a text"
            )

    def random_model(self) -> ModelConfig:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del sizes["path"]
        return ModelConfig(tied=True, **sizes)


@dataclasses.dataclass(frozen=True)
class Policy:
    model: ModelConfig
    params: dict  # master weights on the device, stacked layout
    tokenizer: Tokenizer


def load(config: PolicyConfig, key: jax.Array) -> Policy:
    """The policy at the start of a run. `key` draws random weights where there is no path.

    Raises ValueError for float64 where JAX has it switched off or a run without a checkpoint, and
    as `pretrained.load` and `Checkpoints` do.
    """
    if config.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "policy.dtype='float64' needs JAX's 64-bit mode; set the environment variable "
            "JAX_ENABLE_X64=1, or use float32"
        )
    path = Path(config.path)
    if config.path and (path / FINAL).is_dir():
        config = dataclasses.replace(config, path=str(path / FINAL))
    elif config.path and (path / CHECKPOINTS).is_dir():
        return _from_checkpoint(config, path, None, key)
    elif path.parent.name == CHECKPOINTS and path.name.isdecimal():
        return _from_checkpoint(config, path.parent.parent, int(path.name), key)
    if config.path:
        # Parameters stay float64 where the arithmetic is (tests), else they are float32.
        dtype = jnp.promote_types(config.dtype, jnp.float32)
        found = pretrained.load(config.path, dtype)
        model = dataclasses.replace(found.config, dtype=config.dtype, remat=config.remat)
        return Policy(model, jax.tree.map(jnp.array, found.params), found.tokenizer)
    text = tokenizer.byte_tokenizer()
    model = config.random_model()
    return Policy(model, transformer.init(model, key), text)


def _from_checkpoint(config: PolicyConfig, run: Path, step: int | None, key) -> Policy:
    """The weights of a run's checkpoint, the newest where `step` is None; optimizer and data start
    anew."""
    checkpoints = Checkpoints(run / CHECKPOINTS, CheckpointConfig())
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(
            f"policy.path={config.path!r} has no such finished checkpoint; there are {steps}"
        )
    step = steps[-1] if step is None else step
    sizes = checkpoints.record(step)["config"]["policy"]
    sizes = PolicyConfig(**sizes | {"dtype": config.dtype, "remat": config.remat})
    start = load(sizes, key)
    return dataclasses.replace(start, params=checkpoints.restore(step, {PART: start.params})[PART])
