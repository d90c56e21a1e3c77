"""Random schedules against a model of each block's contents: whatever a step attends to is what the request says.

Requests begin alike, are cancelled, preempted, and begin anew as after a loss of all workers. Each step is executed on
a memory of (block, offset) -> all tokens up to there, and must read there exactly what its sequence is.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest

from xgpt.core.policies import LaneSettings, OneLane, Pool, Request, Schedule, Step, TwoLane, TwoLaneSettings
from xgpt.core.schema.step_log import Chain

KINDS: dict[str, dict[str, Any]] = {
    "orca": {"mix": True, "max_batch": 5},
    "chunked": {"mix": True, "max_batch": 5, "token_budget": 5},
    "ahead": {"mix": True, "max_batch": 5, "ahead": True},
    "prompts first": {"mix": True, "max_batch": 5, "token_budget": 5, "ahead": True, "prompts_first": True},
    "whole prompts": {"mix": True, "max_batch": 5, "token_budget": 9, "whole_prompts": True},
    "rra": {"mix": False, "encode_every": 2, "encode_tokens": 10.0, "carried_batch": 1.0, "decode_batch": 3.0},
    "static": {"mix": False, "max_batch": 4, "refill_when_empty": True},
    "micro-batches": {"mix": True, "max_batch": 6, "microbatches": 2},
    "waa": {},
}
"""Settings of one lane; waa's two are drawn."""
NUM_REQUESTS = 25
NUM_ROUNDS = 220

Tokens = tuple[int, ...]


class Memory:
    """One lane's K/V: what each place of each block was computed from."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._holds: dict[tuple[int, int], int] = {}

    def write(self, blocks: list[int], place: int, sequence: Tokens) -> None:
        self._holds[blocks[place // self._size], place % self._size] = hash(sequence[: place + 1])

    def read(self, blocks: list[int], count: int, sequence: Tokens) -> None:
        for place in range(count):
            assert self._holds.get((blocks[place // self._size], place % self._size)) == hash(sequence[: place + 1])


class Client:
    """What a request says, has been answered, and which blocks its workers know of.

    Attributes:
        said: prompt and output so far; goal: its output's length.
        blocks, prompt_blocks: as its workers were told, where it is decoded and where it is encoded.
        found: blocks that it found where it is decoded.
    """

    def __init__(self, prompt: Tokens, goal: int) -> None:
        self.said, self.goal, self.answered = prompt, goal, 0
        self.blocks: list[int] = []
        self.prompt_blocks: list[int] = []
        self.found = 0
        self.is_known = False


class World:
    """One schedule, driven at random."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng
        self.size, count = rng.choice([1, 2, 4]), rng.choice([12, 20, 40])
        kv: Any = "reserve" if kind == "static" else rng.choice(["reserve", "quantile"])
        most = rng.choice([None, 3, 6])
        pool = Pool(count, self.size, kv=kv, holds_finished=kind == "static", max_running=most)
        self.schedule = self._schedule(pool)
        self.memory = {"prompt": Memory(self.size), "decode": Memory(self.size)}
        self.clients: dict[int, Client] = {}
        self.ended: set[int] = set()
        self.under_way: deque[Step] = deque()
        self.seen: Counter[str] = Counter()

    def _schedule(self, pool: Pool) -> Schedule:
        if self.kind != "waa":
            return OneLane(LaneSettings(**KINDS[self.kind]), pool)
        settings = TwoLaneSettings(
            encode_tokens=self.rng.choice([4.0, 12.0]),
            encode_stages=self.rng.choice([1, 2]),
            encode_blocks=pool.kv_blocks,
            max_decode_batch=6,
            decode_microbatches=self.rng.choice([1, 2]),
            buffer_iterations=self.rng.choice([0, 2]),
        )
        return TwoLane(settings, pool)

    @property
    def pool(self) -> Pool:
        return self.schedule.pool

    def chain(self, tokens: Tokens) -> Chain:
        ends = range(self.size, len(tokens) + 1, self.size)
        return tuple(str(hash(tokens[:end])).encode() for end in ends)

    def run(self) -> None:
        for _ in range(NUM_ROUNDS):
            if len(self.clients) < NUM_REQUESTS and self.rng.random() < 0.5:
                self.submit()
            if self.clients and self.rng.random() < 0.08:
                self.cancel(self.rng.choice(list(self.clients)))
            if self.rng.random() < 0.01:
                self.lose_all_workers()
            for lane in self.schedule.lanes:
                while (step := self.schedule.next_step(lane)) is not None:
                    self.begin(step)
            if self.under_way:
                self.settle(self.take_oldest())
                self.check_counts()

    def submit(self) -> None:
        rng, id_ = self.rng, len(self.clients)
        prompt = (1,) * rng.choice([0, 4, 8]) + tuple(rng.randrange(3) for _ in range(rng.randrange(1, 8)))
        most = rng.randrange(1, 10)
        promised = rng.choice([None, 1, 3])
        request = Request(id_, len(prompt), most, promised_output=promised, chain=self.chain(prompt))
        self.clients[id_] = Client(prompt, rng.randrange(1, most + 1))
        if self.pool.can_ever_fit(request):
            self.schedule.submit(request)
        else:
            self.ended.add(id_)

    def cancel(self, id_: int) -> None:
        if id_ not in self.ended:
            self.let_go(self.schedule.cancel(id_))
            self.seen["cancelled"] += 1

    def lose_all_workers(self) -> None:
        """Begin anew with all that waited or ran, and with empty memories."""
        old = self.pool
        requests = [*old.running.values(), *old.waiting]
        silent = {request.id for request in old.running.values() if old.is_silent(request.id)}
        self.ended |= silent
        self.schedule = self.schedule.fresh()
        self.under_way.clear()
        self.memory = {name: Memory(self.size) for name in self.memory}
        for request in requests:
            client = self.clients[request.id]
            client.is_known = False
            if request.id in silent:
                continue
            left = request.input_length + request.max_output - len(client.said)
            chain = self.chain(client.said)
            again = Request(request.id, len(client.said), left, promised_output=request.promised_output, chain=chain)
            if self.pool.can_ever_fit(again):
                self.schedule.submit(again)
            else:
                self.ended.add(request.id)
        self.seen["lost"] += 1

    def begin(self, step: Step) -> None:
        """Tell the workers of a step: which requests have gone, and which blocks those that begin have."""
        self.check_counts()
        for id_ in step.preempted:
            self.clients[id_].is_known = False
            self.seen["preempted"] += 1
        for chunk in step.encode:
            request, client = self.pool.running[chunk.id], self.clients[chunk.id]
            if chunk.start == request.cached:
                assert request.table is not None
                client.blocks = list(request.table.blocks)
                client.prompt_blocks = list((request.prompt_table or request.table).blocks)
                client.found, client.is_known = request.table.found, True
                self.seen["found"] += request.cached > 0
        self.under_way.append(step)

    def take_oldest(self) -> Step:
        """Of some lane, as steps of one lane end in their order."""
        lane = self.rng.choice(sorted({step.lane for step in self.under_way}))
        step = next(step for step in self.under_way if step.lane == lane)
        self.under_way.remove(step)
        return step

    def settle(self, step: Step) -> None:
        tokens = [id_ for id_ in self.execute(step) if id_ in self.pool.running]
        finished: list[int] = []
        for id_ in tokens:
            client = self.clients[id_]
            client.said += (self.rng.randrange(3),)
            client.answered += 1
            if not self.pool.is_silent(id_) and client.answered >= client.goal:
                finished.append(id_)
        running = self.pool.running
        outputs = {id_: self.chain(self.clients[id_].said)[len(running[id_].chain) :] for id_ in finished}
        self.let_go(self.schedule.settle(step, finished, outputs))

    def execute(self, step: Step) -> list[int]:
        """Write what the step computes and read what it attends to; return the requests that have a token more."""
        has_two = self.kind == "waa"
        encoded_in, decoded_in = self.memory["prompt" if has_two else "decode"], self.memory["decode"]
        for id_, block in step.grown:
            self.clients[id_].blocks.append(block)
            if not has_two:
                self.clients[id_].prompt_blocks = self.clients[id_].blocks
        emitted = []
        for id_, start, length in step.encode:
            client = self.clients[id_]
            if client.is_known:
                for place in range(start, start + length):
                    encoded_in.write(client.prompt_blocks, place, client.said)
                encoded_in.read(client.prompt_blocks, start + length, client.said)
                emitted += [id_] if start + length == len(client.said) else []
        for id_ in step.transfer:
            client = self.clients[id_]
            count = len(client.said) - 1
            for place in range(client.found * self.size, count):
                decoded_in.write(client.blocks, place, client.said)
            decoded_in.read(client.blocks, count, client.said)
        for id_ in step.decode:
            client = self.clients[id_]
            if client.is_known:
                decoded_in.write(client.blocks, len(client.said) - 1, client.said)
                decoded_in.read(client.blocks, len(client.said), client.said)
                emitted.append(id_)
        return emitted

    def let_go(self, ids: list[int]) -> None:
        for id_ in ids:
            self.ended.add(id_)
            self.clients[id_].is_known = False

    def check_counts(self) -> None:
        """Every block is free, kept or in use; uses and promises are counted right."""
        pool = self.pool
        lanes = {
            id(pool.memory.decodes): (pool.memory.decodes, "table"),
            id(pool.memory.prompts): (pool.memory.prompts, "prompt_table"),
        }
        if pool.memory.prompts is pool.memory.decodes:
            lanes = {id(pool.memory.decodes): (pool.memory.decodes, "table")}
        for blocks, attribute in lanes.values():
            uses: Counter[int] = Counter()
            for request in pool.running.values():
                if (table := getattr(request, attribute)) is not None:
                    assert len(set(table.blocks)) == len(table.blocks)
                    uses.update(table.blocks)
            free, kept = set(blocks._free), set(blocks._kept)
            assert len(free) == len(blocks._free) and not free & kept and not (free | kept) & uses.keys()
            assert blocks.num_used == len(uses) <= blocks.count
            assert all(blocks._uses.get(block, 1) == count for block, count in uses.items())
        promised = sum(r.blocks - len(r.table.blocks) for r in pool.running.values() if r.table is not None)
        assert promised == pool.memory.num_promised >= 0
        assert pool.reserved_blocks <= pool.kv_blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 2500), marks=pytest.mark.long)], ids=len)
def test_what_a_step_reads_is_what_its_request_says(kind: str, seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(kind, random.Random(f"{kind} {seed}"))
        world.run()
        seen += world.seen
    assert all(seen[what] > 0 for what in ("found", "cancelled", "lost"))
    assert seen["preempted"] > 0 or kind == "static"
