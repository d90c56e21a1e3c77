"""Convert a profile's tables to curves, for each kind of tensor-parallel group."""

from __future__ import annotations

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema import Profile
from xsimulator.costs.curves import Grid, Line, Table
from xsimulator.lengths import Lengths

Group = tuple[int, int]
"""(tensor-parallel degree, expert-parallel degree within the tensor-parallel group)"""


class GroupTables:
    """The curves for one kind of tensor-parallel group."""

    def __init__(self, profile: Profile, group: Group) -> None:
        degree, ep = group
        subject = f"the profile of {profile.model.name} on {profile.device} covers"
        if degree not in profile.tp_degrees:
            raise InputError("tp_degree", degree, f"{subject} {profile.tp_degrees}")
        if group not in profile.groups:
            degrees = tuple(other for tp, other in profile.groups if tp == degree)
            raise InputError("ep_degree", ep, f"{subject} {degrees} for tp_degree {degree}")
        layer = profile.layer(*group)
        self.rest = Line.of(layer.rest)
        self.last = self.rest if layer.last is None else Line.of(layer.last)
        self.encode = Grid(layer.encode_attention)
        self.decode = Grid(layer.decode_attention)
        self.head = Line.of(profile.head_of(degree))
        self.cross = None if layer.cross is None else Grid(layer.cross.attention)
        self.cross_kv = None if layer.cross is None else Line.of(layer.cross.keys_values)
        if profile.encoder_layers:
            encoder = profile.encoder_layer(degree)
            self.encoder_rest = Line.of(encoder.rest)
            self.encoder = Grid(encoder.attention)
        self._of_prompts: dict[Lengths, Table] = {}

    def layers(self, number: int, *, with_last: bool) -> Line:
        """Return the seconds of a stage's `number` layers without attention, by number of tokens."""
        is_cut = with_last and self.last is not self.rest
        return self.rest.scaled(number - 1) + self.last if is_cut else self.rest.scaled(number)

    def of_prompts(self, lengths: Lengths) -> Table:
        """Return the seconds of attention in one layer while prompts are encoded, by number of prompts."""
        if lengths not in self._of_prompts:
            grid = self.encoder if self.cross is not None else self.encode
            batches, reused = grid.batches[:, None], lengths.reused
            if reused is None:
                seconds = grid(batches, lengths.inputs) @ lengths.input_probabilities
            else:  # the other tokens also attend to the cached ones
                found = np.where(reused.cached > 0, grid(batches, np.maximum(reused.cached, 1.0)), 0.0)
                seconds = (grid(batches, reused.whole) - found) @ reused.probabilities
            self._of_prompts[lengths] = Table(grid.batches, seconds)
        return self._of_prompts[lengths]


class Degrees(dict[Group, GroupTables]):
    """The tables of a profile's groups, computed on demand.

    Raises:
        InputError: the profile does not cover a group.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    def __missing__(self, group: Group) -> GroupTables:
        self[group] = GroupTables(self._profile, group)
        return self[group]
