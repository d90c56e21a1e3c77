"""Implement a mixture of experts: a router and the experts, which are feed-forward blocks.

Each expert is a separate block, so that its weights are read, cut and packed like the weights of any other block. A
rank may hold some of the experts, or a slice of every expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xgpt.core.schema import ModelSpec
from xrunner.models.layers import Empty, GatedMlp, parameter


def of_one_expert(spec: ModelSpec) -> ModelSpec:
    assert spec.experts is not None
    return spec.but(ffn_size=spec.experts.ffn_size)


class Router(nn.Module):
    """Chooses experts for each token. Scores are in the dtype of activations, even if other products have another
    dtype.
    """

    def __init__(self, empty: Empty, spec: ModelSpec, *, bias: bool) -> None:
        super().__init__()
        assert spec.experts is not None
        self.of = spec.experts
        self.weight = parameter(empty(spec.experts.number, spec.hidden_size))
        self.bias = parameter(empty(spec.experts.number)) if bias else None
        # Checkpoints use this name. The bias affects the choice of experts, not their weights.
        is_sigmoid = spec.experts.scoring == "sigmoid"
        self.e_score_correction_bias = parameter(empty(spec.experts.number)) if is_sigmoid else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights. # [tokens, hidden] -> int64, float32 [tokens, chosen]"""
        experts, scores = self.of, F.linear(hidden, self.weight, self.bias).float()
        if experts.normalised and experts.scoring == "softmax" and experts.num_groups == 1:
            highest, chosen = scores.topk(experts.active, dim=-1)
            return chosen, highest.softmax(dim=-1) * experts.weight_scale
        rated = weights = scores.softmax(dim=-1) if self.e_score_correction_bias is None else scores.sigmoid()
        if self.e_score_correction_bias is not None:
            rated = weights + self.e_score_correction_bias
        if experts.num_groups > 1:
            rated = self._within_best_groups(rated)
        chosen = rated.topk(experts.active, dim=-1).indices
        weights = weights.gather(1, chosen)
        if experts.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * experts.weight_scale

    def _within_best_groups(self, rated: Tensor) -> Tensor:
        """Return the ratings, with minus infinity for experts outside each token's best groups. # [tokens, experts] ->
        same
        """
        groups = rated.unflatten(-1, (self.of.num_groups, -1))
        looked_at = 1 if self.e_score_correction_bias is None else 2
        best = groups.topk(looked_at, dim=-1).values.sum(dim=-1).topk(self.of.active_groups, dim=-1).indices
        left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=rated.device).scatter_(1, best, False)
        return groups.masked_fill(left_out[..., None], float("-inf")).flatten(1)


class MixtureOfExperts(nn.Module):
    """Sums the outputs of each token's experts, with the router's weights. Then adds the output of the shared experts,
    which is computed for every token.
    """

    def __init__(self, empty: Empty, spec: ModelSpec, block: Callable[[], nn.Module], *, router_bias: bool) -> None:
        super().__init__()
        assert spec.experts is not None
        self.router = Router(empty, spec, bias=router_bias)
        self.experts = nn.ModuleDict({str(number): block() for number in range(spec.experts.number)})
        shared = spec.but(ffn_size=spec.experts.shared_ffn_size)
        self.shared = GatedMlp(empty, shared) if spec.experts.shared_ffn_size else None
        self._first, self._last = 0, spec.experts.number

    def keep(self, first: int, last: int) -> None:
        self.experts = nn.ModuleDict({name: self.experts[name] for name in map(str, range(first, last))})
        self._first, self._last = first, last

    def forward(self, hidden: Tensor) -> Tensor:
        chosen, weights = self.router(hidden)
        of_expert, order = chosen.flatten().sort(stable=True)
        begin, *ends = torch.searchsorted(
            of_expert, torch.arange(self._first, self._last + 1, device=hidden.device)
        ).tolist()
        tokens = order // chosen.shape[1]
        found = hidden.new_zeros(len(order), hidden.shape[1])
        for number, end in enumerate(ends, self._first):
            if end > begin:
                found[begin:end] = self.experts[str(number)](hidden[tokens[begin:end]])
                begin = end
        # Results are put back in the order of tokens and scores, so that a token's result does not depend on the other
        # tokens in the step.
        by_token = torch.empty_like(found)
        by_token[order] = found
        by_token = by_token.unflatten(0, chosen.shape)  # [tokens, chosen, hidden]
        out = torch.einsum("tch,tc->th", by_token, weights.to(hidden.dtype))
        return out if self.shared is None else out + self.shared(hidden)
