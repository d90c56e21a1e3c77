"""Draw small charts as SVG: legible at 340 pixels, in the reader's light or dark scheme, with labels at the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 52, 16, 40, 44
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#24292f}.muted{fill:#57606a}.title{font-weight:600}.grid{stroke:#d8dee4}
.band{fill:#0b5fa5;opacity:.14}.mark{stroke:#24292f;stroke-width:1.5}
.c0{--c:#0b5fa5}.c1{--c:#b5530b}.c2{--c:#1a7f4b}.c3{--c:#8a4fa8}.c4{--c:#57606a}.c5{--c:#cf222e}
path.line{fill:none;stroke:var(--c);stroke-width:2}circle,rect.bar{fill:var(--c)}text.name{fill:var(--c);font-weight:600}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.muted{fill:#9198a1}.grid{stroke:#3d444d}.mark{stroke:#e6edf3}
.band{fill:#58a6ff;opacity:.2}.c0{--c:#58a6ff}.c1{--c:#f0883e}.c2{--c:#3fb950}.c3{--c:#d2a8ff}.c4{--c:#9198a1}.c5{--c:#ff7b72}}
</style>"""


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str = "grid") -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>'


def picture(height: float, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>\n"])


def round_ticks(most: float) -> list[float]:
    """Return four to eight round values from 0 to at least `most`."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [step * number for number in range(math.ceil(most / step) + 1)]


Points = Sequence[tuple[float, float]]


def lines(
    title: str, series: Mapping[str, Points], x_name: str, x_ticks: Sequence[float], *, is_log: bool = False
) -> str:
    """Draw lines over x, each with its name at its last point."""
    height, right = 300, WIDTH - RIGHT - 7.5 * max(map(len, series)) - 8
    ticks = round_ticks(max(y for points in series.values() for _, y in points))
    scale = math.log if is_log else float
    low, high = scale(x_ticks[0]), scale(x_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - low) / (high - low)
        return LEFT + share * (right - LEFT), height - BOTTOM - y / ticks[-1] * (height - TOP - BOTTOM)

    parts = [text(8, 20, title, kind="title")]
    for y in ticks:
        parts += [line(LEFT, at(x_ticks[0], y)[1], right, at(x_ticks[0], y)[1])]
        parts += [text(LEFT - 8, at(x_ticks[0], y)[1] + 4, f"{y:g}", anchor="end", kind="muted")]
    parts += [text(at(x, 0)[0], height - BOTTOM + 18, f"{x:g}", anchor="middle", kind="muted") for x in x_ticks]
    parts += [text((LEFT + right) / 2, height - 8, x_name, anchor="middle", kind="muted")]
    places: dict[str, tuple[float, float]] = {}
    for name, points in sorted(series.items(), key=lambda one: one[1][-1][1]):
        x, y = at(*points[-1])
        taken = [other_y for other_x, other_y in places.values() if abs(other_x - x) < 60]
        while any(abs(other - y) < 15 for other in taken):  # names that would overlap move up
            y -= 1
        places[name] = x, y
    for number, (name, points) in enumerate(series.items()):
        spots = [at(*point) for point in points]
        path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(spots))
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots)
        label = text(places[name][0] + 9, places[name][1] + 4, name, kind="name")
        parts.append(f'<g class="c{number % 6}"><path class="line" d="{path}"/>{dots}{label}</g>')
    return picture(height, parts)


def histograms(title: str, rows: Mapping[str, Sequence[float]], *, least: float, most: float, step: float) -> str:
    """Draw one histogram a row of values in percent: zero, the median, and the band that holds nine tenths.

    Values beyond the ends count in the last bars.
    """
    each, right = 104.0, WIDTH - RIGHT
    height = TOP + each * len(rows) + BOTTOM
    parts = [text(8, 20, title, kind="title")]
    count = round((most - least) / step)

    def at(value: float) -> float:
        return LEFT - 36 + (min(max(value, least), most) - least) / (most - least) * (right - LEFT + 36)

    for number, (name, values) in enumerate(rows.items()):
        base, ordered = TOP + each * (number + 1) - 16, sorted(values)
        median, low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.05, 0.95))
        bars = [0] * count
        for value in values:
            bars[min(max(int((value - least) // step), 0), count - 1)] += 1
        tall = (each - 46) / max(bars)
        parts.append(text(8, base - each + 34, f"{name} ({len(values)})", kind="title"))
        said = f"median {median:+.0f}%, nine tenths {low:+.0f} to {high:+.0f}%"
        parts.append(text(right, base - each + 34, said, anchor="end", kind="muted"))
        parts.append(f'<rect class="band" x="{at(low):.1f}" y="{base - each + 42:.1f}" '
                     f'width="{at(high) - at(low):.1f}" height="{each - 42:.1f}"/>')  # fmt: skip
        width = at(least + step) - at(least) - 1
        parts += [
            f'<rect class="bar c0" x="{at(least + step * i):.1f}" y="{base - bar * tall:.1f}" width="{width:.1f}" '
            f'height="{bar * tall:.1f}"/>'
            for i, bar in enumerate(bars)
            if bar
        ]
        parts += [line(at(least), base, right, base), line(at(0), base - each + 42, at(0), base)]
        parts.append(line(at(median), base - each + 40, at(median), base + 4, "mark"))
    ends = {most: f"{most:+g}% and more"}
    for value in (*range(math.ceil(least / 50) * 50, int(most) - 50, 50), int(most)):
        words = ends.get(value, f"{value:+g}%" if value else "0")
        anchor = "end" if value == most else "middle" if value > least else "start"
        parts.append(text(at(value), height - 22, words, anchor=anchor, kind="muted"))
    return picture(height, parts)


def bars(
    title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, columns: int = 2, tall: float = 150
) -> str:
    """Draw a panel for each key, with a group of bars for each of its keys, and a bar of each series in a group."""
    names = list(dict.fromkeys(name for panel in panels.values() for group in panel.values() for name in group))
    wide = (WIDTH - 8) / columns
    parts, x = [text(8, 20, title, kind="title")], 8.0
    for number, name in enumerate(names):
        parts.append(f'<g class="c{number}">{text(x, 42, name, kind="name")}</g>')
        x += 8 * len(name) + 16
    for place, (panel, groups) in enumerate(panels.items()):
        left, top = 8 + place % columns * wide, TOP + 12 + place // columns * tall
        low, high = top + tall - 32, top + 28
        ticks = round_ticks(max(value for group in groups.values() for value in group.values()))
        begin = left + 9 * max(len(f"{tick:g}") for tick in (ticks[0], ticks[-1])) + 4
        parts.append(text(left, top + 16, panel, kind="muted"))
        for tick in (ticks[0], ticks[-1]):
            y = low - tick / ticks[-1] * (low - high)
            parts += [
                line(begin, y, left + wide - 10, y),
                text(begin - 5, y + 4, f"{tick:g}", anchor="end", kind="muted"),
            ]
        each = (left + wide - 10 - begin) / len(groups)
        for number, (label, group) in enumerate(groups.items()):
            start, bar = begin + each * (number + 0.1), 0.8 * each / len(names)
            parts.append(text(start + 0.4 * each, low + 16, label, anchor="middle", kind="muted"))
            for which, name in enumerate(names):
                height = group.get(name, 0.0) / ticks[-1] * (low - high)
                parts.append(f'<rect class="bar c{which}" x="{start + which * bar:.1f}" y="{low - height:.1f}" '
                             f'width="{bar - 1:.1f}" height="{height:.1f}"/>')  # fmt: skip
    return picture(TOP + 12 + tall * math.ceil(len(panels) / columns), parts)


def pairs(title: str, rows: Mapping[str, tuple[tuple[float, str], tuple[float, str]]], names: tuple[str, str]) -> str:
    """Draw two bars a row, each with its value in words. The longer bar of each row has the same length."""
    each, left, right = 58.0, 8.0, WIDTH - 84.0
    parts = [text(8, 20, title, kind="title")]
    for number, name in enumerate(names):
        parts.append(f'<g class="c{4 - 4 * number}">{text(8 + 90 * number, 42, name, kind="name")}</g>')
    for place, (label, values) in enumerate(rows.items()):
        top, most = TOP + 14 + each * place, max(value for value, _ in values)
        parts.append(text(left, top + 14, label, kind="muted"))
        for number, (value, words) in enumerate(values):
            y, width = top + 20 + 16 * number, (right - left) * value / most
            parts.append(f'<rect class="bar c{4 - 4 * number}" x="{left}" y="{y}" width="{width:.1f}" height="12"/>')
            parts.append(text(left + width + 6, y + 11, words))
    return picture(TOP + 14 + each * len(rows), parts)
