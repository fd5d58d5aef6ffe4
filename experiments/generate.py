"""Sample responses to the prompts of a file:

    python -m experiments.generate --model=smollm2 --prompts=prompts.jsonl --out=responses.jsonl \\
        --samples=4 --max_new_tokens=128 --temperature=1.0 --seed=0

Reads a prompt file (`read_prompt_file`: .jsonl, .csv, .parquet and more) with `prompt` (used as it
is) or `messages` (through the chat template). Writes one JSON line per response: prompt (index,
from 0), member, token_ids, log_probs, text, finish_reason. The output appears whole, when all is
done.
"""

import json
import time
from pathlib import Path

from absl import app, flags

from tlt_jax import atomic
from tlt_jax.models import pretrained
from tlt_jax.rl.data import encode_record
from tlt_jax.rl.prompt_file import read_prompt_file
from tlt_jax.rl.prompt_record import PromptRecord
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Response, Sampling

MODEL = flags.DEFINE_string("model", None, "smollm2, a folder, a Hugging Face id or a .gguf file.")
PROMPTS = flags.DEFINE_string("prompts", None, "Prompt file.")
OUT = flags.DEFINE_string("out", None, "File to write; must not exist.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Responses to each prompt.", lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Longest response.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Smallest set of this mass; 1 keeps everything.")
TOP_K = flags.DEFINE_integer("top_k", 0, "The k likeliest tokens; 0 keeps everything.")
SEED = flags.DEFINE_integer("seed", 0, "Of the noise.", lower_bound=0, upper_bound=2**32 - 1)
ROWS = flags.DEFINE_integer("rows", 32, "Responses decoded together.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the arithmetic.")


def response_line(prompt: int, response: Response, text: str) -> str:
    return json.dumps(
        {
            "prompt": prompt,
            "member": response.member,
            "token_ids": response.tokens.tolist(),
            "log_probs": [round(float(x), 6) for x in response.log_probs],
            "text": text,
            "finish_reason": response.finish_reason,
        }
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    out = Path(OUT.value)
    try:
        sampling = Sampling(MAX_NEW_TOKENS.value, TEMPERATURE.value, TOP_P.value, TOP_K.value)
        if out.exists():
            raise ValueError(f"--out={out} exists; choose another file or remove it")
        records = read_prompt_file(PROMPTS.value)
        check_writable(out)
        model = pretrained.load(MODEL.value)
        generate(model, records, sampling, out)
    except (ValueError, OSError) as error:
        # What users can mend comes as one sentence; anything else keeps its traceback.
        raise SystemExit(str(error)) from None


def check_writable(out: Path):
    """Fail now, rather than after the sampling, where the file cannot be written."""
    try:
        atomic.check_writable(out)
    except OSError as error:
        raise ValueError(
            f"--out={out} cannot be written: {error.strerror}; choose another place"
        ) from None


def encode(records: list[PromptRecord], model: pretrained.Pretrained, new_tokens: int) -> list:
    """Token ids of each prompt; ValueError names the line of one that the model has no room for."""
    prompts = [encode_record(r, model.tokenizer) for r in records]
    for record, ids in zip(records, prompts):
        if len(ids) + new_tokens > model.config.max_context:
            raise ValueError(
                f"{record.where}: {len(ids)} tokens and --max_new_tokens="
                f"{new_tokens} exceed the model's context of {model.config.max_context}; shorten "
                "the prompt or lower --max_new_tokens"
            )
    return prompts


def generate(
    model: pretrained.Pretrained, records: list[PromptRecord], sampling: Sampling, out: Path
):
    prompts = encode(records, model, sampling.max_new_tokens)
    config = EngineConfig.fit(
        rows=min(ROWS.value, len(prompts) * SAMPLES.value),
        prompt_tokens=max(len(p) for p in prompts),
        new_tokens=sampling.max_new_tokens,
        shrink=4,
    )
    engine = Engine(model.config, config, model.tokenizer.eos_ids)
    began = time.monotonic()
    answers = engine.generate(
        model.params, prompts, samples=SAMPLES.value, sampling=sampling, seed=SEED.value
    )
    seconds = time.monotonic() - began
    lines = [
        response_line(i, r, model.tokenizer.decode(r.tokens))
        for i, a in enumerate(answers)
        for r in a
    ]
    atomic.write_text(out, "\n".join(lines) + "\n")
    tokens = sum(len(r.tokens) for a in answers for r in a)
    compiling = engine.pool.compile_seconds
    print(
        f"{len(lines)} responses, {tokens} tokens in {seconds:.1f} s, of which {compiling:.1f} s "
        f"compiling {len(engine.pool.programs)} programs: {out}"
    )


if __name__ == "__main__":
    flags.mark_flags_as_required(["model", "prompts", "out"])
    app.run(main)
