"""Run one stage of a pipeline. It receives hidden states from the previous stage and sends them to the next."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from xrunner.attention import AttentionBackend, Batch
from xrunner.kv_cache import KvCache
from xrunner.models import EncoderDecoderModel, Model


class Pipe(Protocol):
    """The link to other stages. A sent tensor must not change until it has arrived."""

    def receive(self, num_rows: int) -> Tensor:
        """Wait for the previous stage's hidden states. # [rows, hidden]"""

    def send(self, hidden: Tensor) -> None:
        """Send to the next stage without waiting. # [rows, hidden]"""

    def send_to_all(self, memory: Tensor) -> None:
        """In the last stage, send the encoder's output to every other stage. # [rows, hidden]"""

    def receive_from_last(self, num_rows: int) -> Tensor:
        """Wait for the encoder's output from the last stage. # [rows, hidden]"""


class StageModel:
    """A stage's part of a model. It is called like the whole model.

    In an encoder-decoder, the first decoder layer needs the output of the last encoder layer, so a step with prompts
    goes through the pipeline twice. The first pass is `run_encoder`. At its end, the last stage sends the encoder's
    output to every other stage. The second pass is the call of this object. Under WAA, each lane does one of the two
    passes, and the encode lane's output is transferred to every stage of the decode lane. Each stage gets it by
    `take_encoder_output`.
    """

    def __init__(self, model: Model, pipe: Pipe) -> None:
        self.model = model
        self._pipe = pipe
        self._memories: deque[Tensor] = deque()
        """Encoder outputs for later calls. The last stage keeps them. Under WAA, every stage of the decode lane keeps
        them.
        """

    @property
    def runs_encoder_first(self) -> bool:
        return isinstance(self.model, EncoderDecoderModel)

    def run_encoder(self, batch: Batch, backend: AttentionBackend) -> Tensor | None:
        """Run a batch of prompts through the encoder layers only.

        Return the encoder's output in the last stage of an encode lane. In other stages, return None.
        # [prompt tokens, hidden]
        """
        model = self.model
        assert isinstance(model, EncoderDecoderModel) and not batch.num_decodes
        hidden = model.encode(batch, backend, self._received(_num_prompt_tokens(batch)))
        assert hidden is not None
        if not model.has_head:
            self._pipe.send(hidden)
            return None
        if not model.runs_decoder:
            return hidden
        self._pipe.send_to_all(hidden)
        self._memories.append(hidden)
        return None

    def take_encoder_output(self, memory: Tensor) -> None:
        """Store the encoder's output from another lane, for the next batch's prompts. # [prompt tokens, hidden]"""
        self._memories.append(memory)

    def __call__(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor | None:
        """Run a step. Return logits in the last stage, and None in other stages. # [sampled, vocab]"""
        model = self.model
        if isinstance(model, EncoderDecoderModel):
            memory = self._memory(batch)
            out = model.decode(batch, memory, cache, backend, self._received(len(batch.context_len)))
        else:
            out = model(batch, cache, backend, self._received(len(batch.token_ids)))
        if model.has_head:
            return out
        self._pipe.send(out)
        return None

    def _memory(self, batch: Batch) -> Tensor | None:
        num_rows = _num_prompt_tokens(batch)
        if not num_rows:
            return None
        return self._memories.popleft() if self._memories else self._pipe.receive_from_last(num_rows)

    def _received(self, num_rows: int) -> Tensor | None:
        return None if self.model.has_embedding else self._pipe.receive(num_rows)


def _num_prompt_tokens(batch: Batch) -> int:
    """Each sequence has one more token, which starts its decoder."""
    return len(batch.token_ids) - len(batch.context_len)
