"""Convert between text and token ids, if the checkpoint has a tokenizer, and end texts at stop strings."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from xgpt.core.errors import cut
from xgpt.core.schema import ModelSpec
from xrunner.grammar import Grammars
from xrunner.server.api.chat import ChatTemplate, load_chat_template
from xrunner.server.api.directory import read_tokenizer, special_tokens
from xrunner.server.api.form import OutputForm

REPLACEMENT = "\ufffd"
"""The character that decoders write for invalid bytes. They also write it for the first bytes of an unfinished
character."""
CONTEXT = 4
"""Number of tokens before a text that may affect its beginning. Decoders look one token back."""
MAX_UNFINISHED = 3
"""Largest number of bytes of an unfinished character. It is also the largest number of its tokens."""


class TextCodec:
    """A checkpoint's tokenizer, and its chat template if it has one.

    Attributes:
        eos_token_id: the tokenizer's end token, which may differ from the model's.
        added: ids of the tokens that are not text. A model may write them anywhere.
        longest_token: number of characters in the longest token. A text of n tokens is at most n times as long."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None, eos_token: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        sources = ("", "") if chat_template is None else (chat_template.source, chat_template.tool_use)
        self.form = OutputForm.of(sources[0], {token.content: id_ for id_, token in added.items()}, sources[1])
        self.eos_token_id = None if eos_token is None else tokenizer.token_to_id(eos_token)
        self.added = frozenset(added)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text. A rendered chat needs no special tokens added. Other threads can run meanwhile.
        Raises ValueError: the tokenizer fails at this text."""
        # The library's method for a single text would keep Python's lock throughout.
        try:
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:  # the library's panics are not Exceptions
            raise ValueError(cut(str(error))) from None

    def has_text(self, token: int) -> bool:
        """Return whether the decoder shows the token: it is in the tokenizer's vocabulary and is not special."""
        return token not in self._special and self.tokenizer.id_to_token(token) is not None


def load_tokenizer(checkpoint: Path) -> TextCodec | None:
    """Return the tokenizer of a checkpoint directory, or None if it has none. Raises InputError: tokenizer.json or the
    chat template exists but cannot be read."""
    # The library's own threads would bypass `tokenising`, which decides which text is next, and at which priority.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = read_tokenizer(checkpoint)
    if found is None:
        return None
    tokenizer, settings = found
    return TextCodec(tokenizer, load_chat_template(checkpoint), special_tokens(settings).get("eos_token"))


@lru_cache(maxsize=1 << 16)
def token_text(codec: TextCodec | None, token: int) -> str:
    return f"token_id:{token}" if codec is None else codec.tokenizer.decode([token], skip_special_tokens=False)


@lru_cache(maxsize=1 << 16)
def token_bytes(codec: TextCodec | None, token: int) -> bytes:
    """Return the bytes of a single token, even if they are only part of a character."""
    text = token_text(codec, token)
    if codec is None or REPLACEMENT not in text:
        return text.encode()
    written = codec.tokenizer.id_to_token(token) or text
    if (found := _BYTE.fullmatch(written)) is not None:
        return bytes([int(found[1], 16)])
    if all(character in _BYTES for character in written):
        return bytes(_BYTES[character] for character in written)
    return text.encode()


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte, as it is written in vocabularies that fall back to bytes."""


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class Detokenizer:
    """Decodes one request's output token by token, and never returns part of a character. Without a tokenizer, texts
    are empty.

    A token's text depends on its neighbours (a leading space, the bytes of one character). So each call decodes a
    window: the last few tokens whose text was returned, and all tokens after them.

    Args:
        shown: special tokens that are shown as text.
        context: preceding tokens. Their text was returned earlier."""

    def __init__(self, codec: TextCodec | None, shown: Collection[int] = (), context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._shown = shown
        self._ids: list[int] = []
        if codec is not None:
            self._ids = [token for token in context if codec.has_text(token)][-CONTEXT:]
        before = "" if codec is None or not self._ids else self._decoded(codec)
        if before.endswith(REPLACEMENT):
            self._ids, before = [], ""  # a part of a character, which the next tokens may complete
        self._num_given = len(before)
        """Number of characters of the window's text that have been returned."""
        self._num_pending = 0
        """Number of tokens since text was returned."""

    def push(self, token: int) -> str:
        # Hidden tokens are removed before decoding: a window with only such tokens would be decoded like the beginning
        # of a text.
        if self._codec is None or not (token in self._shown or self._codec.has_text(token)):
            return ""
        self._ids.append(token)
        self._num_pending += 1
        text = self._decoded(self._codec)
        if not text.endswith(REPLACEMENT):
            return self._give(self._codec, text, 0)
        if self._num_pending <= MAX_UNFINISHED:
            return ""
        # No character has so many tokens, so only the last tokens can still become a character.
        num_held = len(text) - len(text.rstrip(REPLACEMENT))
        return self._give(self._codec, text, min(num_held, MAX_UNFINISHED))

    def flush(self) -> str:
        return "" if self._codec is None else self._decoded(self._codec)[self._num_given :]

    def _decoded(self, codec: TextCodec) -> str:
        return codec.tokenizer.decode(self._ids, skip_special_tokens=False)

    def _give(self, codec: TextCodec, text: str, num_held: int) -> str:
        given = text[self._num_given : len(text) - num_held]
        # Decoders look one token back, so one token before the held or pending tokens is enough context.
        del self._ids[: -max(self._num_pending, 1)]
        self._num_pending = 0
        self._num_given = max(0, len(self._decoded(codec)) - num_held)
        return given


class StopStrings:
    """Ends a text at the first stop string, even if the string spans several pieces of the text.

    Text that may begin a stop string is held back until more text decides. The stop string that is complete first ends
    the text, and among several the longest. Each character is examined once for each stop string (Knuth, Morris and
    Pratt, Fast pattern matching in strings, SIAM J. Comput. 1977).

    Args:
        include: whether to leave the stop string in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        """For each stop string, the length of its longest prefix with which the text so far ends."""
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Return the text that may be sent after `piece`. If a stop string has ended the text, return it too."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        end, longest = len(piece), 0
        for number, (stop, borders) in enumerate(self._stops):
            matched, position = self._matched[number], 0
            while position < end:
                if not matched and (position := piece.find(stop[0], position, end)) < 0:
                    break
                while matched and stop[matched] != piece[position]:
                    matched = borders[matched - 1]
                matched += stop[matched] == piece[position]
                position += 1
                if matched == len(stop):
                    longest = matched if position < end else max(longest, matched)
                    end, matched = position, 0
            self._matched[number] = matched
        if longest:
            end += len(self._held)
            self._held = ""
            return text[: end if self._include else end - longest], text[end - longest : end]
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """Return, for each prefix of `stop`, the length of its longest border: a shorter prefix of it that is also its
    suffix."""
    borders, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return tuple(borders)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an endpoint, with its tokenizer and grammars.

    Attributes:
        names: the model's names. A request must give one of them.
        codec: the tokenizer. None means that prompts are token ids only, and answers have no text.
        grammars: compiler of grammars for outputs. None means that there is no tokenizer, or the engine does not
            support grammars.
        sampling_defaults: values of fields that a request leaves out (`checkpoint.sampling_defaults`).
        path: the checkpoint's directory. Empty means that the weights are drawn from a seed."""

    names: tuple[str, ...]
    spec: ModelSpec
    codec: TextCodec | None = None
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    path: str = ""

    @property
    def name(self) -> str:
        return self.names[0]
