"""One run of the engine over a queue of groups: which response sits in which row, and when.

Only host bookkeeping lives here. The device sees fixed shapes; see `engine.py` for the programs.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from tlt_jax.models.kv_cache import KVCache
from tlt_jax.spec.programs import bucket_for
from tlt_jax.spec.queue import Queue
from tlt_jax.spec.request import Group, Response
from tlt_jax.spec.round import Emitted
from tlt_jax.spec.state import DecodeState, no_new_rows


@dataclasses.dataclass
class Row:
    """The response that a row of the batch is working on."""

    group: Group
    member: int
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)
    features: list[np.ndarray] = dataclasses.field(default_factory=list)
    emitted: int = 0

    def response(self, finish_reason: str) -> Response:
        return Response(
            self.group,
            self.member,
            np.concatenate(self.tokens),
            np.concatenate(self.log_probs),
            finish_reason,
            np.concatenate(self.features) if self.features else None,
        )


@dataclasses.dataclass
class Prefix:
    """Prefilled prompts, on the device while a response to one of them waits in the queue."""

    cache: KVCache
    prompts: int  # shape of the batch: prompts x tokens
    tokens: int


class Session:
    """Drives an engine's programs over a queue of groups; made by `Engine.start`.

    Several sessions, each of its own engine, may take from one queue.
    """

    def __init__(self, engine, params: dict, queue: Queue, run_key: jax.Array):
        self.engine, self.params, self.queue, self.run_key = engine, params, queue, run_key
        self.prefixes: dict[Group, tuple[Prefix, int]] = {}
        self.in_flight: Emitted | None = None
        self.prefilling: jax.Array | None = None  # ready when the newest prompts are computed
        self.slots = engine.cache_bucket(queue.longest_prompt)
        self.rows: list[Row | None] = []
        self.state: DecodeState | None = None  # until the first rows enter

    def add(self, groups: Sequence[Group]):
        """Put more groups at the end of the queue, also while a segment is in flight.

        What only these need (a wider cache, a batch that grows again) compiles at its first use.
        """
        self.queue.add(groups)

    @property
    def live(self) -> int:
        """Rows that are working on a response."""
        return sum(row is not None for row in self.rows)

    @property
    def done(self) -> bool:
        return not self.queue and not self.live and self.in_flight is None

    def run(self) -> Iterator[Response]:
        """Yield responses as they finish."""
        while not self.done:
            self.dispatch()
            yield from self.collect()

    def dispatch(self, admit: int | None = None) -> bool:
        """Let at most `admit` waiting responses in (None: as many as there are rows for), then
        start one segment; do not wait. False, and nothing started, where there is no row to work
        on: another session has taken what waited."""
        if self.in_flight is not None:
            raise RuntimeError("a segment is in flight; collect it before dispatching the next")
        if self.done:
            raise RuntimeError("every response is finished; there is nothing to dispatch")
        self.prefilling = None
        room = self.engine.config.batch_buckets[-1] - self.live
        entering = self.queue.take(room if admit is None else min(admit, room))
        if not self.live and not entering:
            return False
        self._fit_rows(len(entering))
        self._grow_to(self.engine.cache_bucket(self.queue.longest_prompt))
        self._admit(entering)
        self.prefixes = {g: p for g, p in self.prefixes.items() if self.queue.waits(g)}
        self._grow()
        program = self.engine.decode_program(self.params, len(self.rows), self.slots)
        self.state, self.in_flight = program.run(self.params, self.state)
        return True

    def ready(self) -> bool:
        """Whether `collect` would return without waiting."""
        return self._flying().token.is_ready()

    def wait(self):
        """Wait until `ready`."""
        self._flying().token.block_until_ready()

    def _flying(self) -> Emitted:
        if self.in_flight is None:
            raise RuntimeError("no segment is in flight; dispatch one first")
        return self.in_flight

    def collect(self) -> list[Response]:
        """Wait for the segment in flight; the responses that it finished, in row order."""
        emitted, self.in_flight = jax.device_get(self._flying()), None
        finished = []
        for b, row in enumerate(self.rows):
            if row is None:
                continue
            # Indexing by a mask copies, so that a long row does not keep whole segments alive.
            kept = emitted.token[b] >= 0
            tokens = emitted.token[b][kept]
            if np.any(tokens >= self.engine.model.vocab_size):
                raise FloatingPointError(
                    f"the model's logits are NaN at draw {row.group.draw}, member {row.member}, "
                    f"response token {row.emitted}; check the weights"
                )
            row.tokens.append(tokens)
            row.log_probs.append(emitted.log_prob[b][kept])
            if emitted.features is not None:
                row.features.append(emitted.features[b][kept])
            row.emitted += len(tokens)
            reason = self._finish_reason(row, tokens)
            if reason is not None:
                finished.append(row.response(reason))
                self.rows[b] = None
        return finished

    def _finish_reason(self, row: Row, tokens: np.ndarray) -> str | None:
        if tokens[-1] in self.engine.eos_ids:
            return "stop"
        return "length" if row.emitted == row.group.sampling.max_new_tokens else None

    def _admit(self, entering: list[tuple[Group, int]]):
        """Give free rows to these responses; a prompt is prefilled once for all its members."""
        free = [b for b, row in enumerate(self.rows) if row is None]
        self._prefill([g for g in dict.fromkeys(g for g, _ in entering) if g not in self.prefixes])
        by_prefix: dict[int, list] = {}
        for b, (group, member) in zip(free, entering):
            self.rows[b] = Row(group, member)
            by_prefix.setdefault(id(self.prefixes[group][0]), []).append(b)
        for rows in by_prefix.values():
            self._fan_out(rows)

    def _prefill(self, groups: list[Group]):
        """Compute the caches of these prompts, in the largest batches that they fill."""
        engine = self.engine
        by_bucket: dict[int, list[Group]] = {}
        for group in groups:
            by_bucket.setdefault(engine.prompt_bucket(len(group.prompt)), []).append(group)
        for T, waiting in sorted(by_bucket.items()):
            while waiting:
                P = max(p for p in engine.config.prefill_rows if p <= len(waiting))
                batch, waiting = waiting[:P], waiting[P:]
                tokens, length = np.zeros((P, T), np.int32), np.zeros(P, np.int32)
                for i, group in enumerate(batch):
                    length[i] = len(group.prompt) - 1
                    tokens[i, : length[i]] = group.prompt[:-1]
                arrays = jax.device_put((tokens, length), engine.sharding)
                cache = engine.prefill_program(self.params, P, T).run(self.params, *arrays)
                prefix = Prefix(cache, P, T)
                self.prefilling = cache.length
                self.prefixes.update({group: (prefix, i) for i, group in enumerate(batch)})

    def _fan_out(self, rows: list[int]):
        """Start the responses just put into `rows`, all of one prefix batch, on the device."""
        engine, new = self.engine, no_new_rows(len(self.rows))
        for b in rows:
            row = self.rows[b]
            prefix, new.source[b] = self.prefixes[row.group]
            new.token[b] = row.group.prompt[-1]
            sampling = row.group.sampling
            new.limit[b] = len(row.group.prompt) + sampling.max_new_tokens
            new.domain[b], new.draw[b], new.member[b] = row.group.domain, row.group.draw, row.member
            new.sampling.temperature[b] = sampling.temperature
            new.sampling.top_p[b] = sampling.top_p
            new.sampling.top_k[b] = sampling.top_k
        program = engine.admit_program(
            len(self.rows), self.slots, prefix.prompts, prefix.tokens, self.run_key
        )
        new = jax.device_put(new, engine.sharding)
        self.state = program.run(self.state, prefix.cache, new, self.run_key)

    def _fit_rows(self, entering: int):
        """Move the live rows to the smallest bucket that holds them and those that enter.

        While rows enter the batch does not shrink: it is as large as it has to be until then.
        """
        size = bucket_for(self.engine.config.batch_buckets, self.live + entering)
        if not self.live and size != len(self.rows):
            self.slots = self.engine.cache_bucket(self.queue.longest_prompt)
            self.state = self.engine.empty_program(size, self.slots).run()
            self.rows = [None] * size
        if size == len(self.rows) or (entering and size < len(self.rows)):
            return
        keep = [b for b, row in enumerate(self.rows) if row is not None]
        padding = [len(self.rows)] * (size - len(keep))
        self._resize(keep + padding, self.slots)
        self.rows = [self.rows[b] for b in keep] + [None] * len(padding)

    def _grow(self):
        """Make room for what the next segment can write."""
        ahead = self.engine.config.segment_rounds
        ends = [
            len(row.group.prompt) - 1 + min(row.emitted + ahead, row.group.sampling.max_new_tokens)
            for row in self.rows
            if row is not None
        ]
        self._grow_to(max(ends))

    def _grow_to(self, slots: int):
        for wider in self.engine.config.cache_buckets:
            if self.slots < slots and wider > self.slots:
                self._resize(list(range(len(self.rows))), wider)
                self.slots = wider

    def _resize(self, rows: list[int], slots: int):
        program = self.engine.resize_program(len(self.rows), self.slots, len(rows), slots)
        order = jax.device_put(np.array(rows, np.int32), self.engine.sharding)
        self.state = program.run(self.state, order)
