"""Text to token ids and back, where the checkpoint brings a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from xgpt.errors import InputError

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, the first bytes of an unfinished one among them."""


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None where it has none.

    Raises:
        InputError: tokenizer.json is there but cannot be read.
    """
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError("tokenizer", str(path), f"it cannot be read: {error}") from None


class Detokenizer:
    """The text of one request's output, token by token; never half a character. Without a tokenizer: no text.

    Each call decodes the tokens since the last but one call that gave text, because what a token reads as
    depends on its neighbours (a leading space, the bytes of one character).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_given = 0
        """Leading tokens of `_ids` whose text has been given already."""

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(REPLACEMENT) else self._give(self._tokenizer, text)

    def flush(self) -> str:
        """What is still held back when the output ends."""
        if self._tokenizer is None:
            return ""
        return self._give(self._tokenizer, self._tokenizer.decode(self._ids))

    def _give(self, tokenizer: Tokenizer, text: str) -> str:
        given = tokenizer.decode(self._ids[: self._num_given])
        del self._ids[: self._num_given]
        self._num_given = len(self._ids)
        return text[len(given) :]
