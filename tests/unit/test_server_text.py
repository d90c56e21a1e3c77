"""Text out of tokens: whole characters only, and nothing lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import byte_codec
from xgpt.errors import InputError
from xrunner.server.text import REPLACEMENT, Detokenizer, StopStrings, load_tokenizer
from xrunner.server.writers import ChatWriter, CompletionWriter, Delta

CODEC = byte_codec()
TOKENIZER = CODEC.tokenizer


@given(st.text(alphabet=st.characters(exclude_characters=REPLACEMENT, codec="utf-8")))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(CODEC)
    pieces = [detokenizer.push(token) for token in TOKENIZER.encode(text).ids]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(CODEC)
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
    assert loaded.encode("hé") == TOKENIZER.encode("hé").ids
    assert loaded.chat_template is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(tmp_path)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """What StopStrings must give, whatever the pieces: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4)), st.booleans())
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    finder = StopStrings(stops, include=include)
    given_out = ""
    for piece in pieces:
        text, ended = finder.push(piece)
        given_out += text
        if ended:
            break
    else:
        ended = False
        given_out += finder.flush()
    assert (given_out, ended) == cut("".join(pieces), stops, include)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["###", "END"])
    assert [finder.push(piece) for piece in ("a#", "#b", "E", "N", "D!")] == [
        ("a", False),
        ("##b", False),
        ("", False),
        ("", False),
        ("", True),
    ]


@pytest.mark.parametrize("writer", [CompletionWriter, ChatWriter])
def test_an_event_is_one_line_for_every_reader(writer: type[CompletionWriter | ChatWriter]) -> None:
    """Whatever its text: httpx, and who reads streams with it, ends lines wherever `str.splitlines` does."""
    text = "a\nb\r\v\f\x1c\x1d\x1e\x85\u2028\u2029€"
    chunk = writer("m", 0, include_usage=False).chunk(Delta(0, text, 7, None, None, True), None, 3, 1)
    assert chunk.endswith(b"\n\n")
    (line, _) = chunk.decode().splitlines()
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    assert choice.get("text", choice.get("delta", {}).get("content")) == text
