"""Text as a source: ids word by word, and the table that is learned."""

import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendaya.encoders import encode
from zendaya.encoders.text import MAX_VOCAB, IdEmbedding, TextEncoder
from zendaya.errors import ConfigError, SourceError
from zendaya.text import Tokenizer

TEXTS = ["a dog runs over the green grass", "two men in red shirts don't stand, they run!", "ein Hund läuft über das grüne Gras"]
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=320)


def ids(tokens):
    return tokens.values_TE[:, 0].long().tolist()


@given(text=st.text(alphabet="ab cdü .,!'é\n\t\u00a0漢\u0301", max_size=60), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_words_one_by_one_are_the_text_at_once(text, sizes):
    encoder = TextEncoder(TOKENIZER)
    plain = " ".join(text.split())
    if not plain:
        with pytest.raises(SourceError, match="empty"):
            encode(encoder, [text])
        return
    chunks, place = [], 0
    while place < len(text):
        chunks.append(text[place : place + sizes[len(chunks) % len(sizes)]])
        place += len(chunks[-1])
    assert ids(encode(encoder, chunks)) == TOKENIZER.encode(plain)


def test_a_word_comes_when_it_has_ended():
    encoder = TextEncoder(TOKENIZER, words_per_s=2.0)
    state = encoder.start()
    assert len(encoder.read(state, "a d")) == len(TOKENIZER.encode("a"))
    assert len(encoder.read(state, "og")) == 0
    later = encoder.read(state, " ")
    assert ids(later) == TOKENIZER.encode(" dog")
    assert set(later.arrival_s) == {1.0}
    assert len(encoder.finish(state)) == 0
    assert encoder.traits.ids
    assert encoder.traits.dim == 1


def test_the_table_is_learned_and_exact():
    torch.manual_seed(0)
    table = IdEmbedding(320, 16)
    tokens = encode(TextEncoder(TOKENIZER), ["a dog runs"])
    vectors = table(tokens.values_TE[None])
    assert torch.equal(vectors[0], table.table.weight[ids(tokens)])
    vectors.sum().backward()
    touched = table.table.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert touched == sorted(set(ids(tokens)))


def test_what_cannot_be():
    table = IdEmbedding(320, 16)
    for bad in (320.0, -1.0, 1.5, float("nan")):
        with pytest.raises(SourceError, match="whole numbers in 0 … 319"):
            table(torch.tensor([[bad]]))
    with pytest.raises(SourceError, match="shape"):
        table(torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="words_per_s"):
        TextEncoder(TOKENIZER, words_per_s=0)
    with pytest.raises(ConfigError, match="ids"):
        IdEmbedding(MAX_VOCAB + 1, 1)
    with pytest.raises(SourceError, match="is this text"):
        encode(TextEncoder(TOKENIZER), ["x" * 10_001])


def test_real_sentences(data):
    with gzip.open(next((data / "multi30k").glob("val*.de.gz")), "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file][:300]
    tokenizer = Tokenizer.train(lines, vocab_size=1000)
    encoder = TextEncoder(tokenizer)
    for line in lines:
        assert ids(encode(encoder, [line[i : i + 3] for i in range(0, len(line), 3)])) == tokenizer.encode(" ".join(line.split()))
