"""Declare the arguments and the help of each command. The functions that do the work are in `run`, `plain`, `loop`,
`compare` and `completion`.

Only click is imported here, so that help and shell completion answer immediately.
"""

from __future__ import annotations

import click

from xgpt.cli import options
from xgpt.cli.options import explain_option, force_option, json_option, output_option
from xgpt.cli.values import Whole


@options.command("plan", most_used=("output",))
@output_option("Where to write the plan.", default="plan.json")
@explain_option
@json_option
def plan() -> None:
    """Find the schedule with the highest throughput under a latency bound, and write plan.json.

    --objective chooses what throughput means. By default it is the highest arrival rate within the bound.

    \b
    Examples:
      xgpt plan --latency-bound 9.8
      xgpt plan --latency-bound inf --model llama-3.1-8b --cluster h200x1 --workload azure-conv
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --arrival-rate 12 --devices auto
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --fix tp=2 --fix max_batch=64
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --price 0.5 --maximise "tokens / cost"
      xgpt plan --latency-bound 8 --model opt-13b --arrival-rate 12 --among a40x4=0.5,h100x8=2.9
    """


@options.command("fleet", most_used=("output",))
@output_option("Where to write the fleet.", default="fleet.json")
@json_option
def fleet() -> None:
    """Find the replicas that serve each interval of a day's load at the lowest cost, and write fleet.json.

    There may be several kinds of replicas. The day is simulated request by request on this fleet and, for comparison,
    on the cheapest fleet that never changes.

    \b
    Examples:
      xgpt fleet --trace day.csv --latency-bound 15 --model llama-3.1-8b --cluster h100x8
      xgpt fleet --trace day.yaml --latency-bound 15 --ttft 2 --model llama-3.1-8b \\
        --among h100x8=2.9,a100x16=1.4,l40sx8=0.9 --devices 64
    """


@options.command("profile")
@output_option("Also write the profile here. Profiles of xgpt's own engine are cached in any case.")
@json_option
def profile() -> None:
    """Measure step times on this machine, compute them from a datasheet, or import published measurements.

    \b
    Examples:
      xgpt profile --model opt-125m -o profile.json
      xgpt profile --model ./opt-125m --engine vllm -o vllm.json
      xgpt profile --model llama-3.1-70b --cluster h100x8 --dtype float8 --import-from aiconfigurator -o profile.json
    """


@options.command("simulate")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--timeline", metavar="FILE", help="Write the first replica's steps as a Chrome trace, which Perfetto opens."
)
@output_option("With --own-times: write each request's times, and whether they are within the bounds, as CSV.")
@json_option
def simulate() -> None:
    """Run a plan request by request on the simulated engine.

    \b
    Examples:
      xgpt simulate plan.json --requests 5000 --arrival-rate 1.5 --timeline timeline.json
      xgpt simulate plan.json --arrival-rate 1:120,4:60,1:120
      xgpt simulate plan.json --workload log.csv --own-times -o requests.csv
      xgpt simulate plan.json --bench 'vllm bench serve --random-input-len 512 --num-prompts 640 --max-concurrency 64'
    """


@options.command("compare")
@output_option("Write --current as a plan, for xgpt simulate, report and bench.")
@explain_option
@json_option
def compare() -> None:
    """Judge the current deployment: keep it, or what to run instead, and what this gains.

    \b
    Examples:
      xgpt compare --latency-bound 9.8
      xgpt compare --latency-bound 4 --model llama-3.1-8b --cluster h200x1 --price 3.5 \\
        --current 'vllm serve llama --max-num-seqs 128 --max-num-batched-tokens 2048' -o current.json
    """


@options.command("serve")
@click.argument("plan_path", metavar="PLAN.JSON")
@force_option
def serve() -> None:
    """Run a plan behind an OpenAI-compatible endpoint.

    When lengths change, the server switches to a better plan: see http://HOST:PORT/ and /plan/history. Logs are JSON on
    standard error. Each request has a line with its id, but never with its prompt.

    A plan for several devices runs in one process for each device. With --ray it runs on the machines of a Ray cluster.
    With --engine vllm start the same command on each machine, with --nnodes and the machine's --node-rank. Tensors are
    sent unencrypted, so these machines need a private network.

    \b
    Example:
      xgpt serve plan.json --port 8000
      curl localhost:8000/v1/completions -d '{"model": "opt-125m", "prompt": [2, 100, 200], "max_tokens": 8}'
    """


@options.command("autoscale")
@click.argument("fleet_path", metavar="FLEET.JSON")
@click.option("--simulate", "simulated_trace", metavar="FILE", required=True, help="A day's load, as for xgpt fleet.")
@json_option
def autoscale() -> None:
    """Simulate a day on which a fleet follows the rule and the schedule that `xgpt export fleet.json --to k8s` writes.

    \b
    Example:
      xgpt autoscale fleet.json --simulate tomorrow.csv
    """


@options.command("bench")
@click.argument("target", metavar="PLAN.JSON|URL")
@click.option("--calibrate", metavar="FILE", help="Fit the plan's profile to the measured steps, and write it to FILE.")
@force_option
@json_option
def bench() -> None:
    """Send a workload's requests to a plan or an endpoint, and compare measured figures with the plan's predictions.

    A plan that was made for arrivals is measured at its predicted arrival rate.

    The API key for a URL is read from the environment variable XGPT_API_KEY.

    \b
    Examples:
      xgpt bench plan.json --requests 300
      xgpt bench plan.json --calibrate profile.json && xgpt plan --profile profile.json --latency-bound 9.8
      xgpt bench plan.json --saturated
      xgpt bench http://127.0.0.1:8000 --workload chat-short --concurrency 16
      xgpt bench http://127.0.0.1:8000 --workload log.csv --arrival-rate 5
    """


@options.command("check")
@click.argument("target", metavar="URL|RESULT.JSON")
@json_option
def check() -> None:
    """Compare a running vLLM or SGLang with its prediction by a short load, and say whether to keep its settings.

    Before anything is sent, the load is shown. Instead of a URL, give what `vllm bench serve --request-rate`, AIPerf or
    guidellm measured. The API key for a URL is read from the environment variable XGPT_API_KEY.

    \b
    Examples:
      xgpt check http://127.0.0.1:8000 --plan plan.json
      xgpt check http://127.0.0.1:8000 --current 'vllm serve ./llama --max-num-seqs 64' --workload log.csv --ttft 1
      xgpt check bench.json --current 'vllm serve ./llama' --model llama-3.1-8b --cluster h100x1 --tpot 0.03
    """


@options.command("tune")
@output_option("Write the recommended settings and all measurements as JSON.")
@json_option
def tune() -> None:
    """Find the best settings of an engine on your devices with as few measurements as possible.

    Each round starts the engine with the settings whose measurement can change the decision most, finds its highest
    rate within the bounds, and ends it. vLLM and xgpt's own engine start on this machine, vLLM from the Python that
    XGPT_VLLM_PYTHON names. Other engines and machines need --start or --manual.

    \b
    Examples:
      xgpt tune --current 'vllm serve ./llama' --workload log.csv --ttft 1 --tpot 0.06 --budget 60m
      xgpt tune --current 'vllm serve ./llama' --workload log.csv --ttft 1 --tpot 0.06 --resume
      xgpt tune --engine xgpt --model ./llama --ttft 1 --tpot 0.06 --budget 60m
      xgpt tune --model llama-3.1-8b --cluster h100x1 --engine sglang --ttft 1 --tpot 0.03 --manual
    """


@options.command("watch")
@click.argument("plan_path", metavar="PLAN.JSON")
def watch() -> None:
    """Compare the /metrics of a running vLLM, SGLang or Dynamo with its plan, and say which assumption broke.

    Lengths, rate, reuse of prompts, and step times are compared. No request passes through this command. When lengths
    change, it plans again, and prints the new command with its gain.

    \b
    Examples:
      xgpt watch --engine http://127.0.0.1:8000 plan.json
      xgpt watch --engine http://a:8000 --engine http://b:8000 plan.json --webhook http://alerts:9000/hook
      xgpt watch --engine http://a:8000 plan.json --apply 'ssh a systemctl set-environment FLAGS="{flags}"'
    """


@options.command("calibrate")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.argument("measured", metavar="RESULT.JSON...", nargs=-1, required=True)
@output_option("Where to write the fitted profile.")
@click.option(
    "--engine-output",
    metavar="FILE",
    help="Where to write the description of the plan's engine, which includes the fitted time of a request.",
)
@json_option
def calibrate() -> None:
    """Fit a plan's step times to a benchmark of any server: `vllm bench serve`, AIPerf, guidellm or genai-perf.

    PLAN.JSON is the plan that the server ran. `xgpt compare --current '...' -o current.json` makes it from the server's
    command. If there are several loads, every second one is left out of the fit and shows the fit's error.

    \b
    Examples:
      xgpt calibrate current.json result.json -o profile.json
      xgpt calibrate current.json low.json mid.json high.json -o profile.json --engine-output engine.yaml
      xgpt plan --profile profile.json --engine engine.yaml --latency-bound 8 --model llama-3.1-8b --cluster h100x1
    """


@options.command("replan")
@click.argument("plan_path", metavar="PLAN.JSON")
@output_option("Where to write the plan that should run from now on, even if it is the same.")
@explain_option
@json_option
def replan() -> None:
    """Compare a plan with the best plan for other lengths, and decide whether to change the plan.

    If --lengths is the URL of a server, the server's current plan is compared, which may differ from PLAN.JSON.

    \b
    Examples:
      xgpt replan plan.json --lengths today.csv -o new.json
      xgpt replan plan.json --lengths http://127.0.0.1:8000
    """


@options.command("report")
@click.argument("plan_path", metavar="PLAN.JSON")
@output_option("Where to write the page.", default="report.html")
def report() -> None:
    """Write a self-contained HTML page about a plan, a day's fleet or a search.

    \b
    Examples:
      xgpt report plan.json -o report.html
      xgpt report fleet.json -o day.html
      xgpt report tuned.json -o rounds.html
    """


@options.command("export")
@click.argument("plan_path", metavar="PLAN.JSON|FLEET.JSON")
@click.option(
    "--to",
    "target",
    type=click.Choice(["shell", "compose", "k8s", "llm-d", "dynamo"]),
    required=True,
    help="What starts the engine's replicas. shell: a script and a systemd unit. compose: Docker Compose. k8s: "
    "Kubernetes. llm-d, dynamo: vLLM on these platforms.",
)
@click.option(
    "--monitoring",
    metavar="NAMESPACE",
    default="monitoring",
    help="Namespace of Prometheus, which may read the pods' metrics.",
)
@click.option("--check", is_flag=True, help="Also check that secrets, claims, images and programs exist.")
@output_option("Where to write the files.", default=".", metavar="DIR")
def export() -> None:
    """Write the files that start a plan, or a day's fleet, elsewhere, with rules and a dashboard that watch it.

    \b
    Examples:
      xgpt export plan.json --to k8s -o deploy --check
      xgpt export fleet.json --to k8s -o deploy
    """


@options.command("ui")
@click.option("--port", type=Whole(0, 65535), default=8470, help="Port of the page. 0 means any free port.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def ui() -> None:
    """Open a local page for planning: choose, drag the bound, and see each policy's result immediately.

    \b
    Example:
      xgpt ui
    """


@options.command("doctor")
@json_option
def doctor() -> None:
    """Describe this machine and xgpt's files on it, and list problems that make measurements unreliable.

    \b
    Example:
      xgpt doctor
    """


@options.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion() -> None:
    """Print the script with which a shell completes commands, options and names.

    \b
    Examples:
      eval "$(xgpt completion bash)"
      xgpt completion fish > ~/.config/fish/completions/xgpt.fish
    """
