"""A random policy's vocabulary: at least the bytes', more where devices are to divide it."""

import jax
import pytest

from tlt_jax.rl import policy


def test_a_padded_vocabulary_has_rows_that_no_text_uses():
    made = policy.load(policy.PolicyConfig(path="", vocab_size=260), jax.random.key(0))
    assert made.model.vocab_size == made.params["embed"].shape[0] == 260
    assert made.tokenizer.vocab_size == policy.BYTES
    assert max(made.tokenizer.encode("é, ÿ and \u65e5")) < policy.BYTES


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"policy.vocab_size=258 must be at least 259"):
        policy.PolicyConfig(vocab_size=258)


def test_an_answer_with_an_unused_id_still_reads():
    """A random policy samples those rows, too."""
    text = policy.load(policy.PolicyConfig(path="", vocab_size=260), jax.random.key(0)).tokenizer
    a, b = text.encode("ab")
    assert text.decode([a, policy.BYTES, b]) == "ab"
