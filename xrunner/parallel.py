"""Build the part of a model that one of several devices holds: some layers or, with tensor parallelism, slices of
layers.

A rank builds its model from the sizes of its part (`Part.local`), and hooks add up the partial results of a stage's
ranks. Source: Megatron-LM (arXiv 1909.08053) sec. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec
from xrunner.generation import NO_TOKEN
from xrunner.models import EncoderDecoderModel, Model, family_of
from xrunner.models.experts import MixtureOfExperts
from xrunner.models.latent import LatentSelfAttention
from xrunner.models.layers import (
    CrossAttention,
    Embedding,
    GatedMlp,
    Linear,
    Mlp,
    RelativeBias,
    SelfAttention,
    parameter,
)


class Group(Protocol):
    rank: int
    degree: int

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in place."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, by rank. All have the same shape."""


class Share(NamedTuple):
    start: int
    stop: int
    full: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Share:
        return Share(*(factor * x for x in self))


def share(full: int, rank: int, degree: int) -> Share:
    return Share(full * rank // degree, full * (rank + 1) // degree, full)


class Cut(NamedTuple):
    """The part of a stored tensor that a rank holds: indices from `start` on, out of `full`, along dimension `dim` of
    the model's parameter."""

    dim: int
    start: int
    full: int


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that one rank holds.

    Attributes:
        rank, degree: the rank's number among the ranks that share these layers, and the number of these ranks.
        ep: number of parts into which the ranks divide a layer's experts. The ranks of one part hold slices of its
            experts.

    Raises:
        InputError: the heads cannot be divided among these ranks.
    """

    spec: ModelSpec
    layers: tuple[int, int]
    encoder_layers: tuple[int, int]
    is_first: bool = True
    is_last: bool = True
    rank: int = 0
    degree: int = 1
    runs_decoder: bool = True
    ep: int = 1

    def __post_init__(self) -> None:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        if self.degree > kv_heads and (self.degree % kv_heads or self.degree > heads):
            has = f"{self.spec.name} has {heads} attention heads and {kv_heads} key/value heads"
            more = f", or a multiple of it up to {heads}" if heads > kv_heads else ""
            raise InputError("stage.tp", self.degree, f"{has}: take at most {kv_heads}{more}")

    @classmethod
    def whole(cls, spec: ModelSpec) -> Part:
        return cls(spec, (0, spec.num_layers), (0, spec.num_encoder_layers))

    @property
    def kv_heads(self) -> Share:
        """K/V heads that this rank caches. If there are more ranks than heads, the share is one head. Other ranks cache
        the same head.
        """
        total = self.spec.num_kv_heads
        if self.degree <= total:
            return share(total, self.rank, self.degree)
        head = self.rank * total // self.degree
        return Share(head, head + 1, total)

    @property
    def cached_heads(self) -> Share:
        return self.kv_heads if self.spec.latent is None else Share(0, 1, 1)

    @property
    def heads(self) -> Share:
        spec, kv = self.spec, self.kv_heads
        group = spec.num_heads // spec.num_kv_heads
        readers = max(1, self.degree // spec.num_kv_heads)
        reader_share = share(group * kv.size, self.rank % readers, readers)
        return Share(group * kv.start + reader_share.start, group * kv.start + reader_share.stop, spec.num_heads)

    @property
    def ffn(self) -> Share:
        return share(self.spec.ffn_size, self.rank, self.degree)

    @property
    def experts(self) -> Share:
        number = self.spec.experts.number if self.spec.experts is not None else 0
        return share(number, self.rank // (self.degree // self.ep), self.ep)

    @property
    def expert_ffn(self) -> Share:
        size, slices = self.spec.experts.ffn_size if self.spec.experts is not None else 0, self.degree // self.ep
        return share(size, self.rank % slices, slices)

    @property
    def shared_ffn(self) -> Share:
        return share(self.spec.experts.shared_ffn_size if self.spec.experts else 0, self.rank, self.degree)

    @property
    def vocabulary(self) -> Share:
        return share(self.spec.vocab_size, self.rank, self.degree)

    @property
    def local(self) -> ModelSpec:
        """The sizes of the model that this rank builds. They are not validated: a part may have no encoder layer."""
        first, last = self.layers

        def inside(layers: Sequence[int]) -> tuple[int, ...]:
            return tuple(layer - first for layer in layers if first <= layer < last)

        if (experts := self.spec.experts) is not None:
            sizes = {"ffn_size": self.expert_ffn.size, "shared_ffn_size": self.shared_ffn.size}
            experts = experts.but(dense_layers=inside(experts.dense_layers), **sizes)
        return self.spec.but(
            experts=experts,
            full_attention_layers=inside(self.spec.full_attention_layers),
            num_layers=last - first,
            num_encoder_layers=self.encoder_layers[1] - self.encoder_layers[0],
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            ffn_size=self.ffn.size,
            vocab_size=self.vocabulary.size,
        )


class VocabularyShare(Embedding):
    """The embedding's rows for a rank's share of the vocabulary. Tokens of other ranks give zero, and the group adds up
    results.
    """

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.first = first

    def forward(self, index: Tensor) -> Tensor:  # int64 [tokens] -> [tokens, size]
        index = index - self.first
        elsewhere = (index < 0) | (index >= len(self.weight))
        return F.embedding(index.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)


def build(part: Part) -> Model:
    """Return the model of a part, without memory (on "meta") and without its group."""
    model = family_of(part.spec)(part.local, partial(torch.empty, device="meta"))
    model.first_layers = {
        name: (part.encoder_layers if name.startswith("encoder") else part.layers)[0]
        for name in model.checkpoint_layers
    }
    model.has_embedding, model.has_head = part.is_first, part.is_last
    unused = (() if part.is_first else model.first_modules) + (() if part.is_last else model.last_modules)
    if not part.runs_decoder:
        assert isinstance(model, EncoderDecoderModel)
        model.drop_decoder()
        unused = tuple(name for name in unused if not name.startswith(("decoder.", "lm_head")))
    for name in unused:
        owner, _, leaf = name.rpartition(".")
        delattr(model.get_submodule(owner), leaf)
    if part.degree > 1:
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.keep(part.experts.start, part.experts.stop)
        if part.is_first:
            model.token_embedding = VocabularyShare(model.token_embedding.weight, part.vocabulary.start)
        _drop_biases(model, part)
    return model


def places_of(model: Model) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that hold it and its names there. The key is its name in the first
    module.
    """
    found: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for leaf, value in module._parameters.items():
            if value is not None:
                found.setdefault(id(value), (f"{prefix}.{leaf}".removeprefix("."), []))[1].append((module, leaf))
    return dict(found.values())


def materialise(places: Sequence[tuple[nn.Module, str]], dtype: torch.dtype, device: str) -> None:
    (module, leaf), *_ = places
    new = parameter(torch.empty(module._parameters[leaf].shape, dtype=dtype, device=device))  # type: ignore[union-attr]
    for module, leaf in places:
        module._parameters[leaf] = new


def join(model: Model, group: Group) -> None:
    def add_up(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return group.add_up(output)

    for module in _reduced(model):
        module.register_forward_hook(add_up)
    if model.has_embedding:
        model.token_embedding.register_forward_hook(add_up)


def _drop_biases(model: Model, part: Part) -> None:
    for module in _reduced(model):
        match module:
            case Linear() if part.rank:
                module.bias = None
            case MixtureOfExperts() if part.expert_ffn.start:
                for expert in module.experts.values():
                    assert isinstance(expert, GatedMlp)
                    expert.down.bias = None


def _reduced(model: Model) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for name, module in model.named_modules():
        match module:
            case SelfAttention() | CrossAttention() | LatentSelfAttention() if hasattr(module, "out"):
                modules.append(module.out)
            case Mlp() | GatedMlp() if ".experts." not in name and not name.endswith(".shared"):
                modules.append(module.down)
            case MixtureOfExperts():
                modules.append(module)
    return modules


def cuts(model: Model, part: Part) -> dict[str, tuple[Cut, ...]]:
    """Return, for each parameter, the parts of stored tensors that a rank holds. There is one cut for each projection
    that the parameter fuses.

    Every rank holds all of a parameter that is not named here.
    """
    if part.degree == 1:
        return {}
    found: dict[str, tuple[Cut, ...]] = {}
    q, kv = part.heads.times(part.spec.head_dim), part.kv_heads.times(part.spec.head_dim)

    def rows(name: str, *shares: Share) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = tuple(Cut(0, share.start, share.full) for share in shares)

    def columns(name: str, shares: Share) -> None:
        found[f"{name}.weight"] = (Cut(1, shares.start, shares.full),)

    for name, module in model.named_modules():
        match module:
            case SelfAttention():
                rows(f"{name}.qkv", q, kv, kv)
                columns(f"{name}.out", q)
                found[f"{name}.sinks"] = (Cut(0, part.heads.start, part.heads.full),)
            case LatentSelfAttention():
                rows(f"{name}.q", q)
                rows(f"{name}.q_b", q)
                rows(f"{name}.kv_b", part.heads.times(module.head_dim - module.turning + module.value_dim))
                columns(f"{name}.out", part.heads.times(module.value_dim))
            case CrossAttention():
                rows(f"{name}.q", q)
                rows(f"{name}.kv", kv, kv)
                columns(f"{name}.out", q)
            case Mlp():
                rows(f"{name}.up", part.ffn)
                columns(f"{name}.down", part.ffn)
            case GatedMlp():
                is_shared = name.endswith(".shared")
                ffn_share = part.expert_ffn if ".experts." in name else part.shared_ffn if is_shared else part.ffn
                rows(f"{name}.gate_up", *((ffn_share.times(2),) if module.takes_turns else (ffn_share, ffn_share)))
                columns(f"{name}.down", ffn_share)
            case RelativeBias():
                columns(name, part.heads)
    rows("token_embedding", part.vocabulary)
    rows("lm_head", part.vocabulary)
    return found


class Vocabulary:
    def __init__(self, part: Part, group: Group) -> None:
        self._group = group
        self._first = part.vocabulary.start
        sizes = [share(part.spec.vocab_size, rank, part.degree).size for rank in range(part.degree)]
        self._sizes, self._most = sizes, max(sizes)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return `sampling.highest` over the logits of all ranks. # [rows, share] -> int64 [rows]"""
        best, index = logits.max(dim=-1)
        # Value and index both fit exactly into float64, so one exchange is enough.
        pairs = self._group.gather(torch.stack((best.double(), (index + self._first).double())))
        values, tokens = torch.stack(pairs).unbind(1)  # each [ranks, rows]
        best, rank = values.max(dim=0, keepdim=True)
        return tokens.gather(0, rank)[0].long().masked_fill_(~best[0].isfinite(), NO_TOKEN)

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks. # [rows, share] -> [rows, vocab]"""
        padded = F.pad(logits, (0, self._most - logits.shape[-1]))
        shares = self._group.gather(padded.contiguous())
        return torch.cat([x[:, :size] for x, size in zip(shares, self._sizes, strict=True)], dim=-1)
