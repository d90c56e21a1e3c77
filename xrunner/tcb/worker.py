"""A worker that runs whole batches in rows: it takes the usual worker's place under `xgpt serve --batching`."""

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


class RowWorker(OneAtATime):
    """Executes the steps of whole batches: one that encodes all of a batch, then decode steps of all of it.

    A request that has ended is computed on until its batch has ended, or, in slots, until its slot has. Keys and values
    lie in the batch's own tensors; `policies.row_pool.RowPool` counts them against the plan's memory.

    Args:
        row_tokens: prompt tokens of a row.
        kept: type of keys and values.
        grammars: None: no request has one.
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
        self._generations: dict[int, Generation] = {}
        self._rows: Rows | None = None
        self._ids: list[int] = []
        """The requests that the batch computes, in the order of its logits."""
        self._slot = np.zeros(0, dtype=np.int64)
        """Of each of them its slot. # int64 [requests]"""
        self._lines = np.zeros(0, dtype=np.int64)
        """Of each of them its line in the sampler. # int64 [requests]"""
        self._context = np.zeros(0, dtype=np.int32)
        """Of each of them the tokens whose K/V is kept. # int32 [requests]"""
        self._last_token = np.zeros(0, dtype=np.int64)
        self._sampler = Sampler(model.spec.vocab_size, device, grammars)

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        """Note a request of the batch that the next step encodes."""
        self._generations[generation.id] = generation

    def release(self, ids: Collection[int]) -> None:
        """Forget these requests. In slots, those in which all are forgotten leave, and their memory with them."""
        for id_ in ids:
            if self._generations.pop(id_, None) is not None and id_ in self._ids:
                self._sampler.release(int(self._lines[self._ids.index(id_)]))
        if self._rows is None:
            return
        known = np.array([id_ in self._generations for id_ in self._ids])
        if not known.any():
            self._rows, self._ids = None, []
        elif self._batching == "slots":
            stay = np.flatnonzero(np.isin(self._slot, self._slot[known]))
            if len(stay) < len(self._ids):
                self._rows.keep(stay)
                self._ids = [self._ids[index] for index in stay]
                self._slot, self._lines = self._slot[stay], self._lines[stay]
                self._context, self._last_token = self._context[stay], self._last_token[stay]

    def restart(self) -> None:
        super().restart()
        self.release(list(self._generations))

    def execute(self, step: Step) -> dict[int, int]:
        """Run one step; return the next token of each of its requests."""
        self.logprobs, self.failed = {}, {}
        if not (step.encode or step.decode):
            return {}
        with torch.inference_mode():
            if step.encode:
                hidden = self._begin(step).first()
            else:
                assert self._rows is not None
                hidden = self._rows.next(torch.from_numpy(self._last_token).to(self._device))
                self._context += 1
            takes_highest = self._sampler.takes_highest(self._lines)
            added = self._sampler.clocks(self._lines, self._context) if takes_highest else None
            logits = self.model.head(hidden, highest_only=takes_highest, added=added)
            if takes_highest:
                tokens = highest(logits).cpu().numpy()
            else:
                tokens, logprobs = self._sampler(logits, self._lines, self._context)
                self.failed = {self._ids[index]: why for index, why in self._sampler.failed.items()}
                self.logprobs = {self._ids[index]: value for index, value in logprobs.items()}
        self._last_token = fed(tokens)
        asked = {*step.decode, *(chunk.id for chunk in step.encode)}
        return {id_: token for id_, token in zip(self._ids, tokens.tolist(), strict=True) if id_ in asked}

    def _begin(self, step: Step) -> Rows:
        """Lay the batch of a step that encodes out in rows."""
        assert self._rows is None, "a batch begins when the last one has ended"
        batch = [self._generations[chunk.id] for chunk in step.encode]
        layout = lay_out(
            self._batching, [Request(one.id, len(one.prompt), one.max_output) for one in batch], self._row_tokens
        )
        placed = Layout(layout, {one.id: one.prompt for one in batch})
        self._ids, self._slot = placed.ids, placed.slot
        self._lines = np.arange(len(self._ids))
        self._context = (placed.length + len(self.model.decoder_start)).astype(np.int32)
        for line, id_ in enumerate(self._ids):
            one = self._generations[id_]
            cut = len(one.prompt) - one.num_resumed
            prompt = () if self.model.decoder_start else one.prompt[:cut]
            self._sampler.start(line, one.sampling, one.prompt[cut:], prompt)
        self._rows = rows_of(self.model, placed, max(one.max_output for one in batch), self._kept)
        return self._rows
