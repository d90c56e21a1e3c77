"""Compare predictions from imported tables with published measurements, one row for each source.

    python -m benchmarks.truth [--measured DIR] [--source NAME …] [--json FILE]

Tables of operators and `silicon_sample.csv` are read from the wheel of aiconfigurator-core 0.12 (`pip install
'xgpt-serve[fidelity]'`). Sources without a known licence are read from where --measured says: `vllm_open_loop.csv`
(experiment, model, device, tp, max_num_batched_tokens, max_num_seqs, input_tokens, output_tokens, rate_per_s, and mean
and p99 of e2e and ttft in ms) and `trtllm_max_throughput.csv` (version, model, device, dtype, tp, input_tokens,
output_tokens, output_tokens_per_s, and ep for models with experts). None of them is part of this repository. K/V blocks
that an engine logged are in the code.

Figures of engines (configs/engines) were fitted only to the rows that are marked so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.truth.order import beyond
from benchmarks.truth.page import write_page
from benchmarks.truth.places import SOURCES
from benchmarks.truth.score import errors_of, table
from benchmarks.truth.sources import Row, Setting
from xprofiler.ranges import Cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, metavar="DIR", help="folder of measurements by others")
    parser.add_argument("--source", action="append", choices=[source.name for source in SOURCES])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--errors", type=Path, help="write the errors of each cell to this file, in the form of configs/errors.json"
    )
    parser.add_argument(
        "--again", type=Path, action="append", help="use rows that --json wrote earlier instead of new ones"
    )
    parser.add_argument(
        "--beyond", type=Path, help="write errors after a fit to another load, in the form of configs/beyond.json"
    )
    parser.add_argument("--page", action="store_true", help="write docs/results/truth.md")
    options = parser.parse_args()
    rows: list[Row] = []
    for path in options.again or ():
        rows += [
            Row(**of | {"cell": of["cell"] and Cell(*of["cell"]), "setting": of["setting"] and Setting(*of["setting"])})
            for of in json.loads(path.read_text(encoding="utf-8"))
        ]
    for source in () if options.again else SOURCES:
        if options.source and source.name not in options.source:
            continue
        path = source.path(options.measured)
        if path is None:
            print(f"{source.name}: not here")
            continue
        started = time.perf_counter()
        found = list(source.rows(path))
        predicted = [row for row in found if row.predicted]
        print(
            f"{source.name}: {len(predicted)} of {len(found)} rows predicted in {time.perf_counter() - started:.0f} s"
        )
        for why, count in Counter(row.why_not for row in found if row.why_not).most_common():
            print(f"  {count:4d} not: {why}")
        if source.peers:
            print(f"  published of peers: {source.peers}")
        rows += predicted
    print(table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if options.errors:
        options.errors.write_text(errors_of(rows), encoding="utf-8")
    if options.beyond:
        options.beyond.write_text(beyond(rows), encoding="utf-8")
    if options.page:
        write_page(rows)


if __name__ == "__main__":
    main()
