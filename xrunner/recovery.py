"""Keep an engine's requests and their tokens, in case a request is preempted or a worker is lost, and find the request
that makes steps fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace

from xgpt.core.errors import XgptError
from xgpt.core.policies import Pool, Request
from xgpt.core.processes import too_often
from xrunner.generation import Generation, Logprobs, Token


class Ledger:
    """Requests and their outputs so far: all that is needed to prefill the requests again and continue them."""

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self._generated: dict[int, list[int]] = {}
        self._repeated: dict[int, int] = {}

    def has_begun(self, id_: int) -> bool:
        return id_ in self._generated

    def tokens(
        self, sampled: Mapping[int, int], pool: Pool, logprobs: Mapping[int, Logprobs], errors: Mapping[int, str]
    ) -> list[Token]:
        """Return the tokens of a step that have not been returned before.

        A static batch continues to compute requests that have ended. Their further tokens are not returned.
        """
        tokens = []
        for id_, chosen in sampled.items():
            if not pool.is_silent(id_):
                finish = self.generations[id_].finish(chosen, 1 + pool.running[id_].generated)
                tokens.append(Token(id_, chosen, finish, logprobs.get(id_), errors.get(id_, "")))
        return self.without_repeated(tokens)

    def note(self, token: Token) -> None:
        self._generated.setdefault(token.id, []).append(token.token)

    def forget(self, id_: int) -> None:
        self.generations.pop(id_, None)
        self._generated.pop(id_, None)
        self._repeated.pop(id_, None)

    def sequence(self, id_: int) -> tuple[int, ...]:
        return (*self.generations[id_].prompt, *self._generated.get(id_, ()))

    def resumed(self, request: Request) -> Generation:
        """After a preemption, its prompt contains the output so far."""
        return self.generations[request.id].resumed(self._generated.get(request.id, [])[: request.generated])

    def repeat(self, ids: Iterable[int]) -> None:
        self._repeated |= {id_: len(self._generated[id_]) for id_ in ids if id_ in self._generated}

    def anew(self, request: Request, can_resume: Callable[[Request], bool]) -> Request:
        """Return a copy of the request, with its progress reset, to be scheduled again on workers that hold none of its
        K/V.

        Args:
            can_resume: returns whether a request's output so far can be prefilled with its prompt. If not, its output
                is generated again from the start. The tokens will be the same, since they depend only on the request.
        """
        generation = self.resumed(request)
        size = len(generation.prompt), generation.max_output
        again = replace(request, input_length=size[0], max_output=size[1], is_scored=generation.is_scored)
        again.encoded = again.generated = again.cached = again.blocks = 0
        again.table = again.prompt_table = again.batch = None
        if can_resume(again):
            self.generations[request.id] = generation
            self._generated.pop(request.id, None)
        elif generated := self._generated.get(request.id):
            self._repeated[request.id] = len(generated)
            generation = self.generations[request.id]
            again.input_length, again.max_output = len(generation.prompt), generation.max_output
        return again

    def without_repeated(self, tokens: list[Token]) -> list[Token]:
        if not self._repeated:
            return tokens
        return [token for token in tokens if token.finish == "error" or not self._is_repeated(token.id)]

    def _is_repeated(self, id_: int) -> bool:
        left = self._repeated.get(id_, 0)
        if left > 1:
            self._repeated[id_] = left - 1
        else:
            self._repeated.pop(id_, None)
        return left > 0


FAILURES = 3
PERIOD_S = 60.0
"""The engine gives up if more than `FAILURES` steps fail within this number of seconds."""


class EngineFailed(XgptError):
    """Steps fail repeatedly, whatever requests they contain."""


class Suspects:
    """The requests of a step that has failed.

    These requests run again one after the other, each after the previous one has generated the token at which the step
    failed. If a step fails again, its only suspect is at fault.
    """

    def __init__(self) -> None:
        self._failures: list[float] = []
        self._suspected: set[int] = set()
        self._held: dict[int, Request] = {}
        self._tried: int | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def held(self) -> Set[int]:
        return self._held.keys()

    def fail(self, error: Exception, under_way: Collection[int]) -> int | None:
        """Note that a step failed while these requests had unfinished steps. Return the request at fault, if it is
        known.

        Raises:
            EngineFailed: too many steps have failed recently.
        """
        if too_often(self._failures, FAILURES, PERIOD_S):
            last = f"{type(error).__name__}: {error}"
            raise EngineFailed(f"{FAILURES + 1} steps have failed within {PERIOD_S:.0f} s, the last: {last}") from error
        culprit = self._tried if self._tried in under_way else None
        if culprit is None and len(under_way) == 1 and self._suspected.issuperset(under_way):
            (culprit,) = under_way
        if culprit is None:
            self._suspected.update(under_way)
        return culprit

    def recall(self, pool: Pool) -> list[Request]:
        requests = [*self._held.values(), *pool.running.values(), *pool.waiting]
        self._held = {request.id: request for request in requests if request.id in self._suspected}
        self._tried = None
        return [request for request in requests if request.id not in self._suspected]

    def next(self) -> Request | None:
        if self._tried is not None or not self._held:
            return None
        self._tried = next(iter(self._held))
        return self._held.pop(self._tried)

    def clear(self, sampled: Collection[int]) -> None:
        if self._tried is not None and self._tried in sampled:
            self.forget(self._tried)

    def forget(self, id_: int) -> bool:
        if id_ == self._tried:
            self._tried = None
        self._suspected.discard(id_)
        return self._held.pop(id_, None) is not None
