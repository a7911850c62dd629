"""Text as a source: ids word by word, and the table that is learned."""

import dataclasses
import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendaya import Model, PowerLaw, WaitK
from zendaya.audit import audit
from zendaya.encoders.base import encode
from zendaya.encoders.text import TextEncoder
from zendaya.errors import ConfigError, SourceError
from zendaya.nn.presets import preset
from zendaya.nn.tokenizer import Tokenizer

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


def translator(seed=0, **changes):
    """A small model whose source is text."""
    decoder = dataclasses.replace(preset("tiny").decoder, source_vocab=320, source_dim=1)
    return Model.from_preset("tiny", seed=seed, decoder=decoder, **changes)


def test_the_table_is_learned_with_the_model():
    model = translator()
    tokens = encode(TextEncoder(TOKENIZER), ["a dog runs"])
    model(model.batch([tokens.values_TE], [[7, 8]], PowerLaw(0))).sum().backward()
    touched = model.decoder.source_tokens.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert touched == sorted(set(ids(tokens)))
    model.length_logits(tokens.values_TE[None], torch.tensor([len(tokens)])).sum().backward()  # the head pools vectors, not numbers


@pytest.mark.parametrize("length", ["none", "fix", "inf"])
def test_a_model_that_reads_text_is_audited_like_any(length, tmp_path):
    model = translator(length=length, history=length == "inf")
    for schedule in (PowerLaw(1), WaitK(3, 1)):
        report = audit(model, schedule, cuts=2)
        assert report.passed, report.first
    model.save_pretrained(tmp_path)
    assert torch.equal(Model.from_pretrained(tmp_path).decoder.source_tokens.weight, model.decoder.source_tokens.weight)


def test_a_sentence_is_read_while_it_is_written():
    model, encoder = translator(), TextEncoder(TOKENIZER)
    session, state, read = model.open(WaitK(2, 1)), encoder.start(), []
    for piece in ("a dog ", "runs ov", "er the gre", "en grass "):
        tokens = encoder.read(state, piece)
        read.append(len(list(session.push(tokens.values_TE))))
    assert sum(read) > 0
    assert read[0] < sum(read)


@pytest.mark.parametrize("bad", [320.0, -1.0, 1.5, float("nan")])
def test_an_invalid_id_spoils_only_the_rows_that_read_it(bad):
    model = translator()
    source = torch.tensor([[5.0], [6.0], [7.0], [8.0]])
    spoiled = source.clone()
    spoiled[2] = bad
    with torch.inference_mode():
        clean = model(model.batch([source], [[9, 9, 9]], PowerLaw(1)))[0]
        other = model(model.batch([spoiled], [[9, 9, 9]], PowerLaw(1)))[0]
    assert torch.equal(clean[:2], other[:2])
    assert torch.isnan(other[2:]).all()
    with pytest.raises(SourceError, match="no known id"):
        list(model.open(WaitK(4, 1)).push(spoiled))


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="words_per_s"):
        TextEncoder(TOKENIZER, words_per_s=0)
    with pytest.raises(SourceError, match="is this text"):
        encode(TextEncoder(TOKENIZER), ["x" * 10_001])
    with pytest.raises(ConfigError, match="source_vocab"):
        dataclasses.replace(preset("tiny").decoder, source_vocab=320)


def test_real_sentences(data):
    with gzip.open(next((data / "multi30k").glob("val*.de.gz")), "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file][:300]
    tokenizer = Tokenizer.train(lines, vocab_size=1000)
    encoder = TextEncoder(tokenizer)
    for line in lines:
        assert ids(encode(encoder, [line[i : i + 3] for i in range(0, len(line), 3)])) == tokenizer.encode(" ".join(line.split()))
