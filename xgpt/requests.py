"""The request of a plan: one validated object, whether it comes from Python or the command line."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from xgpt.core.errors import InputError
from xgpt.core.io import parse_arguments
from xgpt.core.schema import (
    AdmissionOrder,
    ClusterSpec,
    Constraint,
    DType,
    EngineSpec,
    Frozen,
    KvPromise,
    ModelSpec,
    Profile,
    Workload,
)
from xgpt.core.schema.policy import PolicyChoice
from xgpt.resolve import check_names
from xscheduler.search.base import Method

Name = Annotated[str, BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)]
"""A shipped name, or a path."""


class PlanRequest(Frozen):
    """The arguments of a plan, checked. Names are looked up later, by `xgpt.problems.resolve`.

    Attributes:
        order: order of admission; None: fcfs, or in-time where tuning finds that better.
        model: a name, a path, a Hugging Face id, or the model's shape.
        config: config.json of an id; None: the one in huggingface_hub's cache.
        dtype: type that the model runs in; None: its own; float32 on a CPU.
        kv_dtype: type of K/V; None: that of a given profile, or of the dtype.
        profile: a file or its content; None: the cached one, a measurement, or the datasheet's.
        engine: the engine that runs the plan, by name or file; None: the profile's.
        price: price of one device for an hour; None: the cluster's.
        constraint: the bounds, and what is maximised under them.
        devices: largest number of devices to use; "auto": the fewest that sustain the arrival rate; None: all.
        fix: values at which control variables, `tp`, `ep`, `pp` and `replicas` are held.
        among: clusters with the price of one device for an hour, instead of `cluster`: the cheapest is used.
    """

    model: Name | ModelSpec = "opt-125m"
    config: Name | None = None
    cluster: Name | ClusterSpec = "local"
    dtype: DType | None = None
    kv_dtype: DType | None = None
    workload: Name | Workload = "summarization"
    profile: Name | Profile | None = None
    engine: Name | EngineSpec | None = None
    price: PositiveFloat | None = None
    constraint: Constraint = Constraint(objective="arrivals")
    policy: PolicyChoice = "auto"
    search: Method = "branch-and-bound"
    kv: KvPromise = "reserve"
    order: AdmissionOrder | None = None
    devices: PositiveInt | Literal["auto"] | None = None
    among: dict[str, PositiveFloat] | None = None
    fix: dict[str, PositiveInt] = Field(default_factory=dict)


def plan_request(**asked: Any) -> PlanRequest:
    """Return the request that keyword arguments make: the fields of `PlanRequest` and those of its constraint.

    None stands for an argument that was not given.

    Raises:
        InputError: an argument is not known, not accepted, or does not go with another one.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    given.setdefault("objective", _objective(given))
    _check_objective(given)
    _check_clusters(given)
    bounds = {name: given.pop(name) for name in Constraint.model_fields if name in given}
    return parse_arguments(given | {"constraint": parse_arguments(bounds, Constraint)}, PlanRequest)


def _objective(given: dict[str, Any]) -> str:
    of_saturated = "sla" in given or given.get("search") == "exhaustive"
    return "saturated" if of_saturated and "arrival_rate_per_s" not in given else "arrivals"


def _check_objective(given: dict[str, Any]) -> None:
    """Refuse options of one objective under the other one."""
    saturated = given["objective"] == "saturated"
    other = "arrivals" if saturated else "saturated"
    by_rate = "arrival_rate_per_s" in given and not saturated
    under = "arrival_rate_per_s" if by_rate else f"objective={given['objective']}"
    of_arrivals = ("arrival_rate_per_s", "burstiness", "ttft_quantile", "tpot_quantile")
    for name in of_arrivals if saturated else ("sla",):
        if name in given:
            raise InputError(name, given[name], f"it goes with `objective={other}`: with `{under}` leave it out")
    if not saturated and given.get("search") == "exhaustive":
        accepted = f"it goes with `objective=saturated`: with `{under}` take branch-and-bound or optuna"
        raise InputError("search", "exhaustive", accepted)
    for name in ("ttft", "tpot"):
        if f"{name}_quantile" in given and f"{name}_s" not in given:
            accepted = f"it is the share of requests that keep `{name}_s`: give that, too"
            raise InputError(f"{name}_quantile", given[f"{name}_quantile"], accepted)


def _check_clusters(given: dict[str, Any]) -> None:
    """Refuse a choice of devices without the arrival rate that it needs, or in two ways at once."""
    devices = given.get("devices", "auto")
    if devices != "auto" and (not isinstance(devices, int) or devices < 1):
        raise InputError("devices", devices, "give auto, or a number of devices, at least 1")
    if "arrival_rate_per_s" not in given:
        for name, by_rate in (("among", "among" in given), ("devices", given.get("devices") == "auto")):
            if by_rate:
                raise InputError(name, given[name], "it goes with `arrival_rate_per_s`")
    if "among" in given:
        check_names(given["among"])
        for name in ("cluster", "devices", "price", "profile"):
            if name in given:
                raise InputError(name, given[name], "`among` names the clusters: leave it out")
