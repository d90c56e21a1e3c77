"""One stage of a pipeline: hidden states in from the stage before, out to the stage behind."""

from __future__ import annotations

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


class Stage:
    """A model's part between its neighbours, called like the whole model.

    An encoder-decoder's prompts run through the encoder layers of all stages before the first decoder layer can look
    at what has been read; the last stage therefore hands it to every other.
    """

    def __init__(self, model: Model, pipe: Pipe) -> None:
        self.model = model
        self._pipe = pipe

    def __call__(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor | None:
        """Logits of the last stage, where there is a decoder. # [sampled, vocab]"""
        model = self.model
        if isinstance(model, EncoderDecoderModel):
            memory = self._encode(model, batch)
            if not model.runs_decoder:
                assert memory is not None, "a step of an encoder has prompts"
                model.keep(batch, memory, cache)
                return None
            out = model.decode(batch, memory, cache, backend, self._received(len(batch.context_len)))
        else:
            out = model(batch, cache, backend, self._received(len(batch.token_ids)))
        if model.has_head:
            return out
        self._pipe.send(out)
        return None

    def _encode(self, model: EncoderDecoderModel, batch: Batch) -> Tensor | None:
        num_rows = len(batch.token_ids) - len(batch.context_len)
        if not num_rows:
            return None
        hidden = model.encode(batch, self._received(num_rows))
        assert hidden is not None
        if model.has_head:
            self._pipe.send_to_all(hidden)
            return hidden
        self._pipe.send(hidden)
        return self._pipe.receive_from_last(num_rows)

    def _received(self, num_rows: int) -> Tensor | None:
        return None if self.model.has_embedding else self._pipe.receive(num_rows)
