import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya import Tokenizer, ZendayaError
from zendaya.nn.config import Framing

TOKENIZER = Tokenizer.train(["the cat sat on the mat", "the dog sat on the log"], vocab_size=290)


@given(st.text())
def test_any_text_comes_back(text):
    import unicodedata

    normal = unicodedata.normalize("NFC", text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == normal


@given(st.text(min_size=1))
def test_streamed_text_equals_the_whole(text):
    add = TOKENIZER.stream()
    ids = TOKENIZER.encode(text)
    whole = "".join(add(token) for token in ids)
    assert TOKENIZER.decode(ids).startswith(whole.replace("\ufffd", "")) or "\ufffd" in text
    if "\ufffd" not in text:
        assert whole == TOKENIZER.decode(ids)


def test_special_ids_are_not_text():
    framing = TOKENIZER.framing()
    assert framing == Framing(prompt=(1,), end=2, previous=3, suppress=(0, 1, 3))
    assert TOKENIZER.decode([1, *TOKENIZER.encode("the cat"), 2]) == "the cat"
    assert TOKENIZER.vocab_size <= 290


def test_json_keeps_the_tokenizer():
    again = Tokenizer.from_json(TOKENIZER.to_json())
    assert again.encode("the cat sat") == TOKENIZER.encode("the cat sat")


def test_bad_input_is_refused():
    with pytest.raises(ZendayaError, match="vocab_size"):
        Tokenizer.train(["a"], vocab_size=10)
    with pytest.raises(ZendayaError, match="not a tokenizer"):
        Tokenizer.from_json("{}")
    with pytest.raises(ZendayaError, match="prompt"):
        Framing(prompt=())
