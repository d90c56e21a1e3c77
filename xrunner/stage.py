"""One stage of a pipeline: takes hidden states from the stage before and hands them to the stage behind."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from xrunner.attention import AttentionBackend, Batch
from xrunner.kv_cache import KvCache
from xrunner.models import EncoderDecoderModel, Model


class Pipe(Protocol):
    """The stages before and behind. What is sent must not change until it has arrived."""

    def receive(self, num_rows: int) -> Tensor:
        """Wait for what the stage before has sent. # [rows, hidden]"""

    def send(self, hidden: Tensor) -> None:
        """Hand on without waiting. # [rows, hidden]"""

    def send_to_all(self, memory: Tensor) -> None:
        """The last stage's: what an encoder has read, for every other stage. # [rows, hidden]"""

    def receive_from_last(self, num_rows: int) -> Tensor:
        """# [rows, hidden]"""


class StageModel:
    """A model's part between its neighbours, called like the whole model.

    An encoder-decoder's prompts run through the encoder layers of all stages before the first decoder layer can look
    at what has been read; the last stage therefore hands it to every other. So a step with prompts passes twice: first
    it is `read`, then called, both in the order of the steps. Under WAA each lane does one of both: what the encode
    lane's last stage has read is moved to every stage of the decode lane, which is told to `recall` it.
    """

    def __init__(self, model: Model, pipe: Pipe) -> None:
        self.model = model
        self._pipe = pipe
        self._memories: deque[Tensor] = deque()
        """What has been read, and is here for calls to come: in the last stage, or under WAA in the decode lane."""

    @property
    def reads(self) -> bool:
        """Whether prompts pass twice."""
        return isinstance(self.model, EncoderDecoderModel)

    def read(self, batch: Batch, backend: AttentionBackend) -> Tensor | None:
        """Run a batch's prompts through the encoder layers; it holds nothing else.

        Returns what has been read, of the last stage of an encode lane. # [prompt tokens, hidden]
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

    def recall(self, memory: Tensor) -> None:
        """Take what another lane has read of the next batch's prompts. # [prompt tokens, hidden]"""
        self._memories.append(memory)

    def __call__(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor | None:
        """Logits of the last stage. # [sampled, vocab]"""
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
        """Return what has been read of the batch's prompts."""
        num_rows = _num_prompt_tokens(batch)
        if not num_rows:
            return None
        return self._memories.popleft() if self._memories else self._pipe.receive_from_last(num_rows)

    def _received(self, num_rows: int) -> Tensor | None:
        return None if self.model.has_embedding else self._pipe.receive(num_rows)


def _num_prompt_tokens(batch: Batch) -> int:
    """Each sequence has one token more, the decoder's."""
    return len(batch.token_ids) - len(batch.context_len)
