"""A trace into a compact workload file: `python -m tools.make_workload trace.csv --name N --source S`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import yaml

from xgpt.errors import XgptError
from xgpt.schema import Histogram
from xgpt.workload import histogram_of, read_lengths

LEVELS = np.concatenate([np.arange(30) * 0.03, 0.9 + np.arange(8) * 0.01, 0.98 + np.arange(20) * 0.001])
"""Where bins begin, as values of the cdf: narrower in the tail, where latency bounds look."""


def compact(histogram: Histogram) -> Histogram:
    """At most one bin for each of LEVELS, at its mean length, and the largest length kept in addition."""
    lengths, probabilities = np.array(histogram.lengths), np.array(histogram.probabilities)
    below = np.cumsum(probabilities) - probabilities
    bins = np.searchsorted(LEVELS, below + 1e-12, side="right")
    bins[-1] = len(LEVELS) + 1
    mass = np.bincount(bins, probabilities)
    total = np.bincount(bins, probabilities * lengths)
    used = mass > 0
    means = np.rint(total[used] / mass[used]).astype(int)
    return Histogram(lengths=tuple(means.tolist()), probabilities=tuple(mass[used].tolist()))


def render(name: str, source: str, inputs: Histogram, outputs: Histogram) -> str:
    """The YAML of a WorkloadSpec."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="CSV or JSON lines, as `xgpt plan --workload` takes")
    parser.add_argument("--name", required=True)
    parser.add_argument("--source", required=True, help="where the trace comes from, with its licence")
    parser.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    args = parser.parse_args()
    try:
        lengths = read_lengths(args.trace)
    except XgptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sides = (compact(histogram_of(side)) for side in (lengths.input, lengths.output))
    text = render(args.name, args.source, *sides)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
