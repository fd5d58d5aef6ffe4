"""Write tests/goldens/*.npz: logits of transformers for the checkpoints of cases.py.

    python -m tests.goldens.make_goldens

Needs torch (requirements-parity.txt). Each file holds config.json, the float32 weights by Hugging
Face name ("w:" in front), tokens [B, T] padded on the right, lengths [B], and logits [B, T, V].
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.goldens.cases import CASES, FOLDER

LENGTHS = (40, 23, 1)


def random_model(fields: dict, seed: int):
    """A transformers model of a config.json with every weight random, norms around 1."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Twice the usual scale, so that attention is far from uniform.
            weight.copy_(1 + 0.3 * noise if "norm" in name else 2 * noise / 24**0.5)
    return model


def tokens_of(seed: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (len(LENGTHS), max(LENGTHS)))


def logits_of(model, tokens_BT: np.ndarray) -> np.ndarray:
    """transformers' logits [B, T, V]; rows are valid up to LENGTHS."""
    mask = np.arange(tokens_BT.shape[1])[None] < np.array(LENGTHS)[:, None]
    with torch.no_grad():
        out = model(
            input_ids=torch.as_tensor(tokens_BT), attention_mask=torch.as_tensor(mask).long()
        )
    return out.logits.numpy()


def state_of(model) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, a tied head left out."""
    state = {name: w.numpy() for name, w in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def main():
    for name, fields in CASES.items():
        seed = zlib.crc32(name.encode())
        model = random_model(fields, seed)
        tokens_BT = tokens_of(seed, fields["vocab_size"])
        path = FOLDER / f"{name}.npz"
        np.savez_compressed(
            path,
            config=json.dumps(fields),
            tokens=tokens_BT.astype(np.int32),
            lengths=np.array(LENGTHS, np.int32),
            logits=logits_of(model, tokens_BT),
            **{f"w:{k}": w for k, w in state_of(model).items()},
        )
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
