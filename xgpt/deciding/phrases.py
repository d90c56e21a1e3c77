"""Write figures in words: shares, rates with their ranges, bounds, loads, and lines of a width."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable

from xgpt.core.numbers import LEVELS, level_of
from xgpt.core.schema import Ranged
from xgpt.core.schema.estimate import SessionEstimate
from xgpt.core.schema.recommendation import AtLoad, BoundKept, LostSpan

WIDTH, MOST_LINES = 80, 15
LONGER = 1.1
"""Requests of a window are called longer from this ratio to the log's mean on."""
PAGE = 10_000
"""Width of a line on a page, which wraps lines itself."""


def in_sessions(rate: Ranged, found: SessionEstimate) -> Ranged:
    """Return a rate of turns as one of sessions."""
    return Ranged(**{name: value and value / found.turns for name, value in dict(rate).items()})


def per_s(rate_per_s: float, sessions: SessionEstimate | None) -> str:
    """Return a rate of requests in words or, if they are turns, as one of sessions."""
    return f"{rate_per_s:.3g} requests/s" if sessions is None else f"{rate_per_s / sessions.turns:.3g} sessions/s"


def load_in_words(
    load: AtLoad,
    *,
    is_kept_said: bool = False,
    is_lost: bool = False,
    sessions: SessionEstimate | None = None,
    wanted: float | None = None,
    is_brief: bool = False,
    whose: str = "the",
) -> str:
    """Return the user's load, and what is kept at it, by its rate and over the whole log if there is one.

    Args:
        sessions: the sessions whose turns are the load.
        is_kept_said: whether the shares of the log have been stated.
        is_lost: whether another deployment does not hold it, perhaps since more arrive for a minute.
        wanted: the probability with which it must be held.
        is_brief: whether the worst window is not named.
        whose: whose bounds are kept, if several are spoken of.
    """
    text = f"{load.rate_per_s:.3g}/s" if sessions is None else per_s(load.rate_per_s, sessions)
    text += f" at its busiest ({load.window})" if load.window else ""
    if (is_lost or not load.holds) and load.minute_per_s is not None and not _longer(load):
        text += f", {load.minute_per_s:.3g}/s for a minute{f' ({load.minute})' if load.minute else ''}"
    if load.confidence is not None and load.holds:
        less = f" ({100 * wanted:g}% wanted)" if wanted is not None and load.confidence < wanted else ""
        text += f", held in {tenths(load.confidence)}{less}"
    kept = "" if is_kept_said else kept_in_words(load)
    kept = kept.partition(" (")[0] if is_brief and load.holds else kept
    what = "" if load.num_requests is None else f"{whose} bounds for "
    where = "" if load.window else " at its own rate"
    return f"{text}; replayed{where}, it keeps {what}{kept}" if kept else text


def kept_in_words(load: AtLoad, *, is_why_said: bool = True) -> str:
    """Return the shares of a log's requests that keep the bounds, or "" if it was not replayed.

    Args:
        is_why_said: whether to say by how much requests of the worst window are longer.
    """
    kept, least = (None if share is None else percent(share) for share in (load.share_kept, load.worst_share_kept))
    of = "" if load.num_requests is None else f" of {load.num_requests:,} requests"
    parts = [] if kept is None else [f"{kept}{of}"]
    window = load.worst_window + (_longer(load) if is_why_said else "")
    window += ", which may be chance" if load.is_short_by_chance else ""
    parts += [] if least in (None, kept, "all") else [f"{least} in the worst window ({window})"]
    return ", ".join(parts)


MOST_SPANS = 3


def late_in_words(load: AtLoad, most: int | None = MOST_SPANS) -> str:
    """Return how many requests of a log are late, and when, or "" if each window keeps enough.

    Args:
        most: number of times that are named, those with the most late requests. None means all.
    """
    if not load.lost or load.num_late is None:
        return ""
    said = _most_late(load, most, lambda each: f"{each.num_late:,} of {each.num_requests:,} from {each.window}")
    return f"{load.num_late:,} requests are late: {said}"


def when_lost(load: AtLoad) -> str:
    """Return when a log is not held, as in " from 08:45 to 12:00 and 14:15 to 15:30", or "" if in no window."""
    return f" from {_most_late(load, 2, lambda each: each.window)}" if load.lost else ""


def _most_late(load: AtLoad, most: int | None, text: Callable[[LostSpan], str]) -> str:
    worst = sorted(load.lost, key=lambda each: -each.num_late)[:most]
    said = [text(each) for each in load.lost if each in worst]
    if more := len(load.lost) - len(said):
        said.append(f"{more} more time{'s' if more > 1 else ''}")
    return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]


def _longer(load: AtLoad) -> str:
    """Return by how much requests of the worst window are longer than the log's, if that may be why it is lost."""
    ratios = {"prompts": load.worst_input_ratio or 0.0, "outputs": load.worst_output_ratio or 0.0}
    said = " and ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items() if ratio >= LONGER)
    return f", {said} times as long" if said and not load.holds else ""


def likely_in_words(factor: Ranged) -> str:
    if factor.low is None:
        return ""
    return f" (at least {factor.low:.2f})" if factor.high is None else f" ({factor.low:.2f} to {factor.high:.2f})"


def in_words(figure: Ranged, unit: str) -> str:
    text = f"{figure.value:.3g} {unit}"
    if figure.low is None or figure.high is None:
        return text
    return f"{text} ({range_in_words(figure.low, figure.high, start='likely ')})"


USEFUL = 30.0
"""A range whose ends differ by a larger factor helps no decision."""


def range_in_words(low: float, high: float, unit: str = "", start: str = "") -> str:
    if low <= 0:
        return f"{f'{start}at most {high:.3g} {unit}'.rstrip()}; in the worst case none"
    return f"{start}{low:.3g} to {high:.3g} {unit}".rstrip() if high <= USEFUL * low else "too uncertain for a range"


def bounds_in_words(bounds: tuple[BoundKept, ...], sessions: SessionEstimate | None = None) -> str:
    """Return bounds as in "TTFT within 2 s and TPOT within 100 ms for 99% of requests".

    Args:
        sessions: the sessions whose turns are bounded.
    """
    names = [f"{bound.name} within {seconds(bound.bound_s)}" for bound in bounds]
    shares = {bound.quantile for bound in bounds}
    if len(shares) == 1:
        each = {"sessions" if bound.name.startswith("session ") else "turns": None for bound in bounds}
        of = "requests" if sessions is None else " and ".join(each)
        return f"{' and '.join(names)} for {100 * shares.pop():g}% of {of}"
    return " and ".join(f"{name} for {100 * bound.quantile:g}%" for name, bound in zip(names, bounds, strict=True))


def seconds(value: float) -> str:
    """Return a duration as in 200 ms or 2 s."""
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.4g} s"


def span(value_s: float) -> str:
    """Return a time as in 40 s or 3 minutes."""
    return f"{value_s:.0f} s" if value_s < 100 else f"{value_s / 60:.0f} minutes"


def tenths(share: float) -> str:
    """Return a probability as in "9 of 10 cases": the next lower one of a few. It never says certain."""
    level = level_of(share)
    return "{} of {} cases".format(*LEVELS[level - 1]) if level else "hardly any case"


def percent(share: float) -> str:
    """Return a share as in 99.98%. "all" means all."""
    if 0 < share < 0.0001:
        return "less than 0.01%"
    return "all" if share >= 1 else f"{round(100 * min(share, 0.9999), 2):g}%"


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Return a text in lines of at most `width` characters. A command continues with a backslash."""
    if "\n" in text:
        return [line for part in text.split("\n") for line in wrapped(part, width)]
    if not text.startswith("$ "):
        return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    found, line = [], ""
    for word in _words(text[2:]):
        if line and len(line) + 1 + len(word) > width - 4:
            found.append(f"  {line} \\")
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*found, f"  {line}"]


def _words(command: str) -> list[str]:
    found: list[str] = []
    for word in shlex.split(command):
        quoted = word if word == "&&" or word.startswith("CUDA_") else shlex.quote(word)
        if found and not word.startswith("-") and found[-1].startswith("--") and " " not in found[-1]:
            found[-1] += f" {quoted}"
        else:
            found.append(quoted)
    return found
