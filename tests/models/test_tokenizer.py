"""Tokenizers: round trips, special tokens, chat templates, and what ends a response."""

import json

import gguf as gguf_package
import pytest

from tests.models.test_hf import TINY, random_params
from tlt_jax.models import gguf, hf, pretrained, tokenizer
from tlt_jax.models.config import ModelConfig

TEXTS = (
    "Hello, world!  Two  spaces\tand\ttabs\n\n\nthree lines \r\n",
    "3.14159 x 2,000 = 6283.18; 1234567890 007",
    "naïve café Ångström Übergröße ﬁ ½ ²",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and a zero\u200bwidth space, nbsp\u00a0here",
    "def f(x):\n    return {'a': x**2}  # it's they'll WE'RE",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def smollm2():
    return tokenizer.from_gguf(gguf.open_file(gguf.find_smollm2()), "smollm2")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(smollm2, text):
    for t in (smollm2, tokenizer.byte_tokenizer()):
        ids = t.encode(text)
        assert t.decode(ids, specials=True) == text
        assert all(0 <= i < t.vocab_size for i in ids)


def test_smollm2_ids(smollm2):
    """Known ids of the published tokenizer: one token per digit, no BOS, ChatML."""
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("12") == smollm2.encode("1") + smollm2.encode("2")
    assert smollm2.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert (smollm2.eos_ids, smollm2.pad_id, smollm2.bos_id) == ((2,), 2, 1)
    text = smollm2.decode(smollm2.chat(HELLO), specials=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_" not in smollm2.decode(smollm2.chat(HELLO))


def test_save_and_load_keep_every_id(smollm2, tmp_path):
    for name, one in (("a", smollm2), ("b", tokenizer.byte_tokenizer())):
        one.save(tmp_path / name)
        again = tokenizer.load_folder(tmp_path / name)
        assert again.eos_ids == one.eos_ids and again.pad_id == one.pad_id
        assert again.chat(HELLO) == one.chat(HELLO)
        for text in TEXTS:
            assert again.encode(text) == one.encode(text)


def test_byte_tokenizer_is_small():
    t = tokenizer.byte_tokenizer()
    assert t.vocab_size == 259
    assert len(t.encode("aé🙂")) == 1 + 2 + 4
    assert len({t.pad_id, *t.eos_ids}) == 2
    ids = t.chat(HELLO)
    assert t.decode(ids, specials=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_every_source_of_eos_counts(tmp_path):
    t = tokenizer.byte_tokenizer()
    t.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert tokenizer.load_folder(tmp_path).eos_ids == (5, 6, *t.eos_ids)


def edit(folder, **changes):
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def test_folder_without_template_pad_or_eos(tmp_path):
    tokenizer.byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    edit(tmp_path, pad_token=None)
    t = tokenizer.load_folder(tmp_path)
    assert t.pad_id == t.eos_ids[0]
    with pytest.raises(ValueError, match="no chat template"):
        t.chat(HELLO)
    edit(tmp_path, eos_token=None)
    with pytest.raises(ValueError, match="names no EOS token"):
        tokenizer.load_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        tokenizer.load_folder(tmp_path / "nothing")


def gguf_tokenizer(path, **changes):
    """A reader over a byte-level vocabulary with one merge, as a GGUF file."""
    pieces = sorted(tokenizer.pre_tokenizers.ByteLevel.alphabet()) + ["11", "<bos>", "<eot>"]
    writer = gguf_package.GGUFWriter(path, "llama")
    fields = {"model": "gpt2", "pre": "llama-bpe", "bos": 257, "eos": 258} | changes
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(pieces)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["1 1"])
    writer.add_bos_token_id(fields["bos"])
    writer.add_eos_token_id(fields["eos"])
    if "eot" in fields:
        writer.add_eot_token_id(fields["eot"])
    if "add_bos" in fields:
        writer.add_add_bos_token(fields["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.open_file(path)


def test_gguf_settings(tmp_path):
    t = tokenizer.from_gguf(gguf_tokenizer(tmp_path / "a", eos=257, eot=258), "a")
    assert t.eos_ids == (257, 258)
    assert t.encode("x")[0] == 257, "Llama 3 starts with a BOS"
    assert len(t.encode("1111")) == 4, "BOS, and digits in groups of three: 11 1, 1"
    t = tokenizer.from_gguf(gguf_tokenizer(tmp_path / "b", pre="qwen2", add_bos=False), "b")
    assert len(t.encode("1111")) == 4, "one token per digit"
    assert t.encode("e\u0301") == t.encode("é"), "Qwen composes characters first"
    with pytest.raises(ValueError, match="no chat template"):
        t.chat(HELLO)
    with pytest.raises(ValueError, match="tokenizer.ggml.pre='other' is not supported"):
        tokenizer.from_gguf(gguf_tokenizer(tmp_path / "c", pre="other"), "c")
    with pytest.raises(ValueError, match="tokenizer.ggml.model='llama' is not supported"):
        tokenizer.from_gguf(gguf_tokenizer(tmp_path / "d", model="llama"), "d")


def test_pretrained_folder(tmp_path):
    config = ModelConfig(**{**vars(TINY), "vocab_size": 320})
    t = tokenizer.byte_tokenizer()
    hf.save(tmp_path / "m", config, random_params(config), tokenizer=t)
    model = pretrained.load(tmp_path / "m")
    assert model.config == config and model.tokenizer.eos_ids == t.eos_ids
    assert model.tokenizer.encode("abc") == t.encode("abc")
    written = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert written == {"bos_token_id": None, "eos_token_id": t.eos_ids[0], "pad_token_id": t.pad_id}

    hf.save(tmp_path / "small", TINY, random_params(TINY), tokenizer=t)
    with pytest.raises(ValueError, match="ids up to 258, but the model embeds only 20"):
        pretrained.load(tmp_path / "small")
