"""Text out of tokens: whole characters only, and nothing lost."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.fakes import byte_codec
from xgpt.core.errors import InputError
from xrunner.server.api.choices import Delta
from xrunner.server.api.text import REPLACEMENT, Detokenizer, StopStrings, TextCodec, load_tokenizer
from xrunner.server.api.writers import ChatWriter, CompletionWriter

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


SPECIAL = ["<s>", "</s>", "<unk>"]
CORPUS = (
    "the quick brown fox jumps over the lazy dog. don't stop, it's 5 o'clock!",
    "Größe, naïve café €5 日本語 テスト 😀 👩\u200d👩\u200d👧 ok",
    " multiple   spaces\n\nnewlines\t",
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: a space that is a letter, bytes that are tokens."""
    words = ["▁", "▁▁", "a", "b", "▁a", "▁the", "c", "é", "日"]
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE(vocab={v: i for i, v in enumerate(vocab)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def suffixed() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, unigram, byte_fallback, word_piece, suffixed])
def test_pieces_join_to_what_transformers_decodes(make) -> None:
    """Special tokens anywhere, and ids that the tokenizer lacks; random tokens, where any of them make a text."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = make()
    codec, reference = TextCodec(tokenizer), PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    reference.add_special_tokens({"additional_special_tokens": SPECIAL})
    size, rng = tokenizer.get_vocab_size(), random.Random(1)
    for trial in range(600):
        # A byte that is no character takes the whole run of bytes with it, those whose text is out among them.
        if trial % 2 or make is byte_fallback:
            ids = tokenizer.encode(rng.choice(CORPUS)[rng.randrange(8) :] + rng.choice(CORPUS)).ids
            for _ in range(4):
                ids.insert(rng.randint(0, len(ids)), rng.choice([0, 1, 2, size]))
        else:
            ids = [rng.randrange(size + 3) for _ in range(rng.randint(1, 60))]
        detokenizer = Detokenizer(codec)
        text = "".join([detokenizer.push(id_) for id_ in ids]) + detokenizer.flush()
        assert text == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_output_that_is_no_text_costs_no_more_than_text(make) -> None:
    tokenizer = make()
    bad = tokenizer.token_to_id("ÿ" if make is byte_level else "<0xFF>")

    def seconds(token: int) -> float:
        detokenizer = Detokenizer(TextCodec(tokenizer))
        begin_s = time.perf_counter()
        for _ in range(4000):
            detokenizer.push(token)
        return time.perf_counter() - begin_s

    assert min(seconds(bad) for _ in range(3)) < 10 * min(seconds(tokenizer.token_to_id("a")) for _ in range(3))


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What StopStrings must give, whatever the pieces: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


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
        ended = None
        given_out += finder.flush()
    assert (given_out, ended) == cut("".join(pieces), stops, include)


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    """Whatever the text: here each character may be the last but one of every stop string."""

    def took_s(length: int) -> float:
        ending = StopStrings(["a" * length + chr(98 + number) for number in range(16)])
        begin_s = time.process_time()
        for _ in range(4000):
            ending.push("a")
        return time.process_time() - begin_s

    assert min(took_s(999) for _ in range(3)) < 4 * min(took_s(3) for _ in range(3)) + 0.01


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["###", "END"])
    assert [finder.push(piece) for piece in ("a#", "#b", "E", "N", "D!")] == [
        ("a", None),
        ("##b", None),
        ("", None),
        ("", None),
        ("", "END"),
    ]


@pytest.mark.parametrize("writer", [CompletionWriter, ChatWriter])
def test_an_event_is_one_line_for_every_reader(writer: type[CompletionWriter | ChatWriter]) -> None:
    """Whatever its text: httpx, and clients that read streams with it, end lines wherever `str.splitlines` does."""
    text = "a\nb\r\v\f\x1c\x1d\x1e\x85\u2028\u2029€"
    chunk = writer("m", 0, include_usage=False).chunk(Delta(0, text, 7, None, None, True), None, 3, 1)
    assert chunk.endswith(b"\n\n")
    (line, _) = chunk.decode().splitlines()
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    assert choice.get("text", choice.get("delta", {}).get("content")) == text


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(st.text("abc", max_size=4)))
def test_an_output_ends_where_a_stop_string_is_first_complete(stops: list[str], pieces: list[str]) -> None:
    """As it would if each end of the text were looked at."""
    text, ending = "", StopStrings(stops)
    out, is_over = "", None
    for piece in pieces:
        text += piece
        given_out, is_over = ending.push(piece)
        out += given_out
        if is_over:
            break
    else:
        out += ending.flush()
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert bool(is_over) == bool(ends)
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert out == text[: ends[0] - longest]
    else:
        assert out == text


def test_a_tokenizer_that_encodes_nothing_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Its template names a special token that it does not have: each request had 500."""
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="tokenizer"):
        load_tokenizer(tmp_path)
