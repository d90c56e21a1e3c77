"""Make workloads: a trace's lengths as histograms, or a synthetic trace of requests with shared prefixes.

python -m tools.make_workload lengths trace.csv --name N --source S -o workload.yaml
python -m tools.make_workload conversations --requests 5000 --think-s 30 -o conversations.jsonl
python -m tools.make_workload shared-prompts --prompts 100 -o agents.jsonl
python -m tools.make_workload reuse trace.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from tools.structured import BLOCK, conversations, shared_prompts, write
from xgpt.core.errors import InputError, XgptError
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import Histogram
from xgpt.core.traces import read_lengths
from xgpt.core.workload import TraceLengths, binned

STRUCTURED: dict[str, Callable[..., TraceLengths]] = {"conversations": conversations, "shared-prompts": shared_prompts}


def render(name: str, source: str, inputs: Histogram, outputs: Histogram) -> str:
    """Return the YAML of a WorkloadSpec."""
    sides = {
        side: {
            "kind": "histogram",
            "lengths": list(histogram.lengths),
            "probabilities": [round(p, 9) for p in histogram.probabilities],
        }
        for side, histogram in (("input", inputs), ("output", outputs))
    }
    document = {"name": name, "source": source, **sides}
    return yaml.safe_dump(document, sort_keys=False, width=110, default_flow_style=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    lengths = commands.add_parser("lengths", help="a trace's lengths as histograms")
    lengths.add_argument("trace", type=Path, help="CSV or JSON lines, as `xgpt plan --workload` takes")
    lengths.add_argument("--name", required=True)
    lengths.add_argument("--source", required=True, help="where the trace comes from, with its licence")
    reuse = commands.add_parser("reuse", help="how much of a trace's prompts is reusable, and at which distances")
    reuse.add_argument("trace", type=Path, help="JSON lines in Mooncake's format")
    for name, make in STRUCTURED.items():
        subparser = commands.add_parser(name, help=str(make.__doc__).splitlines()[0])
        subparser.add_argument("--requests", type=int, default=5000)
        subparser.add_argument("--seed", type=int, default=0)
        for option, default in (make.__kwdefaults__ or {}).items():
            subparser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    for command in commands.choices.values():
        command.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    args = vars(parser.parse_args())
    command, output = args.pop("command"), args.pop("output")
    try:
        match command:
            case "lengths":
                text = _lengths(**args)
            case "reuse":
                text = _reuse(read_lengths(args["trace"]))
            case _:
                text = _structured(STRUCTURED[command], **args)
    except XgptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if output:
        output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _lengths(trace: Path, name: str, source: str) -> str:
    lengths = read_lengths(trace)
    return render(name, source, binned(lengths.input), binned(lengths.output))


def _structured(make: Callable[..., TraceLengths], requests: int, seed: int, **options: float) -> str:
    """Print a trace, and print to standard error how much of it is reusable and how large a cache this takes."""
    trace = make(requests, np.random.default_rng(seed), **options)
    print(_reuse(trace), end="", file=sys.stderr)
    return write(trace)


def _reuse(trace: TraceLengths) -> str:
    """Print how much of a trace's prompts is reusable, at which distances, and how large a cache this takes.

    Raises:
        InputError: the trace does not state what requests share.
    """
    if trace.prefixes is None:
        raise InputError("trace", "lengths alone", "give JSON lines with hash_ids, which say what requests share")
    curve = ReuseCurve(trace, min(BLOCK, trace.prefixes.block_size))
    lines = [f"prompt tokens: {trace.input.sum()}, reusable at most: {curve.most:.1%}"]
    distances = ", ".join(f"{q:.0%} within {tokens:.0f}" for q, tokens in curve.distances((0.1, 0.5, 0.9, 0.99)))
    lines.append(f"reuse distances, tokens: {distances}")
    lines += [f"with a cache of {tokens:.0f} tokens: {curve.share(tokens):.1%}" for tokens in curve.sizes(5)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
