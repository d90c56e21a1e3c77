"""Execute steps on one device. A worker has the weights, the K/V cache and each request's last token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from xgpt.core.policies import BlockTable, Chunk, Step
from xgpt.core.schema import SLICE_TOKENS
from xrunner.attention import AttentionBackend, Batch, Sequences, make_batch
from xrunner.executor import OneAtATime
from xrunner.generation import Generation
from xrunner.kv_cache import KvCache
from xrunner.models import Model
from xrunner.parallel import Part, Vocabulary
from xrunner.prompt_scores import PromptScores, ScoredPlaces
from xrunner.request_rows import RequestRows
from xrunner.sampling import Sampler, highest
from xrunner.stage import StageModel
from xrunner.transfer import CachePart, Cargo, EncoderOutputs

SCORED_TOKENS = 128
"""Largest number of tokens in a slice of a step in which prompts are scored."""

Run = Callable[[Batch, KvCache, AttentionBackend], Tensor | None]


class Worker(OneAtATime):
    """Executes steps on one device: turns a step into a batch, runs the worker's part of the model, and chooses tokens.

    A worker has the whole model, or a stage of a pipeline. All stages execute the same steps, but only the last stage
    chooses tokens. The other stages get the tokens through `set_last_tokens`.

    Attributes:
        encoder_outputs: an encoder's output for prompts that another lane decodes, by request. The encode lane keeps it
            until the request is released. The decode lane keeps it until the request's first step, which computes keys
            and values from it.
            # each [prompt tokens, hidden]

    Args:
        stage: the worker's stage of a pipeline. None means that it has the whole model.
        run: runs the whole model in place of `model` itself, for instance by captured graphs.
        vocabulary: this rank's share of the vocabulary. None means all of it.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: AttentionBackend,
        *,
        stage: StageModel | None = None,
        run: Run | None = None,
        vocabulary: Vocabulary | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.resumes = self.scores_prompts = not model.decoder_start
        self.cache = cache
        self.backend = backend
        self.encoder_outputs: dict[int, Tensor] = {}
        self._run = run or stage or model
        self._stage = stage
        self._vocabulary = vocabulary
        self._device = cache.device
        self._rows = RequestRows()
        self._prompts: dict[int, np.ndarray] = {}
        self._scores = PromptScores()
        self._sampler = sampler or Sampler(model.spec.vocab_size, self._device)
        self.grammars = self._sampler.grammars

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        """Reserve a row for a request with these blocks.

        If the model's decoder has a start token, this token follows the prompt. This needs no further slot, since the
        last output token is never fed to the model.
        """
        lengths = (len(generation.prompt), generation.max_output)
        num_tokens = max(lengths) if self.model.decoder_start else sum(lengths)
        limit = self.model.spec.max_context
        assert num_tokens <= limit, f"{num_tokens} tokens exceed the model's context of {limit}"
        prompt = (*generation.prompt, *self.model.decoder_start)
        assert not (self.model.decoder_start and generation.num_resumed), "outputs are no encoder's prompt"
        self._take_row(generation, table)
        self._prompts[generation.id] = np.array(prompt, dtype=np.int64)
        self._scores.start(generation)

    def adopt(self, generation: Generation, table: BlockTable, cached: int) -> None:
        """Reserve a row for a request whose first `cached` tokens another worker has encoded.

        Before the request decodes, the K/V of these tokens must be written into its blocks. For an encoder-decoder, the
        encoder's output must be written into `encoder_outputs`.
        """
        if self.model.decoder_start:
            self.start(generation, table)
            return
        row = self._take_row(generation, table)
        self._prompts[generation.id] = np.array(generation.prompt, dtype=np.int64)
        self._rows.context[row] = cached

    def _take_row(self, generation: Generation, table: BlockTable) -> int:
        row = self._rows.take(generation.id, table.blocks, len(generation.prompt))
        if self.model.has_head and self.model.runs_decoder:
            cut = len(generation.prompt) - generation.num_resumed
            prompt = () if self.model.decoder_start else generation.prompt[:cut]
            self._sampler.start(row, generation.sampling, generation.prompt[cut:], prompt)
        return row

    def cargo(self, part: Part) -> Cargo:
        if self.model.decoder_start:
            return EncoderOutputs(self.encoder_outputs, self.model.spec.hidden_size, self.dtype)
        return CachePart(self.cache, part)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def release(self, ids: Collection[int]) -> None:
        """Requests that never started, and repeated ids, are ignored."""
        started = [id_ for id_ in dict.fromkeys(ids) if id_ in self._rows]
        for id_ in started:
            self.encoder_outputs.pop(id_, None)
            self._sampler.release(self._rows.release(id_))
            del self._prompts[id_]
            self._scores.forget(id_)

    def restart(self) -> None:
        super().restart()
        self.release(list(self._rows))

    def set_last_tokens(self, ids: Collection[int], tokens: Collection[int]) -> None:
        self._rows.last_token[self._rows.of(ids)] = fed(np.fromiter(tokens, dtype=np.int64, count=len(tokens)))

    def run_encoder(self, step: Step) -> None:
        """Add the step's blocks to its requests. If prompts go through the pipeline twice, run them through the
        encoder.

        The prompts are cut into the same slices as in the second pass, which depend on the step's decodes.
        """
        self._rows.grow(step.grown)
        if self._stage is None or not self._stage.runs_encoder_first:
            return
        for part in self._parts(step):
            if part.encode:
                prompts = Step(part.encode, ())
                ids = [chunk.id for chunk in part.encode]
                rows = self._rows.of(ids)
                with torch.inference_mode():
                    batch = self._batch(prompts, rows, np.ones(len(rows), dtype=bool))
                    output = self._stage.run_encoder(batch, self.backend)
                if output is not None:
                    lengths = self._rows.prompt_len[rows].tolist()
                    self.encoder_outputs |= zip(ids, output.split(lengths), strict=True)

    def execute(self, step: Step, *, encoder_ran: bool = False) -> dict[int, int]:
        """Run one step. Return the next token of each request that decoded or finished its prefill.

        A step with more tokens than a slice runs slice by slice, so that activations fit into the memory planned for
        them.
        """
        self.logprobs, self.failed = {}, {}
        tokens: dict[int, int] = {}
        if not encoder_ran:
            self.run_encoder(step)
        if not self.model.runs_decoder:
            return tokens
        for part in self._parts(self._joined(step)):
            self._pass_encoder_outputs(part)
            tokens |= self._execute(part)
        return tokens

    def _joined(self, step: Step) -> Step:
        """Return the step with each request that is new to this decode lane as a prompt, since its K/V must be computed
        here.
        """
        joining = [id_ for id_ in step.decode if id_ in self.encoder_outputs]
        if not joining:
            return step
        prompts = (Chunk(id_, 0, int(self._rows.prompt_len[self._rows[id_]])) for id_ in joining)
        return Step(tuple(prompts), tuple(id_ for id_ in step.decode if id_ not in self.encoder_outputs))

    def _pass_encoder_outputs(self, part: Step) -> None:
        outputs = [self.encoder_outputs.pop(chunk.id) for chunk in part.encode if chunk.id in self.encoder_outputs]
        if outputs:
            assert self._stage is not None
            self._stage.take_encoder_output(torch.cat(outputs).to(self._device))

    def _parts(self, step: Step) -> Iterator[Step]:
        for part in slices(step, SCORED_TOKENS if self._scores.concern(step) else SLICE_TOKENS):
            whole = self._uncut(part) if self.model.decoder_start else part
            if whole.encode or whole.decode:
                yield whole

    def _uncut(self, step: Step) -> Step:
        """Return the step for a model that cannot cut prompts: a prompt's last chunk becomes the whole prompt, and its
        other chunks are dropped.
        """
        ended = [id_ for id_, start, length in step.encode if start + length == self._rows.prompt_len[self._rows[id_]]]
        return Step(tuple(Chunk(id_, 0, len(self._prompts[id_])) for id_ in ended), step.decode)

    def _execute(self, step: Step) -> dict[int, int]:
        ends = [chunk.start + chunk.length == len(self._prompts[chunk.id]) for chunk in step.encode]
        rows = self._rows.of((*step.decode, *(chunk.id for chunk in step.encode)))
        batch = self._batch(step, rows, np.array([True] * len(step.decode) + ends))
        sampled = [*step.decode, *(chunk.id for chunk, end in zip(step.encode, ends, strict=True) if end)]
        sampled_rows = self._rows.of(sampled)
        scored = self._scores.places(step, self._prompts)
        if scored is not None:
            batch = replace(batch, logit_rows=torch.cat([batch.logit_rows, scored.rows.to(self._device)]))
        takes_highest = scored is None and self._vocabulary is None and self._sampler.takes_highest(sampled_rows)
        if takes_highest:
            batch = replace(batch, added=self._sampler.clocks(sampled_rows, self._rows.context[sampled_rows]))
        is_plain = takes_highest or self._sampler.is_idle
        tokens = self.next_tokens(batch) if is_plain else self._chosen(batch, sampled, sampled_rows, scored)
        if tokens is None:
            return {}
        self._rows.last_token[sampled_rows] = fed(tokens)
        return dict(zip(sampled, tokens.tolist(), strict=True))

    def next_tokens(self, batch: Batch) -> np.ndarray | None:
        """Run the model. Return the tokens with the highest sums of logits and `batch.added`.

        The result is None if this is not the last stage. # int64 [sampled]
        """
        with torch.inference_mode():
            logits = self.logits(replace(batch, highest_only=True))
            return None if logits is None else self.sample(logits).cpu().numpy()

    def logits(self, batch: Batch) -> Tensor | None:
        """Run the model, and return its logits. The next call may overwrite them. # [sampled, vocab or this rank's
        share of it]
        """
        return self._run(batch, self.cache, self.backend)

    def sample(self, logits: Tensor) -> Tensor:
        return highest(logits) if self._vocabulary is None else self._vocabulary.argmax(logits)

    def _chosen(self, batch: Batch, ids: list[int], rows: np.ndarray, scored: ScoredPlaces | None) -> np.ndarray:
        """Run the model, and choose tokens by each request's sampling parameters. # int64 [sampled]

        Args:
            scored: prompt tokens to score. Their logits follow the requests' logits.
        """
        with torch.inference_mode():
            logits = self.logits(batch)
            assert logits is not None, "only the last stage has sampling parameters"
            if self._vocabulary is not None:
                logits = self._vocabulary.gather(logits)
            if scored is not None:
                self._scores.add(scored, logits[len(rows) :])
                logits = logits[: len(rows)]
            tokens, logprobs = self._sampler(logits, rows, self._rows.context[rows])
        self.failed |= {ids[index]: why for index, why in self._sampler.failed.items()}
        for index, value in logprobs.items():
            self.logprobs[ids[index]] = value._replace(prompt=self._scores.take(ids[index]))
        return tokens

    def _batch(self, step: Step, rows: np.ndarray, wants_logits: np.ndarray) -> Batch:
        num_decodes = len(step.decode)
        query_len = np.ones(len(rows), dtype=np.int32)
        query_len[num_decodes:] = [chunk.length for chunk in step.encode]
        kept = self._rows
        kept.context[rows[num_decodes:]] = [chunk.start for chunk in step.encode]
        kept.context[rows] += query_len
        pieces = [self._prompts[id_][start : start + length] for id_, start, length in step.encode]
        prompt_len = kept.prompt_len[rows] if self.model.decoder_start else None
        return make_batch(
            np.concatenate([kept.last_token[rows[:num_decodes]], *pieces]),
            Sequences(query_len, kept.context[rows], kept.tables[rows], prompt_len),
            block_size=self.cache.block_size,
            num_decodes=num_decodes,
            wants_logits=wants_logits,
            device=self._device,
        )


def fed(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens to feed next, with 0 for a request that has no token but stays in its batch. # int64 [n] ->
    same"""
    return np.maximum(tokens, 0)


def slices(step: Step, most: int = SLICE_TOKENS) -> Iterator[Step]:
    decode, chunks = step.decode, []
    room = max(1, most - len(decode))
    for id_, start, length in step.encode:
        end = start + length
        while start < end:
            taken = min(end - start, room)
            chunks.append(Chunk(id_, start, taken))
            start, room = start + taken, room - taken
            if not room:
                yield Step(tuple(chunks), decode)
                decode, chunks, room = (), [], most
    if decode or chunks:
        yield Step(tuple(chunks), decode)
