"""Keep requests out of the schedule until their grammar is compiled, so that no step waits for a compiler."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xrunner.generation import NO_TOKEN, Generation, Token

AHEAD_BYTES = 1 << 18
"""Largest total length of the compiled grammars of requests that have not begun."""


@dataclass(slots=True)
class _Compiled:
    kept: object
    account: str
    users: set[int]
    has_begun: bool = False


class GrammarQueue:
    """Compiles the grammars of submitted requests in a thread, one after the other, and passes each request on when its
    grammar is compiled.

    A grammar stays compiled until its last request has ended, even if that request is preempted in between. A grammar
    is unused until one of its requests begins. At most `AHEAD_BYTES` of unused grammars are compiled, but each account
    may always have one. The next grammar comes from the account with the highest priority or, among equals, from the
    one whose unused grammars are shortest in total, relative to its share.

    Any thread may call the methods.

    Args:
        pass_on: receives each request. If its grammar cannot be compiled, receives its last token instead.
    """

    def __init__(self, compile_: Callable[[str], object], pass_on: Callable[[Generation | Token], None]) -> None:
        self._compile = compile_
        self._pass_on = pass_on
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[int, Generation]] = {}
        self._compiled: dict[str, _Compiled] = {}
        self._grammars: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, generation: Generation) -> None:
        if (grammar := generation.sampling.grammar) is None:
            self._pass_on(generation)
            return
        with self._changed:
            if grammar in self._compiled:
                self._release(generation, grammar)
                return
            self._waiting.setdefault(generation.account.name, {})[generation.id] = generation
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
            self._changed.notify()

    def cancel(self, id_: int) -> bool:
        with self._changed:
            return any(self._drop(account, id_) for account in list(self._waiting))

    def compile_again(self, generation: Generation) -> bool:
        """Submit a request again after new workers have started. Return False if the request has no grammar."""
        if generation.sampling.grammar is None:
            return False
        self.forget([generation.id])
        self.submit(generation)
        return True

    def begin(self, ids: Iterable[int]) -> None:
        if self._grammars:
            with self._changed:
                for grammar in {self._grammars[id_] for id_ in ids if id_ in self._grammars}:
                    self._compiled[grammar].has_begun = True
                self._changed.notify()

    def forget(self, ids: Iterable[int]) -> None:
        if self._grammars:
            with self._changed:
                for id_ in ids:
                    if (grammar := self._grammars.pop(id_, None)) is not None:
                        users = self._compiled[grammar].users
                        users.discard(id_)
                        if not users:
                            del self._compiled[grammar]
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _drop(self, account: str, id_: int) -> bool:
        requests = self._waiting[account]
        found = requests.pop(id_, None) is not None
        if not requests:
            del self._waiting[account]
        return found

    def _release(self, generation: Generation, grammar: str) -> None:
        self._compiled[grammar].users.add(generation.id)
        self._grammars[generation.id] = grammar
        self._pass_on(generation)  # within the lock, so that no request is passed on after it was cancelled

    def _next(self) -> Generation | None:
        ahead: Counter[str] = Counter()
        for grammar, compiled in self._compiled.items():
            if not compiled.has_begun:
                ahead[compiled.account] += len(grammar)
        firsts = [next(iter(requests.values())) for requests in self._waiting.values()]
        accounts = {first.account: first for first in firsts}
        for account in sorted(accounts, key=lambda one: (-one.priority, ahead[one.name] / one.share)):
            first = accounts[account]
            length = len(first.sampling.grammar or "")
            if not ahead[account.name] or ahead.total() + length <= AHEAD_BYTES:
                return first
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                first = self._next()
                if self._is_closed or first is None:
                    return
            kept, reason, grammar = None, "", first.sampling.grammar
            assert grammar is not None
            try:
                kept = self._compile(grammar)
            except Exception as error:  # whatever the error is, it concerns only these requests
                reason = f"its grammar cannot be compiled: {error}"
            with self._changed:
                waiting = [one for requests in self._waiting.values() for one in requests.values()]
                users = [one for one in waiting if one.sampling.grammar == grammar]
                if users and not reason:
                    self._compiled[grammar] = _Compiled(kept, first.account.name, set())
                for one in users:
                    self._drop(one.account.name, one.id)
                    if reason:
                        self._pass_on(Token(one.id, NO_TOKEN, "error", error=reason))
                    else:
                        self._release(one, grammar)
                if (others := self._waiting.pop(first.account.name, None)) is not None:
                    self._waiting[first.account.name] = others  # the other accounts come first
            del kept
