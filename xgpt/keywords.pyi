# ruff: noqa: E501
"""The keyword arguments of `xgpt.api`, as editors and type checkers see them: made from `xgpt.requests`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from xgpt.core.policies import Rule
from xgpt.core.schema import ClusterSpec, EngineSpec, ModelSpec, Profile, Workload

class Speculated(TypedDict, total=False):
    speculative: Literal["eagle3", "eagle", "mtp", "ngram"] | None
    """Drafting method. eagle, eagle3: a trained head; mtp: the model's layer for multi-token prediction; ngram: a search in the text so far. The planner chooses the number of draft tokens, 0 if drafts gain nothing."""
    speculative_tokens: int | None
    """Number of draft tokens in a step, with `speculative`."""
    acceptance: float | Sequence[float] | str | PathLike[str] | None
    """Acceptance of drafts, with `speculative`. Several shares, one for each draft position: share i is the share of steps that accept at least i draft tokens. A single share: the probability that a draft token is accepted if all earlier ones are. A file: a saved metrics page of a server (vLLM, SGLang)."""
    draft_model: str | PathLike[str] | None
    """Checkpoint of the draft model, for the engine's command."""

class ArrivalFields(TypedDict, total=False):
    burstiness: float | None
    """Coefficient of variation of the time between arrivals: 1 for Poisson, above 1 for bursts."""

class Policy(TypedDict, total=False):
    policy: Literal["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack"] | None
    """Kind of schedule, in which "encode" means prefill. rra: encode a batch of prompts, then run several decode steps, in turn. waa: some devices encode and the others decode; waa-c divides the devices by computation, waa-m by memory. chunked: each step decodes the running requests and encodes chunks of waiting prompts. orca: the same with whole prompts. static: a batch runs until all its requests have finished. slack: chunked, but each step encodes as many prompt tokens as the running requests can wait for under `tpot_s`; simulation tunes the rule. exegpt: the better of rra and waa. auto: the best of all except slack."""

class GrowthFields(TypedDict, total=False):
    rate: float | None
    """Factor on the number of requests of a log with times, each at its time of day: x2 is twice as many."""
    outputs: float | None
    """Factor on the output lengths: x1.6 makes each output 1.6 times as long."""

class BoundFields(TypedDict, total=False):
    ttft_s: float | None
    """Bound on the time to first token, in seconds or as in 200ms."""
    tpot_s: float | None
    """Bound on the mean time per output token, in seconds or as in 50ms."""
    headroom: float | None
    """Safety margin: the plan keeps the bounds even if all times are longer than predicted by this share."""

class ObjectiveAndShares(BoundFields, total=False):
    objective: Literal["arrivals", "saturated"] | None
    """What to maximise. arrivals: the highest rate of Poisson arrivals at which the bounds are kept; latency counts from arrival. saturated: throughput while requests are always waiting; latency counts from admission, as in ExeGPT."""
    quantile: float | None
    """Share of requests that must keep the bounds."""
    sla: Literal["length", "request"] | None
    """With `objective=saturated`: which latency must keep the bound. length: that of a request whose output length is at the quantile. request: the quantile of the simulated latencies of all requests."""
    session_wait_s: float | None
    """Bound on a session's waiting: the sum of its turns' times to first token. Needs a workload of sessions."""
    session_time_s: float | None
    """Bound on the time from a session's start to its last token, without its pauses. Needs a workload of sessions."""
    ttft_quantile: float | None
    """Share of requests that must keep `ttft_s`, separately from the other bounds, as in MLPerf's server scenario."""
    tpot_quantile: float | None
    """Share of requests that must keep `tpot_s`, separately from the other bounds."""

class ModelAndDevices(TypedDict, total=False):
    model: str | PathLike[str] | ModelSpec | None
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: str | PathLike[str] | None
    """The model's config.json: beside a Hugging Face id in `model`, or in place of `model`. Nothing is downloaded."""
    cluster: str | PathLike[str] | ClusterSpec | None
    """Devices: local (this machine), local:N (N cores of this machine), a shipped name, or a YAML file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Data type of matrix products."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Data type of the KV cache, for example int8 on CPUs or float8 on GPUs. xgpt's own engine keeps the type `dtype` on GPUs, so float8 is only for plans that another engine runs."""

class ProblemFields(ModelAndDevices, total=False):
    price: float | None
    """Price of one device for an hour, in any currency."""
    profile: str | PathLike[str] | Profile | None
    """Profile (step times) from which to plan."""
    engine: str | PathLike[str] | EngineSpec | None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a YAML file."""

class ProblemRequest(ProblemFields, ObjectiveAndShares, GrowthFields, total=False):
    workload: str | PathLike[str] | Workload | None
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: int | None
    """Length of the prefix that all prompts share, such as a system prompt. Its keys and values are computed once. Leave this out for a trace that already says which prefixes its prompts share."""
    confidence: float | None
    """Probability with which the smallest number of devices must sustain the load, by the errors of earlier predictions."""
    search: Literal["branch-and-bound", "exhaustive", "optuna"] | None
    """Search method. branch-and-bound: proves how far the plan can be from the best one. optuna: samples settings and proves nothing. exhaustive: tries every setting, only with `objective=saturated`."""
    kv: Literal["reserve", "quantile"] | None
    """How many requests the KV cache admits. reserve: each request keeps room for its longest possible output. quantile: as many requests enter as fit 99.9% of the time; if memory runs out, the newest is preempted, as in vLLM."""

class PlanKeywords(ProblemRequest, Policy, ArrivalFields, Speculated, total=False):
    arrival_rate_per_s: float | None
    """Requests a second that the plan must sustain. The latency bound then counts from arrival."""
    api_servers: int | None
    """Number of API server processes of each vLLM command (`--api-server-count`). Each process uses one core to tokenise and stream."""
    devices: int | Literal["auto"] | None
    """Use at most N devices of the cluster; auto: the smallest number that sustains `arrival_rate_per_s`, or the log in `workload`."""
    among: Mapping[str | PathLike[str], float] | None
    """Instead of `cluster`: choose the cheapest of these clusters that sustains the load, with the fewest devices. PRICE is the price of one device for an hour."""
    maximise: str | PathLike[str] | None
    """Your own objective, with `objective=saturated`: an expression over a plan's figures at saturation, such as "tokens / cost" or "throughput if gap < 0.1 else -gap". Figures: throughput, tokens, latency, ttft, tpot, gap, running, encode_batch, idle, devices, replicas, cost. Optuna searches, and no gap is proven."""
    order: Literal["fcfs", "in-time", "sjf", "lpt", "edf", "das", "shuffled"] | None
    """Which waiting request enters next. fcfs: the earliest arrival. in-time: the earliest arrival, but the longest prompts last if not all requests can keep `ttft_s`. sjf: the shortest prompt. lpt: the longest output, which finishes a given set of requests soonest. edf: the earliest deadline. das: by prompt length and deadline (TCB). shuffled: the earliest arrival, at random within each 64 requests (ExeGPT)."""
    fix: Mapping[str | PathLike[str], int] | None
    """Fix a control variable, such as token_budget=8192 or max_batch=128. Variables of the placement are tp, ep, pp, replicas and tp_devices. tp_devices is the number of a replica's devices in tensor-parallel groups: on three devices, tp=2 with tp_devices=2 gives a stage of two devices and a stage of one. `order=das` adds eta_percent and, for a plan that runs in rows, row_tokens (L in TCB) and row_batches; row_batches=2 lets a batch enter the slots that the previous batch has freed. Policies without the variable are left out. Repeatable."""

class FleetKeywords(ProblemFields, BoundFields, Policy, GrowthFields, total=False):
    attain: float | None
    """Share of requests that must keep the bounds."""
    slo_window: Literal["interval", "day"] | None
    """Whether `attain` holds in each interval, or of the whole day. A day may keep it while its busiest quarter of an hour does not."""
    among: Mapping[str | PathLike[str], float] | None
    """Instead of `cluster`: place replicas on any mixture of these clusters. PRICE is the price of one device for an hour."""
    devices: int | Mapping[str | PathLike[str], int] | None
    """Use at most N devices of each cluster, with those of replicas that start beside others that end."""
    interval_s: float | None
    """Length of an interval, in seconds. The fleet changes only between intervals."""
    least_stay_s: float | None
    """Shortest time, in seconds, for which a started replica runs."""
    startup_s: float | None
    """Seconds from ordering a replica until it begins to load weights: the start of machine, image and engine."""
    least_replicas: int | None
    """Smallest number of replicas at any time."""
    seed: int | None
    """If `trace` has rates over hours: seed from which its requests are drawn."""

class ProfileKeywords(ModelAndDevices, total=False):
    engine: Literal["xgpt", "vllm"] | None
    """Engine whose steps are measured."""
    import_from: str | PathLike[str] | None
    """Import tables of measured times, from the installed package aiconfigurator or from a folder."""
    framework: str | PathLike[str] | None
    """Engine whose kernel times are imported: vllm, sglang, trtllm, or one with a version, as in vllm-0.15."""

class RuleField(TypedDict, total=False):
    rule: Rule | str | PathLike[str] | None
    """Scheduling rule of your own: an `xgpt.Rule`, or a class of one, of a Python module."""

class OfAPlan(TypedDict, total=False):
    profile: str | PathLike[str] | Profile | None
    """Profile from which the plan was made."""

class LoadFields(OfAPlan, total=False):
    workload: str | PathLike[str] | Workload | None
    """Lengths of the requests to run: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    arrival_rate_per_s: float | Sequence[tuple[float, float | None]] | None
    """Poisson arrivals a second, or stages of different rates: 2:60,8:30,2 means 2 a second for 60 s, 8 a second for 30 s, then 2 a second until the end."""
    seed: int | None
    """Seed from which lengths and arrival times are drawn."""

class SimulateKeywords(LoadFields, ArrivalFields, GrowthFields, RuleField, total=False):
    num_requests: int | Literal["all"] | None
    """Number of requests to measure; with `own_times`, all means the whole trace. Further requests run before and after them to keep the load steady."""
    clients: int | None
    """Number of clients in a closed loop, instead of arrivals: a client sends its next request when its last one has ended."""
    bench: str | PathLike[str] | None
    """Send what this command of `vllm bench serve`, SGLang's bench_serving or AIPerf sends, from the first to the last request. Lengths of data sets come from `workload`."""
    own_times: bool | None
    """Replay a trace as recorded: each request arrives at its recorded time and has its own input and output length."""
    since_s: float | None
    """With `own_times`: begin the replay this many seconds after the trace's first request."""

class CompareKeywords(ProblemRequest, total=False):
    current: str | PathLike[str] | None
    """The current deployment, scored for comparison with the plans: a command of vLLM, SGLang or TensorRT-LLM, or a docker run, Compose file, pod manifest or Helm values with such a command."""
    devices: int | None
    """Plan for at most N devices of the cluster, such as those that run now."""
    variables: Mapping[str | PathLike[str], str | PathLike[str]] | None
    """Value of a shell variable in `current` that the command or file does not set. Repeatable."""

class Replanning(TypedDict, total=False):
    replan_policies: Literal["pinned", "all"] | None
    """Policies that re-planning may choose. pinned: those that were requested for the plan, with the fixed values. all: every policy."""

class EngineFields(RuleField, total=False):
    engine: Literal["xgpt", "vllm"] | None
    """Engine that runs the plan: xgpt's own, or vLLM with xgpt's schedule."""
    batching: Literal["flat", "padded", "rows", "slots"] | None
    """Layout of a batch. flat: no padding. padded: one row for each request. rows: several requests in each row, one after the other. slots: rows divided into slots, each of which is freed when its request has finished. All except flat need a plan of policy static for one device."""

class Served(OfAPlan, EngineFields, Replanning, total=False):
    checkpoint: str | PathLike[str] | None
    """Directory of the model's weights."""
    replan: bool | None
    """Switch to better plans when lengths change."""
    reuse: bool | None
    """Reuse the KV cache of earlier prompts for later prompts with the same prefix."""
    nnodes: int | None
    """With `engine=vllm`: number of machines that run the plan together."""
    node_rank: int | None
    """With `engine=vllm`: rank of this machine among the machines that run the plan."""
    master_addr: str | PathLike[str] | None
    """With `engine=vllm`: address of the first machine of this machine's replica, where PORT (29500 by default) and the next port must be free."""
    ray: str | PathLike[str] | None
    """With xgpt's own engine: address of the Ray cluster whose machines run the plan; `auto`: this machine's Ray cluster."""
    dry_run: bool | None
    """Check devices, memory and checkpoint, and start nothing."""

class RequestLimits(TypedDict, total=False):
    max_waiting: int | None
    """Largest number of waiting requests. Further requests are answered with 429."""
    answer_within_s: float | None
    """Seconds within which an answer must be complete, waiting included. A request that would take longer immediately gets the answer 429. CLASS=S: for one of the plan's classes. Repeatable."""
    answer_within_of: Mapping[str | PathLike[str], float] | None
    """Seconds within which answers must be complete, for each class."""
    request_timeout_s: float | None
    """Seconds after which an incomplete answer ends with 504. 0 means no limit."""
    default_max_tokens: int | None
    """max_tokens for requests that do not state max_tokens."""
    max_max_tokens: int | None
    """Largest max_tokens that a request may state."""
    drain_s: float | None
    """Seconds after SIGTERM within which running requests may finish."""
    shutdown_delay_s: float | None
    """Seconds after SIGTERM in which requests are still accepted, while /ready answers 503 so that load balancers send no more."""

class Endpoint(TypedDict, total=False):
    host: str | PathLike[str] | None
    """Address on which to listen. An address that other machines can reach needs `api_key_file`."""
    port: int | None
    """Port on which to listen. 0 means any free port."""
    api_key_file: str | PathLike[str] | None
    """File of API keys, one on each line: [NAME] KEY [SETTINGS]. On SIGHUP the server reads the file again."""
    allowed_hosts: Sequence[str | PathLike[str]] | None
    """Host name that a request's Host header may contain, besides this machine's names. Repeatable."""
    allowed_origins: Sequence[str | PathLike[str]] | None
    """Origin whose pages may use the server from a browser (CORS), for example https://chat.example. Repeatable."""
    served_model_names: Sequence[str | PathLike[str]] | None
    """Name by which clients ask for the model, instead of the name in the plan. Repeatable."""
    ssl_certfile: str | PathLike[str] | None
    """PEM certificate. If given, the server uses HTTPS (TLS 1.2 or newer)."""
    ssl_keyfile: str | PathLike[str] | None
    """The certificate's private key, if it is in a separate file."""

class ServeKeywords(Endpoint, RequestLimits, Served, total=False):
    log_level: Literal["debug", "info", "warning", "error"] | None
    """Lowest severity of logged messages."""
    otlp_endpoint: str | PathLike[str] | None
    """Send OpenTelemetry traces to this URL. The standard OTEL_... variables are also read."""
    step_log: str | PathLike[str] | None
    """Write every executed step to FILE, as one JSON line."""
    force: bool | None
    """Let the step log overwrite any file, not only an earlier step log."""

class BenchKeywords(LoadFields, EngineFields, total=False):
    num_requests: int | None
    """Number of requests to measure. Further requests run before and after them to keep the load steady."""
    saturated: bool | None
    """Keep requests waiting at all times, even if the plan was made for arrivals."""
    concurrency: int | None
    """With a URL: number of requests that are outstanding at the same time."""
    pauses: float | None
    """With a URL and a workload of sessions: factor on their pauses. Hit rates under x0.1 are not those of real pauses, unless the rate is scaled as well."""
    stream: bool | None
    """Ask for streamed answers. Answers from a URL are always streamed."""
    calibrate: bool | None
    """Fit the plan's profile to the measured steps."""
    ca_file: str | PathLike[str] | None
    """Certificate authorities (PEM) for an https URL."""

class EngineRequest(ProblemRequest, total=False):
    current: str | PathLike[str] | None
    """The current deployment: a command of vLLM or SGLang, or a docker run, Compose file, pod manifest or Helm values with such a command. Its model, and options such as --max-model-len, are kept."""
    seed: int | None
    """Seed from which the requests are drawn."""

class CheckKeywords(EngineRequest, total=False):
    plan: str | PathLike[str] | None
    """The plan that the server runs, instead of `current` and the problem."""
    arrival_rate_per_s: float | None
    """Requests a second of your own load. Loads at 50% and 90% of it are sent."""
    yes: bool | None
    """Send the load without asking, even if the server is serving others."""

class TuneKeywords(EngineRequest, total=False):
    budget_s: float | None
    """Time after which no further measurement begins, such as 90s, 60m or 2h."""
    also: Sequence[str | PathLike[str]] | None
    """Try every setting also with this flag of the engine, such as attention-backend=FLASHINFER,TRITON_ATTN. What it changes is measured, not predicted. Repeatable."""
    journal: str | PathLike[str] | None
    """File of the finished measurements."""
    resume: bool | None
    """Go on with the measurements in `journal`."""
    start: str | PathLike[str] | None
    """Shell command that starts an engine and runs until it ends, for other machines and engines. {command}, {flags} and {port} are replaced, as in "ssh gpu7 {command} --port {port}"."""
    url: str | PathLike[str] | None
    """With `start`: address of the started engine, in which {port} is replaced."""
    manual: bool | None
    """Show each command and wait until you have started it and given its URL."""

class WatchKeywords(OfAPlan, total=False):
    engine: Sequence[str | PathLike[str]]
    """URL of a replica of the engine, whose /metrics are read with the key in XGPT_API_KEY. Repeatable."""
    look_s: float | None
    """Seconds between two readings of the metrics."""
    webhook: str | PathLike[str] | None
    """Post each alarm to this URL, as a JSON document."""
    apply: str | PathLike[str] | None
    """Shell command that restarts a replica with new settings, in which {flags} and {url} are replaced. It runs for one replica after the other. The next one follows when the restarted one answers."""

class CalibrateKeywords(OfAPlan, total=False): ...

class ReplanKeywords(OfAPlan, Replanning, GrowthFields, total=False):
    horizon_s: float | None
    """A change of placement pauses requests. It must gain more than this pause costs within this many seconds."""
    least_gain: float | None
    """Smallest gain in throughput, as a share, for which the plan changes."""

class ReportKeywords(OfAPlan, total=False):
    seed: int | None
    """Seed from which the simulated requests are drawn."""
