"""In place of an engine that users run: an OpenAI-compatible server that batches as vLLM does, on a clock that sleeps.

    python -m tests.fake_engine MODEL --port N [--max-num-seqs N] [--max-num-batched-tokens N]

FAKE_STEP_S, FAKE_TOKEN_S: seconds of each step, and of each token in it. FAKE_MOST_SEQS: with more, it does not start
for lack of memory. FAKE_DIES_AFTER: number of answers after which it ends. /metrics has what vLLM's page has. K/V of
prompts and answers is kept for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field

STEP_S, TOKEN_S = (
    float(os.environ.get(name, default)) for name, default in (("FAKE_STEP_S", "0.004"), ("FAKE_TOKEN_S", "4e-5"))
)
BLOCK = 16
EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class Asked:
    prompt: int
    output: int
    queue: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    arrived_s: float = field(default_factory=time.perf_counter)
    encoded: int = 0
    made: int = 0
    tokens: list[int] = field(default_factory=list)
    last_s: float = 0.0
    gone: bool = False


class Engine:
    def __init__(self, model: str, seqs: int, tokens: int) -> None:
        self.model, self.seqs, self.tokens = model, seqs, tokens
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.ended = 0
        self.histograms: dict[str, list[float]] = {}
        self.kept: set[int] = set()
        self.hits = self.queries = 0

    def seen(self, name: str, value: float) -> None:
        self.histograms.setdefault(name, []).append(value)

    def find(self, asked: Asked) -> None:
        """Let a prompt begin after its blocks that were computed before."""
        while asked.encoded + BLOCK < asked.prompt and hash(tuple(asked.tokens[: asked.encoded + BLOCK])) in self.kept:
            asked.encoded += BLOCK
        self.hits, self.queries = self.hits + asked.encoded, self.queries + asked.prompt

    async def run(self) -> None:
        while True:
            self.running = [each for each in self.running if not each.gone]
            self.waiting = [each for each in self.waiting if not each.gone]
            while self.waiting and len(self.running) < self.seqs:
                self.running.append(self.waiting.pop(0))
                self.find(self.running[-1])
            if not self.running:
                await asyncio.sleep(0.001)
                continue
            left, used, emits = self.tokens, 0, []
            for each in self.running:
                if each.encoded >= each.prompt and left:
                    left, used = left - 1, used + 1
                    emits.append(each)
            for each in self.running:
                if each.encoded < each.prompt and left:
                    piece = min(left, each.prompt - each.encoded)
                    each.encoded, left, used = each.encoded + piece, left - piece, used + piece
                    if each.encoded == each.prompt:
                        emits.append(each)
            await asyncio.sleep(STEP_S + TOKEN_S * used)
            now_s = time.perf_counter()
            for each in emits:
                if each.made:
                    self.seen("inter_token_latency_seconds", now_s - each.last_s)
                else:
                    self.seen("time_to_first_token_seconds", now_s - each.arrived_s)
                each.made, each.last_s = each.made + 1, now_s
                each.queue.put_nowait(each.made)
                if each.made == each.output:
                    self.running.remove(each)
                    whole = each.tokens + list(range(1, each.made))
                    self.kept.update(hash(tuple(whole[:end])) for end in range(BLOCK, len(whole) + 1, BLOCK))
                    self.ended += 1
                    self.seen("request_prompt_tokens", each.prompt)
                    self.seen("request_generation_tokens", each.output)
                    if self.ended >= int(os.environ.get("FAKE_DIES_AFTER", "1000000000")):
                        sys.stdout.flush()
                        os._exit(1)

    def page(self) -> str:
        lines = []
        for name, values in self.histograms.items():
            lines.append(f"# TYPE vllm:{name} histogram")
            for edge in (*(SECONDS if name.endswith("seconds") else EDGES), float("inf")):
                shown = "+Inf" if edge == float("inf") else f"{edge:g}"
                lines.append(f'vllm:{name}_bucket{{le="{shown}",model_name="m"}} {sum(v <= edge for v in values)}')
            lines += [f"vllm:{name}_count {len(values)}", f"vllm:{name}_sum {sum(values)}"]
        lines += ["# TYPE vllm:request_success counter", f"vllm:request_success_total {self.ended}"]
        for name in ("hits", "queries"):
            lines += [f"# TYPE vllm:prefix_cache_{name} counter"]
            lines += [f"vllm:prefix_cache_{name}_total {getattr(self, name)}"]
        lines += ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running {len(self.running)}"]
        lines += ["# TYPE vllm:num_requests_waiting gauge", f"vllm:num_requests_waiting {len(self.waiting)}"]
        return "\n".join(lines) + "\n"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while header := (await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                path = line.split()[1].decode()
                if path == "/v1/completions":
                    await self.complete(json.loads(body), writer)
                    continue
                models = json.dumps({"data": [{"id": self.model, "owned_by": "vllm"}]})
                text = self.page() if path == "/metrics" else models
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def complete(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        prompt, output = body["prompt"], body["max_tokens"]
        assert isinstance(prompt, list) and isinstance(output, int)
        asked = Asked(len(prompt), output, tokens=prompt)
        self.waiting.append(asked)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(output):
                token = await asked.queue.get()
                self.chunk(writer, json.dumps({"choices": [{"token_ids": [token], "text": "a"}]}))
                await writer.drain()
            self.chunk(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            asked.gone = True

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    given, _ = parser.parse_known_args()
    if given.max_num_seqs > int(os.environ.get("FAKE_MOST_SEQS", "100000")):
        print("RuntimeError: CPU out of memory: KV cache of too many sequences")
        sys.exit(1)
    engine = Engine(given.model, given.max_num_seqs, given.max_num_batched_tokens)
    server = await asyncio.start_server(engine.answer, "127.0.0.1", given.port)
    async with server:
        await engine.run()


if __name__ == "__main__":
    asyncio.run(main())
