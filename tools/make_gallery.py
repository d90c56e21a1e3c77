"""Write docs/gallery: questions that plans answer, each with its commands, a picture and two sentences.

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

from matplotlib import rcParams
from matplotlib.figure import Figure

from xgpt.core.schema import Plan
from xgpt.core.schema.plan import rate_of as rate

rcParams["svg.hashsalt"] = "xgpt"  # so that equal figures give equal files
OUT = Path(__file__).parents[1] / "docs/gallery"
COLOURS = ("#0b5fa5", "#d1731a", "#1a7f4b", "#8a4fa8", "#6b7785")
PLAN = "xgpt plan --latency-bound"

Found = dict[str, Plan]
"""Plans by label, without labels whose command ends with exit code 1."""


@dataclass(frozen=True)
class Entry:
    """A question of the gallery.

    Attributes:
        commands: the commands by label.
        value: returns the plan's figure that is drawn.
        unit: unit of this figure.
        says: returns the sentences.
        series: if labels are "NAME, X", the quantity X over which lines are drawn instead of bars.
    """

    slug: str
    question: str
    commands: dict[str, str]
    value: Callable[[Plan], float]
    unit: str
    says: Callable[[Found], str]
    series: str | None = None


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
        "cheaper-device",
        "Which is cheaper for a chat in which 99% of first tokens come within 2 s: four A100 or one H200?",
        {
            "4 x A100": f"{PLAN} 20 --model llama-3.1-8b --cluster a100x16 --devices 4 {CHAT}",
            "1 x H200": f"{PLAN} 20 --model llama-3.1-8b --cluster h200x1 {CHAT}",
        },
        rate,
        "arrivals/s",
        lambda found: (
            f"Four A100 serve {rate(found['4 x A100']):.0f} requests a second, and one H200 serves "
            f"{rate(found['1 x H200']):.0f}. If an A100 costs $1.40 an hour and an H200 $2.90, a million requests "
            f"cost ${price(found['4 x A100'], 1.4):.1f} on the A100s and ${price(found['1 x H200'], 2.9):.1f} on the "
            "H200."
        ),
    ),
    Entry(
        "three-gpus",
        "What does a third H200 add for Llama 3.1 70B, if tensor parallelism needs a power of two?",
        {f"{count} devices": f"{PLAN} 30 {H200} --devices {count}" for count in (2, 3, 4)},
        rate,
        "arrivals/s",
        lambda found: (
            f"Two H200 serve {rate(found['2 devices']):.2f} requests a second, three serve "
            f"{rate(found['3 devices']):.2f}, and four serve {rate(found['4 devices']):.2f}. The plan for three is "
            f"{policy(found['3 devices'])}, on a pipeline with stages of "
            f"{' and '.join(str(stage.tp) for stage in found['3 devices'].stages)} devices."
        ),
    ),
    Entry(
        "rra-or-chunked",
        "How much more does chunked prefill serve than RRA?",
        {
            f"{kind}, {bound}": f"{PLAN} {bound} --objective saturated --policy {kind} {LLAMA8}"
            for kind in ("rra", "chunked")
            for bound in (4, 8, 16, 32, 64)
        },
        throughput,
        "req/s, saturated",
        lambda found: (
            "Under a bound of 8 s, chunked prefill serves "
            f"{ratio(found, 'chunked, 8', 'rra, 8', throughput):.2f} times as many requests as RRA. Under 64 s, it "
            f"serves {ratio(found, 'chunked, 64', 'rra, 64', throughput):.2f} times as many. Under RRA, a request "
            "waits for the next step that encodes prompts. A loose bound leaves time for this wait."
        ),
        series="latency bound, s",
    ),
    Entry(
        "looser-bound",
        "What does a looser latency bound buy?",
        {f"llama-3.1-70b, {bound}": f"{PLAN} {bound} {LLAMA70}" for bound in (10, 12, 15, 20, 30, 60)},
        rate,
        "arrivals/s",
        lambda found: (
            f"If the bound grows from 10 to 15 s, the rate grows by a factor of "
            f"{ratio(found, 'llama-3.1-70b, 15', 'llama-3.1-70b, 10'):.2f}. From 30 to 60 s, it grows by a factor of "
            f"{ratio(found, 'llama-3.1-70b, 60', 'llama-3.1-70b, 30'):.2f}. A further second gains most "
            "if the bound is tight."
        ),
        series="latency bound, s",
    ),
    Entry(
        "objective",
        "Is the plan with the highest throughput also the plan with the highest arrival rate?",
        {
            "arrivals": f"{PLAN} 10 {QWEN32}",
            "saturated": f"{PLAN} 10 {QWEN32} --objective saturated",
        },
        rate,
        "arrivals/s",
        lambda found: (
            f"At saturation, when requests are always waiting, the plan for the highest throughput "
            f"({policy(found['saturated'])}) serves "
            f"{throughput(found['saturated']) / throughput(found['arrivals']):.2f} times as many requests as the plan "
            f"for the highest arrival rate ({policy(found['arrivals'])}). But if requests arrive at random, the first "
            f"plan keeps the bound of 10 s only up to {rate(found['saturated']):.1f} requests a second. The second "
            f"plan keeps the bound up to {rate(found['arrivals']):.1f}."
        ),
    ),
    Entry(
        "share",
        "What does it cost to keep a bound for 999 of 1,000 requests instead of for 900?",
        {f"{share}": f"{PLAN} 15 {LLAMA70} --quantile {share}" for share in (0.9, 0.99, 0.999)},
        rate,
        "arrivals/s",
        lambda found: (
            f"If 90% of requests must keep the bound, the rate is {rate(found['0.9']):.1f} a second; for 99% it is "
            f"{rate(found['0.99']):.1f}, and for 99.9% {rate(found['0.999']):.1f}. If nearly all requests must keep "
            "the bound, the longest outputs determine the rate."
        ),
    ),
    Entry(
        "how-many",
        "How many H100 does Llama 3.1 70B need for 2, 6 and 12 requests a second, each within 15 s?",
        {f"{each}/s": f"{PLAN} 15 {LLAMA70} --arrival-rate {each} --devices auto" for each in (2, 6, 12)},
        lambda plan: float(plan.num_devices),
        "devices",
        lambda found: (
            f"Llama 3.1 70B needs {found['2/s'].num_devices} H100 for 2 requests a second, {found['6/s'].num_devices} "
            f"for 6, and {found['12/s'].num_devices} for 12. Even for a small load, the devices must hold all weights "
            "and answer within 15 s."
        ),
    ),
    Entry(
        "batching",
        "How much more does iteration-level batching serve than static batches?",
        {kind: f"{PLAN} 20 --policy {kind} {LLAMA8}" for kind in ("static", "orca", "chunked")},
        rate,
        "arrivals/s",
        lambda found: (
            f"ORCA's schedule serves {ratio(found, 'orca', 'static'):.1f} times as many requests as static batches, "
            f"and chunked prefill serves {ratio(found, 'chunked', 'static'):.1f} times as many. In a static batch, the "
            "slot of a request that has ended stays empty until the longest output of the batch has ended."
        ),
    ),
    Entry(
        "eight-bits",
        "How much more does a model serve in float8 than in bfloat16?",
        {
            dtype: f"{PLAN} 30 --model qwen3-32b --cluster h200x1 --workload azure-conv --dtype {dtype}"
            for dtype in ("bfloat16", "float8")
        },
        rate,
        "arrivals/s",
        lambda found: (
            f"On one H200, Qwen3-32B serves {ratio(found, 'float8', 'bfloat16'):.2f} times as many requests in float8. "
            "The weights take half the memory and are read in half the time. The freed memory holds more keys and "
            "values."
        ),
    ),
    Entry(
        "experts",
        "Does a mixture of experts serve more than a dense model of the same size?",
        {
            "Qwen3-32B": f"{PLAN} 30 --model qwen3-32b --cluster h200x1 --workload azure-conv",
            "Qwen3-30B-A3B": f"{PLAN} 30 --model qwen3-30b-a3b --cluster h200x1 --workload azure-conv",
        },
        rate,
        "arrivals/s",
        lambda found: (
            f"Within 30 s, Qwen3-30B-A3B serves {rate(found['Qwen3-30B-A3B']):.1f} requests a second, and Qwen3-32B "
            f"serves {rate(found['Qwen3-32B']):.1f}: {ratio(found, 'Qwen3-30B-A3B', 'Qwen3-32B'):.1f} times as many. "
            "For each token, the mixture computes with only 3 of its 30 billion parameters. But a step with many "
            "requests reads nearly all experts from memory, so the gain is less than tenfold."
        ),
    ),
    Entry(
        "code-or-chat",
        "Does a request for code need as much time as a request in a conversation?",
        {
            name: f"{PLAN} 8 --model llama-3.1-8b --cluster h200x1 --workload {name}"
            for name in ("azure-code", "azure-conv")
        },
        rate,
        "arrivals/s",
        lambda found: (
            f"One H200 serves {rate(found['azure-code']):.0f} requests of the code trace a second, and "
            f"{rate(found['azure-conv']):.0f} of the conversation trace. Requests for code have longer prompts and "
            "shorter outputs. Their rate is limited by matrix products. The rate of conversations is limited by the "
            "time to read keys and values."
        ),
    ),
    Entry(
        "engine",
        "How much more does a device serve with a newer version of vLLM?",
        {engine: f"{PLAN} 8 {LLAMA8} --engine {engine}" for engine in ("vllm-0.10", "vllm-0.15", "vllm-0.32")},
        rate,
        "arrivals/s",
        lambda found: (
            f"With vLLM 0.32, one H200 serves {ratio(found, 'vllm-0.32', 'vllm-0.10'):.2f} times as many requests as "
            "with vLLM 0.10. By default, vLLM 0.32 schedules a step while the previous step runs, so less time passes "
            "between steps. The folder `configs/engines` has the figures of each version, with their sources."
        ),
    ),
)


def run(command: str) -> Plan | None:
    """Return the plan that a command makes, or None if no plan keeps the bound."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", *command.split(), "--json"]
        ran = subprocess.run(arguments, cwd=directory, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"{command}: {ran.stderr}")
    return Plan.model_validate_json(ran.stdout) if ran.returncode == 0 else None


def draw(entry: Entry, found: Found, path: Path) -> None:
    """Draw a picture of each plan's value."""
    figure = Figure(figsize=(7, 2.6 if entry.series else 0.8 + 0.4 * len(found)))
    axes = figure.add_subplot()
    if entry.series is None:
        labels, values = list(found), [entry.value(plan) for plan in found.values()]
        bars = axes.barh(labels, values, color=COLOURS[0], height=0.6)
        axes.bar_label(
            bars,
            [f"{value:.3g} ({policy(plan)})" for value, plan in zip(values, found.values(), strict=True)],
            padding=4,
        )
        axes.invert_yaxis()
        axes.set_xlim(right=1.25 * max(values))
    else:
        for colour, name in zip(COLOURS, dict.fromkeys(label.partition(", ")[0] for label in found), strict=False):
            points = [
                (float(label.partition(", ")[2]), entry.value(plan))
                for label, plan in found.items()
                if label.startswith(f"{name}, ")
            ]
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
        axes.set_xscale("log")
        axes.set_xticks(sorted({float(label.partition(", ")[2]) for label in found}))
        axes.minorticks_off()
        axes.set_xlabel(entry.series)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(frameon=False)
        axes.grid(color="#d9dfe6")
    (axes.set_xlabel if entry.series is None else axes.set_ylabel)(entry.unit)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})


def page(entries: Sequence[tuple[Entry, Found]]) -> str:
    """Return the gallery in Markdown."""
    parts = [
        "# Gallery\n\nEach section answers a question by comparing plans. The commands below a figure compute its "
        "numbers. They predict\nstep times from datasheets. `make gallery` makes this page and its figures.\n"
    ]
    for entry, found in entries:
        commands = "\n".join(f"    {command}" for command in entry.commands.values())
        parts.append(
            f"## {entry.question}\n\n![{entry.question}]({entry.slug}.svg)\n\n"
            f"{fill(entry.says(found), 120)}\n\n{commands}\n"
        )
    return "\n".join(parts)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    drawn = []
    with ThreadPoolExecutor(2) as pool:
        for entry in ENTRIES:
            plans = dict(zip(entry.commands, pool.map(run, entry.commands.values()), strict=True))
            found = {label: plan for label, plan in plans.items() if plan is not None}
            draw(entry, found, OUT / f"{entry.slug}.svg")
            drawn.append((entry, found))
            print(entry.slug, entry.says(found), flush=True)
    (OUT / "index.md").write_text(page(drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
