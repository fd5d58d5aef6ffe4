"""Samples of uneven length to micro-batches of one fixed shape, on the host.

Which logits score which token is decided in one place, `scored_places`. Masks come from
lengths, never from token values: an EOS is a generated token like any other, and a pad id that
equals it is harmless.

Packed rows hold the prompt of a group once, followed by its responses: each response attends to
the prompt and to itself. With 8 responses of 12 tokens to a prompt of 40 that is 136 tokens of
work in place of 416, and the same gradient.
"""

import dataclasses

import flax.struct
import jax
import numpy as np

OPTIONAL = ("old_logp", "reference_logp")  # log-probs that all samples of an update have, or none
INTEGERS = ("at", "targets", "sample", "sequence")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response with its per-token values."""

    prompt: np.ndarray  # [P] int, at least one token
    response: np.ndarray  # [R] int, as sampled: a final EOS included
    advantages: np.ndarray | float  # [R], or one number for all tokens
    rollout_logp: np.ndarray  # [R] log-probs under the logits that were sampled
    old_logp: np.ndarray | None = None  # [R] denominator of the ratio; None: the policy itself
    reference_logp: np.ndarray | None = None  # [R] under the policy that a KL is taken to
    group: int | None = None  # samples of one group have the same prompt and may share it

    def __post_init__(self):
        if len(self.prompt) == 0:
            raise ValueError("a sample has an empty prompt; start it with a BOS or newline token")
        for name in ("advantages", "rollout_logp", "old_logp", "reference_logp"):
            size = np.size(getattr(self, name)) if getattr(self, name) is not None else None
            scalar = name == "advantages" and np.ndim(self.advantages) == 0
            if size is not None and not scalar and size != len(self.response):
                raise ValueError(
                    f"{name} has {size} values for a response of {len(self.response)} tokens; "
                    "give one per response token"
                )

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@flax.struct.dataclass
class PackedBatch:
    """A micro-batch: B rows of T tokens and the list of N = B * T places for scored tokens.

    The first `count` places of the list are real; the others point at 0 and hold zeros. Per-token
    numbers are float64 on the host; a jitted function takes them in JAX's default precision.
    """

    tokens: np.ndarray  # [B, T] int32
    positions: np.ndarray  # [B, T] int32, of the token within its own sample
    segments: np.ndarray  # [B, T] int32, 1, 2, … within a row; 0 is padding
    prefixes: np.ndarray  # [B, T] int32, the segment of the shared prompt; 0 where there is none
    at: np.ndarray  # [N] int32, b * T + t of the logits that score the token
    targets: np.ndarray  # [N] int32, the token scored
    sample: np.ndarray  # [N] int32, index of its sample; -1 past `count`
    sequence: np.ndarray  # [N] int32, the same counted from 0 within the micro-batch
    advantages: np.ndarray  # [N] float
    weights: np.ndarray  # [N] float, of the token in the loss
    rollout_logp: np.ndarray  # [N] float
    old_logp: np.ndarray | None  # [N] float, or None for all
    reference_logp: np.ndarray | None  # [N] float, or None for all
    count: np.ndarray  # [] int32, scored tokens


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Rows and tokens per row of every micro-batch of a run."""

    rows: int
    length: int

    @classmethod
    def within(cls, budget: int, length: int, samples: int) -> "BatchShape":
        """The shape that fits `budget` tokens and spreads `samples` rows evenly.

        32 rows of 192 tokens within 2048 tokens: 10 would fit, 4 micro-batches are needed, so 8.
        """
        if length > budget:
            raise ValueError(
                f"micro_batch_tokens={budget} is less than one row of {length} tokens; "
                f"raise it to at least {length} or shorten prompts and responses"
            )
        batches = -(-samples // (budget // length))
        return cls(rows=-(-samples // batches), length=length)


def scored_places(prompt_end: int, start: int, response: int) -> np.ndarray:
    """Where the logits are that score the response tokens at `start`, `start` + 1, …, in order.

    Logits at a token predict the token after it, so the first response token is scored at the
    prompt's last token, wherever that stands. Worked: prompt a b c at 0 1 2, response x y at 7 8
    (3 to 6 hold another response to the same prompt): x is scored at 2, y at 7; 8 scores nothing.
    """
    places = np.arange(start - 1, start - 1 + response)
    places[:1] = prompt_end
    return places


def first_fit_decreasing(sizes: list[int], room: int) -> list[list[int]]:
    """Indices of `sizes` in rows of at most `room`: longest first, each into the first row that
    holds it. Ties keep their order, so the result is a function of the sizes alone."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((r for r, free in enumerate(left) if sizes[i] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(i)
        left[row] -= sizes[i]
    return rows


def bundles(samples: list[Sample], room: int) -> list[list[int]]:
    """Indices of samples that share one copy of their prompt: as many of a group, in order, as
    `room` tokens hold, then the next bundle. Samples without a group stay alone."""
    open_bundle: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    out: list[list[int]] = []
    for i, sample in enumerate(samples):
        group, size = sample.group, len(sample.response)
        if group is not None and left.get(group, -1) >= size:
            open_bundle[group].append(i)
            left[group] -= size
            continue
        out.append([i])
        if group is not None:
            open_bundle[group], left[group] = out[-1], room - sample.tokens
    return out


def mini_batches(samples: list[Sample], count: int) -> list[list[Sample]]:
    """Samples in at most `count` parts of whole groups, in the order in which the groups come.

    As many groups to each part as possible is even; fewer parts where there are fewer groups. A
    sample without a group is one of its own.
    """
    groups: dict[object, list[Sample]] = {}
    for i, sample in enumerate(samples):
        key = ("alone", i) if sample.group is None else sample.group
        groups.setdefault(key, []).append(sample)
    members = list(groups.values())
    count = min(count, len(members))
    ends = [len(members) * (i + 1) // count for i in range(count)]
    return [sum(members[a:b], []) for a, b in zip([0, *ends], ends)]


def pack(
    samples: list[Sample],
    shape: BatchShape,
    *,
    packed: bool,
    weights: np.ndarray | None = None,
    shards: int = 1,
) -> list[PackedBatch]:
    """Samples in micro-batches of `shape`; what is not full is filled with empty rows.

    packed: several samples share a row (attention is cut by `segments`), those of one group also
    their prompt; else one per row, in order. weights: of each token of a sample in the loss, one
    number per sample; 0 where there is no loss. shards: devices that compute as many micro-batches
    at once (`side_by_side`); rows are dealt to them in turn, so that each has its share.
    Raises ValueError for a sample longer than a row.
    """
    weights = np.zeros(len(samples)) if weights is None else weights
    sizes = [s.tokens for s in samples]
    for i, size in enumerate(sizes):
        if size > shape.length:
            raise ValueError(
                f"sample {i} has {size} tokens (prompt {len(samples[i].prompt)}, response "
                f"{len(samples[i].response)}), a row holds {shape.length}; raise the row length"
            )
    for name in OPTIONAL:
        if len({getattr(s, name) is None for s in samples}) > 1:
            raise ValueError(f"some samples have {name} and some do not; give it for all or none")
    rows = [[[i]] for i in range(len(samples))]  # row, bundle, sample
    if packed:
        parts = bundles(samples, shape.length)
        together = [sizes[b[0]] + sum(len(samples[i].response) for i in b[1:]) for b in parts]
        fitted = first_fit_decreasing(together, shape.length)
        rows = [[parts[p] for p in row] for row in fitted]
    if shards == 1:
        parts = [rows[i : i + shape.rows] for i in range(0, len(rows), shape.rows)]
    else:
        count = -(-len(rows) // (shape.rows * shards)) * shards
        parts = [rows[i::count] for i in range(count)]
    return [_batch(samples, weights, part, shape) for part in parts]


def _batch(
    samples: list[Sample], weights: np.ndarray, rows: list[list[list[int]]], shape: BatchShape
) -> PackedBatch:
    B, T = shape.rows, shape.length
    tokens, positions, segments, prefixes = (np.zeros((B, T), np.int32) for _ in range(4))
    given = [name for name in OPTIONAL if getattr(samples[0], name) is not None]
    per_token = ["advantages", "rollout_logp", *given]
    scored = {name: [] for name in (*INTEGERS, "weights", *per_token)}
    sequence = 0
    for b, row in enumerate(rows):
        start, segment = 0, 0
        for bundle in row:
            prompt = samples[bundle[0]].prompt
            P = len(prompt)
            tokens[b, start : start + P] = prompt
            positions[b, start : start + P] = np.arange(P)
            segment += 1
            segments[b, start : start + P] = shared = segment
            last, start = b * T + start + P - 1, start + P  # place of the prompt's last token
            for i in bundle:
                s, R = samples[i], len(samples[i].response)
                if not np.array_equal(s.prompt, prompt):
                    raise ValueError(f"samples {bundle[0]} and {i} share a group, not a prompt")
                here = slice(start, start + R)
                tokens[b, here] = s.response
                positions[b, here] = P + np.arange(R)
                segment += 1
                segments[b, here], prefixes[b, here] = segment, shared
                scored["at"].append(scored_places(last, b * T + start, R))
                scored["targets"].append(s.response)
                scored["sample"].append(np.full(R, i))
                scored["sequence"].append(np.full(R, sequence))
                scored["weights"].append(np.full(R, weights[i]))
                for name in per_token:
                    scored[name].append(np.broadcast_to(getattr(s, name), R))
                start, sequence = start + R, sequence + (R > 0)
    lists = {name: np.concatenate([*parts, []]) for name, parts in scored.items()}
    count = len(lists["at"])

    def padded(name):
        dtype = np.int32 if name in INTEGERS else np.float64
        out = np.full(B * T, -1 if name == "sample" else 0, dtype)
        out[:count] = lists[name]
        return out

    fields = dict.fromkeys(OPTIONAL) | {name: padded(name) for name in scored}
    count = np.int32(count)
    return PackedBatch(tokens, positions, segments, prefixes, count=count, **fields)


def side_by_side(batches: list[PackedBatch], shards: int) -> list[PackedBatch]:
    """Micro-batches for `shards` devices at once (as `pack` makes them): every array gets an axis
    of that size in front. For one device they stay as they are."""
    if shards == 1:
        return batches
    starts = range(0, len(batches), shards)
    return [jax.tree.map(lambda *x: np.stack(x), *batches[i : i + shards]) for i in starts]


def unpack(batches: list[PackedBatch], values: list[np.ndarray], samples: int) -> list[np.ndarray]:
    """Per-place values [N] of every micro-batch back to one array per sample, in token order."""
    out = [np.zeros(0, np.float32)] * samples
    for batch, value in zip(batches, values):
        # Places of one sample lie together and in order.
        for i in np.unique(batch.sample[: batch.count]):
            out[i] = np.asarray(value)[batch.sample == i]
    return out
