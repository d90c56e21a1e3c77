# ruff: noqa: E501
"""The keyword arguments of `xgpt.api`, as editors and type checkers see them: made from `xgpt.requests`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from xgpt.core.schema import ClusterSpec, EngineSpec, ModelSpec, Profile, Workload

class PlanKeywords(TypedDict, total=False):
    speculative: Literal["eagle3", "eagle", "mtp", "ngram"] | None
    """Draft that runs ahead of the model. eagle, eagle3: a trained head; mtp: the model's own layer for multi-token prediction; ngram: a search in the text so far. The tokens ahead are chosen with the schedule; none, if they do not gain."""
    speculative_tokens: int | None
    """Tokens ahead in a step, with `speculative`."""
    acceptance: float | Sequence[float] | str | PathLike[str] | None
    """What is accepted of a draft, with `speculative`: the share of steps in which the first token ahead is accepted, the first two, and so on; or one share, that of tokens that are accepted if all before them are; or a server's metrics page (vLLM, SGLang), saved to a file."""
    draft_model: str | PathLike[str] | None
    """Checkpoint of the draft, for the engine's command."""
    burstiness: float | None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts."""
    policy: Literal["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack"] | None
    """Kind of schedule. rra: encode a batch of prompts, run several decode steps, and again. waa: some devices encode and the others decode; waa-c divides them by computation, waa-m by memory. chunked: each step decodes and encodes pieces of prompts. orca: the same with whole prompts. static: a batch runs until all of it has finished. slack: chunked, with as many prompt tokens a step as running requests have time for under `tpot_s`, tuned by simulation. exegpt: the better of rra and waa. auto: the best of all but slack."""
    ttft_s: float | None
    """Bound on the time to first token, in seconds."""
    tpot_s: float | None
    """Bound on the mean time per output token, in seconds."""
    headroom: float | None
    """Share by which steps may take longer than predicted before a bound is broken."""
    objective: Literal["arrivals", "saturated"] | None
    """What to maximise. arrivals: the highest Poisson arrival rate that keeps the bounds, waiting included. saturated: throughput while requests are always waiting, latency counted from admission, as in ExeGPT."""
    quantile: float | None
    """Share of requests that must keep the bounds."""
    sla: Literal["length", "request"] | None
    """With `objective=saturated`: what must keep the bound. length: a request whose output has the quantile's length. request: the quantile of all requests, by simulation."""
    ttft_quantile: float | None
    """Share of requests that must keep `ttft_s` by itself, as in MLPerf's server scenario."""
    tpot_quantile: float | None
    """Share of requests that must keep `tpot_s` by itself."""
    model: str | PathLike[str] | ModelSpec | None
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: str | PathLike[str] | None
    """config.json of the model: of the Hugging Face id that `model` is, or in its place. Nothing is downloaded."""
    cluster: str | PathLike[str] | ClusterSpec | None
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type to run in."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for."""
    price: float | None
    """Price of one device for an hour, in any currency."""
    profile: str | PathLike[str] | Profile | None
    """Profile (step times) to plan from."""
    engine: str | PathLike[str] | EngineSpec | None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a YAML file."""
    workload: str | PathLike[str] | Workload | None
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: int | None
    """Tokens with which all prompts begin alike, as a system prompt: their keys and values are computed once. Of a trace whose prompts are known it is found without this."""
    search: Literal["branch-and-bound", "exhaustive", "optuna"] | None
    """Method of search; exhaustive goes with `objective=saturated`."""
    kv: Literal["reserve", "quantile"] | None
    """How memory for keys and values is promised. reserve: each request's maximum is set aside. quantile: as many requests enter as fit 99.9% of the time; the newest is preempted if they do not fit, as vLLM does by itself."""
    arrival_rate_per_s: float | None
    """Requests a second that the plan must sustain; the latency bound then counts from arrival."""
    devices: int | Literal["auto"] | None
    """Use at most N devices of the cluster; auto: the fewest that sustain `arrival_rate_per_s`."""
    among: Mapping[str | PathLike[str], float] | None
    """Instead of `cluster`: choose the cheapest of these clusters that sustains `arrival_rate_per_s`, on the fewest devices. PRICE is that of one device for an hour."""
    maximise: str | PathLike[str] | None
    """Objective of your own, with `objective=saturated`: an expression over a plan's figures at saturation, as "tokens / cost" or "throughput if gap < 0.1 else -gap". Figures: throughput, tokens, latency, ttft, tpot, gap, running, encode_batch, idle, devices, replicas, cost. Optuna searches, and nothing is proven."""
    order: Literal["fcfs", "in-time", "sjf", "lpt", "edf", "das"] | None
    """Which waiting request enters next: fcfs, the earliest arrival; in-time, the earliest of as many as can keep `ttft_s`, then the others, the longest prompts; sjf, the shortest prompt; lpt, the longest output (finishes a given set of requests soonest); edf, the earliest deadline; das, by prompt length and deadline (TCB)."""
    fix: Mapping[str | PathLike[str], int] | None
    """Hold a control variable at a value, as token_budget=8192 or max_batch=128. Those of the placement: tp, ep, pp, replicas, and tp_devices, the devices of a replica in tensor-parallel groups: tp=2 and tp_devices=2 hold [2 1] on three. With `order=das`: eta_percent, and of rows row_tokens (TCB's L) and row_batches: with 2, a batch enters where slots of the last one have left. Policies without that variable are left out. Repeatable."""

class FleetKeywords(TypedDict, total=False):
    policy: Literal["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack"] | None
    """Kind of schedule. rra: encode a batch of prompts, run several decode steps, and again. waa: some devices encode and the others decode; waa-c divides them by computation, waa-m by memory. chunked: each step decodes and encodes pieces of prompts. orca: the same with whole prompts. static: a batch runs until all of it has finished. slack: chunked, with as many prompt tokens a step as running requests have time for under `tpot_s`, tuned by simulation. exegpt: the better of rra and waa. auto: the best of all but slack."""
    ttft_s: float | None
    """Bound on the time to first token, in seconds."""
    tpot_s: float | None
    """Bound on the mean time per output token, in seconds."""
    headroom: float | None
    """Share by which steps may take longer than predicted before a bound is broken."""
    model: str | PathLike[str] | ModelSpec | None
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: str | PathLike[str] | None
    """config.json of the model: of the Hugging Face id that `model` is, or in its place. Nothing is downloaded."""
    cluster: str | PathLike[str] | ClusterSpec | None
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type to run in."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for."""
    price: float | None
    """Price of one device for an hour, in any currency."""
    profile: str | PathLike[str] | Profile | None
    """Profile (step times) to plan from."""
    engine: str | PathLike[str] | EngineSpec | None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a YAML file."""
    attain: float | None
    """Share of the day's requests that must keep the bounds."""
    among: Mapping[str | PathLike[str], float] | None
    """Instead of `cluster`: replicas on any of these clusters, mixed. PRICE is that of one device for an hour."""
    devices: int | Mapping[str | PathLike[str], int] | None
    """Use at most N devices of each cluster."""
    interval_s: float | None
    """Length of an interval, within which the fleet does not change."""
    least_stay_s: float | None
    """Least time for which a started replica stays."""
    startup_s: float | None
    """Time from ordering a replica until it begins to load weights: for a machine, an image, an engine."""
    least_replicas: int | None
    """Least number of replicas at any time."""
    seed: int | None
    """Seed of the requests drawn from rates over hours."""

class ProfileKeywords(TypedDict, total=False):
    model: str | PathLike[str] | ModelSpec | None
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: str | PathLike[str] | None
    """config.json of the model: of the Hugging Face id that `model` is, or in its place. Nothing is downloaded."""
    cluster: str | PathLike[str] | ClusterSpec | None
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type to run in."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for."""
    engine: Literal["native", "vllm"] | None
    """Engine whose steps are measured."""
    import_from: str | PathLike[str] | None
    """Import tables that others measured: from the installed package aiconfigurator, or from a folder."""
    framework: str | PathLike[str] | None
    """Engine whose kernels are imported: vllm, sglang, trtllm, or a version of one, as in vllm-0.15."""

class SimulateKeywords(TypedDict, total=False):
    burstiness: float | None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts."""
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""
    workload: str | PathLike[str] | Workload | None
    """Lengths of these requests: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    num_requests: int | None
    """Number of requests that are measured; some more run before and after them."""
    arrival_rate_per_s: float | Sequence[tuple[float, float | None]] | None
    """Poisson arrivals a second, or stages of them: 2:60,8:30,2 is 2 a second for 60 s, 8 for 30 s, then 2."""
    seed: int | None
    """Seed of lengths and arrivals."""
    clients: int | None
    """Clients of a closed loop, in place of arrivals: each sends its next request once its last one has ended."""
    own_times: bool | None
    """Replay a trace as recorded: its pairs of lengths and its arrival times."""

class CompareKeywords(TypedDict, total=False):
    ttft_s: float | None
    """Bound on the time to first token, in seconds."""
    tpot_s: float | None
    """Bound on the mean time per output token, in seconds."""
    headroom: float | None
    """Share by which steps may take longer than predicted before a bound is broken."""
    objective: Literal["arrivals", "saturated"] | None
    """What to maximise. arrivals: the highest Poisson arrival rate that keeps the bounds, waiting included. saturated: throughput while requests are always waiting, latency counted from admission, as in ExeGPT."""
    quantile: float | None
    """Share of requests that must keep the bounds."""
    sla: Literal["length", "request"] | None
    """With `objective=saturated`: what must keep the bound. length: a request whose output has the quantile's length. request: the quantile of all requests, by simulation."""
    ttft_quantile: float | None
    """Share of requests that must keep `ttft_s` by itself, as in MLPerf's server scenario."""
    tpot_quantile: float | None
    """Share of requests that must keep `tpot_s` by itself."""
    model: str | PathLike[str] | ModelSpec | None
    """Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id."""
    config: str | PathLike[str] | None
    """config.json of the model: of the Hugging Face id that `model` is, or in its place. Nothing is downloaded."""
    cluster: str | PathLike[str] | ClusterSpec | None
    """Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type to run in."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"] | None
    """Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for."""
    price: float | None
    """Price of one device for an hour, in any currency."""
    profile: str | PathLike[str] | Profile | None
    """Profile (step times) to plan from."""
    engine: str | PathLike[str] | EngineSpec | None
    """Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest version) or a YAML file."""
    workload: str | PathLike[str] | Workload | None
    """Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    shared_prefix: int | None
    """Tokens with which all prompts begin alike, as a system prompt: their keys and values are computed once. Of a trace whose prompts are known it is found without this."""
    search: Literal["branch-and-bound", "exhaustive", "optuna"] | None
    """Method of search; exhaustive goes with `objective=saturated`."""
    kv: Literal["reserve", "quantile"] | None
    """How memory for keys and values is promised. reserve: each request's maximum is set aside. quantile: as many requests enter as fit 99.9% of the time; the newest is preempted if they do not fit, as vLLM does by itself."""
    current: str | PathLike[str] | None
    """What runs today, to be scored in the same table: a command of vLLM, SGLang or TensorRT-LLM, a docker run, or a Compose file, pod manifest or Helm values that start one."""
    measure: bool | None
    """Also run each plan on this machine."""
    num_requests: int | None
    """With `measure`: number of requests for each plan."""
    seed: int | None
    """With `measure`: seed of lengths."""

class ServeKeywords(TypedDict, total=False):
    replan_policies: Literal["pinned", "all"] | None
    """Policies that may take over. pinned: those that the plan was asked for, with the values that were fixed. all: every policy."""
    engine: Literal["native", "vllm"] | None
    """What runs the plan: xgpt's own engine, or vLLM under xgpt's schedule."""
    batching: Literal["flat", "padded", "rows", "slots"] | None
    """Layout of a batch. flat: without padding. padded: a row for each request. rows: several requests in each row, one after the other. slots: rows divided into slots, each freed as soon as it has finished. All but flat need a plan of policy static for one device."""
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""
    checkpoint: str | PathLike[str] | None
    """Directory of the weights."""
    replan: bool | None
    """Switch to better plans when lengths change."""
    reuse: bool | None
    """Share K/V of earlier prompts with later ones."""
    nnodes: int | None
    """With `engine=vllm`: number of machines that run the plan together."""
    node_rank: int | None
    """With `engine=vllm`: rank of this machine among them."""
    master_addr: str | PathLike[str] | None
    """With `engine=vllm`: address of the first machine of those that hold this one's replica. PORT (29500 if left out) and the next one must be free there."""
    ray: str | PathLike[str] | None
    """With xgpt's own engine: address of the Ray cluster whose machines run the plan; `auto`: the one that this machine is part of."""
    dry_run: bool | None
    """Check devices, memory and checkpoint, and start nothing."""
    max_waiting: int | None
    """Largest number of waiting requests; further ones get 429."""
    answer_within_s: float | None
    """Seconds within which an answer must be whole, waiting included; a request that would take longer gets 429 at once. CLASS=S: for requests of one of the plan's classes. Repeatable."""
    answer_within_of: Mapping[str | PathLike[str], float] | None
    """The same by class, for requests of these classes."""
    request_timeout_s: float | None
    """Seconds after which an answer that is not whole ends with 504. 0: no limit."""
    default_max_tokens: int | None
    """max_tokens of a request that names none."""
    max_max_tokens: int | None
    """Largest max_tokens that a request may ask for."""
    drain_s: float | None
    """Seconds that running requests have to finish after SIGTERM."""
    shutdown_delay_s: float | None
    """Seconds after SIGTERM in which requests are still accepted while /ready answers 503, so that load balancers notice."""
    host: str | PathLike[str] | None
    """Address to listen on; one beyond this machine needs `api_key_file`."""
    port: int | None
    """Port to listen on; 0: any free one."""
    api_key_file: str | PathLike[str] | None
    """File of API keys, one a line: [NAME] KEY [SETTINGS]. SIGHUP makes the server read it again."""
    allowed_hosts: Sequence[str | PathLike[str]] | None
    """Host name that requests may be addressed to, besides this machine's own. Repeatable."""
    allowed_origins: Sequence[str | PathLike[str]] | None
    """Origin whose pages may use the server from a browser (CORS), for example https://chat.example. Repeatable."""
    served_model_names: Sequence[str | PathLike[str]] | None
    """Name by which requests may ask for the model, instead of the plan's. Repeatable."""
    ssl_certfile: str | PathLike[str] | None
    """PEM certificate; with it the server speaks HTTPS, TLS 1.2 or newer."""
    ssl_keyfile: str | PathLike[str] | None
    """The certificate's private key, if it is in a separate file."""
    front: Literal["endpoint", "smg"] | None
    """What answers HTTP. smg: the Shepherd Model Gateway, before an engine in a process of its own."""
    admin_port: int | None
    """With `front=smg`: port of pages, plan and metrics; 0: any."""
    log_level: Literal["debug", "info", "warning", "error"] | None
    """Least severity that is logged."""
    otlp_endpoint: str | PathLike[str] | None
    """Send OpenTelemetry traces to this URL; the standard OTEL_... variables are read, too."""
    step_log: str | PathLike[str] | None
    """Write every executed step to FILE, one JSON line each."""
    force: bool | None
    """Write it over any file, not only over an earlier step log."""

class AutoscaleKeywords(TypedDict, total=False):
    scrape: Sequence[str | PathLike[str]] | None
    """URL of replicas, whose /metrics are read with the key in XGPT_API_KEY. A host that resolves to several addresses stands for a replica at each. KIND may be left out if the fleet has one kind. Repeatable."""
    arrival_rate_per_s: float | None
    """The present load, in requests a second, instead of `scrape`."""
    once: bool | None
    """Print the recommendation for now, and publish nothing."""
    look_s: float | None
    """Time between two looks at the load."""
    day_begins: str | PathLike[str] | None
    """Time of day, UTC, at which the planned day begins."""
    host: str | PathLike[str] | None
    """Address at which the metric is published."""
    port: int | None
    """Port of the metric; 0: any free one."""

class BenchKeywords(TypedDict, total=False):
    engine: Literal["native", "vllm"] | None
    """What runs the plan: xgpt's own engine, or vLLM under xgpt's schedule."""
    batching: Literal["flat", "padded", "rows", "slots"] | None
    """Layout of a batch. flat: without padding. padded: a row for each request. rows: several requests in each row, one after the other. slots: rows divided into slots, each freed as soon as it has finished. All but flat need a plan of policy static for one device."""
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""
    workload: str | PathLike[str] | Workload | None
    """Lengths of these requests: a shipped name, a YAML file, or a trace as CSV or JSON lines."""
    num_requests: int | None
    """Number of requests that are measured; some more run before and after them."""
    arrival_rate_per_s: float | Sequence[tuple[float, float | None]] | None
    """Poisson arrivals a second, or stages of them: 2:60,8:30,2 is 2 a second for 60 s, 8 for 30 s, then 2."""
    seed: int | None
    """Seed of lengths and arrivals."""
    saturated: bool | None
    """Keep requests always waiting, even if the plan was made for arrivals."""
    concurrency: int | None
    """With a URL: number of outstanding requests."""
    stream: bool | None
    """Ask for streamed answers; with a URL they always are."""
    calibrate: bool | None
    """Fit the plan's profile to the measured steps."""
    ca_file: str | PathLike[str] | None
    """Certificate authorities (PEM) for an https URL."""

class CalibrateKeywords(TypedDict, total=False):
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""

class ReplanKeywords(TypedDict, total=False):
    replan_policies: Literal["pinned", "all"] | None
    """Policies that may take over. pinned: those that the plan was asked for, with the values that were fixed. all: every policy."""
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""
    horizon_s: float | None
    """Seconds within which a change of placement must repay its pause."""
    least_gain: float | None
    """Least gain of throughput, as a share, for which the plan is changed."""

class ReportKeywords(TypedDict, total=False):
    profile: str | PathLike[str] | Profile | None
    """Profile that the plan was made from."""
    seed: int | None
    """Seed of the simulated requests."""
