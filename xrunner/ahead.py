"""Launch the next decode step before the engine asks for it, so that a GPU never waits for the engine's loop.

While all requests only decode, the next step nearly always decodes the same requests as the previous step, except those
that have ended. The input tokens are already on the device, so the step is launched before the host has read them, and
the engine's loop settles the previous step while the next one runs. If the schedule then asks for a different step, the
launched one is discarded. The keys and values that it wrote are then overwritten, or are in blocks whose next owner
writes before it reads. Tokens and steps are the same as without early launches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from xgpt.core.policies import Step
from xrunner.attention import Batch
from xrunner.attention.base import to_device
from xrunner.worker import Worker, fed


@dataclass(slots=True)
class _Launched:
    """A decode step that was launched before the schedule asked for it.

    Attributes:
        index: index of each request's token in `tokens`. Released requests are left out.
        tokens: the step's tokens, on the device. # int64 [requests]
    """

    index: dict[int, int]
    tokens: Tensor


class AheadWorker(Worker):
    """A worker of a whole decoder-only model that launches the next step early once two consecutive steps only decode.

    Steps that sample at random, apply penalties or report log probabilities are not launched early.

    Attributes:
        num_hits: number of early steps that the schedule then asked for.
    """

    num_hits = 0
    _ahead: _Launched | None = None
    _decoded = False

    def restart(self) -> None:
        self._ahead = None
        self._decoded = False
        super().restart()

    def release(self, ids: Collection[int]) -> None:
        if self._ahead is not None:
            for id_ in ids:
                self._ahead.index.pop(id_, None)
        super().release(ids)

    def _execute(self, step: Step) -> dict[int, int]:
        if step.encode or not self._sampler.is_idle:
            self._ahead = None
            self._decoded = False
            return super()._execute(step)
        rows = self._rows.of(step.decode)
        tokens = self._take(step.decode)
        if tokens is None:
            tokens = self._launch(self._decodes(step, rows))
        else:
            self._rows.context[rows] += 1
        arriving = _Arriving(tokens)
        if self._decoded:
            self._run_ahead(step, rows, tokens)
        self._decoded = True
        sampled = arriving.wait()
        self._rows.last_token[rows] = fed(sampled)
        return dict(zip(step.decode, sampled.tolist(), strict=True))

    def _run_ahead(self, step: Step, rows: np.ndarray, tokens: Tensor) -> None:
        context = self._rows.context[rows]
        has_room = context // self.cache.block_size < self._rows.num_blocks[rows]
        if not has_room.all() or int(context.max()) >= self.model.spec.max_context:
            return
        batch = self._decodes(step, rows)
        self._rows.context[rows] -= 1  # stays so until the engine asks for this step
        self._ahead = _Launched(
            index={id_: index for index, id_ in enumerate(step.decode)},
            tokens=self._launch(replace(batch, token_ids=tokens.clamp(min=0))),
        )

    def _take(self, ids: tuple[int, ...]) -> Tensor | None:
        """Return the tokens of these requests' next step if it was launched early, else None. # int64 [requests]"""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.index.keys() >= set(ids):
            return None
        self.num_hits += 1
        places = [ahead.index[id_] for id_ in ids]
        if len(places) == len(ahead.tokens) and places == sorted(places):
            return ahead.tokens
        return ahead.tokens[to_device(torch.tensor(places), self._device)]

    def _decodes(self, step: Step, rows: np.ndarray) -> Batch:
        return self._batch(step, rows, np.ones(len(rows), dtype=bool))

    def _launch(self, batch: Batch) -> Tensor:
        """Launch a greedy decode step, and return its tokens on the device. # int64 [requests]"""
        with torch.inference_mode():
            logits = self.logits(batch)
            assert logits is not None, "the whole model is here"
            return self.sample(logits)


class _Arriving:
    """A tensor that is being copied to the host. Later work on the device does not delay the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
