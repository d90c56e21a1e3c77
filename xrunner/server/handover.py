"""Keep an engine's requests, so that another engine can continue them if it ends or hangs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from xgpt.core.errors import MachineError
from xgpt.core.policies import Request
from xgpt.core.processes import too_often
from xrunner.channel.remote import RemoteEngine
from xrunner.generation import NO_TOKEN, Generation, Token
from xrunner.recovery import Ledger

RESTARTS, PERIOD_S = 3, 600.0
"""An engine is restarted at most `RESTARTS` times within `PERIOD_S`. The next loss ends the server."""


class Handover:
    """The requests that an engine has or is about to get, and their outputs so far.

    The first loss of an engine counts as an accident. A request that was running when an engine was lost for the second
    time is a suspect. Suspects are submitted one at a time, each after the previous one has generated a token. If an
    engine is lost meanwhile, the current suspect is the cause and is not submitted again.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._tried: int | None = None
        """The suspect that was submitted and has not generated a token yet."""
        self._losses: Counter[int] = Counter()
        """Number of lost engines that had the request."""
        self._lost_s: list[float] = []

    def __len__(self) -> int:
        return len(self._ledger.generations)

    def accept(self, generation: Generation) -> None:
        """Keep a new request until it has ended."""
        self._ledger.generations[generation.id] = generation
        self._waiting.append(generation.id)

    def ready(self) -> Iterator[Generation]:
        """Yield the requests that the engine may have now."""
        while self._waiting:
            if (generation := self._ledger.generations.get(self._waiting.popleft())) is not None:
                yield generation
        while self._tried is None and self._suspects:
            if (generation := self._ledger.generations.get(self._suspects.popleft())) is not None:
                self._tried = generation.id
                yield generation

    def note(self, tokens: list[Token]) -> list[Token]:
        """Note a step's tokens, forget requests that have ended, and return the tokens that are new."""
        tokens = [token for token in tokens if token.id in self._ledger.generations]
        new = self._ledger.without_repeated(tokens)
        for token in tokens:
            if token.id == self._tried:
                self._tried = None
                del self._losses[token.id]
        for token in new:
            self._ledger.note(token)
            if token.finish is not None:
                self.forget(token.id)
        return new

    def forget(self, id_: int) -> None:
        """Forget a request that has ended, or whose client has gone."""
        self._ledger.forget(id_)
        del self._losses[id_]
        if self._tried == id_:
            self._tried = None

    def lose(self, error: MachineError, engine: RemoteEngine) -> list[Token]:
        """Make all requests wait for another engine; return the ends of requests that cannot continue.

        A request continues after its output so far, if the output can be encoded with the prompt without changing later
        tokens. Otherwise the same tokens are generated again, but are not delivered twice.

        Args:
            engine: the lost engine, which will be restarted. It decides which requests can be resumed and which must be
                repeated.

        Raises:
            MachineError: the engine was lost too often.
        """
        if too_often(self._lost_s, RESTARTS, PERIOD_S):
            times, minutes = RESTARTS + 1, PERIOD_S / 60
            raise MachineError(
                f"the engine was lost {times} times within {minutes:.0f} minutes, the last time: {error}"
            )
        ended = [] if self._tried is None else [self._end(self._tried, f"the engine fails with this request: {error}")]
        return ended + self.take_back(engine, losses=1)

    def take_back(self, engine: RemoteEngine, losses: int = 0) -> list[Token]:
        """Make all requests wait for an engine that is restarted, by default on purpose: not counted as a loss."""
        ended, requests = [], {*self._waiting, *self._suspects}
        self._tried = None
        self._waiting.clear()
        self._suspects.clear()
        for id_, generation in list(self._ledger.generations.items()):
            if not self._prepare(generation, engine):
                ended.append(self._end(id_, "the engine was restarted, and would now sample other tokens"))
                continue
            self._losses[id_] += losses * (id_ not in requests)
            (self._suspects if self._losses[id_] > 1 else self._waiting).append(id_)
        return ended

    def _prepare(self, generation: Generation, engine: RemoteEngine) -> bool:
        """Prepare a request to continue where it was; return False if its tokens cannot be generated again."""
        begun = Request(
            generation.id, len(generation.prompt), generation.max_output, promised_output=generation.promised_output
        )
        begun.generated = generation.max_output
        resumes, fits = engine.resumes(generation), engine.pool.limits.can_ever_fit
        self._ledger.anew(begun, lambda request: resumes and fits(request))
        return engine.repeats(generation) or not self._ledger.has_begun(generation.id)

    def _end(self, id_: int, reason: str) -> Token:
        self.forget(id_)
        return Token(id_, NO_TOKEN, "error", error=reason)
