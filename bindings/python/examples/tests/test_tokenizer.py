"""Both kinds of tokenizer on tiny tables."""

import pytest
from conftest import byte_pair_tables, sentence_piece_tables, write_model

from engine.gguf_file import ModelFile
from engine.tokenizer import WORDS, cut, load_tokenizer

import regex

TEXTS = ["the", " the theatre, 1817!", "naïve café — 漢字 🙂", "tabs\tand\r\nlines\n\n  indented", "", " ", "\x00\x7f"]


@pytest.fixture
def byte_pairs(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", byte_pair_tables)
    return load_tokenizer(ModelFile(tmp_path / "m.gguf"))


@pytest.fixture
def sentence_pieces(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", sentence_piece_tables)
    return load_tokenizer(ModelFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(byte_pairs, sentence_pieces, text):
    for tokenizer in (byte_pairs, sentence_pieces):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_pairs_merge_by_rank(byte_pairs):
    names = [byte_pairs.tokens[i] for i in byte_pairs.encode("the the tthe th")]
    assert names == ["the", "\u0120the", "\u0120", "t", "the", "\u0120", "th"]


def test_sentence_pieces_merge_by_score(sentence_pieces):
    names = [sentence_pieces.tokens[i] for i in sentence_pieces.encode("hello hell\u00e9")]
    # The best union first: 'he' and 'll', then 'hell', 'hello', and the word mark last; unknown bytes apart.
    assert names == ["\u2581hello", "\u2581", "hell", "<0xC3>", "<0xA9>"]


def test_special_tokens_only_where_asked_for(byte_pairs):
    text = "<|im_start|>the<|im_end|>"
    assert len(byte_pairs.encode(text, special=True)) == 3
    assert byte_pairs.ids["<|im_start|>"] not in byte_pairs.encode(text)
    assert byte_pairs.decode(byte_pairs.encode(text, special=True)) == "the"
    assert byte_pairs.decode(byte_pairs.encode(text)) == text


def test_chat_follows_the_tables(byte_pairs, sentence_pieces):
    assert byte_pairs.chat("the")[0] == byte_pairs.ids["<|im_start|>"]
    assert byte_pairs.stops == {byte_pairs.ids["<|im_end|>"]}
    assert sentence_pieces.chat("hello")[0] == 1
    assert sentence_pieces.decode(sentence_pieces.chat("hello")) == "[INST] hello [/INST]"


@pytest.mark.parametrize("name, text, words", [
    ("gpt-2", "I'll see 123 cats  now", ["I", "'ll", " see", " 123", " cats", " ", " now"]),
    ("smollm", "see 123", ["see", " ", "1", "2", "3"]),
    ("qwen2", "I'LL see 123\n\nok", ["I", "'LL", " see", " ", "1", "2", "3", "\n\n", "ok"]),
    ("llama-bpe", "x 12345 (y)", ["x", " ", "123", "45", " (", "y", ")"]),
    ("default", "a=12345.", ["a", "=", "123", "45", "."]),
])
def test_words(name, text, words):
    pieces = [text]
    for pattern in WORDS[name]:
        pieces = [part for piece in pieces for part in cut(regex.compile(pattern), piece)]
    assert pieces == words
