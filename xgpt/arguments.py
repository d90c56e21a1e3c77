"""The types of the keyword arguments that functions of the API share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from xgpt.core.errors import InputError, nearest
from xgpt.core.schema import (
    AdmissionOrder,
    ClusterSpec,
    DType,
    EngineKind,
    EngineSpec,
    KvPromise,
    ModelSpec,
    Objective,
    Profile,
    Workload,
)
from xgpt.core.schema.constraint import Sla

if TYPE_CHECKING:
    from xgpt.core.schema.policy import PolicyChoice
    from xscheduler.search import Method

PathLike = str | os.PathLike[str]
Rates = float | Sequence[tuple[float, float | None]]
"""Requests a second, or stages of them: (rate, seconds)."""


class ProblemArguments(TypedDict, total=False):
    """The arguments of a planning problem, apart from its latency bound."""

    model: PathLike | ModelSpec
    config: PathLike | None
    cluster: PathLike | ClusterSpec | None
    dtype: DType | None
    kv_dtype: DType | None
    workload: PathLike | Workload
    profile: PathLike | Profile | None
    engine: PathLike | EngineSpec | None
    price: float | None
    objective: Objective | None
    quantile: float
    sla: Sla | None
    ttft_s: float | None
    tpot_s: float | None
    ttft_quantile: float | None
    tpot_quantile: float | None
    headroom: float | None
    search: Method | None
    kv: KvPromise


class PlanArguments(ProblemArguments, total=False):
    """The arguments of `xgpt.plan`, apart from its latency bound."""

    arrival_rate_per_s: float | None
    burstiness: float | None
    policy: PolicyChoice
    order: AdmissionOrder | None
    devices: int | Literal["auto"] | None
    among: Mapping[str, float] | None
    fix: Mapping[str, int]


class ProfileArguments(TypedDict, total=False):
    """The arguments of `xgpt.profile`."""

    model: PathLike
    config: PathLike | None
    cluster: PathLike
    dtype: DType | None
    kv_dtype: DType | None
    engine: EngineKind
    import_from: str | None
    framework: str | None


class FleetArguments(TypedDict, total=False):
    """The arguments of `xgpt.fleet`, apart from trace, clusters and latency bound."""

    model: PathLike | ModelSpec
    config: PathLike | None
    cluster: PathLike | ClusterSpec | None
    dtype: DType | None
    kv_dtype: DType | None
    profile: PathLike | Profile | None
    engine: PathLike | EngineSpec | None
    price: float | None
    ttft_s: float | None
    tpot_s: float | None
    headroom: float | None
    policy: PolicyChoice
    interval_s: float
    least_stay_s: float
    startup_s: float
    devices: int | Mapping[str, int] | None
    least_replicas: int
    seed: int


class LoadArguments(TypedDict, total=False):
    """The requests that a plan is simulated or measured with."""

    workload: PathLike | Workload | None
    num_requests: int | None
    arrival_rate_per_s: Rates | None
    seed: int


class BenchArguments(LoadArguments, total=False):
    """A load, and how the client sends it."""

    concurrency: int
    stream: bool


def check(given: Mapping[str, object], known: type) -> None:
    """Refuse keyword arguments that a function does not have.

    Args:
        known: the TypedDict of the arguments that it has.

    Raises:
        InputError: an argument is not known; the message names the first one, and the nearest known name.
    """
    for name in given:
        if name not in known.__annotations__:
            raise InputError(name, given[name], f"there is no such argument{nearest(name, known.__annotations__)}")
