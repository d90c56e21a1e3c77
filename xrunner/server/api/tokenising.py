"""Tokenise prompts, and do other slow work on requests, in threads outside the event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from xrunner.server.api.text import TextCodec

NUM_THREADS, PER_ACCOUNT = 3, 2
"""Threads, and how many of them one account may use: a chat may take `rendering.RENDER_S` to be refused."""
NICENESS = 10
"""Niceness of these threads, so that the engine's threads go first if cores are few."""
SECONDS_A_CHARACTER = 5e-6
"""Several times the tokenising time of a character. For each of its characters, a text counts as having arrived later
by this time. So short texts overtake long ones, but not for ever.
"""
FIRST_LOOK = 8
"""Number of characters, for each token of the limit, that are encoded first; texts with more characters for each token
are rare.
"""

T = TypeVar("T")


class TooLong(Exception):
    """A text has more tokens than the model's context; `at_least` is the number of tokens that were counted."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


@dataclass(order=True, slots=True)
class _Job:
    due_s: float
    number: int
    work: Callable[[], Any] = field(compare=False)
    characters: int = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class Tokenising:
    """Encodes texts, renders chats and compiles grammars in separate threads. All methods belong to the event loop's
    thread.

    Accounts take turns: the next text comes from the account for which the fewest characters were processed while texts
    waited. One account never has all threads. Within an account, short texts go first.
    """

    def __init__(self, codec: TextCodec, max_context: int) -> None:
        self._codec = codec
        self._max_context = max_context
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenising", initializer=_step_back)
        self._numbers = itertools.count()
        self._waiting: dict[str, list[_Job]] = {}
        self._served: dict[str, int] = {}
        """Characters processed for each account; a new account starts at the lowest number of the waiting ones."""
        self._running: Counter[str] = Counter()
        """Number of running jobs, by account."""

    async def encode(self, account: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises TooLong."""
        encode = partial(self._encode, text, add_special_tokens)
        return await self.by_turns(account, len(text), encode)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text in a thread. A text that is much too long is recognised by its beginning, however long the rest
        is.
        """
        length = FIRST_LOOK * self._max_context
        while length < len(text):
            # Cutting may change some tokens at the cut, but far fewer than the context holds.
            found = len(self._codec.encode(text[:length], add_special_tokens=add_special_tokens))
            if found > 2 * self._max_context:
                raise TooLong(found - self._max_context)
            length *= 2
        tokens = self._codec.encode(text, add_special_tokens=add_special_tokens)
        if len(tokens) > self._max_context:
            raise TooLong(len(tokens))
        return tokens

    async def by_turns(self, account: str, characters: int, work: Callable[[], T]) -> T:
        """Run `work` for a text of this many characters when it is the account's turn, and return the result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        due_s = loop.time() + characters * SECONDS_A_CHARACTER
        if account not in self._waiting:
            self._waiting[account] = []
            least = min((self._served[name] for name in self._waiting if name in self._served), default=0)
            self._served[account] = max(least, self._served.get(account, 0))
        heapq.heappush(self._waiting[account], _Job(due_s, next(self._numbers), work, characters, done))
        self._start()
        return await done

    def _start(self) -> None:
        while self._running.total() < NUM_THREADS:
            free = (name for name in self._waiting if self._running[name] < PER_ACCOUNT)
            if (account := min(free, key=self._served.__getitem__, default=None)) is None:
                break
            job = heapq.heappop(self._waiting[account])
            if not self._waiting[account]:
                del self._waiting[account]
            if job.done.cancelled():  # the client has gone
                continue
            self._served[account] += job.characters + 1
            self._running[account] += 1
            running = asyncio.wrap_future(self._threads.submit(job.work))
            running.add_done_callback(partial(self._end, account, job))
        if not self._waiting:
            self._served.clear()

    def _end(self, account: str, job: _Job, running: asyncio.Future[Any]) -> None:
        self._running[account] -= 1
        if not self._running[account]:
            del self._running[account]
        if not job.done.done():
            if (error := running.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        self._start()


def _step_back() -> None:
    if sys.platform == "linux":  # on other systems the whole process would get this niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
