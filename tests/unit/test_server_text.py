"""Text out of tokens: whole characters only, and nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import byte_tokenizer
from xgpt.errors import InputError
from xrunner.server.text import REPLACEMENT, Detokenizer, load_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text(alphabet=st.characters(exclude_characters=REPLACEMENT, codec="utf-8")))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in TOKENIZER.encode(text).ids]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first, second, _ = TOKENIZER.encode("€").ids
    assert [detokenizer.push(first), detokenizer.push(second)] == ["", ""]
    assert detokenizer.flush() == REPLACEMENT


def test_no_tokenizer_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.push(1) + detokenizer.flush() == ""


def test_load_tokenizer(tmp_path) -> None:
    assert load_tokenizer(tmp_path) is None
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("hé").ids == TOKENIZER.encode("hé").ids
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(tmp_path)
