"""Simulate loads on one replica of an engine: clients in a closed loop, arrivals at a rate, or all requests at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from xgpt.checkpoints.files import spec_of
from xgpt.core.errors import InputError
from xgpt.core.policies import LaneSettings, as_run_by, lane_settings
from xgpt.core.schema import (
    Block,
    ChunkedSettings,
    ClusterSpec,
    DType,
    EngineSpec,
    ModelSpec,
    Part,
    Precision,
    Profile,
    Quantization,
)
from xgpt.resolve import load_cluster, load_engine, load_model
from xprofiler import analytic, imported
from xsimulator import benchmarked
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Kv, Stream
from xsimulator.counts.one_lane_arrivals import OneLaneRun
from xsimulator.measures import RequestTimes
from xsimulator.memory import LaneMemory
from xsimulator.stages import whole

Stored = Literal["fp8", "fp8_unscaled", "fp8_block", "int4", "int8", "nvfp4", "nvfp4_ffn", "nvfp4_experts"]
"""Formats of all weights. fp8_unscaled: without stored scales of activations. nvfp4_ffn: all but attention's.
nvfp4_experts: only routed experts.
"""
OF_STATES = 0.9 / 1.9
"""Share of SGLang's memory for states of recurrent layers (--mamba-full-memory-ratio's default), which limits how many
requests run.
"""
KEPT: dict[Stored, tuple[Part, ...]] = {
    "nvfp4": (),
    "nvfp4_ffn": ("attention",),
    "nvfp4_experts": ("attention", "dense", "shared"),
}
"""Parts that a format in four bits leaves in half precision."""
OFFICIAL = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
"""Fields of config.json of models that xgpt does not ship."""


@dataclass(frozen=True)
class Served:
    """The settings of one replica.

    Attributes:
        imported: whether step times come from imported tables. Otherwise they come from the datasheet.
        ep: parts into which the devices divide the experts of a layer.
        stored: format of the weights. None means the model's own.
        kv_dtype: type of K/V. None means the dtype.
        skew: exponent of the power law of routing to experts.
        engine: the engine's name. `changes` are the settings that differ from its defaults.
    """

    model: str
    cluster: str
    dtype: DType
    tp: int
    engine: str
    max_batch: int
    token_budget: int
    imported: bool = True
    changes: tuple[tuple[str, Any], ...] = ()
    ep: int = 1
    stored: Stored | None = None
    kv_dtype: DType | None = None
    skew: float = 0.0

    @property
    def model_spec(self) -> ModelSpec:
        return _model(self.model, self.stored, self.skew)

    @property
    def spec(self) -> EngineSpec:
        return _engine(self.engine, self.changes)

    def path_s(self, prompt: float) -> float:
        """Return the seconds of a request outside of the engine's loop."""
        return self.spec.request_path_s(prompt)

    @property
    def cost(self) -> LaneCost:
        return _cost(self._made, self.tp, self.ep)

    @property
    def _made(self) -> Made:
        of_model = self.model, self.stored, self.skew
        return Made(
            *of_model, self.cluster, self.dtype, self.kv_dtype, self.engine, self.imported, changes=self.changes
        )

    @property
    def lane(self) -> LaneSettings:
        rule = lane_settings(ChunkedSettings(token_budget=self.token_budget, max_batch=self._memory[1]), 0.0, 0.0)
        return as_run_by(self.spec, rule)

    @property
    def kv(self) -> Kv:
        """Return the K/V memory, in blocks. These loads ignore the end of outputs, so that SGLang reserves for them."""
        model = self.spec
        return Kv(self._memory[0], model.block_size, model.admits_by_use and model.mixes)

    @cached_property
    def _memory(self) -> tuple[int, int]:
        """Blocks of K/V beside the states of recurrent layers, and the largest number of requests in a step."""
        spec = self.model_spec
        cluster, model = cluster_of(self.cluster), self.spec
        if model.memory_share is not None:
            device = cluster.device.model_copy(update={"usable_memory": model.memory_share})
            cluster = cluster.model_copy(update={"device": device})
        precision = Precision.of(self.dtype, cluster.device.type, model.framework, self.kv_dtype)
        memory = LaneMemory(
            spec,
            cluster,
            precision,
            whole(spec, self.tp, max(1, self.ep // self.tp * self.tp)),
            model.block_size,
            model,
        )
        blocks, most = float(memory.blocks_beside(self.token_budget)[0]), self.max_batch
        if memory.request_blocks and model.framework == "sglang":
            most = min(most, int(OF_STATES * blocks / memory.request_blocks))
        return int(blocks - most * memory.request_blocks), most


class Made(NamedTuple):
    model: str
    stored: Stored | None
    skew: float
    cluster: str
    dtype: DType
    kv_dtype: DType | None
    engine: str
    imported: bool
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> ModelSpec:
        return _model(self.model, self.stored, self.skew)

    @property
    def engine_spec(self) -> EngineSpec:
        return _engine(self.engine, self.changes)


def cluster_of(name: str) -> ClusterSpec:
    """Return a shipped cluster. `b200x8/2` is two devices of a node alone."""
    shipped, _, number = name.partition("/")
    cluster = load_cluster(shipped)
    return cluster.model_copy(update={"devices_per_node": int(number)}) if number else cluster


@cache
def _engine(name: str, changes: tuple[tuple[str, Any], ...]) -> EngineSpec:
    return load_engine(name).model_copy(update=dict(changes))


@cache
def _model(name: str, stored: Stored | None, skew: float) -> ModelSpec:
    spec = spec_of(OFFICIAL[name], name) if name in OFFICIAL else load_model(name)[0]
    if stored is not None and stored.startswith("nvfp4"):
        spec = spec.model_copy(update={"quantization": Quantization(kind="nvfp4", kept=KEPT[stored])})
    elif stored is not None:
        quantization = {"kind": stored.removesuffix("_unscaled"), "finds_scales": stored.endswith("_unscaled")}
        spec = spec.model_copy(update={"quantization": Quantization.model_validate(quantization)})
    if spec.experts is not None:
        spec = spec.model_copy(update={"experts": spec.experts.model_copy(update={"skew": skew})})
    if spec.blocks:
        spec = spec.model_copy(update={"blocks": tuple(_skewed(block, skew) for block in spec.blocks)})
    return spec


def _skewed(block: Block, skew: float) -> Block:
    if block.experts is None:
        return block
    return block.model_copy(update={"experts": block.experts.model_copy(update={"skew": skew})})


@cache
def _profile(served: Made) -> Profile:
    make = imported.profile if served.imported else analytic.profile
    return make(served.spec, cluster_of(served.cluster), served.dtype, served.engine_spec, kv_dtype=served.kv_dtype)


@cache
def _cost(served: Made, tp: int, ep: int) -> LaneCost:
    return LaneCost(served.spec, _profile(served), whole(served.spec, tp, ep), engine=served.engine_spec)


def closed_loop(
    served: Served,
    clients: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    cached: Sequence[int] = (),
    path_s: float | None = None,
) -> tuple[RequestTimes, float]:
    """Return the times of the requests of `clients` clients that all start at the same time, and when the last one
    ends, in seconds.

    Args:
        cached: cached tokens of each prompt. Empty means that nothing is cached. # [requests]
        path_s: seconds of a request outside of the engine. None means the engine's default.
    """
    path_s = served.path_s(float(np.mean(inputs))) if path_s is None else path_s
    return benchmarked.closed_loop(served.lane, served.cost, served.kv, (inputs, outputs), clients, path_s, cached)


def open_loop(
    served: Served, rate_per_s: float, lengths: tuple[int, int], cached: Sequence[int], seed: int
) -> RequestTimes:
    """Return the times of requests of equal lengths that arrive in a Poisson process.

    Args:
        cached: cached tokens of each prompt. # [requests]
    """
    rng, path_s = np.random.default_rng(seed), served.path_s(lengths[0])
    arrivals = (1e9 * np.cumsum(rng.exponential(1 / rate_per_s, len(cached)))).astype(int).tolist()
    inputs, outputs = ([length] * len(cached) for length in lengths)
    stream = Stream(inputs, outputs, lengths[1], arrivals, cached)
    run = _ran(served, stream)
    return RequestTimes.of_ns(np.asarray(arrivals), run.first_ns, run.end_ns, outputs).later(path_s)


def all_at_once(served: Served, inputs: Sequence[int], outputs: Sequence[int]) -> float:
    """Return the output tokens a second if all requests wait from the start."""
    run = _ran(served, Stream(list(inputs), list(outputs), max(outputs), [0] * len(inputs)))
    return sum(outputs) / max(run.end_ns) * 1e9


def _ran(served: Served, stream: Stream) -> OneLaneRun:
    run = OneLaneRun(served.lane, served.cost, served.kv, stream)
    run.run()
    return run


def needs(served: Served, longest: int) -> None:
    """Check that the longest request of a load fits in memory."""
    blocks = served.kv
    if blocks.of(longest) > blocks.blocks:
        raise InputError("tp", served.tp, "its memory does not hold the longest request")
