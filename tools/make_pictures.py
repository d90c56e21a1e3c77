"""Draw the pictures of docs from stored figures.

python -m tools.make_pictures
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from benchmarks.lib.results import stored
from benchmarks.papers import figures
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


def gallery(name: str, title: str, x_name: str, x_ticks: list[float], *, is_log: bool = False) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for label, x, y in stored("figures/gallery")[name].rows:
        if y != "-":
            series.setdefault(label, []).append((float(x), float(y)))
    return svg.lines(title, series, x_name, x_ticks, is_log=is_log)


def pictures() -> dict[Path, str]:
    """Return the text of each picture by its path."""
    bounds = "latency bound of 99% of requests, s", [10.0, 15.0, 20.0, 30.0, 60.0]
    drawn = {"images/truth": truth()} | {f"images/papers/{name}": text for name, text in figures.pictures()}
    drawn["gallery/bounds"] = gallery("bounds", "Llama 3.1 70B, eight H100: arrivals a second", *bounds, is_log=True)
    devices = "devices", [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    drawn["gallery/devices"] = gallery("devices", "Llama 3.1 70B within 15 s: arrivals a second", *devices)
    return {DOCS / f"{name}.svg": text for name, text in drawn.items()}


def main() -> None:
    for path, text in pictures().items():
        write_atomic(path, text)


if __name__ == "__main__":
    main()
