"""Compute log probabilities of prompt tokens for requests that ask for them, as each prompt chunk runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xgpt.core.policies import Step
from xrunner.generation import Generation, Logprobs
from xrunner.sampling import logprobs_of


class PromptScores:
    def __init__(self) -> None:
        self._scores: dict[int, list[Logprobs]] = {}
        self._num_top: dict[int, int] = {}

    def start(self, generation: Generation) -> None:
        num_top = generation.sampling.prompt_logprobs
        if num_top is not None and generation.is_scored:
            self._scores[generation.id], self._num_top[generation.id] = [], num_top

    def forget(self, id_: int) -> None:
        self._scores.pop(id_, None)
        self._num_top.pop(id_, None)

    def concern(self, step: Step) -> bool:
        return any(chunk.id in self._scores for chunk in step.encode)

    def places(self, step: Step, prompts: Mapping[int, np.ndarray]) -> ScoredPlaces | None:
        return ScoredPlaces.at(step, prompts, self._num_top)

    def add(self, places: ScoredPlaces, logits: Tensor) -> None:
        """Add the scores of a step. `logits`: logits at the scored positions. # [scored, vocab]"""
        for id_, scores in places.scores(logits):
            self._scores[id_] += scores

    def take(self, id_: int) -> tuple[Logprobs, ...]:
        return tuple(self._scores.pop(id_, ()))


@dataclass(frozen=True, slots=True)
class ScoredPlaces:
    """The positions in a step after which a prompt token is scored.

    Attributes:
        rows: the rows of these positions in a batch in which the step's decodes come first. # int64 [scored]
        targets: the prompt tokens that follow these positions and are scored. # int64 [scored]
        requests: for each request: its id, the number of its positions, and the number of most probable tokens to
            report for each position.
    """

    rows: Tensor
    targets: Tensor
    requests: list[tuple[int, int, int]]

    @classmethod
    def at(cls, step: Step, prompts: Mapping[int, np.ndarray], num_top: Mapping[int, int]) -> ScoredPlaces | None:
        if not num_top:
            return None
        begin, rows, targets, requests = len(step.decode), [], [], []
        for id_, start, length in step.encode:
            if id_ in num_top:
                following = prompts[id_][start + 1 : start + length + 1]
                rows.append(np.arange(begin, begin + len(following)))
                targets.append(following)
                requests.append((id_, len(following), num_top[id_]))
            begin += length
        if not requests:
            return None
        return cls(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(targets)), requests)

    def scores(self, logits: Tensor) -> Iterator[tuple[int, list[Logprobs]]]:
        """Yield each request's scores of its prompt tokens, from the logits at the positions. # [scored, vocab]"""
        targets, begin = self.targets.to(logits.device), 0
        for id_, count, num_top in self.requests:
            end = begin + count
            yield id_, logprobs_of(logits[begin:end], targets[begin:end], np.full(count, num_top))
            begin = end
