"""This machine as TCB's systems see it: the layers that serve, in rows or flattened, on the computer's own clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.tcb.layouts import run_rows
from benchmarks.tcb.systems import Demand, Machine
from xgpt.core.policies import Blocks, BlockTable, Chunk, Schedule, Step
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import RowBatch
from xgpt.core.schema import ModelSpec
from xgpt.core.schema.step_log import StepRecord
from xrunner.build import WorkerSettings, build_worker, warm_up
from xrunner.engine import Engine
from xrunner.generation import Generation

NUM_BLOCKS = 16_000
"""Of 16 tokens: more than all requests of the largest batch need."""


class RealMachine(Machine):
    """Idle time is skipped: its clock is the computer's plus what was skipped."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        self._worker = build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=NUM_BLOCKS, threads=threads))
        self._tokens = np.random.default_rng(0).integers(2, spec.vocab_size, 10_000)
        self._skipped = 0
        warm_up(self._worker)

    def now(self) -> int:
        return time.perf_counter_ns() + self._skipped

    def skip_to(self, time_ns: int) -> None:
        self._skipped += max(0, time_ns - self.now())

    def run_rows(self, batch: RowBatch, output_lengths: Mapping[int, int], *, free_slots: bool = False) -> None:
        prompts = {place.id: self._prompt(place.id, place.length) for place in batch.places}
        run_rows(self._worker.model, batch, prompts, output_lengths, free_slots=free_slots)

    def run_flattened(self, requests: Sequence[Request], output_lengths: Mapping[int, int]) -> None:
        worker = self._worker
        blocks = Blocks(NUM_BLOCKS)
        for one in requests:
            table = BlockTable(())
            for _ in range(-(-(one.input_length + one.max_output) // worker.cache.block_size)):
                blocks.grow(table)
            worker.start(self._generation(one), table)
        worker.execute(Step(tuple(Chunk(one.id, 0, one.input_length) for one in requests), ()))
        running = {one.id: output_lengths[one.id] - 1 for one in requests}
        while running:
            worker.release([id_ for id_, left in running.items() if not left])
            running = {id_: left - 1 for id_, left in running.items() if left}
            if running:
                worker.execute(Step((), tuple(running)))

    def run_iterations(self, schedule: Schedule, demand: Demand) -> list[StepRecord]:
        origin, arrived, requests = self.now(), 0, demand.requests
        log: list[StepRecord] = []
        engine = Engine(schedule, self._worker, clock=lambda: self.now() - origin, on_step=log.append)
        while self.now() - origin < requests[-1].arrival_ns:
            while arrived < len(requests) and requests[arrived].arrival_ns <= self.now() - origin:
                engine.submit(self._generation(requests[arrived]))
                arrived += 1
            if engine.step() is None:
                self.skip_to(origin + requests[arrived].arrival_ns)
        self._worker.release([one.id for one in requests])
        return log

    def _generation(self, one: Request) -> Generation:
        prompt = tuple(self._prompt(one.id, one.input_length).tolist())
        return Generation(one.id, prompt, one.max_output, output_length=one.max_output, deadline_ns=one.deadline_ns)

    def _prompt(self, id_: int, length: int) -> np.ndarray:
        start = (37 * id_) % (len(self._tokens) - length)
        return self._tokens[start : start + length]
