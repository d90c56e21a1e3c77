"""Prompts become token ids by turns, and no long one is in another's way."""

import asyncio
import threading
import time

import pytest

from tests.fakes import byte_codec
from xrunner.server.api.tokenising import Tokenising, TooLong

CONTEXT = 1000


def tokenising() -> Tokenising:
    return Tokenising(byte_codec(), CONTEXT)


def test_token_ids() -> None:
    assert asyncio.run(tokenising().encode("a", "hé")) == byte_codec().encode("hé")


@pytest.mark.parametrize("length", [CONTEXT + 1, 5 * CONTEXT, 10**7])
def test_a_text_that_is_too_long_is_noticed_by_its_beginning(length: int) -> None:
    begin_s = time.perf_counter()
    with pytest.raises(TooLong) as found:
        asyncio.run(tokenising().encode("a", "x" * length))
    assert found.value.at_least > CONTEXT
    assert time.perf_counter() - begin_s < 1


def test_accounts_take_turns_and_short_texts_go_first() -> None:
    order: list[str] = []

    async def run() -> None:
        by_turns = tokenising()
        jobs = [by_turns.by_turns("greedy", 1000, lambda: time.sleep(0.02)) for _ in range(20)]
        jobs += [by_turns.by_turns("greedy", 1, lambda: order.append("short"))]
        jobs += [by_turns.by_turns("other", 100_000, lambda i=i: order.append(f"other {i}")) for i in range(2)]
        ended = [asyncio.ensure_future(job) for job in jobs]
        for i, job in enumerate(ended[:20]):
            job.add_done_callback(lambda _, i=i: order.append("long"))
        await asyncio.gather(*ended)

    asyncio.run(run())
    assert order.index("short") < 6 and order.index("other 0") < 6


def test_work_that_takes_long_leaves_other_accounts_a_thread() -> None:
    """Two chats whose template takes ten seconds once held up every other key's prompts for as long."""

    async def run() -> float:
        by_turns, over = tokenising(), threading.Event()
        slow = [asyncio.ensure_future(by_turns.by_turns("slow", 1, lambda: over.wait(5))) for _ in range(4)]
        await asyncio.sleep(0.05)
        begin_s = time.monotonic()
        assert await by_turns.by_turns("other", 1, lambda: 7) == 7
        took_s = time.monotonic() - begin_s
        over.set()
        await asyncio.gather(*slow)
        return took_s

    assert asyncio.run(run()) < 2


def test_what_fails_in_a_thread_fails_for_its_request() -> None:
    async def run() -> None:
        by_turns = tokenising()
        with pytest.raises(ZeroDivisionError):
            await by_turns.by_turns("a", 1, lambda: 1 / 0)
        assert await by_turns.by_turns("a", 1, lambda: 7) == 7
        left = asyncio.ensure_future(by_turns.by_turns("a", 1, lambda: time.sleep(0.1)))
        await asyncio.sleep(0.01)
        left.cancel()
        assert await by_turns.by_turns("a", 1, lambda: 8) == 8

    asyncio.run(run())
