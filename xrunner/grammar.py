"""Restrict outputs to a grammar: compute, with llguidance, which tokens may come next.

A grammar is text, built by `json_grammar` or `xrunner.server.api.tools`. Every worker that chooses tokens gets the
grammar with the request, and compiles it before the request enters the schedule (`xrunner.grammar_queue`). Tokens that
the request had generated elsewhere advance the grammar when the request starts.
"""

from __future__ import annotations

import json
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from xgpt.core.errors import MachineError, cut
from xgpt.core.schema import ModelSpec
from xrunner.heap import give_back_soon

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 1 << 16
"""Largest grammar in bytes. The grammars of usual tools are a tenth as large."""
KEPT_S = 0.3
"""The most recently used grammars are kept as long as compiling all of them took at most this number of processor
seconds.
"""
LONG_BYTES = 1 << 13
"""If a grammar is longer than this, the process returns freed memory to the system after compiling the grammar and
after each output that followed the grammar.
"""
STEP_FUEL, STEP_ITEMS, STATES = 20_000, 20_000, 30_000
"""Limits on computing the tokens that may come next: the work of llguidance's lexer and of its parser, each in
llguidance's units, and the number of the lexer's states. Usual schemas need a tenth of this. A pattern that needs more
work takes 25 MiB, and adds 2 ms to a step for each output until it is refused. With llguidance's own limits it took 200
MiB, and added 8 ms to every step."""
KEPT_ANSWERS = 64

ANY_OBJECT: dict[str, Any] = {"type": "object"}
RULES = r"""
object: "{" WS? (member ("," WS? member)*)? "}"
member: STRING WS? ":" WS? value WS?
value: object | array | STRING | NUMBER | "true" | "false" | "null"
array: "[" WS? (element ("," WS? element)*)? "]"
element: value WS?
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WS: /[ \t\r\n]{1,64}/
GAP: /[ \t\r\n]{1,8}/

%llguidance {"no_forcing": true}
"""
"""The end of each grammar: JSON without a schema, and white space, which is bounded: some models otherwise write it
until their limit. Where a model is free (WS), it may indent deeply.

No earlier line can undo `no_forcing`. Without it, llguidance computes after each token how much of the following text
is certain, and allows only the usual tokens of that text. A model prefers these tokens anyway. For a constant of 60,000
characters, the computation adds 6 to 15 ms to every step. Source of the JSON: RFC 8259.
"""
OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \t\r\n]{0,8}", "json_allow_general_unicode_escapes": True}}


def json_grammar(schema: dict[str, Any]) -> str:
    return f"start: {json_rule(schema)}\n"


def json_rule(schema: dict[str, Any]) -> str:
    return "object" if schema == ANY_OBJECT else f"%json {json.dumps(schema | OPTIONS)}"


def regex_rule(pattern: str) -> str:
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def choice_rule(choices: Sequence[str]) -> str:
    return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)})"


def whole_grammar(answer: str, begin: str, end: str, free: str, *, is_open: bool, may_lack_end: bool) -> str:
    """Return the grammar of an output: reasoning, if there is any, and then the rule `answer`.

    Args:
        answer: Lark rules. The rule `answer` matches the output after the reasoning.
        begin, end: Lark terms of the marks around reasoning.
        may_lack_end: whether the output may end within reasoning.
    """
    # If the mark is text, its first occurrence ends the reasoning. If the mark is a token, only this token ends the
    # reasoning.
    unended = (
        ""
        if end.startswith("<[")
        else f" & ~/(.|\\n)*{re.escape(json.loads(end)).replace('/', chr(92) + '/')}(.|\\n)*/"
    )
    ended = f"last: THOUGHT {end}" if end.startswith("<[") else f"last[lazy]: THOUGHT {end}"
    begun = ("" if is_open else f"GAP? {begin} ") + (f"(THOUGHT <[{free}]>)* " if free else "")
    optional = "" if is_open else " | answer"
    cut = f" | {begun}THOUGHT" if may_lack_end else ""
    return f"start: {begun}last GAP? answer{optional}{cut}\n{answer}{ended}\nTHOUGHT: /(.|\\n)*/{unended}\n"


def ranges(tokens: Collection[int]) -> str:
    ranges: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1] = (ranges[-1][0], token)
        else:
            ranges.append((token, token))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


class Grammars:
    """Grammars for a checkpoint's tokens. A separate thread reads the checkpoint's tokenizer. The first use waits for
    this thread.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._recent: OrderedDict[str, Compiled] = OrderedDict()
        self._in_use: WeakValueDictionary[str, Compiled] = WeakValueDictionary()
        self._lock = Lock()
        self._known = lru_cache(KEPT_ANSWERS)(self._try)
        self._read: Future[LLTokenizer] = Future()
        Thread(target=self._load, args=(tokenizer,), daemon=True).start()

    def _load(self, path: Path) -> None:
        try:
            from llguidance import LLTokenizer

            self._read.set_result(LLTokenizer(path.read_text(encoding="utf-8"), self._vocab_size, self._eos))
        except Exception as error:
            self._read.set_exception(MachineError(f"{path} cannot be used for grammars: {error}"))

    def why_not(self, grammar: str) -> str | None:
        """Return why a grammar is refused, or None if it is accepted. Any thread may call this.

        Raises:
            MachineError: the tokenizer cannot be used.
        """
        # The results are cached by grammar, so long grammars are refused before.
        return f"it is longer than {MAX_BYTES} bytes" if len(grammar.encode()) > MAX_BYTES else self._known(grammar)

    def _try(self, grammar: str) -> str | None:
        """The compiled grammar is not kept, since outputs follow it in another process."""
        compiled = self._compile(grammar)
        if compiled.matcher.is_error():
            return cut(compiled.matcher.get_error())
        if GrammarState(compiled, self._vocab_size, self._eos).allowed() is None:
            return "no output matches it, or it is too large to follow"
        return None

    def state(self, grammar: str, output: Sequence[int] = ()) -> GrammarState:
        state = GrammarState(self.compiled(grammar), self._vocab_size, self._eos)
        if len(grammar) > LONG_BYTES:
            weakref.finalize(state, give_back_soon).atexit = False
        for token in output:
            state.take(token)
        return state

    def compiled(self, grammar: str) -> Compiled:
        """One that is in use or was used recently is not compiled again. Any thread may call this."""
        with self._lock:
            known = self._in_use.get(grammar)
        compiled = known or self._compile(grammar)
        if not compiled.matcher.is_error():
            with self._lock:
                self._in_use[grammar] = self._recent[grammar] = compiled
                self._recent.move_to_end(grammar)
                while len(self._recent) > 1 and sum(one.seconds for one in self._recent.values()) > KEPT_S:
                    self._recent.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._read.result()
        limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, max_lexer_states=STATES)
        begin_s = time.thread_time()
        compiled = Compiled(LLMatcher(tokenizer, grammar + RULES, limits=limits), time.thread_time() - begin_s)
        if len(grammar) > LONG_BYTES:  # its request may be cancelled before it begins
            weakref.finalize(compiled, give_back_soon).atexit = False
        return compiled


@dataclass(frozen=True, eq=False)
class Compiled:
    matcher: LLMatcher
    seconds: float


class GrammarState:
    """The position of an output in its grammar. The first position is the grammar's start. The grammar stays compiled
    as long as this object exists.

    Args:
        eos_token_ids: tokens that are allowed only if the output is complete, even if the tokenizer has text for them.
    """

    def __init__(self, compiled: Compiled, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()  # copying takes no time, and all copies share computed states
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)

    def allowed(self) -> np.ndarray | None:
        """Return which tokens may come next, or None if llguidance can no longer follow the output, for instance
        because the grammar is too large.

        # bool [vocab]
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return None
        found = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        if not self._matcher.is_accepting():
            found[self._eos] = False
        return found

    def take(self, token: int) -> None:
        """Advance by a token. If the token is not allowed, no token is allowed afterwards."""
        self._matcher.consume_token(token)


def grammars_of(checkpoint: Path | None, spec: ModelSpec) -> Grammars | None:
    """Return the grammars for a checkpoint's tokens, or None if the checkpoint has no tokenizer or no token that ends
    an output. Later calls in the same process return the same object.
    """
    path = None if checkpoint is None else checkpoint / "tokenizer.json"
    if path is None or not path.is_file() or not spec.eos_token_ids:
        return None
    return _grammars(path, spec.vocab_size, tuple(spec.eos_token_ids))


_grammars = lru_cache(maxsize=4)(Grammars)
