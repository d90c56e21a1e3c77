"""Draw the papers' figures from stored rows and tables: the values that a paper states beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.lib.results import Result, stored
from tools import svg

NUMBER = re.compile(r"[-+]?([0-9.]+) ?(%|x|s|req/s|GB|stages|minutes)?$")
SHORTER = (("engines alone, ", ""),)
"""What labels of a picture leave out of a row's description."""
TASKS = {"summarization": "S", "translation": "T", "code-generation": "G", "chat-short": "C1", "chat-long": "C2"}
"""ExeGPT's names of tasks (Table 3)."""


def pictures() -> Iterator[tuple[str, str]]:
    """Yield each picture's name and text."""
    for paper, names in (
        ("exegpt", ("Fig. 6", "Fig. 8", "Fig. 9", "Fig. 10", "Fig. 11")),
        ("orca", ("Fig.",)),
        ("tcb", ("Fig.", "4.2.2")),
    ):
        yield f"{paper}-stated", _stated(paper, names)
    for number in (6, 8):
        yield f"exegpt-{number}", _exegpt_6_8(number)
    yield "exegpt-7", _exegpt_7()
    title = "ExeGPT Figure 10, simulated: requests/s on real lengths"
    yield "exegpt-10", _columns("ExeGPT Figure 10", title, ["model", "trace"], "bound", ("FT", "RRA or WAA"))
    yield "exegpt-11", _exegpt_11()
    for name, title in (("10a", "101B"), ("10b", "175B"), ("10c", "341B")):
        yield f"orca-{name}", _rates(f"ORCA Figure {name}", f"{title}, simulated: median ms a token")
    yield "orca-11", _rates("ORCA Figure 11", "175B, all alike, simulated: median s")
    yield "orca-9c", _orca_9c()
    for rows in ("10", "32"):
        yield f"tcb-{13 if rows == '10' else 14}", _slots(rows)
    title, orders = "TCB Figure 15, simulated: utility a second", ("das", "sjf", "edf", "fcfs")
    yield "tcb-15", _columns("Orders of admission", title, ["varied"], "value", orders)


def _table(start: str) -> Result:
    (found,) = (one for name, one in stored("figures/papers").items() if name.startswith(start))
    return found


def _cells(found: Result) -> list[dict[str, str]]:
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def _stated(paper: str, sources: tuple[str, ...]) -> str:
    rows = {}
    for cells in _cells(stored("papers")[paper]):
        both = cells["paper"], cells["ours"]
        read = [NUMBER.match(cell) for cell in both]
        if cells["source"].startswith(sources) and all(read):
            label = cells["what"]
            for long, short in SHORTER:
                label = label.replace(long, short)
            numbers = [float(one[1]) for one in read if one]
            label = re.sub(r" \((?!measured)[^()]{2,}\)", "", f"{cells['source']}: {label}")
            rows[label[:66]] = (numbers[0], both[0]), (numbers[1], both[1])
    names = {"exegpt": "ExeGPT", "orca": "ORCA", "tcb": "TCB"}
    return svg.pairs(f"{names[paper]}: what its text states, and ours", rows, ("paper", "xgpt"))


def _bound(bound: str) -> str:
    return "Inf" if bound == "no bound" else bound.removesuffix(" s")


OF_FIGURE = {
    6: ({"t5-11b", "opt-13b", "gpt3-39b", "gpt3-101b"}, {"S", "T", "C1"}, ("FT", "RRA", "WAA")),
    8: ({"gpt3-101b", "gpt3-175b", "gpt3-341b"}, {"G", "C1", "C2"}, ("FT", "RRA")),
}
"""ExeGPT's figures with models, tasks and systems."""


def _exegpt_6_8(number: int) -> str:
    models, tasks, systems = OF_FIGURE[number]
    rows = [
        (f"{cells['model']}, {cells['cluster']}, {task}", _bound(cells["bound"]), name, cells[name])
        for cells in _cells(_table("ExeGPT Figures 6 and 8"))
        for name in systems
        if cells["model"] in models and (task := TASKS[cells["task"]]) in tasks
    ]
    return _bars(f"ExeGPT Figure {number}, predicted: requests/s by bound in s", rows)


def _exegpt_7() -> str:
    cells = [row.values() for row in _cells(_table("ExeGPT Figure 7"))]
    rows = [(task, _bound(bound), system, value) for task, bound, system, value in cells]
    return _bars("ExeGPT Figure 7, predicted: requests/s over FT's", rows)


def _exegpt_11() -> str:
    rows = [row.values() for row in _cells(_table("ExeGPT Figure 11"))]
    rates = [
        (f"{lengths}: requests/s", factor, name, value)
        for lengths, factor, unchanged, best, _ in rows
        for name, value in (("unchanged", unchanged), ("best", best))
    ]
    latencies = [(f"{lengths}: p99 latency", factor, "unchanged", value) for lengths, factor, *_, value in rows]
    return _bars("ExeGPT Figure 11, predicted: WAA on other output lengths", rates + latencies)


def _columns(start: str, title: str, panel: Sequence[str], group: str, series: Sequence[str]) -> str:
    rows = [
        (
            ", ".join(cells[one] for one in panel).replace("_", " "),
            _bound(cells[group]),
            name.partition(",")[0],
            cells[name],
        )
        for cells in _cells(_table(start))
        for name in series
    ]
    return _bars(title, rows)


def _bars(title: str, rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Draw rows of panel, group, series and value."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for panel, group, series, value in rows:
        panels.setdefault(panel, {}).setdefault(group, {})[series] = 0.0 if value == "-" else float(value)
    return svg.bars(title, panels)


def _rates(start: str, title: str) -> str:
    found = _table(start)
    series = {
        name: [(float(row[0]), float(row[i])) for row in found.rows if row[i] != "-"]
        for i, name in enumerate(found.columns)
        if name in ("orca(32)", "orca(128)", "ft(1, 1)", "ft(8, 8)")
    }
    return svg.lines(f"{start}, {title}", series, "requests/s", [0.1, 0.3, 1, 3, 12], is_log=True)


def _orca_9c() -> str:
    found = _table("ORCA Figure 9c")
    costs = [(i, float(name.split()[0])) for i, name in enumerate(found.columns) if name.endswith(" ms more")]
    series = {f"batch {row[0]}": [(ms, float(row[i])) for i, ms in costs] for row in found.rows if row[1] == "32"}
    title = "ORCA Figure 9c, 175B, predicted: FT's time over ORCA's"
    return svg.lines(title, series, "ms of FT's control messages a step", [0.0, 15.0, 30.0, 45.0])


def _slots(rows: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in _cells(_table("Slots compared with pure rows")):
        if cells["rows"] == rows:
            point = float(cells["slots a row"]), float(cells["slots freed early"].removesuffix("x"))
            series.setdefault(cells["lengths of answers"], []).append(point)
    figure = 13 if rows == "10" else 14
    title = f"TCB Figure {figure}, {rows} rows, simulated: slots over rows"
    return svg.lines(title, series, "slots a row", [1.0, 4.0, 7.0, 10.0])
