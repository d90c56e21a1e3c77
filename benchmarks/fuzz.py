"""Send thousands of bad requests, and check for 5xx, hangs, missing answers and growing memory.

    python -m benchmarks.fuzz [--requests 10000] [--seed 0]

The requests go to a small server in a separate process, only over loopback. Prints a table and writes
results/fuzz.json. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.lib.tiny_server import SPEC, Running, running
from xgpt.core.io import write_atomic

RESULTS = Path("results/fuzz.json")
CONCURRENCY = 16
ANSWER_TIMEOUT_S = 30
WARM_UP = 0.25
"""Share of good and of bad requests that are sent as warm-up, since libraries keep memory for each shape of a batch,
and the allocator keeps memory of the largest bodies."""
NUM_PARTS = 10
MAX_RSS_GROWTH = 0.02

COMPLETION: dict[str, Any] = {"model": SPEC.name, "prompt": [1, 2, 3], "max_tokens": 2}
CHAT: dict[str, Any] = {"model": SPEC.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n",
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "output_length", "logit_bias", "user", "logprobs",
    "top_logprobs", "best_of", "echo", "suffix", "add_generation_prompt", "chat_template_kwargs", "tools",
    "tool_choice", "response_format", "unheard_of",
)  # fmt: skip
VALUES = (
    "null", "true", "false", "0", "-1", "1", "3", "0.5", "-0.0", "1e308", "-1e308", "1e999", "1e-320", "NaN",
    "Infinity", "-Infinity", str(2**31), str(2**53), str(2**63), str(-(2**63)), "9" * 40, "9" * 5000, '""', '"x"',
    '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"' + "y" * 5000 + '"', "[]", "[[]]", "[null]", "[0]", "[-1]",
    "[1e3]", "[999999999]", '[""]', '["x", 1]', "[[1], 2]", "[[1], [2]]", "{}", '{"a": {}}', '{"1": 100}',
    '{"include_usage": 7}', '[{"role": "user"}]', '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": [{"type": "text", "text": "x"}]}]', "[" * 2000, "[" * 200 + "]" * 200,
    '{"a":' * 200 + "1" + "}" * 200, "{{ 7 * 7 }}", "01", "+1", "0x10", "'x'",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and how it is sent.

    Attributes:
        may_close: whether the server may close the connection without an answer.
        leaves: whether the client, after sending, ends its side ("eof"), closes the connection ("close") or waits
            (None).
        must_succeed: whether the request is good.
    """

    raw: bytes
    may_close: bool = False
    leaves: str | None = None
    must_succeed: bool = False


def http(path: str, body: bytes, *, method: str = "POST", length: int | None = None, extra: str = "") -> bytes:
    size = len(body) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n{extra}\r\n"
    return head.encode() + body


def good(rng: random.Random) -> Case:
    path = rng.choice(list(BODIES))
    return Case(http(path, json.dumps(BODIES[path] | {"stream": rng.random() < 0.5}).encode()), must_succeed=True)


def varied(rng: random.Random) -> Case:
    body = COMPLETION | {"prompt": [1] * rng.randint(1, 60), "max_tokens": rng.randint(1, 12), "n": rng.randint(1, 2)}
    return Case(http("/v1/completions", json.dumps(body).encode()), must_succeed=True)


def wrong_value(rng: random.Random) -> Case:
    """Return a good request in which one to three fields have values of any kind."""
    path = rng.choice(list(BODIES))
    fields = {name: json.dumps(value) for name, value in BODIES[path].items()}
    fields |= {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.randint(1, 3))}
    return Case(http(path, ("{" + ",".join(f'"{k}":{v}' for k, v in fields.items()) + "}").encode()))


def broken_json(rng: random.Random) -> Case:
    """Return a good body with bytes removed, doubled or changed, including invalid UTF-8."""
    path = rng.choice(list(BODIES))
    body = bytearray(json.dumps(BODIES[path]).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        end = at + rng.randint(0, 8)
        body[at:end] = rng.choice((b"", body[at:end] * 2, rng.randbytes(3), b"\xff\xfe", b"\xed\xa0\x80", b"\xc0"))
    return Case(http(path, bytes(body)))


def noise(rng: random.Random) -> Case:
    return Case(http(rng.choice(list(BODIES)), rng.randbytes(rng.choice((0, 1, 10, 1000)))))


def limits(rng: random.Random) -> Case:
    context = SPEC.max_context
    body = COMPLETION | rng.choice(
        (
            {"prompt": [1] * (context - 2)}, {"prompt": [1] * context}, {"prompt": [1] * 100_000},
            {"prompt": "x" * (context + 1)}, {"prompt": "\u20ac" * 1000}, {"prompt": [[1]] * 2000},
            {"prompt": [[1]] * 20, "n": 128}, {"prompt": ""}, {"prompt": []}, {"max_tokens": context},
            {"max_tokens": 0}, {"prompt": [SPEC.vocab_size]}, {"stop": ["x"] * 100}, {"stop": "x" * 5000},
            {"logprobs": 21}, {"n": 8, "logprobs": 20, "temperature": 2}, {"model": "other"},
        )
    )  # fmt: skip
    return Case(http("/v1/completions", json.dumps(body).encode()))


def big_body(rng: random.Random) -> Case:
    path, body = rng.choice(
        (
            ("/v1/completions", json.dumps(COMPLETION | {"prompt": "x" * 10_000_000}).encode()),
            ("/v1/completions", json.dumps(COMPLETION | {"prompt": [1] * 3_300_000}).encode()),
            ("/v1/chat/completions", json.dumps(CHAT | {"user": "y" * 10_000_000}).encode()[:-1]),
            ("/v1/completions", b" " * 10_000_000),
        )
    )
    return Case(http(path, body))


def half_closed(rng: random.Random) -> Case:
    """Return a request whose client sends part or all of it and then leaves."""
    raw = http("/v1/completions", json.dumps(COMPLETION | {"max_tokens": 100, "stream": rng.random() < 0.5}).encode())
    return Case(raw[: rng.choice((len(raw), rng.randrange(1, len(raw))))], True, rng.choice(("eof", "close")))


def bad_http(rng: random.Random) -> Case:
    body = json.dumps(COMPLETION).encode()
    raw = rng.choice(
        (
            http("/v1/completions", body, method=rng.choice(("GET", "PUT", "DELETE", "BREW"))),
            http(rng.choice(("/", "/v1", "/v1/completions/", "/%00", "/../etc", "/" + "a" * 3000)), body),
            http("/v1/completions", body, length=len(body) - 5),
            http("/v1/completions", body, extra="Content-Encoding: gzip\r\n"),
            http("/v1/completions", body, extra="X: " + "y" * 100_000 + "\r\n"),
            http("/v1/completions", body, extra="Content-Length: 3\r\n"),
            http("/v1/completions", body, extra="Transfer-Encoding: chunked\r\n"),
            b"\x16\x03\x01\x02\x00\x01\x00",  # a TLS greeting
            rng.randbytes(40) + b"\r\n\r\n",
        )
    )
    # Some of these announce more bytes than they send, so the server would wait.
    return Case(raw, may_close=True, leaves="eof")


KINDS: dict[Callable[[random.Random], Case], int] = {
    good: 4,
    wrong_value: 40,
    broken_json: 20,
    noise: 5,
    limits: 15,
    big_body: 1,
    half_closed: 10,
    bad_http: 5,
}
"""Number of requests of each kind in a hundred."""


@dataclass(slots=True)
class Outcome:
    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For each kind of request, how often each status, "closed", "left" or "hang" occurred."""
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """Resident memory at the start, after the warm-up, and after each tenth of the requests."""

    @property
    def rss_growth(self) -> float:
        """Relative growth of memory over the last half. In the first half, large bodies fill the allocators' pools."""
        return self.rss_bytes[-1] / self.rss_bytes[-1 - NUM_PARTS // 2] - 1


async def fuzz(server: Running, num_requests: int, seed: int) -> Outcome:
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=num_requests)
    num_warm = int(WARM_UP * num_requests)
    warm_up = [varied] * num_warm + kinds[-num_warm:]
    outcome = Outcome(rss_bytes=[server.rss_bytes()])
    tenths = [kinds[i * num_requests // NUM_PARTS : (i + 1) * num_requests // NUM_PARTS] for i in range(NUM_PARTS)]
    for part in (warm_up, *tenths):
        queue = iter(part)
        await asyncio.gather(*(_work(server, queue, rng, outcome) for _ in range(CONCURRENCY)))
        outcome.rss_bytes.append(server.rss_bytes())
    return outcome


async def _work(server: Running, queue: Any, rng: random.Random, outcome: Outcome) -> None:
    for kind in queue:
        case = kind(rng)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status = await exchange(server.port, case)
        except TimeoutError:
            status = "hang"
        outcome.answers[kind.__name__][status] += 1
        is_fine = status[0] in "24" or status == "left" or (status == "closed" and case.may_close)
        if not is_fine or (case.must_succeed and status != "200"):
            outcome.failures.append(f"{kind.__name__}: {status}: {case.raw[:300]!r}")


async def exchange(port: int, case: Case) -> str:
    """Return the answer's status, "closed" if none came, or "left" if the client did not wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(case.raw)
        await writer.drain()
        if case.leaves == "close":
            return "left"
        if case.leaves == "eof":
            writer.write_eof()
        while (status := (await reader.readline()).split(b" "))[1:2] == [b"100"]:
            await reader.readuntil(b"\r\n")  # an interim answer
        while await reader.read(1 << 16):
            pass
        return status[1].decode() if len(status) > 1 else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()


@click.command()
@click.option("--requests", "num_requests", default=10_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(num_requests: int, seed: int) -> None:
    """Send bad requests to a small server, and report its answers."""
    with running() as server:
        outcome = asyncio.run(fuzz(server, num_requests, seed))
    for kind, answers in outcome.answers.items():
        click.echo(f"{kind:12} " + "  ".join(f"{status}: {count}" for status, count in sorted(answers.items())))
    sizes = ", ".join(f"{size / 2**20:.0f}" for size in outcome.rss_bytes)
    click.echo(f"memory at the start, warm, after each tenth: {sizes} MiB")
    click.echo(f"growth over the last half: {100 * outcome.rss_growth:+.1f}%")
    click.echo(f"blocks free again: {server.last_words['free_blocks']} of {server.last_words['num_blocks']}")
    result = {
        "num_requests": num_requests,
        "seed": seed,
        "answers": outcome.answers,
        "failures": outcome.failures,
        "rss_bytes": outcome.rss_bytes,
        **server.last_words,
    }
    write_atomic(RESULTS, json.dumps(result, indent=1) + "\n")
    leaks = server.last_words["free_blocks"] < server.last_words["num_blocks"]
    for failure in outcome.failures[:20]:
        click.echo(failure, err=True)
    raise SystemExit(bool(outcome.failures) or leaks or outcome.rss_growth > MAX_RSS_GROWTH)


if __name__ == "__main__":
    main()
