"""The small measurements that decided how the decode path is written.

    python -m experiments.bench.primitives [--json]

Each choice is timed beside its alternative in one process, in turn, with SmolLM2's shapes and 30
layers of separate weights (so that nothing stays in a cache between layers). Medians; ratios are
alternative / choice, so above 1 the choice is faster.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

from tlt_jax.models import layers
from tlt_jax.models.kv_cache import TILE
from tlt_jax.spec import noise, sampling

LAYERS, WIDTH, MLP, KV_HEADS, GROUP, HEAD, VOCAB = 30, 576, 1536, 3, 3, 64, 49152


def alternate(choice, alternative, repetitions: int) -> dict[str, float]:
    """Median milliseconds of two functions run in turn, and the median of their ratios."""
    times = []
    for i in range(repetitions + 1):
        pair = []
        for function in (choice, alternative):
            start = time.perf_counter()
            jax.block_until_ready(function())
            pair.append(1e3 * (time.perf_counter() - start))
        if i:  # the first pair compiles
            times.append(pair)
    return {
        "choice_ms": statistics.median(a for a, _ in times),
        "alternative_ms": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


def normal(seed: int, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def products(rows: int, repetitions: int) -> dict:
    """Few-row products: weight first (`layers.linear`) against x @ w^T, up and down of an MLP."""
    up = [normal(i, MLP, WIDTH) for i in range(LAYERS)]
    down = [normal(i, WIDTH, MLP) for i in range(LAYERS)]
    x = normal(99, rows, WIDTH)

    def chain(product):
        def run(x, up, down):
            for a, b in zip(up, down):
                x = x + product(product(x, a), b) * 1e-3
            return x

        return jax.jit(run)

    ours, plain = chain(layers.linear), chain(lambda x, w: jnp.einsum("MI,OI->MO", x, w))
    return alternate(lambda: ours(x, up, down), lambda: plain(x, up, down), repetitions)


def layouts(rows: int, repetitions: int) -> dict:
    """Layers apart against layers stacked and scanned: the same products."""
    up = [normal(i, MLP, WIDTH) for i in range(LAYERS)]
    down = [normal(i, WIDTH, MLP) for i in range(LAYERS)]
    stacked = jnp.stack(up), jnp.stack(down)
    x = normal(99, rows, WIDTH)

    def block(x, weights):
        a, b = weights
        return x + layers.linear(layers.linear(x, a), b) * 1e-3, None

    @jax.jit
    def apart(x, up, down):
        for weights in zip(up, down):
            x, _ = block(x, weights)
        return x

    scanned = jax.jit(lambda x, stacked: jax.lax.scan(block, x, stacked)[0])
    return alternate(lambda: apart(x, up, down), lambda: scanned(x, stacked), repetitions)


def cache_scores(rows: int, slots: int, repetitions: int) -> dict:
    """Attention over the cache: tiled keys, multiplied and summed, against a batched product over
    keys [B, K, S, C]."""
    tiled = [normal(i, rows, KV_HEADS, slots // TILE, HEAD, TILE) for i in range(LAYERS)]
    flat = [normal(i, rows, KV_HEADS, slots, HEAD) for i in range(LAYERS)]
    q = normal(99, rows, KV_HEADS, GROUP, HEAD)

    def each(scores):
        return jax.jit(lambda q, keys: [scores(q * (1 + i), k) for i, k in enumerate(keys)])

    ours = each(layers.cached_scores)
    product = each(lambda q, k: jnp.einsum("BKGC,BKSC->BKGS", q, k))
    return alternate(lambda: ours(q, tiled), lambda: product(q, flat), repetitions)


def argmax(rows: int, repetitions: int) -> dict:
    """Noise and argmax over the vocabulary: two plain reductions against `jnp.argmax`."""
    logits, seeds = normal(0, rows, VOCAB), jnp.ones((rows, 2), jnp.uint32)
    ids = jnp.arange(VOCAB, dtype=jnp.uint32)

    def perturbed(logits):
        return logits + noise.gumbel(seeds, ids)

    ours = jax.jit(lambda x: sampling.first_argmax(perturbed(x)))
    paired = jax.jit(lambda x: jnp.argmax(perturbed(x), axis=1))
    return alternate(lambda: ours(logits), lambda: paired(logits), repetitions)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    n, results = args.repetitions, {}
    for rows in (1, 2, 4, 8, 16, 32, 64):
        results[f"weight-first product, {rows} rows"] = products(rows, n)
    for rows in (1, 8, 32):
        results[f"layers apart, {rows} rows"] = layouts(rows, n)
    for rows in (2, 8, 32):
        results[f"tiled cache scores, {rows} rows x 256 slots"] = cache_scores(rows, 256, n)
    for rows in (2, 32):
        results[f"noise and argmax, {rows} rows"] = argmax(rows, n)
    if args.json:
        print(json.dumps(results))
        return
    print(f"{'choice':<44}{'choice':>10}{'alternative':>14}{'ratio':>8}")
    for name, r in results.items():
        print(
            f"{name:<44}{r['choice_ms']:>7.2f} ms{r['alternative_ms']:>11.2f} ms{r['ratio']:>8.2f}"
        )


if __name__ == "__main__":
    main()
