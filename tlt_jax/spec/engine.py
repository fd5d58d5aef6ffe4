"""The rollout engine: prompts in, responses out, through a few fixed-shape device programs.

    engine = Engine(model_config, EngineConfig.fit(rows=32, prompt_tokens=60, new_tokens=128), eos)
    responses = engine.generate(params, prompts, samples=4, sampling=Sampling(128))

`generate` is a loop over a `Session`, which a training loop of its own can drive: `dispatch` puts
one segment of rounds on the device and returns at once, `ready` polls, `collect` fetches what it
produced. Between segments rows are admitted from the queue, the batch is compacted to a smaller
bucket when the queue is dry, and the cache grows by buckets.

Which rows share a batch, and when, cannot change a token: see `noise.py`.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.models import kv_cache, layers, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.sharding.mesh import FSDP, TENSOR, single_device_mesh, slice_mesh
from tlt_jax.sharding.rules import DECODE, PREFIX, PUBLISHED, WHOLE, Rules, place, shardings
from tlt_jax.spec import noise
from tlt_jax.spec import round as rounds
from tlt_jax.spec import state as states
from tlt_jax.spec.programs import ProgramPool, bucket_for
from tlt_jax.spec.queue import Queue
from tlt_jax.spec.request import Group, Response, Sampling
from tlt_jax.spec.session import Session

MAX_DECODE_PROGRAMS = 12  # each costs seconds to compile


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The fixed shapes that programs are compiled for, each list ascending."""

    batch_buckets: tuple[int, ...] = (2, 8, 32)  # rows decoded together
    cache_buckets: tuple[int, ...] = (256,)  # slots of a row, a multiple of kv_cache.TILE
    prompt_buckets: tuple[int, ...] = (64, 128)  # prompt tokens, likewise
    prefill_rows: tuple[int, ...] = (1, 8)  # prompts prefilled together
    segment_rounds: int = 4  # rounds on the device between two looks by the host
    taps: tuple[int, ...] = ()  # hidden states to return as features, see transformer.forward

    def __post_init__(self):
        for name in ("batch_buckets", "cache_buckets", "prompt_buckets", "prefill_rows"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name}={values} must be ascending positive numbers")
        for name in ("cache_buckets", "prompt_buckets"):
            for value in getattr(self, name):
                if value % kv_cache.TILE:
                    raise ValueError(f"{name} holds {value}; use multiples of {kv_cache.TILE}")
        if self.prefill_rows[0] != 1:
            raise ValueError(f"prefill_rows={self.prefill_rows} must begin with 1")
        if self.prompt_buckets[-1] > self.cache_buckets[-1]:
            raise ValueError(
                f"prompt_buckets end at {self.prompt_buckets[-1]}, beyond the largest cache bucket "
                f"{self.cache_buckets[-1]}; raise cache_buckets"
            )
        if self.segment_rounds < 1:
            raise ValueError(f"segment_rounds={self.segment_rounds} must be at least 1")

    @classmethod
    def fit(
        cls,
        *,
        rows: int,
        prompt_tokens: int,
        new_tokens: int,
        shrink: int = 2,
        row_multiple: int = 1,
        **fields,
    ) -> "EngineConfig":
        """Buckets for at most `rows` rows, prompts of at most `prompt_tokens` and responses of at
        most `new_tokens`; every number of rows is made a multiple of `row_multiple`.

        Batches are divided by `shrink` down to 4, then 1: on CPUs two rows cost as much as four. A
        second cache of half the size where most of the tokens are new, and never more than
        MAX_DECODE_PROGRAMS pairs of batch and cache.
        """
        prompt = _round_up(prompt_tokens, kv_cache.TILE)
        total = _round_up(prompt_tokens + new_tokens, kv_cache.TILE)
        cache = [total]
        if total > 2 * prompt:
            cache.insert(0, _round_up(total // 2, kv_cache.TILE))
        batch = _shrinking(rows, shrink)
        while len(batch) * len(cache) > MAX_DECODE_PROGRAMS:
            if len(cache) > 1:
                cache = [total]
            else:
                shrink *= 2
            batch = _shrinking(rows, shrink)
        buckets = {
            "batch_buckets": tuple(sorted({_round_up(b, row_multiple) for b in batch})),
            "cache_buckets": tuple(cache),
            "prompt_buckets": tuple(sorted({_round_up(prompt // 2, kv_cache.TILE), prompt})),
        }
        return cls(**{**buckets, **fields})


class Engine:
    """Compiled programs for one model on one slice; holds no weights and no rows.

    eos_ids: tokens that end a response, any number of them. mesh: the devices that the programs run
    on together, with axes fsdp (which splits rows) and tensor (`sharding.mesh.slice_mesh`); by
    default JAX's first device alone.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        eos_ids: Sequence[int] = (),
        mesh: Mesh | None = None,
    ):
        bad = [i for i in config.taps if not 0 <= i <= model.num_layers]
        if bad:
            raise ValueError(f"taps {bad} are not layers; use 0 to num_layers={model.num_layers}")
        bad = [i for i in eos_ids if not 0 <= i < model.vocab_size]
        if bad:
            raise ValueError(
                f"eos_ids {bad} lie outside the vocabulary of {model.vocab_size}; they belong to "
                "another tokenizer"
            )
        self.model, self.config, self.eos_ids = model, config, tuple(eos_ids)
        self.mesh = slice_mesh(single_device_mesh(), 0) if mesh is None else mesh
        model.check_split(tensor=self.mesh.shape[TENSOR])
        fsdp = self.mesh.shape[FSDP]
        if any(rows % fsdp for rows in config.batch_buckets):
            raise ValueError(
                f"fsdp={fsdp} devices of a slice share its rows, so each of batch_buckets="
                f"{config.batch_buckets} must be a multiple of it"
            )
        self.sharding = NamedSharding(self.mesh, PartitionSpec())  # of what every device has whole
        self.pool = ProgramPool()
        self._structs: dict[tuple, object] = {}  # shapes of program arguments, by what they are

    def generate(
        self,
        params: dict,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
    ) -> list[list[Response]]:
        """`samples` responses to each prompt, in the order of the prompts.

        params: either layout; those of `transformer.decode_layout` are used as they are, stacked
        ones are copied into it first. Prompt i is draw i of the domain `noise.GENERATE` under the
        run key `seed`: the same call gives the same tokens whatever the buckets.
        """
        groups = [
            Group(tuple(ids), draw, samples, noise.GENERATE) for draw, ids in enumerate(prompts)
        ]
        session = self.start(params, groups, sampling=sampling, run_key=jax.random.key(seed))
        answers = [[None] * samples for _ in groups]
        for response in session.run():
            answers[response.group.draw][response.member] = response
        return answers

    def start(
        self, params: dict, groups: Sequence[Group], *, sampling: Sampling, run_key: jax.Array
    ) -> Session:
        """Check everything, compile what is missing, and queue the groups in order.

        sampling: of every group that brings none of its own.
        """
        queue = Queue(self.check, sampling)
        queue.add(groups)
        return self.session(params, queue, run_key, len(queue))

    def session(self, params: dict, queue: Queue, run_key: jax.Array, responses: int) -> Session:
        """A session that takes from `queue`, as others may; what it needs is compiled.

        responses: how many it takes at first, or more (then rows are refilled as they finish).
        """
        if isinstance(params["layers"], dict):
            params = transformer.decode_layout(self.model, params)
        params = place(self.mesh, PUBLISHED, params)
        if jax.random.key_impl(run_key) != "threefry2x32":
            raise ValueError(
                f"run_key is of the kind {jax.random.key_impl(run_key)}; make it with "
                "jax.random.key(seed, impl='threefry2x32'), whose bits do not depend on the device"
            )
        run_key = jax.device_put(run_key, self.sharding)
        self.compile(params, queue.groups, run_key, responses)
        return Session(self, params, queue, run_key)

    def check(self, group: Group):
        """Raise ValueError for a group that the engine's programs cannot sample."""
        n, c, sampling = len(group.prompt), self.config, group.sampling
        if not n:
            raise ValueError(f"the prompt of draw {group.draw} is empty; give at least one token")
        if group.members < 1:
            raise ValueError(
                f"draw {group.draw} asks for {group.members} samples; ask for 1 or more"
            )
        if not 0 <= group.draw < 2**32:
            raise ValueError(f"draw {group.draw} does not fit 32 bits; use 0 to 2^32 - 1")
        low, high = min(group.prompt), max(group.prompt)
        if low < 0 or high >= self.model.vocab_size:
            raise ValueError(
                f"the prompt of draw {group.draw} holds token {low if low < 0 else high}, outside "
                f"the vocabulary of {self.model.vocab_size}; was another tokenizer used?"
            )
        if n > c.prompt_buckets[-1]:
            raise ValueError(
                f"the prompt of draw {group.draw} has {n} tokens, more than the largest prompt "
                f"bucket {c.prompt_buckets[-1]}; raise prompt_buckets or shorten the prompt"
            )
        total = n + sampling.max_new_tokens
        if total > c.cache_buckets[-1]:
            raise ValueError(
                f"the prompt of draw {group.draw} ({n} tokens) and max_new_tokens="
                f"{sampling.max_new_tokens} need {total} cache slots, more than the largest cache "
                f"bucket {c.cache_buckets[-1]}; raise cache_buckets or lower max_new_tokens"
            )
        if total > self.model.max_context:
            raise ValueError(
                f"the prompt of draw {group.draw} ({n} tokens) and max_new_tokens="
                f"{sampling.max_new_tokens} exceed the model's context of {self.model.max_context}"
            )

    # Programs. A name tells everything that distinguishes a program within one engine.

    def compile(self, params: dict, groups: Sequence[Group], run_key: jax.Array, responses: int):
        """Compile every program that `responses` responses to these groups, or more, can need, so
        that nothing compiles later."""
        c = self.config
        start = bucket_for(c.batch_buckets, responses)
        longest = max((len(g.prompt) for g in groups), default=1)
        first = self.cache_bucket(longest)
        total = max((len(g.prompt) + g.sampling.max_new_tokens for g in groups), default=1)
        last = max(first, bucket_for(c.cache_buckets, total))
        batches = [b for b in c.batch_buckets if b <= start]
        caches = [s for s in c.cache_buckets if first <= s <= last]
        self.empty_program(start, first)
        for T in sorted({self.prompt_bucket(len(g.prompt)) for g in groups}):
            for P in (p for p in c.prefill_rows if p <= max(1, len(groups))):
                self.prefill_program(params, P, T)
                for S in caches:
                    self.admit_program(start, S, P, T, run_key)
        for S in caches:
            for B in batches:
                self.decode_program(params, B, S)
                for larger in (b for b in batches if b > B):
                    self.resize_program(larger, S, B, S)
        for S, wider in zip(caches, caches[1:]):
            for B in batches:
                self.resize_program(B, S, B, wider)

    def prompt_bucket(self, tokens: int) -> int:
        return bucket_for(self.config.prompt_buckets, tokens - 1)

    def cache_bucket(self, prompt_tokens: int) -> int:
        """The cache that a prompt starts in: it takes the whole prefix and one more token."""
        room = max(self.prompt_bucket(prompt_tokens), prompt_tokens)
        return bucket_for(self.config.cache_buckets, room)

    def state_struct(self, rows: int, slots: int):
        return self._struct("state", DECODE, states.empty, self.model, rows, slots)

    def _struct(self, name: str, rules: Rules, function, *static):
        """Shapes and placement of what `function` gives for static arguments; worked out once,
        because every dispatch asks."""
        if (name, *static) not in self._structs:
            tree = jax.eval_shape(partial(function, *static))
            self._structs[name, *static] = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                tree,
                shardings(self.mesh, rules, tree),
            )
        return self._structs[name, *static]

    def _ints(self, *shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.sharding)

    def decode_program(self, params, B: int, S: int):
        function = partial(
            rounds.segment,
            self.model,
            rounds=self.config.segment_rounds,
            eos_ids=self.eos_ids,
            taps=self.config.taps,
        )
        args = (params, self.state_struct(B, S))
        name, out = f"decode rows={B} slots={S}", (placement(args[1]), self.sharding)
        return self.pool.get(name, function, *args, out=out, donate=(1,))

    def prefill_program(self, params, P: int, T: int):
        function, args = partial(prefill, self.model), (params, self._ints(P, T), self._ints(P))
        out = placement(self._prefix_struct(P, T))
        return self.pool.get(f"prefill prompts={P} tokens={T}", function, *args, out=out)

    def _prefix_struct(self, P: int, T: int):
        return self._struct("prefix", PREFIX, kv_cache.empty, self.model, P, T)

    def admit_program(self, B: int, S: int, P: int, T: int, run_key):
        new = self._struct("new rows", WHOLE, states.no_new_rows, B)
        args = (self.state_struct(B, S), self._prefix_struct(P, T), new, run_key)
        name = f"admit rows={B} slots={S} prompts={P} tokens={T}"
        return self.pool.get(name, states.admit, *args, out=placement(args[0]), donate=(0,))

    def resize_program(self, B: int, S: int, to_B: int, to_S: int):
        function = partial(states.take_rows, slots=to_S)
        name = f"resize {B}x{S} to {to_B}x{to_S}"
        out = placement(self.state_struct(to_B, to_S))
        return self.pool.get(name, function, self.state_struct(B, S), self._ints(to_B), out=out)

    def empty_program(self, B: int, S: int):
        function, out = partial(states.empty, self.model, B, S), placement(self.state_struct(B, S))
        return self.pool.get(f"empty rows={B} slots={S}", function, out=out)


def placement(structs):
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda x: x.sharding, structs)


def prefill(model: ModelConfig, params: dict, tokens_PT, length_P) -> kv_cache.KVCache:
    """The cache of `length` tokens of each prompt; no logits are computed."""
    P, T = tokens_PT.shape
    places = jnp.broadcast_to(jnp.arange(T)[None], (P, T))
    mask = layers.causal_mask((places < length_P[:, None]).astype(jnp.int32))
    out = transformer.forward(model, params, tokens_PT, places, mask)
    return kv_cache.from_prefix(out.kv, length_P)


def _shrinking(rows: int, factor: int) -> list[int]:
    """32 by 2: 32, 16, 8, 4, 1."""
    sizes = [rows]
    while sizes[-1] // factor >= 4:
        sizes.append(sizes[-1] // factor)
    return sizes if sizes[-1] == 1 else [*sizes, 1]


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
