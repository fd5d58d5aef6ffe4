"""Policy update against the rate of matrix products on the same machine.

    python -m experiments.bench.update [--json]

An update of 32 samples x 192 tokens of the SmolLM2-135M shape (random weights, float32) is timed
in alternation with large float32 products, so that both see the same machine. Its rate counts
6 x (parameters, head included) x tokens, nothing for attention scores or recomputation.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.rl.algorithm import AlgorithmConfig
from tlt_jax.rl.optimizer import TrainerConfig
from tlt_jax.rl.packing import Sample
from tlt_jax.rl.policy_trainer import PolicyTrainer

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    width=576,
    mlp_width=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    tied=True,
)


def matmul_flops_per_second(size: int = 2048, seconds: float = 1.0) -> float:
    """Best rate of size^3 float32 products within about `seconds`."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def random_samples(model: ModelConfig, rows: int, tokens: int, prompt: int) -> list[Sample]:
    """`rows` samples of `tokens` random tokens, the first `prompt` of them the prompt."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.vocab_size, (rows, tokens), dtype=np.int32)
    logp = np.full(tokens - prompt, -np.log(model.vocab_size))
    return [Sample(x[:prompt], x[prompt:], rng.normal(), logp) for x in ids]


def measure(model: ModelConfig, config: TrainerConfig, rows: int, tokens: int, args) -> dict:
    """Seconds of an update and the share of the matrix-product rate that it reaches."""
    params = transformer.init(model, jax.random.key(0))
    trainer = PolicyTrainer(
        model,
        config,
        AlgorithmConfig(),
        params,
        row_tokens=tokens,
        samples=rows,
        max_new_tokens=tokens - args.prompt,
    )
    samples = random_samples(model, rows, tokens, args.prompt)
    start = time.perf_counter()
    trainer.update(samples)
    first = time.perf_counter() - start
    seconds, rates = [], [matmul_flops_per_second()]
    for _ in range(args.repeat):
        start = time.perf_counter()
        trainer.update(samples)
        jax.block_until_ready(trainer.state)
        seconds.append(time.perf_counter() - start)
        rates.append(matmul_flops_per_second())
    flops = 6 * model.num_params * rows * tokens
    # Each update is held against the products timed just before and after it.
    shares = [flops / s / ((a + b) / 2) for s, a, b in zip(seconds, rates, rates[1:])]
    return {
        "rows": rows,
        "tokens_per_row": tokens,
        "prompt_tokens": args.prompt,
        "micro_batch": [trainer.shape.rows, trainer.shape.length],
        "first_update_s": first,
        "update_s": statistics.median(seconds),
        "update_gflops": flops / statistics.median(seconds) / 1e9,
        "matmul_gflops": statistics.median(rates) / 1e9,
        "share_of_matmul": statistics.median(shares),
        "shares": shares,
        "matmul_gflops_each": [rate / 1e9 for rate in rates],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192, help="per row, prompt included")
    parser.add_argument("--prompt", type=int, default=1, help="tokens that are not scored")
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    config = TrainerConfig(micro_batch_tokens=args.micro_batch_tokens)
    result = measure(SMOLLM2, config, args.rows, args.tokens, args)
    if args.json:
        print(json.dumps(result))
        return
    rows, length = result["micro_batch"]
    print(f"update of {args.rows} x {args.tokens} tokens, micro-batches of {rows} x {length}")
    print(f"  {result['update_s']:.1f} s, {result['update_gflops']:.0f} GFLOP/s", end="")
    print(f" (first: {result['first_update_s']:.1f} s with compilation)")
    print(f"  matrix products: {result['matmul_gflops']:.0f} GFLOP/s")
    # Rates that differ much between one moment and the next mean that others use the machine.
    each = ", ".join(f"{rate:.0f}" for rate in result["matmul_gflops_each"])
    print(f"  (around each update: {each})")
    each = ", ".join(f"{share:.1%}" for share in result["shares"])
    print(f"  share: {result['share_of_matmul']:.1%} (each: {each})")


if __name__ == "__main__":
    main()
