"""Keep an engine's requests and their tokens, in case a request is preempted or a worker is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from xgpt.core.policies import Pool, Request
from xrunner.generation import Generation, Logprobs, Token


class Ledger:
    """Requests and their outputs so far: everything that is needed to encode the requests again and continue."""

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self._generated: dict[int, list[int]] = {}
        self._repeated: dict[int, int] = {}
        """Number of tokens that restarted requests generate again."""

    def has_begun(self, id_: int) -> bool:
        """Return whether the request has generated a token."""
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
        """Note one more token of a request."""
        self._generated.setdefault(token.id, []).append(token.token)

    def forget(self, id_: int) -> None:
        """Forget a request that has ended or was lost."""
        self.generations.pop(id_, None)
        self._generated.pop(id_, None)
        self._repeated.pop(id_, None)

    def sequence(self, id_: int) -> tuple[int, ...]:
        """Return a request's prompt and output so far."""
        return (*self.generations[id_].prompt, *self._generated.get(id_, ()))

    def resumed(self, request: Request) -> Generation:
        """Return a request's prompt and parameters for encoding. After a preemption, the prompt contains the output so
        far."""
        return self.generations[request.id].resumed(self._generated.get(request.id, [])[: request.generated])

    def repeat(self, ids: Iterable[int]) -> None:
        """Note that these requests generate their tokens again."""
        self._repeated |= {id_: len(self._generated[id_]) for id_ in ids if id_ in self._generated}

    def anew(self, request: Request, can_resume: Callable[[Request], bool]) -> Request:
        """Return the request as it enters a schedule again, on workers that do not have it.

        Args:
            can_resume: returns whether a request's output can be encoded with its prompt. If not, the same tokens are
                generated again, since tokens depend only on the request.
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
        """Return the tokens of a step that have not been returned before. Count the tokens that have."""
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
