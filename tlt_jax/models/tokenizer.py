"""Text to token ids and back: a thin class over a transformers fast tokenizer, without torch.

Masks are built from lengths elsewhere; no token value, the pad id's included, means "not there".
"""

import dataclasses
import functools
import json
import os
from pathlib import Path

import jinja2
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tlt_jax.models import gguf

# transformers says on import that it misses torch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What splits text before byte pairs are merged, by `tokenizer.ggml.pre`.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """`fast` does the work; eos_ids are all ids that end a response, most telling first."""

    fast: PreTrainedTokenizerFast
    eos_ids: tuple[int, ...]

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.fast.get_vocab().values()) + 1

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: n tokens stand for at most n times as many."""
        return max(map(len, self.fast.get_vocab()))

    @property
    def bos_id(self) -> int | None:
        return self.fast.bos_token_id

    @property
    def pad_id(self) -> int:
        """An id to fill unused places with: the pad token, or the first EOS where there is none."""
        return self.eos_ids[0] if self.fast.pad_token_id is None else self.fast.pad_token_id

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. A BOS is added if and only if the tokenizer's own default does;
        special tokens spelt out in the text are recognised."""
        return list(self.fast.encode(text))

    def chat(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation up to where the assistant answers; the template adds any BOS.

        messages: dictionaries with `role` and `content`. Raises ValueError without a template, and
        for messages that the template refuses (many want user and assistant to alternate).
        """
        if not self.fast.chat_template:
            raise ValueError(
                "this tokenizer has no chat template, so 'messages' cannot be encoded; "
                "give a raw 'prompt' instead or add chat_template.jinja to the model folder"
            )
        try:
            text = self.fast.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses 'messages': {error}") from None
        return list(self.fast.encode(text, add_special_tokens=False))

    def decode(self, ids, *, specials: bool = False) -> str:
        """Text of token ids, special tokens left out unless `specials`."""
        ids = [int(i) for i in ids]
        return self.fast.decode(
            ids, skip_special_tokens=not specials, clean_up_tokenization_spaces=False
        )

    def save(self, folder) -> None:
        """Write the tokenizer's files into a folder; `load_folder` reads them."""
        self.fast.save_pretrained(folder)


def load_folder(folder) -> Tokenizer:
    """The tokenizer of a model folder, with EOS ids from generation_config.json, config.json and
    the tokenizer itself.

    Raises FileNotFoundError without tokenizer files, ValueError where no EOS can be found.
    """
    folder = Path(folder)
    if not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")):
        raise FileNotFoundError(f"{folder} has no tokenizer.json or tokenizer_config.json")
    fast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise ValueError(f"{folder}: only fast tokenizers (tokenizer.json) are supported")
    eos = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            eos += ids if isinstance(ids, list) else [ids]
    return Tokenizer(fast, _eos_ids([*eos, fast.eos_token_id], str(folder)))


def _eos_ids(ids: list, where: str) -> tuple[int, ...]:
    unique = tuple(dict.fromkeys(int(i) for i in ids if i is not None))
    if not unique:
        raise ValueError(f"{where} names no EOS token; set eos_token_id in generation_config.json")
    return unique


def from_gguf(reader, where: str) -> Tokenizer:
    """The byte-pair tokenizer that a GGUF file describes (`gguf.open_file` gives the reader).

    Raises ValueError naming a tokenizer model or pre-tokenizer that is not supported.
    """

    def get(name: str, default=None):
        return gguf.value(reader, f"tokenizer.{name}", default)

    if (kind := get("ggml.model")) != "gpt2":
        raise ValueError(
            f"{where}: tokenizer.ggml.model={kind!r} is not supported, only 'gpt2' (byte pairs) "
            "is; load the Hugging Face folder of this model instead"
        )
    pieces, pre = get("ggml.tokens"), get("ggml.pre")
    merges = [tuple(m.split(" ")) for m in get("ggml.merges")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    # Llama 3 takes a word that is in the vocabulary whole, even where no merges lead to it.
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    core.normalizer, core.pre_tokenizer = _splitting(pre, where)
    core.decoder = decoders.ByteLevel()
    types = get("ggml.token_type")
    for kind in (CONTROL, USER_DEFINED):
        added = [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for piece, t in zip(pieces, types)
            if t == kind
        ]
        core.add_tokens(added)

    ids = {n: get(f"ggml.{n}_token_id") for n in ("bos", "eos", "eot", "padding", "unknown")}
    core.post_processor = _ends(
        pieces,
        ids["bos"] if get("ggml.add_bos_token", pre == "llama-bpe") else None,
        ids["eos"] if get("ggml.add_eos_token", False) else None,
    )
    roles = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{role: pieces[ids[n]] for n, role in roles.items() if ids[n] is not None},
    )
    return Tokenizer(fast, _eos_ids([ids["eos"], ids["eot"]], where))


def _splitting(pre: str | None, where: str) -> tuple:
    """(normalizer or None, pre-tokenizer) as the tokenizer.json of the family has them."""
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return None, pre_tokenizers.Sequence([digits, whole])
    if pre not in ("qwen2", "llama-bpe"):
        raise ValueError(
            f"{where}: tokenizer.ggml.pre={pre!r} is not supported, only smollm, qwen2 and "
            "llama-bpe are; load the Hugging Face folder of this model instead"
        )
    digits = "" if pre == "qwen2" else "{1,3}"
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS % digits), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    normalizer = normalizers.NFC() if pre == "qwen2" else None
    return normalizer, pre_tokenizers.Sequence([words, whole])


def _ends(pieces: list[str], bos: int | None, eos: int | None):
    """A post-processor that puts BOS before and EOS after a text, where they are not None."""
    ends = [(pieces[i], i) for i in (bos, eos) if i is not None]
    if not ends:
        return processors.ByteLevel(trim_offsets=False)
    before = [] if bos is None else [pieces[bos]]
    after = [] if eos is None else [pieces[eos]]
    one, two = [*before, "$A", *after], [*before, "$B:1", *after]
    return processors.TemplateProcessing(single=one, pair=[*one, *two], special_tokens=ends)


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte (ids 0 to 255) and three special ones: for models made in tests.

    It needs no file, has a chat template, and 259 ids; <|im_end|> ends a response.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=BYTE_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
    )
    return Tokenizer(fast, (fast.eos_token_id,))
