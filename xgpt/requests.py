"""The requests of the command line and the API: one model each, declared field by field.

`python -m tools.make_reference` makes from these models: the options of the command line (`xgpt/options.json`), the
keyword arguments of `xgpt.api` as editors see them (`xgpt/keywords.pyi`), and the pages in docs/reference. A field's
docstring is the help of its option; in it, `name` stands for another field. A class's `group` is the heading under
which help lists the class's own fields.
"""

from __future__ import annotations

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
    """How a field is given at the command line, as far as its name and type do not say it.

    Attributes:
        flag: the option; "": --name with dashes, or --no-name for a switch that is on by default; None: there is none.
        metavar: what help shows for its value.
        kind: how its text is read: a name in `xgpt.cli.values.KINDS`; "": by the field's type.
        unset: what stands for None, as help shows it.
        names: kind of shipped configs whose names the shell completes.
        is_required: whether the command line refuses to go without it.
    """

    flag: str | None = ""
    metavar: str = ""
    kind: str = ""
    unset: str = ""
    names: str = ""
    is_required: bool = False


TOGETHER = Option(metavar="SHARE", unset="`quantile` of requests keep all bounds together")
Name = Annotated[str, BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)]
"""A shipped name, or a path."""


def _checked(text: str) -> str:
    names_in(text)
    return text


Expression = Annotated[str, AfterValidator(_checked)]
"""See `xscheduler.expression`."""
Share = Annotated[float, Field(gt=0, lt=1)]
Variation = Annotated[float, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Rates = float | tuple[tuple[float, float | None], ...]
"""Requests a second, or stages of them: (rate, seconds)."""


class RequestBase(Frozen):
    """The base of all requests.

    Attributes:
        most_used: fields that help lists first.
    """

    most_used: ClassVar[tuple[str, ...]] = ()


class ModelAndDevices(RequestBase):
    """A model, and the devices that it runs on."""

    group: ClassVar[str] = "Problem"
    model: Annotated[Name | ModelSpec, Option(names="models")] = "opt-125m"
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: Annotated[Name | None, Option(metavar="FILE", unset="the one in huggingface_hub's cache")] = None
    """config.json of the model: of the Hugging Face id that `model` is, or in its place. Nothing is downloaded."""
    cluster: Annotated[Name | ClusterSpec, Option(names="clusters")] = "local"
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Annotated[DType | None, Option(unset="the model's own; float32 on a CPU")] = None
    """Number type to run in."""
    kv_dtype: Annotated[DType | None, Option(unset="that of a given profile, or of the dtype")] = None
    """Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for."""


class ProblemFields(ModelAndDevices):
    """What is planned for: a model on devices, with a profile, an engine and a price."""

    group: ClassVar[str] = "Problem"
    price: Annotated[PositiveFloat | None, Option(metavar="P", unset="the cluster file's")] = None
    """Price of one device for an hour, in any currency."""
    profile: Annotated[
        Name | Profile | None,
        Option(metavar="FILE", unset="the cached one; else this machine is measured, or its devices' datasheet used"),
    ] = None
    """Profile (step times) to plan from."""
    engine: Annotated[Name | EngineSpec | None, Option(metavar="NAME", unset="the profile's")] = None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a
    YAML file."""


class BoundFields(RequestBase):
    """Bounds on the times of a request."""

    group: ClassVar[str] = "Bounds"
    latency_bound_s: Annotated[PositiveFloat | None, Option("--latency-bound", "S|inf", "bound")] = None
    """Seconds within which a request must end, or inf for no bound. They count from its arrival; if throughput with
    requests always waiting is maximised, from its admission."""
    ttft_s: Annotated[PositiveFloat | None, Option("--ttft", "S", "seconds")] = None
    """Bound on the time to first token, in seconds."""
    tpot_s: Annotated[PositiveFloat | None, Option("--tpot", "S", "seconds")] = None
    """Bound on the mean time per output token, in seconds."""
    headroom: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        Option(
            metavar="SHARE",
            unset="the known error of the profile's kind (0.05 measured, 0.1 imported, 0.12 from a datasheet), or its "
            "spread if larger",
        ),
    ] = None
    """Share by which steps may take longer than predicted before a bound is broken."""


class ObjectiveAndShares(BoundFields):
    """What is maximised under the bounds, and which share of requests must keep them."""

    group: ClassVar[str] = "Bounds"
    objective: Annotated[Objective | None, Option(unset="arrivals; saturated with `sla` or `search=exhaustive`")] = None
    """What to maximise. arrivals: the highest Poisson arrival rate that keeps the bounds, waiting included. saturated:
    throughput while requests are always waiting, latency counted from admission, as in ExeGPT."""
    quantile: Share = 0.99
    """Share of requests that must keep the bounds."""
    sla: Annotated[Sla | None, Option(unset="length")] = None
    """With `objective=saturated`: what must keep the bound. length: a request whose output has the quantile's length.
    request: the quantile of all requests, by simulation."""
    ttft_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `ttft_s` by itself, as in MLPerf's server scenario."""
    tpot_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `tpot_s` by itself."""


class Policy(RequestBase):
    """Which kinds of schedules are searched."""

    group: ClassVar[str] = "Search"
    policy: PolicyChoice = "auto"
    """Kind of schedule. rra: encode a batch of prompts, run several decode steps, and again. waa: some devices encode
    and the others decode; waa-c divides them by computation, waa-m by memory. chunked: each step decodes and encodes
    pieces of prompts. orca: the same with whole prompts. static: a batch runs until all of it has finished. slack:
    chunked, with as many prompt tokens a step as running requests have time for under `tpot_s`, tuned by simulation.
    exegpt: the better of rra and waa. auto: the best of all but slack."""


class ProblemRequest(ProblemFields, ObjectiveAndShares):
    """A planning problem, and how to search it."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload")
    workload: Annotated[Name | Workload, Option(names="workloads")] = "summarization"
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: Annotated[NonNegativeInt, Option(metavar="TOKENS")] = 0
    """Tokens with which all prompts begin alike, as a system prompt: their keys and values are computed once. Of a
    trace whose prompts are known it is found without this."""
    search: SearchMethod = "branch-and-bound"
    """Method of search; exhaustive goes with `objective=saturated`."""
    kv: Annotated[KvPromise | None, Option(unset="as the engine does")] = None
    """How memory for keys and values is promised. reserve: each request's maximum is set aside. quantile: as many
    requests enter as fit 99.9% of the time; the newest is preempted if they do not fit, as vLLM does by itself."""

    @property
    def constraint(self) -> Constraint:
        """The objective and the bounds, as a plan has them."""
        given = {name: getattr(self, name) for name in Constraint.model_fields if name in type(self).model_fields}
        return Constraint(**{name: value for name, value in given.items() if value is not None})


class ArrivalFields(RequestBase):
    """How requests arrive."""

    group: ClassVar[str] = "Arrivals"
    burstiness: Annotated[Variation | None, Option(metavar="CV", kind="positive", unset="1")] = None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts."""


class Speculated(RequestBase):
    """Speculative decoding, if the engine does it."""

    group: ClassVar[str] = "Speculative decoding"
    speculative: SpeculativeMethod | None = None
    """Draft that runs ahead of the model. eagle, eagle3: a trained head; mtp: the model's own layer for multi-token
    prediction; ngram: a search in the text so far. The tokens ahead are chosen with the schedule; none, if they do not
    gain."""
    speculative_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MOST_AHEAD)] | None, Option(metavar="N", unset="as many as serve the most")
    ] = None
    """Tokens ahead in a step, with `speculative`."""
    acceptance: Annotated[
        float | tuple[float, ...] | Name | None, Option(metavar="SHARE|SHARE,…|FILE", kind="acceptance")
    ] = None
    """What is accepted of a draft, with `speculative`: the share of steps in which the first token ahead is accepted,
    the first two, and so on; or one share, that of tokens that are accepted if all before them are; or a server's
    metrics page (vLLM, SGLang), saved to a file."""
    draft_model: Annotated[Name | None, Option(metavar="NAME", unset="none for mtp and ngram")] = None
    """Checkpoint of the draft, for the engine's command."""


class PlanRequest(ProblemRequest, Policy, ArrivalFields, Speculated):
    """A plan. Names are looked up later, by `xgpt.problems.resolve`."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "output")
    arrival_rate_per_s: Annotated[PositiveFloat | None, Option("--arrival-rate", "R")] = None
    """Requests a second that the plan must sustain; the latency bound then counts from arrival."""
    devices: Annotated[PositiveInt | Literal["auto"] | None, Option(metavar="auto|N", kind="devices")] = None
    """Use at most N devices of the cluster; auto: the fewest that sustain `arrival_rate_per_s`."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: choose the cheapest of these clusters that sustains `arrival_rate_per_s`, on the fewest
    devices. PRICE is that of one device for an hour."""
    maximise: Annotated[Expression | None, Option(metavar="EXPRESSION", unset="throughput")] = None
    """Objective of your own, with `objective=saturated`: an expression over a plan's figures at saturation, as
    "tokens / cost" or "throughput if gap < 0.1 else -gap". Figures: throughput, tokens, latency, ttft, tpot, gap,
    running, encode_batch, idle, devices, replicas, cost. Optuna searches, and nothing is proven."""
    order: Annotated[AdmissionOrder | None, Option(unset="fcfs; slack also tries in-time")] = None
    """Which waiting request enters next: fcfs, the earliest arrival; in-time, the earliest of as many as can keep
    `ttft_s`, then the others, the longest prompts; sjf, the shortest prompt; lpt, the longest output (finishes a given
    set of requests soonest); edf, the earliest deadline; das, by prompt length and deadline (TCB)."""
    fix: Annotated[dict[str, NonNegativeInt], Option(metavar="NAME=N", kind="held")] = Field(default_factory=dict)
    """Hold a control variable at a value, as token_budget=8192 or max_batch=128. Those of the placement: tp, ep, pp,
    replicas, and tp_devices, the devices of a replica in tensor-parallel groups: tp=2 and tp_devices=2 hold [2 1] on
    three. With `order=das`: eta_percent, and of rows row_tokens (TCB's L) and row_batches: with 2, a batch enters where
    slots of the last one have left. Policies without that variable are left out. Repeatable."""


class CompareRequest(ProblemRequest):
    """A comparison of all policies."""

    group: ClassVar[str] = "Comparison"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "current")
    current: Annotated[str | None, Option(metavar="COMMAND|FILE")] = None
    """What runs today, to be scored in the same table: a command of vLLM, SGLang or TensorRT-LLM, a docker run, or a
    Compose file, pod manifest or Helm values that start one."""
    measure: bool = False
    """Also run each plan on this machine."""
    num_requests: Annotated[PositiveInt, Option("--requests")] = 300
    """With `measure`: number of requests for each plan."""
    seed: NonNegativeInt = 0
    """With `measure`: seed of lengths."""


class FleetRequest(ProblemFields, BoundFields, Policy):
    """The fleet of a day."""

    group: ClassVar[str] = "Fleet"
    most_used: ClassVar[tuple[str, ...]] = ("trace", "latency_bound_s", "model", "cluster", "output")
    trace: Annotated[Path, Option(metavar="FILE", is_required=True)]
    """A day's requests with their times (CSV, JSON lines), or its rates and workloads over hours (YAML)."""
    attain: Annotated[Share, Option(metavar="SHARE")] = 0.99
    """Share of the day's requests that must keep the bounds."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: replicas on any of these clusters, mixed. PRICE is that of one device for an hour."""
    devices: Annotated[
        PositiveInt | dict[str, PositiveInt] | None,
        Option(metavar="N|CLUSTER=N,…", kind="counts", unset="as many as needed; with `cluster=local`, this machine's"),
    ] = None
    """Use at most N devices of each cluster."""
    interval_s: Annotated[Seconds, Option("--interval", "S")] = 900.0
    """Length of an interval, within which the fleet does not change."""
    least_stay_s: Annotated[NonNegativeFloat, Option("--least-stay", "S")] = 0.0
    """Least time for which a started replica stays."""
    startup_s: Annotated[NonNegativeFloat, Option("--startup", "S")] = 60.0
    """Time from ordering a replica until it begins to load weights: for a machine, an image, an engine."""
    least_replicas: Annotated[NonNegativeInt, Option(metavar="N")] = 1
    """Least number of replicas at any time."""
    seed: NonNegativeInt = 0
    """Seed of the requests drawn from rates over hours."""


class ProfileRequest(ModelAndDevices):
    """A profile: step times of a model on devices."""

    group: ClassVar[str] = "Source"
    engine: EngineKind = "native"
    """Engine whose steps are measured."""
    import_from: Annotated[str | None, Option(metavar="aiconfigurator|FOLDER")] = None
    """Import tables that others measured: from the installed package aiconfigurator, or from a folder."""
    framework: Annotated[str | None, Option(unset="vllm")] = None
    """Engine whose kernels are imported: vllm, sglang, trtllm, or a version of one, as in vllm-0.15."""


class OfAPlan(RequestBase):
    """A plan that was made from a profile."""

    group: ClassVar[str] = "Plan"
    profile: Annotated[Name | Profile | None, Option(metavar="FILE", unset="the copy kept on this machine")] = None
    """Profile that the plan was made from."""


class LoadFields(OfAPlan):
    """The requests with which a plan is simulated or measured."""

    group: ClassVar[str] = "Load"
    workload: Annotated[Name | Workload | None, Option(unset="the plan's own")] = None
    """Lengths of these requests: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    num_requests: Annotated[
        PositiveInt | None,
        Option(
            "--requests", unset="2000 simulated or 300 measured, or as many as the stages of `arrival_rate_per_s` bring"
        ),
    ] = None
    """Number of requests that are measured; some more run before and after them."""
    arrival_rate_per_s: Annotated[
        Rates | None,
        Option(
            "--arrival-rate",
            "R|R:S,…",
            "rates",
            "requests are always waiting; a measured plan that was made for arrivals gets the rate that it promises",
        ),
    ] = None
    """Poisson arrivals a second, or stages of them: 2:60,8:30,2 is 2 a second for 60 s, 8 for 30 s, then 2."""
    seed: NonNegativeInt = 0
    """Seed of lengths and arrivals."""


class SimulateRequest(LoadFields, ArrivalFields):
    """A simulated run of a plan."""

    group: ClassVar[str] = "Load"
    clients: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Clients of a closed loop, in place of arrivals: each sends its next request once its last one has ended."""
    own_times: bool = False
    """Replay a trace as recorded: its pairs of lengths and its arrival times."""


class EngineFields(RequestBase):
    """What runs a plan."""

    group: ClassVar[str] = "Engine"
    engine: EngineKind = "native"
    """What runs the plan: xgpt's own engine, or vLLM under xgpt's schedule."""
    batching: Batching = "flat"
    """Layout of a batch. flat: without padding. padded: a row for each request. rows: several requests in each row, one
    after the other. slots: rows divided into slots, each freed as soon as it has finished. All but flat need a plan of
    policy static for one device."""


class BenchRequest(LoadFields, EngineFields):
    """A measured run of a plan, or of an endpoint."""

    group: ClassVar[str] = "Client"
    saturated: bool = False
    """Keep requests always waiting, even if the plan was made for arrivals."""
    concurrency: PositiveInt = 32
    """With a URL: number of outstanding requests."""
    stream: bool = False
    """Ask for streamed answers; with a URL they always are."""
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
    """What another plan may change."""

    group: ClassVar[str] = "Plan"
    replan_policies: Literal["pinned", "all"] = "pinned"
    """Policies that may take over. pinned: those that the plan was asked for, with the values that were fixed. all:
    every policy."""


class ReplanRequest(OfAPlan, Replanning):
    """A judgement of a plan under other lengths."""

    group: ClassVar[str] = "Plan"
    lengths: Annotated[Name, Option(metavar="CSV|URL", is_required=True)]
    """Trace of requests (CSV, JSON lines), or URL of a running server (its API key in XGPT_API_KEY)."""
    horizon_s: Annotated[PositiveFloat, Option("--horizon", "S")] = 600.0
    """Seconds within which a change of placement must repay its pause."""
    least_gain: Annotated[Annotated[float, Field(ge=0, le=1)], Option(metavar="SHARE")] = 0.05
    """Least gain of throughput, as a share, for which the plan is changed."""


def _time_of_day(text: str) -> str:
    if re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", text) is None:
        raise ValueError("write HH:MM, as in 08:30")
    return text


class AutoscaleRequest(RequestBase):
    """A recommendation of a fleet's replicas."""

    group: ClassVar[str] = "Load"
    scrape: Annotated[tuple[str, ...], Option(metavar="[KIND=]URL")] = ()
    """URL of replicas, whose /metrics are read with the key in XGPT_API_KEY. A host that resolves to several addresses
    stands for a replica at each. KIND may be left out if the fleet has one kind. Repeatable."""
    arrival_rate_per_s: Annotated[NonNegativeFloat | None, Option("--arrival-rate", "R")] = None
    """The present load, in requests a second, instead of `scrape`."""
    once: bool = False
    """Print the recommendation for now, and publish nothing."""
    look_s: Annotated[PositiveFloat, Option("--look", "S")] = 15.0
    """Time between two looks at the load."""
    day_begins: Annotated[
        Annotated[str, AfterValidator(_time_of_day)] | None,
        Option(metavar="HH:MM", unset="the time at which this command starts"),
    ] = None
    """Time of day, UTC, at which the planned day begins."""
    host: str = "127.0.0.1"
    """Address at which the metric is published."""
    port: Port = 8471
    """Port of the metric; 0: any free one."""


class Served(OfAPlan, EngineFields, Replanning):
    """The plan that a server runs, and how."""

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
    """With `engine=vllm`: address of the first machine of those that hold this one's replica. PORT (29500 if left out)
    and the next one must be free there."""
    ray: Annotated[Name | None, Option(metavar="ADDRESS")] = None
    """With xgpt's own engine: address of the Ray cluster whose machines run the plan; `auto`: the one that this machine
    is part of."""
    dry_run: bool = False
    """Check devices, memory and checkpoint, and start nothing."""


class Endpoint(RequestBase):
    """The address of a server, and what it records."""

    group: ClassVar[str] = "Endpoint"
    host: str = "127.0.0.1"
    """Address to listen on; one beyond this machine needs `api_key_file`."""
    port: Port = 8000
    """Port to listen on; 0: any free one."""
    api_key_file: Annotated[Path | None, Option(metavar="FILE")] = None
    """File of API keys, one a line: [NAME] KEY [SETTINGS]. SIGHUP makes the server read it again."""
    allowed_hosts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-host", "NAME")] = ()
    """Host name that requests may be addressed to, besides this machine's own. Repeatable."""
    allowed_origins: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-origin", "ORIGIN")
    ] = ()
    """Origin whose pages may use the server from a browser (CORS), for example https://chat.example. Repeatable."""
    served_model_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Option("--served-model-name", "NAME")
    ] = ()
    """Name by which requests may ask for the model, instead of the plan's. Repeatable."""
    ssl_certfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """PEM certificate; with it the server speaks HTTPS, TLS 1.2 or newer."""
    ssl_keyfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """The certificate's private key, if it is in a separate file."""
    front: Literal["endpoint", "smg"] = "endpoint"
    """What answers HTTP. smg: the Shepherd Model Gateway, before an engine in a process of its own."""
    admin_port: Port = 0
    """With `front=smg`: port of pages, plan and metrics; 0: any."""


class RequestLimits(RequestBase):
    """Limits on the requests that a server takes."""

    group: ClassVar[str] = "Limits"
    max_waiting: PositiveInt = 4096
    """Largest number of waiting requests; further ones get 429."""
    answer_within_s: Annotated[PositiveFloat | None, Option("--answer-within", "[CLASS=]S", "of_class")] = None
    """Seconds within which an answer must be whole, waiting included; a request that would take longer gets 429 at
    once. CLASS=S: for requests of one of the plan's classes. Repeatable."""
    answer_within_of: Annotated[dict[str, PositiveFloat], Option(None)] = Field(default_factory=dict)
    """The same by class, for requests of these classes."""
    request_timeout_s: Annotated[PositiveFloat | None, Option("--request-timeout", "S", "seconds_or_0")] = 600.0
    """Seconds after which an answer that is not whole ends with 504. 0: no limit."""
    default_max_tokens: Annotated[
        PositiveInt | None,
        Option(metavar="N", unset="the checkpoint's max_new_tokens; else completions 16, chats all that fits"),
    ] = None
    """max_tokens of a request that names none."""
    max_max_tokens: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Largest max_tokens that a request may ask for."""
    drain_s: Annotated[Seconds | None, Option("--drain-timeout", "S", unset="30")] = None
    """Seconds that running requests have to finish after SIGTERM."""
    shutdown_delay_s: Annotated[NonNegativeFloat, Option("--shutdown-delay", "S")] = 0.0
    """Seconds after SIGTERM in which requests are still accepted while /ready answers 503, so that load balancers
    notice."""


class ServeFields(Endpoint, RequestLimits, Served):
    """A server of a plan; `xgpt.serving.serve.ServeRequest` adds what is made of the fields."""

    group: ClassVar[str] = "Logs"
    most_used: ClassVar[tuple[str, ...]] = ("host", "port", "api_key_file", "checkpoint", "engine")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    otlp_endpoint: Annotated[str | None, Option(metavar="URL")] = None
    """Send OpenTelemetry traces to this URL; the standard OTEL_... variables are read, too."""
    step_log: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write every executed step to FILE, one JSON line each."""
    force: Annotated[bool, Option(None)] = False
    """Write it over any file, not only over an earlier step log."""


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
    """Return the request that keyword arguments make; None stands for an argument that was not given.

    Raises:
        InputError: an argument is not known, not accepted, or does not go with another one.
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
    """Return the request of a plan that keyword arguments make; see `request_of`.

    Raises:
        InputError: as `request_of` does.
    """
    return request_of(PlanRequest, asked)


def as_plan_request(request: ProblemRequest | FleetRequest, **changes: Any) -> PlanRequest:
    """Return the request of a plan with the fields that another request shares with it and that were given there."""
    shared = (PlanRequest.model_fields.keys() & request.model_fields_set) - {"among", "devices"}
    return plan_request(**{name: getattr(request, name) for name in shared} | changes)


def _objective(given: dict[str, Any]) -> str:
    of_saturated = "sla" in given or "maximise" in given or given.get("search") == "exhaustive"
    return "saturated" if of_saturated and "arrival_rate_per_s" not in given else "arrivals"


def _check_objective(given: dict[str, Any]) -> None:
    """Refuse options of one objective under the other one."""
    saturated = given["objective"] == "saturated"
    other = "arrivals" if saturated else "saturated"
    by_rate = "arrival_rate_per_s" in given and not saturated
    under = "arrival_rate_per_s" if by_rate else f"objective={given['objective']}"
    of_arrivals = ("arrival_rate_per_s", "burstiness", "ttft_quantile", "tpot_quantile")
    if given.get("sla") == "request" and "maximise" in given:
        raise InputError("maximise", given["maximise"], "it needs `sla=length`")
    for name in of_arrivals if saturated else ("sla", "maximise"):
        if name in given:
            raise InputError(name, given[name], f"it needs `objective={other}`: with `{under}` leave it out")
    if not saturated and given.get("search") == "exhaustive":
        accepted = f"it needs `objective=saturated`: with `{under}` take branch-and-bound or optuna"
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
                raise InputError(name, given[name], "it needs `arrival_rate_per_s`")
    if "among" in given:
        for name in ("cluster", "devices", "price", "profile"):
            if name in given:
                raise InputError(name, given[name], "`among` names the clusters: leave it out")
