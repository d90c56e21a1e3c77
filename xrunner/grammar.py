"""Outputs that keep to a grammar: which tokens may come next. The work is llguidance's.

A grammar is text, made by `json_grammar` or `xrunner.server.api.tools`; it travels with its request, so that whichever
worker picks tokens knows it. A token is taken once it is picked; what a request had generated before it came to this
worker is taken at its start.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpt.errors import MachineError
from xgpt.schema import ModelSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 1 << 16
"""Of a grammar. Those of tools in use are a tenth of it."""

DENSE = {"x-guidance": {"whitespace_flexible": False}}


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a JSON schema's values, without space between their parts: no output is endless white space."""
    return json.dumps({"grammars": [{"json_schema": schema | DENSE}]})


def tagged_grammar(trigger: str, opened: Mapping[str, dict[str, Any]], end: str) -> str:
    """The grammar of text in which `trigger` begins an opening; a value of its JSON schema and `end` follow.

    Args:
        opened: schemas by openings, which begin with the trigger.
    """
    from llguidance import StructTag

    tags = [
        StructTag(trigger=trigger, begin=opening, grammar=schema | DENSE, end=end) for opening, schema in opened.items()
    ]
    return StructTag.to_grammar(tags, assume_special=False)


class Grammars:
    """The grammars of a checkpoint's tokens. Its tokenizer is read in a thread of its own, and waited for when needed.

    Args:
        tokenizer: path of tokenizer.json.
        vocab_size: of the model: as many tokens have a logit.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._read: Future[LLTokenizer] = Future()
        Thread(target=self._load, args=(tokenizer,), daemon=True).start()

    def _load(self, path: Path) -> None:
        try:
            from llguidance import LLTokenizer

            self._read.set_result(LLTokenizer(path.read_text(encoding="utf-8"), self._vocab_size, self._eos))
        except Exception as error:
            self._read.set_exception(MachineError(f"{path} cannot be used for grammars: {error}"))

    def why_not(self, grammar: str) -> str | None:
        """Why a grammar is not accepted; None: it is.

        Raises:
            MachineError: the tokenizer cannot be used.
        """
        from llguidance import LLMatcher

        if len(grammar.encode()) > MAX_BYTES:
            return f"it is longer than {MAX_BYTES} bytes"
        return LLMatcher.validate_grammar(grammar, self._read.result()) or None

    def state(self, grammar: str, output: Sequence[int] = ()) -> State:
        """The state behind `output`.

        Raises:
            MachineError: the tokenizer cannot be used.
        """
        from llguidance import LLMatcher

        state = State(LLMatcher(self._read.result(), grammar), self._vocab_size, self._eos)
        for token in output:
            state.take(token)
        return state


class State:
    """Where an output stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end = np.zeros(vocab_size, dtype=bool)
        self._end[eos_token_ids] = True

    def allowed(self) -> np.ndarray:
        """Which tokens may come next; where the grammar has come to no good end, those that end the output.

        # bool [vocab]
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return self._end
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)

    def take(self, token: int) -> None:
        """Go on by a token; one that is not allowed ends the output."""
        self._matcher.consume_token(token)


def grammars_of(checkpoint: Path | None, spec: ModelSpec) -> Grammars | None:
    """The grammars of a checkpoint's tokens; None: it has no tokenizer, or no token that ends an output."""
    path = None if checkpoint is None else checkpoint / "tokenizer.json"
    if path is None or not path.is_file() or not spec.eos_token_ids:
        return None
    return Grammars(path, spec.vocab_size, spec.eos_token_ids)
