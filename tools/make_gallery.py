"""Write docs/gallery: questions that plans answer, each with its commands and two sentences, and the figures of its
two charts.

    python -m tools.make_gallery

Every figure in a sentence comes from a plan that its command has just made.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from benchmarks.lib.results import store, table
from xgpt.core.io import write_atomic
from xgpt.core.schema import Plan
from xgpt.core.schema.plan import rate_of as rate

OUT = Path(__file__).parents[1] / "docs/gallery"
PLAN = "xgpt plan --latency-bound"

Found = dict[str, Plan]
"""Plans by label, without labels whose command ends with exit code 1."""


@dataclass(frozen=True)
class Entry:
    """A question of the gallery.

    Attributes:
        commands: the commands by label.
        says: returns the sentences.
    """

    question: str
    commands: dict[str, str]
    says: Callable[[Found], str]


def throughput(plan: Plan) -> float:
    return plan.estimate.throughput_rps


def policy(plan: Plan) -> str:
    return plan.policy.kind


def price(plan: Plan, an_hour: float) -> float:
    """Return the price of a million requests at the highest rate."""
    return plan.num_devices * an_hour / rate(plan) / 3600 * 1e6


def ratio(found: Found, over: str, under: str, figure: Callable[[Plan], float] = rate) -> float:
    return figure(found[over]) / figure(found[under])


LLAMA8 = "--model llama-3.1-8b --cluster h200x1 --workload azure-conv"
LLAMA70 = "--model llama-3.1-70b --cluster h100x8 --workload azure-conv"
H200 = "--model llama-3.1-70b --cluster h200x8 --workload azure-conv"
QWEN32 = "--model qwen3-32b --cluster h200x8 --workload azure-conv"
CHAT = "--workload chat-short --ttft 2 --ttft-quantile 0.99"

ENTRIES = (
    Entry(
        "Which is cheaper for a chat in which 99% of first tokens come within 2 s: four A100 or one H200?",
        {
            "4 x A100": f"{PLAN} 20 --model llama-3.1-8b --cluster a100x16 --devices 4 {CHAT}",
            "1 x H200": f"{PLAN} 20 --model llama-3.1-8b --cluster h200x1 {CHAT}",
        },
        lambda found: (
            f"Four A100 serve {rate(found['4 x A100']):.0f} requests a second, and one H200 serves "
            f"{rate(found['1 x H200']):.0f}. If an A100 costs $1.40 an hour and an H200 $2.90, a million requests "
            f"cost ${price(found['4 x A100'], 1.4):.1f} on the A100s and ${price(found['1 x H200'], 2.9):.1f} on the "
            "H200."
        ),
    ),
    Entry(
        "Is the plan with the highest throughput also the plan with the highest arrival rate?",
        {"arrivals": f"{PLAN} 10 {QWEN32}", "saturated": f"{PLAN} 10 {QWEN32} --objective saturated"},
        lambda found: (
            f"At saturation, when requests are always waiting, the plan for the highest throughput "
            f"({policy(found['saturated'])}) serves "
            f"{throughput(found['saturated']) / throughput(found['arrivals']):.2f} times as many requests as the plan "
            f"for the highest arrival rate ({policy(found['arrivals'])}). But if requests arrive at random, the first "
            f"plan keeps the bound of 10 s only up to {rate(found['saturated']):.1f} requests a second. The second "
            f"plan keeps the bound up to {rate(found['arrivals']):.1f}. Both run in xgpt's engine, whose rates are "
            f"higher than vLLM's."
        ),
    ),
    Entry(
        "What does it cost to keep a bound for 999 of 1,000 requests instead of for 900?",
        {f"{share}": f"{PLAN} 15 {LLAMA70} --quantile {share}" for share in (0.9, 0.99, 0.999)},
        lambda found: (
            f"If 90% of requests must keep the bound, the rate is {rate(found['0.9']):.1f} a second; for 99% it is "
            f"{rate(found['0.99']):.1f}, and for 99.9% {rate(found['0.999']):.1f}. If nearly all requests must keep "
            "the bound, the longest outputs determine the rate."
        ),
    ),
    Entry(
        "How much more does a model serve in float8 than in bfloat16?",
        {
            dtype: f"{PLAN} 30 --model qwen3-32b --cluster h200x1 --workload azure-conv --dtype {dtype}"
            for dtype in ("bfloat16", "float8")
        },
        lambda found: (
            f"On one H200, Qwen3-32B serves {ratio(found, 'float8', 'bfloat16'):.2f} times as many requests in float8. "
            "The weights take half the memory and are read in half the time. The freed memory holds more keys and "
            "values."
        ),
    ),
    Entry(
        "Does a mixture of experts serve more than a dense model of the same size?",
        {
            "Qwen3-32B": f"{PLAN} 30 --model qwen3-32b --cluster h200x1 --workload azure-conv",
            "Qwen3-30B-A3B": f"{PLAN} 30 --model qwen3-30b-a3b --cluster h200x1 --workload azure-conv",
        },
        lambda found: (
            f"Within 30 s, Qwen3-30B-A3B serves {rate(found['Qwen3-30B-A3B']):.1f} requests a second, and Qwen3-32B "
            f"serves {rate(found['Qwen3-32B']):.1f}: {ratio(found, 'Qwen3-30B-A3B', 'Qwen3-32B'):.1f} times as many. "
            "For each token, the mixture computes with only 3 of its 30 billion parameters. But a step with many "
            "requests reads nearly all experts from memory, so the gain is less than tenfold."
        ),
    ),
    Entry(
        "Does a request for code need as much time as a request in a conversation?",
        {
            name: f"{PLAN} 8 --model llama-3.1-8b --cluster h200x1 --workload {name}"
            for name in ("azure-code", "azure-conv")
        },
        lambda found: (
            f"One H200 serves {rate(found['azure-code']):.0f} requests of the code trace a second, and "
            f"{rate(found['azure-conv']):.0f} of the conversation trace. Requests for code have longer prompts and "
            "shorter outputs. Their rate is limited by matrix products. The rate of conversations is limited by the "
            "time to read keys and values."
        ),
    ),
    Entry(
        "How much more does a device serve with a newer version of vLLM?",
        {engine: f"{PLAN} 8 {LLAMA8} --engine {engine}" for engine in ("vllm-0.10", "vllm-0.15", "vllm-0.32")},
        lambda found: (
            f"With vLLM 0.32, one H200 serves {ratio(found, 'vllm-0.32', 'vllm-0.10'):.2f} times as many requests as "
            "with vLLM 0.10. By default, vLLM 0.32 schedules a step while the previous step runs, so less time passes "
            "between steps. The folder `configs/engines` has the figures of each version, with their sources."
        ),
    ),
)


CHARTS = {
    "bounds": (
        "Arrivals a second under a latency bound, by policy: Llama 3.1 70B on eight H100, azure-conv.",
        ("policy", "bound, s", "arrivals/s"),
        {
            f"{kind}, {bound}": f"{PLAN} {bound} --policy {kind} {LLAMA70}"
            for kind in ("static", "orca", "chunked", "rra", "waa")
            for bound in (10, 15, 20, 30, 60)
        },
    ),
    "devices": (
        "Arrivals a second by the number of devices: Llama 3.1 70B, azure-conv, within 15 s.",
        ("device", "devices", "arrivals/s"),
        {
            f"{device}, {count}": f"{PLAN} 15 --model llama-3.1-70b --cluster {cluster} --workload azure-conv "
            f"--devices {count}"
            for device, cluster in (("H200", "h200x8"), ("H100", "h100x8"))
            for count in range(2, 9)
        },
    ),
}
"""Charts: what they show, columns, and commands by "SERIES, X"."""
HEAD = """# Gallery

Each answer rests on the plans of the commands below it, with step times from datasheets. `make gallery` makes this page
and `make results` its figures.

## What does a looser latency bound buy, and which policy wins?

![Arrivals a second under a latency bound, by policy](bounds.svg)

    xgpt plan --latency-bound 15 --policy chunked --model llama-3.1-70b --cluster h100x8 --workload azure-conv

## What does one more device add?

![Arrivals a second by the number of devices](devices.svg)

Two and three devices keep no bound of 15 s. Five and six serve hardly more than four.

    xgpt plan --latency-bound 15 --model llama-3.1-70b --cluster h200x8 --workload azure-conv --devices 3
"""


def run(command: str) -> Plan | None:
    """Return the plan that a command makes, or None if no plan keeps the bound."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", *command.split(), "--json"]
        ran = subprocess.run(arguments, cwd=directory, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"{command}: {ran.stderr}")
    return Plan.model_validate_json(ran.stdout) if ran.returncode == 0 else None


def page(entries: Sequence[tuple[Entry, Found]]) -> str:
    """Return the gallery in Markdown."""
    parts = [HEAD]
    for entry, found in entries:
        commands = "\n".join(f"    {command}" for command in entry.commands.values())
        parts.append(f"## {entry.question}\n\n{fill(entry.says(found), 120)}\n\n{commands}\n")
    return "\n".join(parts)


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        for slug, (claim, columns, commands) in CHARTS.items():
            plans = list(pool.map(run, commands.values()))
            rows = [
                [*label.split(", "), "-" if plan is None else f"{rate(plan):.4g}"]
                for label, plan in zip(commands, plans, strict=True)
            ]
            store(f"figures/gallery/{slug}", claim, table(columns, rows))
            print(slug, rows, flush=True)
        drawn = []
        for entry in ENTRIES:
            plans = dict(zip(entry.commands, pool.map(run, entry.commands.values()), strict=True))
            drawn.append((entry, {label: plan for label, plan in plans.items() if plan is not None}))
            print(entry.says(drawn[-1][1]), flush=True)
    write_atomic(OUT / "index.md", page(drawn))


if __name__ == "__main__":
    main()
