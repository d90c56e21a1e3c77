"""Define the contract of a model family: the methods that workers, weight loading and the profiler use."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from xgpt.core.schema import DType, ModelSpec
from xrunner.attention import AttentionBackend, Batch, Scoring
from xrunner.kv_cache import KvCache
from xrunner.models.layers import Attend, Embedding, Empty, Head, LayerNorm, Linear, RmsNorm, Rotary


class DecoderLayer(nn.Module):
    """Computes attention, then the feed-forward block. Each block reads the hidden states through a norm, and adds its
    output to the hidden states.

    Args:
        norms_results: whether the output of each block goes through another norm before it is added (Gemma).
    """

    def __init__(
        self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module, *, norms_results: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.attention_result_norm = norm() if norms_results else nn.Identity()
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_result_norm = norm() if norms_results else nn.Identity()

    def forward(self, hidden: Tensor, batch: Batch, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Run the layer. # [tokens, hidden], int64 [wanted] -> [wanted, hidden]

        Args:
            rows: tokens whose outputs are needed. For the others, only keys and values are computed. None means all
                tokens.
        """
        if rows is not None:
            attend = partial(attend_to, attend, rows)
        attended = self.attention(self.attention_norm(hidden), batch.positions, attend)
        if rows is not None:
            hidden = hidden[rows]
            if not len(rows):
                return hidden
        hidden = self.attention_result_norm(attended).add_(hidden)
        return self.mlp_result_norm(self.mlp(self.mlp_norm(hidden))).add_(hidden)


def attend_to(attend: Attend, rows: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scoring: Scoring) -> Tensor:
    return attend(q, k, v, scoring=scoring)[rows]


class Model(nn.Module):
    """Maps a batch to logits. Each family defines the blocks, and the names of their weights in checkpoints.

    Attributes:
        decoder_start: tokens that an encoder-decoder's decoder processes first. Its prompts cannot be cut into chunks,
            because the encoder reads a whole prompt at once. Empty for decoder-only models.
        checkpoint_layers: the name in checkpoints of each list of layers in this class.
        checkpoint_names: the name in checkpoints of each module in this class. A module that fuses several projections
            has several names. A layer's modules have keys such as "layers.*.attention", and their names are relative to
            the layer. Modules that are not listed have the same name in checkpoints. "experts.*" in keys and names
            stands for each expert.
        checkpoint_stacked: for each parameter of an expert, the name of the tensor in which a checkpoint stores it for
            all experts. The tensor's first index is the expert. Matrices are [in, out].
        checkpoint_copies: for each tensor that a checkpoint may store more than once, the names of its copies.
        checkpoint_transposed: whether a checkpoint stores the projections of its layers as [in, out].
        first_layers: for each list of layers, the checkpoint's number of the list's first layer. Other lists begin at
            0.
    """

    decoder_start: tuple[int, ...] = ()
    norm: ClassVar[type[LayerNorm | RmsNorm]] = LayerNorm
    norms_results: ClassVar[bool] = False
    checkpoint_layers: ClassVar[dict[str, str]]
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]]
    checkpoint_stacked: ClassVar[dict[str, str]] = {}
    checkpoint_copies: ClassVar[dict[str, tuple[str, ...]]] = {}
    checkpoint_transposed: ClassVar[bool] = False
    first_modules: ClassVar[tuple[str, ...]] = ("token_embedding",)
    last_modules: ClassVar[tuple[str, ...]]

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__()
        self.spec = spec
        self.has_embedding = self.has_head = self.runs_decoder = True
        self.first_layers: dict[str, int] = {}
        self._rotaries: dict[bool, Rotary] = {}
        self.token_embedding = Embedding(empty, spec.vocab_size, spec.hidden_size)
        tied = self.token_embedding.weight if spec.tie_embeddings else None
        self.lm_head = Head(empty, spec.hidden_size, spec.vocab_size, weight=tied)

    def _norm(self, empty: Empty) -> LayerNorm | RmsNorm:
        return self.norm(empty, self.spec.hidden_size, self.spec.norm_eps)

    def layer(self, empty: Empty, layer: int) -> DecoderLayer:
        """Return a new layer. Families with another structure return a subclass of `DecoderLayer`. Its `forward` must
        call `attend_to` if `rows` are given.
        """
        attention, mlp = self.attention(empty, layer), self.mlp(empty, layer)
        return DecoderLayer(partial(self._norm, empty), attention, mlp, norms_results=self.norms_results)

    def scoring(self, layer: int) -> Scoring:
        spec = self.spec
        window = None if layer in spec.full_attention_layers else spec.sliding_window
        return Scoring(spec.score_scale, spec.score_softcap, window=window)

    def rotary(self, empty: Empty, layer: int) -> Rotary:
        spec = self.spec
        if spec.sliding_rope_theta is not None and self.scoring(layer).window is not None:
            spec = spec.but(rope_theta=spec.sliding_rope_theta, rope_scaling=None)
        return self._rotaries.setdefault(spec is self.spec, Rotary(empty, spec))

    @abstractmethod
    def attention(self, empty: Empty, layer: int) -> nn.Module:
        """Return the attention block of one layer. `layer` is 0 for the first layer of this pipeline stage."""

    @abstractmethod
    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        """Return the feed-forward block of one layer."""

    @abstractmethod
    def head(self, hidden: Tensor, *, highest_only: bool = False, added: Tensor | None = None) -> Tensor:
        """Return the logits of the requested rows (see `layers.Head`). # [rows, hidden] -> [rows, vocab]"""

    @abstractmethod
    def forward(
        self, batch: Batch, cache: KvCache, backend: AttentionBackend, received: Tensor | None = None
    ) -> Tensor:
        """Run one step. Return the logits of `batch.logit_rows`. # [sampled, vocab]

        In a pipeline, every stage except the last returns hidden states. The next stage gets them as `received`. #
        [tokens, hidden]
        """

    def prepack(self, dtype: DType = "float32", layouts: Mapping[str, str] | None = None) -> None:
        """Weights cannot be loaded after this."""
        for projection in self.projections():
            projection.prepack(dtype, layouts)

    def projections(self) -> Iterator[Linear]:
        return (module for module in self.modules() if isinstance(module, Linear))

    def checkpoint_parameters(self, name: str) -> tuple[str, ...]:
        if name == "lm_head.weight" and self.spec.tie_embeddings:
            name = "token_embedding.weight"  # the last stage may have no layers, only the head
        module, _, leaf = name.rpartition(".")
        place, prefix = module, ""
        for ours, theirs in self.checkpoint_layers.items():
            if module.startswith(f"{ours}."):
                index, _, inner = module.removeprefix(f"{ours}.").partition(".")
                number = int(index) + self.first_layers.get(ours, 0)
                place, prefix, module = f"{ours}.*.{inner}", f"{theirs}.{number}.", inner
                break
        expert = re.search(r"\.experts\.(\d+)\.", place)
        if expert is None:
            return tuple(f"{prefix}{other}.{leaf}" for other in self.checkpoint_names.get(place, (module,)))
        if self.checkpoint_stacked:
            return (prefix + self.checkpoint_stacked[f"{place.rpartition('.')[2]}.{leaf}"],)
        names = self.checkpoint_names.get(place.replace(expert[0], ".experts.*."), (module,))
        return tuple(f"{prefix}{other.replace('*', expert[1])}.{leaf}" for other in names)


class DecoderModel(Model):
    """A decoder-only model: embedding, layers, head.

    `layers[i](hidden, batch, attend)` maps [tokens, hidden] to the same shape. `attend` is any `layers.Attend`. After
    the last layer's attention, tokens whose logits are not needed are dropped.
    """

    last_modules = ("final_norm", "lm_head")

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.layers = nn.ModuleList(self.layer(empty, layer) for layer in range(spec.num_layers))
        self.final_norm = self._norm(empty)

    def embed(self, batch: Batch) -> Tensor:
        return self.token_embedding(batch.token_ids)

    def head(self, hidden: Tensor, *, highest_only: bool = False, added: Tensor | None = None) -> Tensor:
        hidden, cap = self.final_norm(hidden), self.spec.logit_softcap
        if cap is None:
            return self.lm_head(hidden, highest_only=highest_only, added=added)
        logits = cap * torch.tanh(self.lm_head(hidden, highest_only=highest_only and added is None) / cap)
        return logits if added is None else logits + added

    def forward(
        self, batch: Batch, cache: KvCache, backend: AttentionBackend, received: Tensor | None = None
    ) -> Tensor:
        hidden = self.embed(batch) if received is None else received
        for rotary in self._rotaries.values():
            rotary.begin_step()
        attends = [partial(backend.forward, cache=layer_cache, batch=batch) for layer_cache in cache.layers]
        hidden = self.run_layers(hidden, batch, attends, batch.logit_rows if self.has_head else None)
        return self.head(hidden, highest_only=batch.highest_only, added=batch.added) if self.has_head else hidden

    def run_layers(self, hidden: Tensor, batch: Batch, attends: Sequence[Attend], rows: Tensor | None) -> Tensor:
        """Run all layers, each with its `attend`. # [tokens, hidden], int64 [wanted] -> [wanted, hidden]"""
        is_cut = rows is not None and len(rows) < len(hidden)
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden = layer(hidden, batch, attend, rows if is_cut and layer is self.layers[-1] else None)
        return hidden if rows is None or is_cut else hidden[rows]
