"""The requests of the command line and the API, one pydantic model each.

`python -m tools.make_reference` makes from these models: the options of the command line (`xgpt/options.json`), the
keyword arguments of `xgpt.api` as editors see them (`xgpt/keywords.pyi`), and the pages in docs/reference. A field's
docstring is the help of its option. In it, `name` stands for another field. A class's `group` is the heading under
which help lists the class's own fields.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from xgpt.core.errors import InputError
from xgpt.core.io import parse_arguments
from xgpt.core.schema import (
    AdmissionOrder,
    Batching,
    ClusterSpec,
    Constraint,
    DType,
    EngineKind,
    EngineSpec,
    Frozen,
    KvPromise,
    ModelSpec,
    Objective,
    Profile,
    SearchMethod,
    Workload,
)
from xgpt.core.schema.constraint import Sla
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.schema.speculation import MOST_AHEAD, SpeculativeMethod
from xscheduler.expression import names_in

R = TypeVar("R", bound="RequestBase")


@dataclass(frozen=True)
class Option:
    """The parts of a field's form on the command line that do not follow from its name and type.

    Attributes:
        flag: the option. "" means --name with dashes, or --no-name for a switch that is on by default. None means that
            there is no option.
        metavar: placeholder of its value in help.
        kind: type of its value, a name in `xgpt.cli.values.KINDS`. "" means the field's type.
        unset: description of None in help.
        names: kind of shipped configs whose names the shell completes.
        is_required: whether the command line requires it.
    """

    flag: str | None = ""
    metavar: str = ""
    kind: str = ""
    unset: str = ""
    names: str = ""
    is_required: bool = False


TOGETHER = Option(metavar="SHARE", unset="no separate share: `quantile` applies to all bounds together")
Name = Annotated[str, BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)]
"""A shipped name, or a path."""


def _checked(text: str) -> str:
    names_in(text)
    return text


Expression = Annotated[str, AfterValidator(_checked)]
"""An expression, as in `xscheduler.expression`."""
Share = Annotated[float, Field(gt=0, lt=1)]
Variation = Annotated[float, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Rates = float | tuple[tuple[float, float | None], ...]
"""Requests a second, or stages of them: (rate, seconds)."""


class RequestBase(Frozen):
    """The base of all requests.

    Attributes:
        most_used: fields that help shows first.
    """

    most_used: ClassVar[tuple[str, ...]] = ()


class ModelAndDevices(RequestBase):
    """A model, and the devices that it runs on."""

    group: ClassVar[str] = "Problem"
    model: Annotated[Name | ModelSpec, Option(names="models")] = "opt-125m"
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: Annotated[Name | None, Option(metavar="FILE", unset="the one in huggingface_hub's cache")] = None
    """config.json of the model, for a Hugging Face id given as `model`, or instead of `model`. Nothing is
    downloaded."""
    cluster: Annotated[Name | ClusterSpec, Option(names="clusters")] = "local"
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Annotated[DType | None, Option(unset="the model's default; float32 on a CPU")] = None
    """Data type of matrix products."""
    kv_dtype: Annotated[DType | None, Option(unset="the given profile's, or `dtype`")] = None
    """Data type of keys and values, such as int8 on CPUs, or float8 on GPUs (only for plans)."""


class ProblemFields(ModelAndDevices):
    """The subject of a plan: a model on devices, with a profile, an engine and a price."""

    group: ClassVar[str] = "Problem"
    price: Annotated[PositiveFloat | None, Option(metavar="P", unset="the cluster file's")] = None
    """Price of one device for an hour, in any currency."""
    profile: Annotated[
        Name | Profile | None,
        Option(metavar="FILE", unset="the cached one; else measured on this machine, or computed from a datasheet"),
    ] = None
    """Profile (step times) to plan from."""
    engine: Annotated[Name | EngineSpec | None, Option(metavar="NAME", unset="the profile's")] = None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a
    YAML file."""


def _none_if_inf(bound_s: Any) -> Any:
    return None if bound_s == math.inf else bound_s


class BoundFields(RequestBase):
    """Bounds on the times of a request."""

    group: ClassVar[str] = "Bounds"
    latency_bound_s: Annotated[
        PositiveFloat | None, BeforeValidator(_none_if_inf), Option("--latency-bound", "S|inf", "bound")
    ] = None
    """Seconds within which a request must end, or inf for no bound. They count from its arrival, or with
    `objective=saturated` from its admission."""
    ttft_s: Annotated[PositiveFloat | None, Option("--ttft", "S", "seconds")] = None
    """Bound on the time to first token, in seconds."""
    tpot_s: Annotated[PositiveFloat | None, Option("--tpot", "S", "seconds")] = None
    """Bound on the mean time per output token, in seconds."""
    headroom: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        Option(
            metavar="SHARE",
            unset="the known error of the profile's source: 0.1 measured (after eight loads on this machine, what they "
            "showed), 0.1 imported, 0.12 from a datasheet; more if other processes used the cores meanwhile",
        ),
    ] = None
    """Share by which steps may take longer than predicted while the bounds still hold."""


class ObjectiveAndShares(BoundFields):
    """The objective, and the share of requests that must keep the bounds."""

    group: ClassVar[str] = "Bounds"
    objective: Annotated[Objective | None, Option(unset="arrivals; saturated with `sla` or `search=exhaustive`")] = None
    """What to maximise. arrivals: the highest rate of Poisson arrivals that keeps the bounds; latency counts from
    arrival. saturated: throughput while requests are always waiting; latency counts from admission, as in ExeGPT."""
    quantile: Share = 0.99
    """Share of requests that must keep the bounds."""
    sla: Annotated[Sla | None, Option(unset="length")] = None
    """With `objective=saturated`: the latency that must keep the bound. length: that of a request whose output length
    is at the quantile. request: the quantile over all requests, by simulation."""
    ttft_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `ttft_s`, separately from the other bounds, as in MLPerf's server scenario."""
    tpot_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `tpot_s`, separately from the other bounds."""


class Policy(RequestBase):
    """The kinds of schedules to search."""

    group: ClassVar[str] = "Search"
    policy: PolicyChoice = "auto"
    """Kind of schedule. rra: alternately encode a batch of prompts and run several decode steps. waa: some devices
    encode and the others decode; waa-c divides them by computation, waa-m by memory. chunked: each step decodes and
    encodes chunks of prompts. orca: the same with whole prompts. static: a batch runs until all its requests have
    finished. slack: chunked, with as many prompt tokens in a step as the slack of running requests under `tpot_s`
    allows, tuned by simulation. exegpt: the better of rra and waa. auto: the best of all except slack."""


class ProblemRequest(ProblemFields, ObjectiveAndShares):
    """A planning problem, and the method of search."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload")
    workload: Annotated[Name | Workload, Option(names="workloads")] = "summarization"
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: Annotated[NonNegativeInt, Option(metavar="TOKENS")] = 0
    """Number of tokens with which all prompts begin, such as a system prompt. Their keys and values are computed once.
    Not for a trace that already contains the prefixes of its prompts."""
    search: SearchMethod = "branch-and-bound"
    """Method of search; exhaustive needs `objective=saturated`."""
    kv: Annotated[KvPromise | None, Option(unset="the engine's way")] = None
    """How memory for keys and values is reserved. reserve: each request's maximum. quantile: as many requests enter as
    fit 99.9% of the time, and the newest is preempted if they do not fit, as in vLLM."""

    @property
    def constraint(self) -> Constraint:
        """The objective and the bounds, as in a plan."""
        given = {name: getattr(self, name) for name in Constraint.model_fields if name in type(self).model_fields}
        return Constraint(**{name: value for name, value in given.items() if value is not None})


class ArrivalFields(RequestBase):
    """The arrival of requests."""

    group: ClassVar[str] = "Arrivals"
    burstiness: Annotated[Variation | None, Option(metavar="CV", kind="positive", unset="1")] = None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts."""


class Speculated(RequestBase):
    """Speculative decoding, if the engine supports it."""

    group: ClassVar[str] = "Speculative decoding"
    speculative: SpeculativeMethod | None = None
    """Method of drafting. eagle, eagle3: a trained head; mtp: the model's layer for multi-token prediction; ngram: a
    search in the text so far. The number of draft tokens is chosen with the schedule, and is 0 if drafts gain
    nothing."""
    speculative_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MOST_AHEAD)] | None, Option(metavar="N", unset="the number with the highest rate")
    ] = None
    """Draft tokens in a step, with `speculative`."""
    acceptance: Annotated[
        float | tuple[float, ...] | Name | None, Option(metavar="SHARE|SHARE,…|FILE", kind="acceptance")
    ] = None
    """Acceptance of drafts, with `speculative`. Either the shares of steps in which at least one draft token is
    accepted, at least two, and so on; or a single share, the probability that a draft token is accepted if all those
    before it are; or a server's metrics page (vLLM, SGLang), saved to a file.
    """
    draft_model: Annotated[Name | None, Option(metavar="NAME", unset="none for mtp and ngram")] = None
    """Checkpoint of the draft, for the engine's command."""


class PlanRequest(ProblemRequest, Policy, ArrivalFields, Speculated):
    """A request for a plan. `xgpt.problems.resolve` resolves its names."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "output")
    arrival_rate_per_s: Annotated[PositiveFloat | None, Option("--arrival-rate", "R")] = None
    """Requests a second that the plan must sustain. The latency bound then counts from arrival."""
    api_servers: Annotated[PositiveInt | None, Option(metavar="N", unset="as many as the plan's rate needs")] = None
    """API server processes of each vLLM command (`--api-server-count`): each tokenises and streams on one core."""
    devices: Annotated[PositiveInt | Literal["auto"] | None, Option(metavar="auto|N", kind="devices")] = None
    """Use at most N devices of the cluster; auto: as few as sustain `arrival_rate_per_s`."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: choose the cheapest of these clusters that sustains `arrival_rate_per_s`, with as few
    devices as possible. PRICE is the price of one device for an hour."""
    maximise: Annotated[Expression | None, Option(metavar="EXPRESSION", unset="throughput")] = None
    """Your own objective, with `objective=saturated`: an expression over a plan's figures at saturation, such as
    "tokens / cost" or "throughput if gap < 0.1 else -gap". Figures: throughput, tokens, latency, ttft, tpot, gap,
    running, encode_batch, idle, devices, replicas, cost. Optuna searches, and nothing is proven."""
    order: Annotated[AdmissionOrder | None, Option(unset="fcfs; slack also tries in-time")] = None
    """The waiting request that enters next. fcfs: the earliest arrival. in-time: by arrival, with the longest prompts
    last if not all requests can keep `ttft_s`. sjf: the shortest prompt. lpt: the longest output, which finishes a
    given set of requests soonest. edf: the earliest deadline. das: chosen by prompt length and deadline (TCB)."""
    fix: Annotated[dict[str, NonNegativeInt], Option(metavar="NAME=N", kind="held")] = Field(default_factory=dict)
    """Fix a control variable, such as token_budget=8192 or max_batch=128. Variables of the placement are tp, ep, pp,
    replicas and tp_devices. The last is the number of a replica's devices that form tensor-parallel groups: on three
    devices, tp=2 with tp_devices=2 gives a stage of two devices and a stage of one. With `order=das`, eta_percent can
    also be fixed, and so can row_tokens (L in TCB) and row_batches for a plan that runs in rows; row_batches=2 lets a
    batch enter the slots that the previous batch has freed. Policies without the variable are left out. Repeatable.
    """


class CompareRequest(ProblemRequest):
    """A comparison of all policies."""

    group: ClassVar[str] = "Comparison"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "current")
    current: Annotated[str | None, Option(metavar="COMMAND|FILE")] = None
    """The current deployment, which is then scored in the same table: a command of vLLM, SGLang or TensorRT-LLM, or a
    docker run, Compose file, pod manifest or Helm values that contain one."""
    measure: bool = False
    """Also run each plan on this machine."""
    num_requests: Annotated[PositiveInt, Option("--requests")] = 300
    """With `measure`: number of requests for each plan."""
    seed: NonNegativeInt = 0
    """With `measure`: seed of lengths."""


class FleetRequest(ProblemFields, BoundFields, Policy):
    """A request for the fleet of a day."""

    group: ClassVar[str] = "Fleet"
    most_used: ClassVar[tuple[str, ...]] = ("trace", "latency_bound_s", "model", "cluster", "output")
    latency_bound_s: Annotated[
        PositiveFloat | None, BeforeValidator(_none_if_inf), Option("--latency-bound", "S|inf", "bound")
    ] = None
    """Seconds from its arrival within which a request must end, or inf for no bound."""
    trace: Annotated[Path, Option(metavar="FILE", is_required=True)]
    """A day's requests with their times (CSV, JSON lines), or its rates and workloads over hours (YAML)."""
    attain: Annotated[Share, Option(metavar="SHARE")] = 0.99
    """Share of the day's requests that must keep the bounds."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: replicas on any mixture of these clusters. PRICE is the price of one device for an hour."""
    devices: Annotated[
        PositiveInt | dict[str, PositiveInt] | None,
        Option(metavar="N|CLUSTER=N,…", kind="counts", unset="as many as needed; with `cluster=local`, this machine's"),
    ] = None
    """Use at most N devices of each cluster."""
    interval_s: Annotated[Seconds, Option("--interval", "S")] = 900.0
    """Length of an interval. Within an interval the fleet does not change."""
    least_stay_s: Annotated[NonNegativeFloat, Option("--least-stay", "S")] = 0.0
    """Shortest time for which a started replica runs."""
    startup_s: Annotated[NonNegativeFloat, Option("--startup", "S")] = 60.0
    """Time from ordering a replica until it begins to load weights, in which the machine, the image and the engine
    start.
    """
    least_replicas: Annotated[NonNegativeInt, Option(metavar="N")] = 1
    """Smallest number of replicas at any time."""
    seed: NonNegativeInt = 0
    """Seed of the requests drawn from rates over hours."""


class ProfileRequest(ModelAndDevices):
    """A request for a profile, the step times of a model on devices."""

    group: ClassVar[str] = "Source"
    engine: EngineKind = "xgpt"
    """Engine whose steps are measured."""
    import_from: Annotated[str | None, Option(metavar="aiconfigurator|FOLDER")] = None
    """Import tables of measured times, from the installed package aiconfigurator or from a folder."""
    framework: Annotated[str | None, Option(unset="vllm")] = None
    """Engine whose kernels are imported: vllm, sglang, trtllm, or a version of one, as in vllm-0.15."""


class OfAPlan(RequestBase):
    """A plan that was made from a profile."""

    group: ClassVar[str] = "Plan"
    profile: Annotated[Name | Profile | None, Option(metavar="FILE", unset="the copy on this machine")] = None
    """Profile from which the plan was made."""


class LoadFields(OfAPlan):
    """The requests with which a plan is simulated or measured."""

    group: ClassVar[str] = "Load"
    workload: Annotated[Name | Workload | None, Option(unset="the plan's")] = None
    """Lengths of the requests to run: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    num_requests: Annotated[
        PositiveInt | None,
        Option(
            "--requests", unset="2000 to simulate, 300 to measure, or the number in the stages of `arrival_rate_per_s`"
        ),
    ] = None
    """Number of measured requests. Some more run before and after them."""
    arrival_rate_per_s: Annotated[
        Rates | None,
        Option(
            "--arrival-rate",
            "R|R:S,…",
            "rates",
            "none, so requests are always waiting; to measure a plan that was made for arrivals, its predicted rate",
        ),
    ] = None
    """Poisson arrivals a second, or stages of them: 2:60,8:30,2 means 2 a second for 60 s, 8 a second for 30 s, then 2
    a second.
    """
    seed: NonNegativeInt = 0
    """Seed of lengths and arrivals."""


class SimulateRequest(LoadFields, ArrivalFields):
    """A simulated run of a plan."""

    group: ClassVar[str] = "Load"
    num_requests: Annotated[
        PositiveInt | Literal["all"] | None,
        Option("--requests", "all|N", "requests", "2000, or the number in the stages of `arrival_rate_per_s`"),
    ] = None  # type: ignore[assignment]
    """Number of measured requests; all: the whole trace, with `own_times`. Some more run before and after them."""
    clients: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Number of clients of a closed loop, in place of arrivals: each client sends its next request when its previous
    one has ended.
    """
    own_times: bool = False
    """Replay a trace as recorded: its pairs of lengths and its arrival times."""
    since_s: Annotated[NonNegativeFloat, Option("--since", "S", "seconds_or_0")] = 0.0
    """With `own_times`: seconds after the trace's first request at which the replay begins."""


class EngineFields(RequestBase):
    """The engine of a plan."""

    group: ClassVar[str] = "Engine"
    engine: EngineKind = "xgpt"
    """Engine that runs the plan: xgpt's own, or vLLM with xgpt's schedule."""
    batching: Batching = "flat"
    """Layout of a batch. flat: without padding. padded: a row for each request. rows: several requests in each row, one
    after the other. slots: rows divided into slots, each freed when its request has finished. All except flat need a
    plan of policy static for one device."""


class BenchRequest(LoadFields, EngineFields):
    """A measured run of a plan, or of an endpoint."""

    group: ClassVar[str] = "Client"
    saturated: bool = False
    """Keep requests waiting at all times, even if the plan was made for arrivals."""
    concurrency: PositiveInt = 32
    """With a URL: number of outstanding requests."""
    stream: bool = False
    """Ask for streamed answers. From a URL, answers are always streamed."""
    calibrate: Annotated[bool, Option(None)] = False
    """Fit the plan's profile to the measured steps."""
    ca_file: Annotated[Path | None, Option(metavar="FILE", unset="the system's")] = None
    """Certificate authorities (PEM) for an https URL."""


class CalibrateRequest(OfAPlan):
    """A fit of a plan's step times to a user's benchmarks."""

    group: ClassVar[str] = "Plan"


class ReportRequest(OfAPlan):
    """A page about a plan."""

    group: ClassVar[str] = "Plan"
    seed: NonNegativeInt = 0
    """Seed of the simulated requests."""


class Replanning(RequestBase):
    """Which plans re-planning may choose."""

    group: ClassVar[str] = "Plan"
    replan_policies: Literal["pinned", "all"] = "pinned"
    """Policies that re-planning may choose. pinned: those that were requested for the plan, with their fixed values.
    all: every policy."""


class ReplanRequest(OfAPlan, Replanning):
    """A judgement of a plan under other lengths."""

    group: ClassVar[str] = "Plan"
    lengths: Annotated[Name, Option(metavar="CSV|URL", is_required=True)]
    """Trace of requests (CSV, JSON lines), or URL of a running server (its API key in XGPT_API_KEY)."""
    horizon_s: Annotated[PositiveFloat, Option("--horizon", "S")] = 600.0
    """Seconds within which the gain of a change of placement must make up for the pause."""
    least_gain: Annotated[Annotated[float, Field(ge=0, le=1)], Option(metavar="SHARE")] = 0.05
    """Smallest gain of throughput, as a share, that justifies a change of plan."""


def _time_of_day(text: str) -> str:
    if re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", text) is None:
        raise ValueError("write HH:MM, as in 08:30")
    return text


class AutoscaleRequest(RequestBase):
    """A recommendation of a fleet's replicas."""

    group: ClassVar[str] = "Load"
    scrape: Annotated[tuple[str, ...], Option(metavar="[KIND=]URL")] = ()
    """URL of replicas. Their /metrics are read with the key in XGPT_API_KEY. A host name with several addresses stands
    for one replica at each address. KIND may be left out if the fleet has one kind. Repeatable.
    """
    arrival_rate_per_s: Annotated[NonNegativeFloat | None, Option("--arrival-rate", "R")] = None
    """The current load, in requests a second, instead of `scrape`."""
    once: bool = False
    """Print the current recommendation once, and publish nothing."""
    look_s: Annotated[PositiveFloat, Option("--look", "S")] = 15.0
    """Time between two readings of the load."""
    day_begins: Annotated[
        Annotated[str, AfterValidator(_time_of_day)] | None,
        Option(metavar="HH:MM", unset="the time at which this command starts"),
    ] = None
    """Time of day, UTC, at which the planned day begins."""
    host: str = "127.0.0.1"
    """Address at which the metric is published."""
    port: Port = 8471
    """Port of the metric. 0 means any free port."""


class Served(OfAPlan, EngineFields, Replanning):
    """The plan that a server runs, and how it runs the plan."""

    group: ClassVar[str] = "Engine"
    checkpoint: Annotated[Name | None, Option(metavar="DIR", unset="the plan's")] = None
    """Directory of the weights."""
    replan: bool = True
    """Switch to better plans when lengths change."""
    reuse: bool = True
    """Share K/V of earlier prompts with later ones."""
    nnodes: PositiveInt = 1
    """With `engine=vllm`: number of machines that run the plan together."""
    node_rank: NonNegativeInt = 0
    """With `engine=vllm`: rank of this machine among them."""
    master_addr: Annotated[str | None, Option("--master-addr", "HOST[:PORT]")] = None
    """With `engine=vllm`: address of the first machine of this machine's replica. On that machine, PORT (29500 by
    default) and the next port must be free.
    """
    ray: Annotated[Name | None, Option(metavar="ADDRESS")] = None
    """With xgpt's own engine: address of the Ray cluster whose machines run the plan; `auto`: the one that this machine
    is part of."""
    dry_run: bool = False
    """Check devices, memory and checkpoint, and start nothing."""


class Endpoint(RequestBase):
    """The address and access of a server."""

    group: ClassVar[str] = "Endpoint"
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs `api_key_file`."""
    port: Port = 8000
    """Port to listen on. 0 means any free port."""
    api_key_file: Annotated[Path | None, Option(metavar="FILE")] = None
    """File of API keys, one on each line: [NAME] KEY [SETTINGS]. On SIGHUP the server reads it again."""
    allowed_hosts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-host", "NAME")] = ()
    """Host name that the Host header of requests may have, besides the names of this machine. Repeatable."""
    allowed_origins: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-origin", "ORIGIN")
    ] = ()
    """Origin whose pages may use the server from a browser (CORS), for example https://chat.example. Repeatable."""
    served_model_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Option("--served-model-name", "NAME")
    ] = ()
    """Name of the model in requests, instead of the name in the plan. Repeatable."""
    ssl_certfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """PEM certificate. With it the server speaks HTTPS, TLS 1.2 or newer."""
    ssl_keyfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """The certificate's private key, if it is in a separate file."""
    front: Literal["endpoint", "smg"] = "endpoint"
    """The HTTP server. smg: the Shepherd Model Gateway, in front of an engine in a separate process."""
    admin_port: Port = 0
    """With `front=smg`: port of pages, plan and metrics. 0 means any free port."""


class RequestLimits(RequestBase):
    """Limits on the requests of a server."""

    group: ClassVar[str] = "Limits"
    max_waiting: PositiveInt = 4096
    """Largest number of waiting requests. Further requests are answered with 429."""
    answer_within_s: Annotated[PositiveFloat | None, Option("--answer-within", "[CLASS=]S", "of_class")] = None
    """Seconds within which an answer must be complete, waiting included. A request that would take longer is answered
    with 429 immediately. CLASS=S: for one of the plan's classes. Repeatable.
    """
    answer_within_of: Annotated[dict[str, PositiveFloat], Option(None)] = Field(default_factory=dict)
    """Seconds within which answers of each of these classes must be complete."""
    request_timeout_s: Annotated[PositiveFloat | None, Option("--request-timeout", "S", "seconds_or_0")] = 600.0
    """Seconds after which an incomplete answer ends with 504. 0 means no limit."""
    default_max_tokens: Annotated[
        PositiveInt | None,
        Option(
            metavar="N",
            unset="the checkpoint's max_new_tokens; without it 16 for completions, and as many as fit for chats",
        ),
    ] = None
    """max_tokens of requests that do not state it."""
    max_max_tokens: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Largest max_tokens that a request may state."""
    drain_s: Annotated[Seconds | None, Option("--drain-timeout", "S", unset="30")] = None
    """Seconds within which running requests may finish after SIGTERM."""
    shutdown_delay_s: Annotated[NonNegativeFloat, Option("--shutdown-delay", "S")] = 0.0
    """Seconds after SIGTERM for which requests are still accepted while /ready answers 503, so that load balancers stop
    sending."""


class ServeFields(Endpoint, RequestLimits, Served):
    """The fields of a request to serve a plan. `xgpt.serving.serve.ServeRequest` adds their checks."""

    group: ClassVar[str] = "Logs"
    most_used: ClassVar[tuple[str, ...]] = ("host", "port", "api_key_file", "checkpoint", "engine")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of logged messages."""
    otlp_endpoint: Annotated[str | None, Option(metavar="URL")] = None
    """Send OpenTelemetry traces to this URL. The standard OTEL_... variables are also read."""
    step_log: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write every executed step to FILE, as one JSON line."""
    force: Annotated[bool, Option(None)] = False
    """Overwrite any file with the step log, not only an earlier step log."""


REQUESTS: dict[str, type[RequestBase]] = {
    "plan": PlanRequest,
    "fleet": FleetRequest,
    "profile": ProfileRequest,
    "simulate": SimulateRequest,
    "compare": CompareRequest,
    "serve": ServeFields,
    "autoscale": AutoscaleRequest,
    "bench": BenchRequest,
    "calibrate": CalibrateRequest,
    "replan": ReplanRequest,
    "report": ReportRequest,
}
"""The request of each command."""


def request_of(type_: type[R], asked: dict[str, Any]) -> R:
    """Return the request with these keyword arguments; None means that an argument was not given.

    Raises:
        InputError: an argument is not known, not accepted, or cannot be combined with another one.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if isinstance(given.get("among"), dict):
        from xgpt.resolve import check_names

        check_names(given["among"])
    if issubclass(type_, ProblemRequest):
        given.setdefault("objective", _objective(given))
        _check_objective(given)
        _check_clusters(given)
    if issubclass(type_, AutoscaleRequest) and bool(given.get("scrape")) == ("arrival_rate_per_s" in given):
        accepted = "give the URLs of the replicas, or the load as `arrival_rate_per_s`, not both"
        raise InputError("scrape", ", ".join(given.get("scrape", ())) or None, accepted)
    return parse_arguments(given, type_)


def plan_request(**asked: Any) -> PlanRequest:
    """Return the request for a plan with these keyword arguments. See `request_of`.

    Raises:
        InputError: as `request_of` does.
    """
    return request_of(PlanRequest, asked)


def as_plan_request(request: ProblemRequest | FleetRequest, **changes: Any) -> PlanRequest:
    """Return a request for a plan with the given fields of another request that both have."""
    shared = (PlanRequest.model_fields.keys() & request.model_fields_set) - {"among", "devices"}
    return plan_request(**{name: getattr(request, name) for name in shared} | changes)


def _objective(given: dict[str, Any]) -> str:
    of_saturated = "sla" in given or "maximise" in given or given.get("search") == "exhaustive"
    return "saturated" if of_saturated and "arrival_rate_per_s" not in given else "arrivals"


def _check_objective(given: dict[str, Any]) -> None:
    """Check that options belong to the objective, and go with each other."""
    saturated = given["objective"] == "saturated"
    other = "arrivals" if saturated else "saturated"
    by_rate = "arrival_rate_per_s" in given and not saturated
    under = "arrival_rate_per_s" if by_rate else f"objective={given['objective']}"
    of_arrivals = ("arrival_rate_per_s", "burstiness", "ttft_quantile", "tpot_quantile")
    if given.get("sla") == "request" and "maximise" in given:
        raise InputError("maximise", given["maximise"], "it needs `sla=length`")
    for name in ("among", "maximise"):
        if name in given and "speculative" in given:
            raise InputError(name, given[name], "it cannot be combined with `speculative`")
    for name in of_arrivals if saturated else ("sla", "maximise"):
        if name in given:
            raise InputError(name, given[name], f"it needs `objective={other}`: with `{under}` leave it out")
    if not saturated and given.get("search") == "exhaustive":
        accepted = f"it needs `objective=saturated`: with `{under}` use branch-and-bound or optuna"
        raise InputError("search", "exhaustive", accepted)
    for name in ("ttft", "tpot"):
        if f"{name}_quantile" in given and f"{name}_s" not in given:
            accepted = f"it is the share of requests that keep `{name}_s`: give `{name}_s` as well"
            raise InputError(f"{name}_quantile", given[f"{name}_quantile"], accepted)


def _check_clusters(given: dict[str, Any]) -> None:
    """Check that devices are chosen in only one way, and that an arrival rate is given if the choice needs one."""
    devices = given.get("devices", "auto")
    if devices != "auto" and (not isinstance(devices, int) or devices < 1):
        raise InputError("devices", devices, "give auto, or a number of devices, at least 1")
    if "arrival_rate_per_s" not in given:
        for name, by_rate in (("among", "among" in given), ("devices", given.get("devices") == "auto")):
            if by_rate:
                raise InputError(name, given[name], "it needs `arrival_rate_per_s`")
    if "among" in given:
        for name in ("cluster", "devices", "price", "profile"):
            if name in given:
                raise InputError(name, given[name], f"`among` already names the clusters: leave `{name}` out")
