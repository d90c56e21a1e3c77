"""Draw the pictures of docs from stored figures.

python -m tools.make_pictures
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from benchmarks.lib.results import stored
from tools import svg
from xgpt.core.io import configs_dir, write_atomic

DOCS = Path(__file__).parents[1] / "docs"


def truth() -> str:
    """Return the errors of predictions, from the ratios of measured to predicted that ranges come from."""
    rows: dict[str, list[float]] = defaultdict(list)
    for load, _, family, _, source, *_, quantity, ratios in json.loads((configs_dir() / "errors.json").read_text()):
        if source == "imported" and load != "disaggregated":
            rows[f"{quantity}, {family}"] += [100 * (1 / ratio - 1) for ratio in ratios]
    names = sorted((name for name in rows if len(rows[name]) >= 50), key=lambda name: name.split(", ")[::-1])
    kept = {name: rows[name] for name in names}
    return svg.histograms("Predicted over measured, published rows", kept, least=-100, most=150, step=5)


def orca() -> str:
    """Return ORCA's Figure 10b from our simulations."""
    (found,) = (one for name, one in stored("figures/papers").items() if name.startswith("ORCA Figure 10b"))
    series = {
        name: [(float(row[0]), float(row[i])) for row in found.rows if row[i] != "-"]
        for i, name in enumerate(found.columns)
        if i and name not in ("orca(1)", "orca(8)")
    }
    title = "ORCA Figure 10b, 175B, simulated: median ms a token"
    return svg.lines(title, series, "requests/s", [0.1, 0.3, 1, 3, 12], is_log=True)


def exegpt() -> str:
    """Return ExeGPT's Figures 6 and 8 as ratios: the better of RRA and WAA over FasterTransformer."""
    (found,) = (one for name, one in stored("figures/papers").items() if name.startswith("ExeGPT Figures 6 and 8"))
    rows: dict[str, dict[str, list[float]]] = {}
    for row in found.rows:
        cells = dict(zip(found.columns, row, strict=True))
        group = rows.setdefault(f"{cells['model']}, {cells['cluster']}", {})
        for name, column in (("FT at longest output", "over FT"), ("FT at p99", "over FT at p99")):
            group.setdefault(name, []).extend([] if cells[column] == "-" else [float(cells[column])])
    title = "ExeGPT Figures 6 and 8, predicted: throughput over FT"
    return svg.strips(title, rows, "times FT's throughput; bar: mean", [1, 2, 3, 5, 10, 20])


def gallery(name: str, title: str, x_name: str, x_ticks: list[float], *, is_log: bool = False) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for label, x, y in stored("figures/gallery")[name].rows:
        if y != "-":
            series.setdefault(label, []).append((float(x), float(y)))
    return svg.lines(title, series, x_name, x_ticks, is_log=is_log)


def pictures() -> dict[Path, str]:
    """Return the text of each picture by its path."""
    bounds = "latency bound of 99% of requests, s", [10.0, 15.0, 20.0, 30.0, 60.0]
    drawn = {f"images/{draw.__name__}": draw() for draw in (truth, orca, exegpt)}
    drawn["gallery/bounds"] = gallery("bounds", "Llama 3.1 70B, eight H100: arrivals a second", *bounds, is_log=True)
    devices = "devices", [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    drawn["gallery/devices"] = gallery("devices", "Llama 3.1 70B within 15 s: arrivals a second", *devices)
    return {DOCS / f"{name}.svg": text for name, text in drawn.items()}


def main() -> None:
    for path, text in pictures().items():
        write_atomic(path, text)


if __name__ == "__main__":
    main()
