"""Run row batches under `xgpt serve --batching`, with a worker that replaces the usual one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from xgpt.core.policies import BlockTable, Request, Step
from xgpt.core.policies.tcb import lay_out
from xgpt.core.schema import Batching
from xrunner.executor import OneAtATime
from xrunner.generation import Generation
from xrunner.grammar import Grammars
from xrunner.models import Model
from xrunner.sampling import Sampler, highest
from xrunner.tcb.rows import Layout, Rows, rows_of
from xrunner.worker import fed


class _RunningBatch:
    """A running batch and the state of its requests. All arrays have the requests' order in the logits.

    Attributes:
        slot: slot of each request. # int64 [requests]
        lines: each request's row in the sampler. # int64 [requests]
        context: number of each request's tokens whose K/V are stored. # int32 [requests]
        last_token: each request's next input token. # int64 [requests]
    """

    def __init__(self, rows: Rows, placed: Layout, sampler: Sampler, before: int) -> None:
        self.rows, self.sampler = rows, sampler
        self.ids, self.slot = placed.ids, placed.slot
        self.lines = np.arange(len(self.ids))
        self.context = (placed.length + before).astype(np.int32)
        self.last_token = np.zeros(len(self.ids), dtype=np.int64)

    def keep(self, stay: np.ndarray) -> None:
        self.rows.keep(stay)
        self.ids = [self.ids[index] for index in stay]
        self.slot, self.lines = self.slot[stay], self.lines[stay]
        self.context, self.last_token = self.context[stay], self.last_token[stay]


class RowWorker(OneAtATime):
    """Executes the steps of row batches. One step encodes a whole batch, later steps decode all its requests.

    A request that has ended is computed until its whole batch or, with slots, its whole slot has ended. Keys and values
    are in the batch's own tensors. `policies.row_pool.RowPool` counts them against the plan's memory.
    """

    def __init__(
        self,
        model: Model,
        batching: Batching,
        row_tokens: int,
        device: torch.device,
        kept: torch.dtype,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.resumes = not model.decoder_start
        self._batching, self._row_tokens, self._device, self._kept = batching, row_tokens, device, kept
        self.grammars = grammars
        self._generations: dict[int, Generation] = {}
        self.inside: dict[int, _RunningBatch] = {}
        self._samplers: dict[int, Sampler] = {}

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        self._generations[generation.id] = generation

    def release(self, ids: Collection[int]) -> None:
        gone = {id_ for id_ in ids if self._generations.pop(id_, None) is not None}
        for number, batch in list(self.inside.items()):
            for id_ in gone.intersection(batch.ids):
                batch.sampler.release(int(batch.lines[batch.ids.index(id_)]))
            known = np.array([id_ in self._generations for id_ in batch.ids])
            if not known.any():
                del self.inside[number]
            elif self._batching == "slots":
                stay = np.flatnonzero(np.isin(batch.slot, batch.slot[known]))
                if len(stay) < len(batch.ids):
                    batch.keep(stay)

    def restart(self) -> None:
        super().restart()
        self.release(list(self._generations))

    def execute(self, step: Step) -> dict[int, int]:
        self.logprobs, self.failed = {}, {}
        if not (step.encode or step.decode):
            return {}
        with torch.inference_mode():
            if step.encode:
                batch = self.inside[step.microbatch] = self._begin(step)
                hidden = batch.rows.first()
            else:
                batch = self.inside[step.microbatch]
                hidden = batch.rows.next(torch.from_numpy(batch.last_token).to(self._device))
                batch.context += 1
            sampler, lines = batch.sampler, batch.lines
            takes_highest = sampler.takes_highest(lines)
            added = sampler.clocks(lines, batch.context) if takes_highest else None
            logits = self.model.head(hidden, highest_only=takes_highest, added=added)
            if takes_highest:
                tokens = highest(logits).cpu().numpy()
            else:
                tokens, logprobs = sampler(logits, lines, batch.context)
                self.failed = {batch.ids[index]: why for index, why in sampler.failed.items()}
                self.logprobs = {batch.ids[index]: value for index, value in logprobs.items()}
        batch.last_token = fed(tokens)
        asked = {*step.decode, *(chunk.id for chunk in step.encode)}
        return {id_: token for id_, token in zip(batch.ids, tokens.tolist(), strict=True) if id_ in asked}

    def _begin(self, step: Step) -> _RunningBatch:
        assert step.microbatch not in self.inside, "a batch begins when the last one of its micro-batch has ended"
        batch = [self._generations[chunk.id] for chunk in step.encode]
        layout = lay_out(
            self._batching, [Request(one.id, len(one.prompt), one.max_output) for one in batch], self._row_tokens
        )
        placed = Layout(layout, {one.id: one.prompt for one in batch})
        if step.microbatch not in self._samplers:
            self._samplers[step.microbatch] = Sampler(self.model.spec.vocab_size, self._device, self.grammars)
        sampler = self._samplers[step.microbatch]
        for line, id_ in enumerate(placed.ids):
            one = self._generations[id_]
            cut = len(one.prompt) - one.num_resumed
            prompt = () if self.model.decoder_start else one.prompt[:cut]
            sampler.start(line, one.sampling, one.prompt[cut:], prompt)
        rows = rows_of(self.model, placed, max(one.max_output for one in batch), self._kept)
        return _RunningBatch(rows, placed, sampler, len(self.model.decoder_start))
