"""Define the requests of the command line and the API, one pydantic model for each command.

From these models, `python -m tools.make_reference` makes the options of the command line (`xgpt/options.json`), the
types of the keyword arguments of `xgpt.api` (`xgpt/keywords.pyi`), and the pages in docs/reference. A field's docstring
is the help text of its option, in which `name` refers to another field. A class's `group` is the heading under which
the help lists the class's own fields.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from xgpt.core.errors import InputError
from xgpt.core.load import Growth
from xgpt.core.policies import Rule
from xgpt.core.refusals import refusal
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
from xgpt.core.schema.fleet import STARTUP_S, SloWindow
from xgpt.core.schema.policy import POLICY_GROUPS, POLICY_WORDS, PolicyChoice
from xgpt.core.schema.speculation import MOST_AHEAD, SpeculativeMethod
from xscheduler.expression import names_in

R = TypeVar("R", bound="RequestBase")


@dataclass(frozen=True)
class Option:
    """How the command line shows a field, where this does not follow from the field's name and type.

    Attributes:
        flag: the option's name. "" means --name with dashes, or --no-name for a switch that is on by default. None
            means that the command line has no such option.
        metavar: placeholder for the value in the help.
        kind: type of the value, a name in `xgpt.cli.values.KINDS`. "" means the field's type.
        unset: what the help says about the value None.
        names: the kind of shipped configs whose names the shell completes.
        is_required: whether the command line requires the option.
        group: heading under which the help lists the option. "" means that of the class.
    """

    flag: str | None = ""
    metavar: str = ""
    kind: str = ""
    unset: str = ""
    names: str = ""
    is_required: bool = False
    group: str = ""


RESEARCH = "Research"
"""Group of the options that reproduce papers, or are for experiments."""
TOGETHER = Option(metavar="SHARE", unset="no separate share: `quantile` applies to all bounds together")
Name = Annotated[str, BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)]
"""The name of a shipped config, or a path."""


def _checked(text: str) -> str:
    names_in(text)
    return text


Expression = Annotated[str, AfterValidator(_checked)]
"""An expression over a plan's figures, as `xscheduler.expression` defines it."""
Share = Annotated[float, Field(gt=0, lt=1)]
Variation = Annotated[float, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Rates = float | tuple[tuple[float, float | None], ...]
"""Requests a second, or stages with different rates: (rate, seconds)."""


class RequestBase(Frozen):
    """The base class of all requests.

    Attributes:
        most_used: names of the fields that the help lists first.
    """

    most_used: ClassVar[tuple[str, ...]] = ()


class ModelAndDevices(RequestBase):
    """A model, and the devices on which it runs."""

    group: ClassVar[str] = "Problem"
    model: Annotated[Name | ModelSpec, Option(names="models")] = "opt-125m"
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: Annotated[Name | None, Option(metavar="FILE", unset="the one in huggingface_hub's cache")] = None
    """The model's config.json: beside a Hugging Face id in `model`, or in place of `model`. Nothing is downloaded."""
    cluster: Annotated[Name | ClusterSpec, Option(names="clusters")] = "local"
    """Devices: local (this machine), local:N (N cores of this machine), a shipped name, or a YAML file."""
    dtype: Annotated[DType | None, Option(unset="the engine's default; float32 in xgpt's own on a CPU")] = None
    """Data type of matrix products."""
    kv_dtype: Annotated[DType | None, Option(unset="the type in `profile`; without a profile, `dtype`")] = None
    """Data type of the KV cache, for example int8 on CPUs or float8 on GPUs. xgpt's own engine keeps the type `dtype`
    on GPUs, so float8 is only for plans that another engine runs."""


class ProblemFields(ModelAndDevices):
    """What to plan for: a model on devices, with a profile, an engine and a price."""

    group: ClassVar[str] = "Problem"
    price: Annotated[PositiveFloat | None, Option(metavar="P", unset="the cluster file's")] = None
    """Price of one device for an hour, in any currency."""
    profile: Annotated[
        Name | Profile | None,
        Option(metavar="FILE", unset="the cached one; else measured on this machine, or computed from a datasheet"),
    ] = None
    """Profile (step times) from which to plan."""
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
    """Bound on the seconds from a request's arrival to its last token; inf means no bound. With `objective=saturated`
    the time counts from admission."""
    ttft_s: Annotated[PositiveFloat | None, Option("--ttft", "S", "seconds")] = None
    """Bound on the time to first token, in seconds or as in 200ms."""
    tpot_s: Annotated[PositiveFloat | None, Option("--tpot", "S", "seconds")] = None
    """Bound on the mean time per output token, in seconds or as in 50ms."""
    headroom: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        Option(
            metavar="SHARE",
            unset=(
                "the usual error of the profile's source: 0.1 for a measured profile (once eight loads are recorded "
                "on this machine, the slow-down that they showed), 0.1 for an imported one, 0.12 for a datasheet; more "
                "if other processes used the cores during the measurement"
            ),
        ),
    ] = None
    """Safety margin: the plan keeps the bounds even if all times are longer than predicted by this share."""


class ObjectiveAndShares(BoundFields):
    """The objective, and the share of requests that must keep the bounds."""

    group: ClassVar[str] = "Bounds"
    objective: Annotated[
        Objective | None, Option(unset="arrivals; saturated with `sla` or `search=exhaustive`", group=RESEARCH)
    ] = None
    """What to maximise. arrivals: the highest rate of Poisson arrivals at which the bounds are kept; latency counts
    from arrival. saturated: throughput while requests are always waiting; latency counts from admission, as in
    ExeGPT."""
    quantile: Share = 0.99
    """Share of requests that must keep the bounds."""
    sla: Annotated[Sla | None, Option(unset="length", group=RESEARCH)] = None
    """With `objective=saturated`: which latency must keep the bound. length: that of a request whose output length is
    at the quantile. request: the quantile of the simulated latencies of all requests."""
    session_wait_s: Annotated[PositiveFloat | None, Option("--session-wait", "S", "seconds")] = None
    """Bound on a session's waiting: the sum of its turns' times to first token. Needs a workload of sessions."""
    session_time_s: Annotated[PositiveFloat | None, Option("--session-time", "S", "seconds")] = None
    """Bound on the time from a session's start to its last token, without its pauses. Needs a workload of sessions."""
    ttft_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `ttft_s`, separately from the other bounds, as in MLPerf's server scenario."""
    tpot_quantile: Annotated[Share | None, TOGETHER] = None
    """Share of requests that must keep `tpot_s`, separately from the other bounds."""


def _choices_in_words() -> str:
    each = " ".join(f"{name}: {does}." for name, does in POLICY_WORDS.items() if does)
    others = ", ".join(name for name in POLICY_WORDS if name not in {*POLICY_GROUPS, *POLICY_GROUPS["auto"]})
    groups = f"exegpt: the better of rra and waa. auto: the best of all except {others}."
    return f'Kind of schedule, in which "encode" means prefill. {each} {groups}'


class Policy(RequestBase):
    """The policies to search."""

    group: ClassVar[str] = "Search"
    policy: Annotated[PolicyChoice, Field(description=_choices_in_words())] = "auto"


class GrowthFields(RequestBase):
    """How a load differs from its log."""

    group: ClassVar[str] = "Arrivals"
    rate: Annotated[PositiveFloat, Option(metavar="xN", kind="factor")] = 1.0
    """Factor on the number of requests of a log with times, each at its time of day: x2 is twice as many."""
    outputs: Annotated[PositiveFloat, Option(metavar="xN", kind="factor")] = 1.0
    """Factor on the output lengths: x1.6 makes each output 1.6 times as long."""

    @property
    def growth(self) -> Growth:
        """The growth of the load."""
        return Growth(self.rate, self.outputs)


class ProblemRequest(ProblemFields, ObjectiveAndShares, GrowthFields):
    """A planning problem, and the search method."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload")
    workload: Annotated[Name | Workload, Option(names="workloads")] = "summarization"
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: Annotated[NonNegativeInt, Option(metavar="TOKENS")] = 0
    """Length of the prefix that all prompts share, such as a system prompt. Its keys and values are computed once.
    Leave this out for a trace that already says which prefixes its prompts share."""
    confidence: Share = 0.9
    """Probability with which the smallest number of devices must sustain the load, by the errors of earlier
    predictions."""
    search: Annotated[SearchMethod, Option(group=RESEARCH)] = "branch-and-bound"
    """Search method. branch-and-bound: proves how far the plan can be from the best one. optuna: samples settings and
    proves nothing. exhaustive: tries every setting, only with `objective=saturated`."""
    kv: Annotated[KvPromise | None, Option(unset="as the engine does")] = None
    """How many requests the KV cache admits. reserve: each request keeps room for its longest possible output.
    quantile: as many requests enter as fit 99.9% of the time; if memory runs out, the newest is preempted, as in
    vLLM."""

    @property
    def constraint(self) -> Constraint:
        """The objective and the bounds, as in a plan."""
        given = {name: getattr(self, name) for name in Constraint.model_fields if name in type(self).model_fields}
        return Constraint(**{name: value for name, value in given.items() if value is not None})


class ArrivalFields(RequestBase):
    """How requests arrive."""

    group: ClassVar[str] = "Arrivals"
    burstiness: Annotated[Variation | None, Option(metavar="CV", kind="positive", unset="1")] = None
    """Coefficient of variation of the time between arrivals: 1 for Poisson, above 1 for bursts."""


class Speculated(RequestBase):
    """Speculative decoding, if the engine supports it."""

    group: ClassVar[str] = "Speculative decoding"
    speculative: SpeculativeMethod | None = None
    """Drafting method. eagle, eagle3: a trained head; mtp: the model's layer for multi-token prediction; ngram: a
    search in the text so far. The planner chooses the number of draft tokens, 0 if drafts gain nothing."""
    speculative_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MOST_AHEAD)] | None, Option(metavar="N", unset="the number with the highest rate")
    ] = None
    """Number of draft tokens in a step, with `speculative`."""
    acceptance: Annotated[
        float | tuple[float, ...] | Name | None, Option(metavar="SHARE|SHARE,…|FILE", kind="acceptance")
    ] = None
    """Acceptance of drafts, with `speculative`. Several shares, one for each draft position: share i is the share of
    steps that accept at least i draft tokens. A single share: the probability that a draft token is accepted if all
    earlier ones are. A file: a saved metrics page of a server (vLLM, SGLang)."""
    draft_model: Annotated[Name | None, Option(metavar="NAME", unset="none for mtp and ngram")] = None
    """Checkpoint of the draft model, for the engine's command."""


class PlanRequest(ProblemRequest, Policy, ArrivalFields, Speculated):
    """A request for a plan."""

    group: ClassVar[str] = "Search"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "output")
    arrival_rate_per_s: Annotated[PositiveFloat | None, Option("--arrival-rate", "R")] = None
    """Requests a second that the plan must sustain. The latency bound then counts from arrival."""
    api_servers: Annotated[PositiveInt | None, Option(metavar="N", unset="as many as the plan's rate needs")] = None
    """Number of API server processes of each vLLM command (`--api-server-count`). Each process uses one core to
    tokenise and stream."""
    devices: Annotated[
        PositiveInt | Literal["auto"] | None,
        Option(metavar="auto|N", kind="devices", unset="all; auto if `workload` is a log with times"),
    ] = None
    """Use at most N devices of the cluster; auto: the smallest number that sustains `arrival_rate_per_s`, or the log in
    `workload`."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: choose the cheapest of these clusters that sustains the load, with the fewest devices.
    PRICE is the price of one device for an hour."""
    maximise: Annotated[Expression | None, Option(metavar="EXPRESSION", unset="throughput", group=RESEARCH)] = None
    """Your own objective, with `objective=saturated`: an expression over a plan's figures at saturation, such as
    "tokens / cost" or "throughput if gap < 0.1 else -gap". Figures: throughput, tokens, latency, ttft, tpot, gap,
    running, encode_batch, idle, devices, replicas, cost. Optuna searches, and no gap is proven."""
    order: Annotated[
        AdmissionOrder | None,
        Option(unset="fcfs; with `ttft_s` also in-time, unless an engine is named", group=RESEARCH),
    ] = None
    """Which waiting request enters next. fcfs: the earliest arrival. in-time: the earliest arrival, but the longest
    prompts last if not all requests can keep `ttft_s`. sjf: the shortest prompt. lpt: the longest output, which
    finishes a given set of requests soonest. edf: the earliest deadline. das: by prompt length and deadline (TCB).
    shuffled: the earliest arrival, at random within each 64 requests (ExeGPT)."""
    fix: Annotated[dict[str, NonNegativeInt], Option(metavar="NAME=N", kind="held")] = Field(default_factory=dict)
    """Fix a control variable, such as token_budget=8192 or max_batch=128. Variables of the placement are tp, ep, pp,
    replicas and tp_devices. tp_devices is the number of a replica's devices in tensor-parallel groups: on three
    devices, tp=2 with tp_devices=2 gives a stage of two devices and a stage of one. `order=das` adds eta_percent and,
    for a plan that runs in rows, row_tokens (L in TCB) and row_batches; row_batches=2 lets a batch enter the slots that
    the previous batch has freed. Policies without the variable are left out. Repeatable."""


class CompareRequest(ProblemRequest):
    """A comparison of all policies."""

    group: ClassVar[str] = "Comparison"
    most_used: ClassVar[tuple[str, ...]] = ("latency_bound_s", "model", "cluster", "workload", "current")
    current: Annotated[str | None, Option(metavar="COMMAND|FILE")] = None
    """The current deployment, scored for comparison with the plans: a command of vLLM, SGLang or TensorRT-LLM, or a
    docker run, Compose file, pod manifest or Helm values with such a command."""
    devices: Annotated[
        PositiveInt | None, Option(metavar="N", unset="all; as few as hold it if `workload` is a log with times")
    ] = None
    """Plan for at most N devices of the cluster, such as those that run now."""
    variables: Annotated[dict[str, str], Option("--set", "NAME=VALUE", kind="assigned")] = Field(default_factory=dict)
    """Value of a shell variable in `current` that the command or file does not set. Repeatable."""


class EngineRequest(ProblemRequest):
    """The problem of an engine that users run, and the command that runs now."""

    group: ClassVar[str] = "Deployment"
    current: Annotated[str | None, Option(metavar="COMMAND|FILE")] = None
    """The current deployment: a command of vLLM or SGLang, or a docker run, Compose file, pod manifest or Helm values
    with such a command. Its model, and options such as --max-model-len, are kept."""
    seed: NonNegativeInt = 0
    """Seed from which the requests are drawn."""


class CheckRequest(EngineRequest):
    """A comparison of a running server with its prediction."""

    group: ClassVar[str] = "Load"
    most_used: ClassVar[tuple[str, ...]] = ("plan", "current", "workload", "latency_bound_s", "ttft_s", "tpot_s")
    plan: Annotated[Path | None, Option(metavar="FILE")] = None
    """The plan that the server runs, instead of `current` and the problem."""
    arrival_rate_per_s: Annotated[
        PositiveFloat | None,
        Option("--arrival-rate", "R", unset="the rate at which the bounds are predicted to be kept"),
    ] = None
    """Requests a second of your own load. Loads at 50% and 90% of it are sent."""
    yes: bool = False
    """Send the load without asking, even if the server is serving others."""


class TuneRequest(EngineRequest):
    """A search for the best settings of an engine by measurements."""

    group: ClassVar[str] = "Measurement"
    most_used: ClassVar[tuple[str, ...]] = ("current", "workload", "latency_bound_s", "ttft_s", "tpot_s", "budget_s")
    budget_s: Annotated[PositiveFloat | None, Option("--budget", "TIME", "seconds", "no limit")] = None
    """Time after which no further measurement begins, such as 90s, 60m or 2h."""
    also: Annotated[tuple[str, ...], Option(metavar="FLAG[=VALUE,…]")] = ()
    """Try every setting also with this flag of the engine, such as attention-backend=FLASHINFER,TRITON_ATTN. What it
    changes is measured, not predicted. Repeatable."""
    journal: Annotated[Name, Option(metavar="FILE")] = "tune.jsonl"
    """File of the finished measurements."""
    resume: bool = False
    """Go on with the measurements in `journal`."""
    start: Annotated[str | None, Option(metavar="COMMAND")] = None
    """Shell command that starts an engine and runs until it ends, for other machines and engines. {command}, {flags}
    and {port} are replaced, as in "ssh gpu7 {command} --port {port}"."""
    url: Annotated[str | None, Option(metavar="URL", unset="http://127.0.0.1:{port}")] = None
    """With `start`: address of the started engine, in which {port} is replaced."""
    manual: bool = False
    """Show each command and wait until you have started it and given its URL."""


class FleetRequest(ProblemFields, BoundFields, Policy, GrowthFields):
    """A request for a fleet that serves a day's load."""

    group: ClassVar[str] = "Fleet"
    most_used: ClassVar[tuple[str, ...]] = ("trace", "latency_bound_s", "model", "cluster", "output")
    latency_bound_s: Annotated[
        PositiveFloat | None, BeforeValidator(_none_if_inf), Option("--latency-bound", "S|inf", "bound")
    ] = None
    """Bound on the seconds from a request's arrival to its last token; inf means no bound."""
    trace: Annotated[Path, Option(metavar="FILE", is_required=True)]
    """A day's requests with their times (CSV, JSON lines), or its rates and workloads over hours (YAML)."""
    attain: Annotated[Share, Option(metavar="SHARE")] = 0.99
    """Share of requests that must keep the bounds."""
    slo_window: SloWindow = "interval"
    """Whether `attain` holds in each interval, or of the whole day. A day may keep it while its busiest quarter of an
    hour does not."""
    among: Annotated[dict[str, PositiveFloat] | None, Option(metavar="CLUSTER=PRICE,…", kind="prices")] = None
    """Instead of `cluster`: place replicas on any mixture of these clusters. PRICE is the price of one device for an
    hour."""
    devices: Annotated[
        PositiveInt | dict[str, PositiveInt] | None,
        Option(metavar="N|CLUSTER=N,…", kind="counts", unset="as many as needed; with `cluster=local`, this machine's"),
    ] = None
    """Use at most N devices of each cluster, with those of replicas that start beside others that end."""
    interval_s: Annotated[Seconds, Option("--interval", "S")] = 900.0
    """Length of an interval, in seconds. The fleet changes only between intervals."""
    least_stay_s: Annotated[NonNegativeFloat, Option("--least-stay", "S")] = 0.0
    """Shortest time, in seconds, for which a started replica runs."""
    startup_s: Annotated[NonNegativeFloat, Option("--startup", "S")] = STARTUP_S
    """Seconds from ordering a replica until it begins to load weights: the start of machine, image and engine."""
    least_replicas: Annotated[NonNegativeInt, Option(metavar="N")] = 1
    """Smallest number of replicas at any time."""
    seed: NonNegativeInt = 0
    """If `trace` has rates over hours: seed from which its requests are drawn."""


class ProfileRequest(ModelAndDevices):
    """A request for a profile: the step times of a model on devices."""

    group: ClassVar[str] = "Source"
    engine: EngineKind = "xgpt"
    """Engine whose steps are measured."""
    import_from: Annotated[str | None, Option(metavar="aiconfigurator|FOLDER")] = None
    """Import tables of measured times, from the installed package aiconfigurator or from a folder."""
    framework: Annotated[str | None, Option(unset="vllm")] = None
    """Engine whose kernel times are imported: vllm, sglang, trtllm, or one with a version, as in vllm-0.15."""


class OfAPlan(RequestBase):
    """The profile of an existing plan."""

    group: ClassVar[str] = "Plan"
    profile: Annotated[Name | Profile | None, Option(metavar="FILE", unset="the copy on this machine")] = None
    """Profile from which the plan was made."""


class WatchRequest(OfAPlan):
    """A watch over a running engine."""

    group: ClassVar[str] = "Engine"
    engine: Annotated[tuple[str, ...], Option("--engine", "URL", is_required=True)]
    """URL of a replica of the engine, whose /metrics are read with the key in XGPT_API_KEY. Repeatable."""
    look_s: Annotated[PositiveFloat, Option("--look", "S")] = 5.0
    """Seconds between two readings of the metrics."""
    webhook: Annotated[str | None, Option(metavar="URL")] = None
    """Post each alarm to this URL, as a JSON document."""
    apply: Annotated[str | None, Option(metavar="COMMAND")] = None
    """Shell command that restarts a replica with new settings, in which {flags} and {url} are replaced. It runs for one
    replica after the other. The next one follows when the restarted one answers."""


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
    """Number of requests to measure. Further requests run before and after them to keep the load steady."""
    arrival_rate_per_s: Annotated[
        Rates | None,
        Option(
            "--arrival-rate",
            "R|R:S,…",
            "rates",
            "none, so requests are always waiting; in xgpt bench, the predicted rate of a plan that was made for "
            "arrivals",
        ),
    ] = None
    """Poisson arrivals a second, or stages of different rates: 2:60,8:30,2 means 2 a second for 60 s, 8 a second for 30
    s, then 2 a second until the end."""
    seed: NonNegativeInt = 0
    """Seed from which lengths and arrival times are drawn."""


class RuleField(RequestBase):
    """A scheduling rule of one's own."""

    group: ClassVar[str] = "Engine"
    rule: Annotated[InstanceOf[Rule] | Name | None, Option(metavar="MODULE:NAME", unset="the plan's")] = None
    """Scheduling rule of your own: an `xgpt.Rule`, or a class of one, of a Python module."""


class SimulateRequest(LoadFields, ArrivalFields, GrowthFields, RuleField):
    """A simulated run of a plan."""

    group: ClassVar[str] = "Load"
    num_requests: Annotated[
        PositiveInt | Literal["all"] | None,
        Option(
            "--requests",
            "all|N",
            "requests",
            "2000, or the number in the stages of `arrival_rate_per_s`; with `own_times`, all",
        ),
    ] = None  # type: ignore[assignment]
    """Number of requests to measure; with `own_times`, all means the whole trace. Further requests run before and after
    them to keep the load steady."""
    clients: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Number of clients in a closed loop, instead of arrivals: a client sends its next request when its last one has
    ended."""
    bench: Annotated[Name | None, Option(metavar="COMMAND")] = None
    """Send what this command of `vllm bench serve`, SGLang's bench_serving or AIPerf sends, from the first to the last
    request. Lengths of data sets come from `workload`."""
    own_times: bool = False
    """Replay a trace as recorded: each request arrives at its recorded time and has its own input and output length."""
    since_s: Annotated[NonNegativeFloat, Option("--since", "S", "seconds_or_0")] = 0.0
    """With `own_times`: begin the replay this many seconds after the trace's first request."""


class EngineFields(RuleField):
    """The engine of a plan."""

    group: ClassVar[str] = "Engine"
    engine: EngineKind = "xgpt"
    """Engine that runs the plan: xgpt's own, or vLLM with xgpt's schedule."""
    batching: Annotated[Batching, Option(group=RESEARCH)] = "flat"
    """Layout of a batch. flat: no padding. padded: one row for each request. rows: several requests in each row, one
    after the other. slots: rows divided into slots, each of which is freed when its request has finished. All except
    flat need a plan of policy static for one device."""


class BenchRequest(LoadFields, EngineFields):
    """A measurement of a plan or of an endpoint."""

    group: ClassVar[str] = "Client"
    saturated: bool = False
    """Keep requests waiting at all times, even if the plan was made for arrivals."""
    concurrency: PositiveInt = 32
    """With a URL: number of requests that are outstanding at the same time."""
    pauses: Annotated[PositiveFloat, Option(metavar="xN", kind="factor")] = 1.0
    """With a URL and a workload of sessions: factor on their pauses. Hit rates under x0.1 are not those of real pauses,
    unless the rate is scaled as well."""
    stream: bool = False
    """Ask for streamed answers. Answers from a URL are always streamed."""
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
    """Seed from which the simulated requests are drawn."""


class Replanning(RequestBase):
    """The policies that re-planning may choose."""

    group: ClassVar[str] = "Plan"
    replan_policies: Literal["pinned", "all"] = "pinned"
    """Policies that re-planning may choose. pinned: those that were requested for the plan, with the fixed values. all:
    every policy."""


class ReplanRequest(OfAPlan, Replanning, GrowthFields):
    """A request to decide whether another plan should replace a plan, since request lengths differ."""

    group: ClassVar[str] = "Plan"
    lengths: Annotated[Name, Option(metavar="CSV|URL", is_required=True)]
    """Trace of requests (CSV, JSON lines), or URL of a running server (its API key in XGPT_API_KEY)."""
    horizon_s: Annotated[PositiveFloat, Option("--horizon", "S")] = 600.0
    """A change of placement pauses requests. It must gain more than this pause costs within this many seconds."""
    least_gain: Annotated[Annotated[float, Field(ge=0, le=1)], Option(metavar="SHARE")] = 0.05
    """Smallest gain in throughput, as a share, for which the plan changes."""


class Served(OfAPlan, EngineFields, Replanning):
    """The plan that a server runs, and how it runs the plan."""

    group: ClassVar[str] = "Engine"
    checkpoint: Annotated[Name | None, Option(metavar="DIR", unset="the plan's")] = None
    """Directory of the model's weights."""
    replan: bool = True
    """Switch to better plans when lengths change."""
    reuse: bool = True
    """Reuse the KV cache of earlier prompts for later prompts with the same prefix."""
    nnodes: PositiveInt = 1
    """With `engine=vllm`: number of machines that run the plan together."""
    node_rank: NonNegativeInt = 0
    """With `engine=vllm`: rank of this machine among the machines that run the plan."""
    master_addr: Annotated[str | None, Option("--master-addr", "HOST[:PORT]")] = None
    """With `engine=vllm`: address of the first machine of this machine's replica, where PORT (29500 by default) and the
    next port must be free."""
    ray: Annotated[Name | None, Option(metavar="ADDRESS")] = None
    """With xgpt's own engine: address of the Ray cluster whose machines run the plan; `auto`: this machine's Ray
    cluster."""
    dry_run: bool = False
    """Check devices, memory and checkpoint, and start nothing."""


class Endpoint(RequestBase):
    """The address and access of a server."""

    group: ClassVar[str] = "Endpoint"
    host: str = "127.0.0.1"
    """Address on which to listen. An address that other machines can reach needs `api_key_file`."""
    port: Port = 8000
    """Port on which to listen. 0 means any free port."""
    api_key_file: Annotated[Path | None, Option(metavar="FILE")] = None
    """File of API keys, one on each line: [NAME] KEY [SETTINGS]. On SIGHUP the server reads the file again."""
    allowed_hosts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-host", "NAME")] = ()
    """Host name that a request's Host header may contain, besides this machine's names. Repeatable."""
    allowed_origins: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Option("--allowed-origin", "ORIGIN")
    ] = ()
    """Origin whose pages may use the server from a browser (CORS), for example https://chat.example. Repeatable."""
    served_model_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Option("--served-model-name", "NAME")
    ] = ()
    """Name by which clients ask for the model, instead of the name in the plan. Repeatable."""
    ssl_certfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """PEM certificate. If given, the server uses HTTPS (TLS 1.2 or newer)."""
    ssl_keyfile: Annotated[Path | None, Option(metavar="FILE")] = None
    """The certificate's private key, if it is in a separate file."""


class RequestLimits(RequestBase):
    """Limits on the requests of a server."""

    group: ClassVar[str] = "Limits"
    max_waiting: PositiveInt = 4096
    """Largest number of waiting requests. Further requests are answered with 429."""
    answer_within_s: Annotated[PositiveFloat | None, Option("--answer-within", "[CLASS=]S", "of_class")] = None
    """Seconds within which an answer must be complete, waiting included. A request that would take longer immediately
    gets the answer 429. CLASS=S: for one of the plan's classes. Repeatable."""
    answer_within_of: Annotated[dict[str, PositiveFloat], Option(None)] = Field(default_factory=dict)
    """Seconds within which answers must be complete, for each class."""
    request_timeout_s: Annotated[PositiveFloat | None, Option("--request-timeout", "S", "seconds_or_0")] = 600.0
    """Seconds after which an incomplete answer ends with 504. 0 means no limit."""
    default_max_tokens: Annotated[
        PositiveInt | None,
        Option(
            metavar="N",
            unset="the checkpoint's max_new_tokens; without it 16 for completions, and as many as fit for chats",
        ),
    ] = None
    """max_tokens for requests that do not state max_tokens."""
    max_max_tokens: Annotated[PositiveInt | None, Option(metavar="N")] = None
    """Largest max_tokens that a request may state."""
    drain_s: Annotated[Seconds | None, Option("--drain-timeout", "S", unset="30")] = None
    """Seconds after SIGTERM within which running requests may finish."""
    shutdown_delay_s: Annotated[NonNegativeFloat, Option("--shutdown-delay", "S")] = 0.0
    """Seconds after SIGTERM in which requests are still accepted, while /ready answers 503 so that load balancers send
    no more."""


class ServeFields(Endpoint, RequestLimits, Served):
    """The fields of a request to serve a plan. `xgpt.serving.serve.ServeRequest` adds checks."""

    group: ClassVar[str] = "Logs"
    most_used: ClassVar[tuple[str, ...]] = ("host", "port", "api_key_file", "checkpoint", "engine")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of logged messages."""
    otlp_endpoint: Annotated[str | None, Option(metavar="URL")] = None
    """Send OpenTelemetry traces to this URL. The standard OTEL_... variables are also read."""
    step_log: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write every executed step to FILE, as one JSON line."""
    force: Annotated[bool, Option(None)] = False
    """Let the step log overwrite any file, not only an earlier step log."""


REQUESTS: dict[str, type[RequestBase]] = {
    "plan": PlanRequest,
    "fleet": FleetRequest,
    "profile": ProfileRequest,
    "simulate": SimulateRequest,
    "compare": CompareRequest,
    "serve": ServeFields,
    "bench": BenchRequest,
    "check": CheckRequest,
    "tune": TuneRequest,
    "watch": WatchRequest,
    "calibrate": CalibrateRequest,
    "replan": ReplanRequest,
    "report": ReportRequest,
}
"""The request of each command."""


def parse_arguments(given: dict[str, Any], type_: type[R]) -> R:
    """Return the request that a function's keyword arguments make.

    Raises:
        InputError: an argument is not accepted or not known. The message is one line about the first such argument.
    """
    try:
        return type_.model_validate(given)
    except ValidationError as error:
        raise refusal(error, type_, given) from None


def request_of(type_: type[R], /, **asked: Any) -> R:
    """Return the request that these keyword arguments make. An argument with the value None counts as not given.

    Raises:
        InputError: an argument is not known, is not accepted, or cannot be combined with another argument.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if isinstance(given.get("among"), dict):
        from xgpt.resolve import check_names

        check_names(given["among"])
    if issubclass(type_, ProblemRequest):
        given.setdefault("objective", _objective(given))
        _check_objective(given)
        _check_clusters(given)
    return parse_arguments(given, type_)


def plan_request(**asked: Any) -> PlanRequest:
    """Return the request for a plan that these keyword arguments make.

    Raises:
        InputError: as `request_of` does.
    """
    return request_of(PlanRequest, **asked)


def as_plan_request(request: ProblemRequest | FleetRequest, **changes: Any) -> PlanRequest:
    """Return a plan request with the fields set in another request, and with `changes`. Left out are `among`,
    `devices`, and fields that plan requests lack.
    """
    shared = (PlanRequest.model_fields.keys() & request.model_fields_set) - {"among", "devices"}
    return plan_request(**{name: getattr(request, name) for name in shared} | changes)


def _objective(given: dict[str, Any]) -> str:
    of_saturated = "sla" in given or "maximise" in given or given.get("search") == "exhaustive"
    return "saturated" if of_saturated and "arrival_rate_per_s" not in given else "arrivals"


def _check_objective(given: dict[str, Any]) -> None:
    """Check that the arguments belong to the objective and can be combined."""
    saturated = given["objective"] == "saturated"
    other = "arrivals" if saturated else "saturated"
    by_rate = "arrival_rate_per_s" in given and not saturated
    under = "arrival_rate_per_s" if by_rate else f"objective={given['objective']}"
    of_arrivals = (
        *("arrival_rate_per_s", "burstiness", "ttft_quantile", "tpot_quantile"),
        *("session_wait_s", "session_time_s"),
    )
    if given.get("sla") == "request" and "maximise" in given:
        raise InputError("maximise", given["maximise"], "it needs `sla=length`: give that, or leave `maximise` out")
    for name in ("among", "maximise"):
        if name in given and "speculative" in given:
            raise InputError(name, given[name], "it cannot be combined with `speculative`: leave one of them out")
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
    """Check that clusters and devices are chosen in only one way."""
    devices = given.get("devices", "auto")
    if devices != "auto" and (not isinstance(devices, int) or devices < 1):
        raise InputError("devices", devices, "give auto, or a number of devices, at least 1")
    if "among" in given:
        for name in ("cluster", "devices", "price", "profile"):
            if name in given:
                raise InputError(name, given[name], f"`among` already names the clusters: leave `{name}` out")
