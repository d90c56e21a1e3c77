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
"""Number of threads, and largest number of threads for one account. The second number is smaller, so that an account
cannot block all threads with chats that take `rendering.RENDER_S` until they are refused."""
NICENESS = 10
"""Niceness of these threads, so that the engine's threads have priority."""
SECONDS_A_CHARACTER = 5e-6
"""Seconds by which each character of a text delays the text's turn. This is several times as long as tokenising a
character takes. So short texts overtake long ones, but every long text gets its turn."""
FIRST_LOOK = 8
"""If a text has more than this number of characters for each token of the context, only its beginning is encoded at
first. Few texts have so many characters in a token."""

T = TypeVar("T")


class TooLong(Exception):
    """A text has too many tokens for the model's context: at least `at_least`."""

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
    """Encodes texts, renders chats and compiles grammars in separate threads. All methods run in the event loop's
    thread.

    The next text comes from the account for which the fewest characters were processed while texts were waiting. No
    account can use all threads. Within an account, short texts come first."""

    def __init__(self, codec: TextCodec, max_context: int) -> None:
        self._codec = codec
        self._max_context = max_context
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenising", initializer=_step_back)
        self._numbers = itertools.count()
        self._waiting: dict[str, list[_Job]] = {}
        self._served: dict[str, int] = {}
        """Characters processed for each account. A new account starts at the lowest number among waiting accounts."""
        self._running: Counter[str] = Counter()

    async def encode(self, account: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encode = partial(self._encode, text, add_special_tokens)
        return await self.by_turns(account, len(text), encode)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        length = FIRST_LOOK * self._max_context
        while length < len(text):
            # Cutting may change a few tokens at the cut, but far fewer than fit into the context.
            found = len(self._codec.encode(text[:length], add_special_tokens=add_special_tokens))
            if found > 2 * self._max_context:
                raise TooLong(found - self._max_context)
            length *= 2
        tokens = self._codec.encode(text, add_special_tokens=add_special_tokens)
        if len(tokens) > self._max_context:
            raise TooLong(len(tokens))
        return tokens

    async def by_turns(self, account: str, characters: int, work: Callable[[], T]) -> T:
        """Run `work` for a text with this many characters when it is the account's turn, and return the result."""
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
    if sys.platform == "linux":  # on other systems, setpriority would affect the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
