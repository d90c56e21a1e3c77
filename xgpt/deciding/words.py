"""Render a recommendation as the lines that a command prints first: the answer, then its conditions."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from math import ceil

from xgpt.core.schema import Decision, Offer, Ranged, Recommendation
from xgpt.core.schema.estimate import SessionEstimate
from xgpt.core.schema.recommendation import AtLoad, BoundKept

WIDTH = 80
MOST_COMMANDS = 2
"""Most commands that are printed. plan.json has all."""


def lines(found: Recommendation, width: int = WIDTH) -> list[str]:
    """Return the lines: what to run, what it keeps, what it gains, what would change it."""
    said = [*_answer(found), *_promise(found), *_reasons(found)]
    return [line for text in said for line in _wrapped(text, width)]


def _answer(found: Recommendation) -> Iterator[str]:
    best = found.best
    engine = f" in {best.engine}" if best.engine else ""
    what = f"{found.model} on {found.devices}{engine}: {best.name}"
    if found.action == "keep":
        yield f"Keep what runs now, {what}: {found.why}."
        return
    yield f"{'Run' if found.action == 'run' else 'Change to'} {what}" + (f": {found.why}." if found.why else ".")
    for process in best.processes[:MOST_COMMANDS]:
        yield f"$ {process.command}"
    if (rest := len(best.processes) - MOST_COMMANDS) > 0:
        yield f"and {rest} more like it, each on its own devices and port (all are in plan.json)"


def _promise(found: Recommendation) -> Iterator[str]:
    best = found.best
    if (sessions := best.sessions) is not None:
        rate = in_words(in_sessions(best.rate_per_s, sessions), "sessions/s")
        yield f"Keeps {bounds_in_words(found.bounds)} up to {rate}, about {sessions.at_once:.3g} at once."
        yield from session_lines(sessions)
    elif found.bounds:
        yield f"Keeps {bounds_in_words(found.bounds)} up to {in_words(best.rate_per_s, 'requests/s')}."
    else:
        yield f"Serves up to {in_words(best.rate_per_s, 'requests/s')}; no bound is given."
    if (load := best.at_load) is not None:
        most = best.rate_per_s.value
        more = f" It takes {ceil(load.rate_per_s / most)} such deployments." if 0 < most < load.rate_per_s else ""
        wanted = min((bound.quantile for bound in found.bounds), default=0.0)
        holds = load.share_kept is None or load.share_kept >= wanted
        yield f"{'Your load' if holds else 'Too little for your load'}: {load_in_words(load)}.{more}"
    if found.gain is not None:
        yield f"{gain_in_words(found)}."
    if found.unverified:
        yield f"Not verified by measurements: {'; '.join(found.unverified)}."


def in_sessions(rate: Ranged, found: SessionEstimate) -> Ranged:
    """Return a rate of turns as one of sessions."""
    return Ranged(**{name: value and value / found.turns for name, value in dict(rate).items()})


def session_lines(found: SessionEstimate) -> Iterator[str]:
    """Yield what turns find in the cache, and what keeping it gains."""
    last = found.reused_by_turn[-1]
    text = f"Turns find {100 * found.reused_by_turn[0]:.0f}% of their first prompt and {100 * last:.0f}% of later ones"
    if found.kept_tokens:
        text += f" in {found.kept_tokens:,.0f} tokens kept between turns"
    if found.alone_per_s is not None and found.alone_per_s > 0:
        text += f", which serves {found.rate_per_s / found.alone_per_s:.2g} times as many sessions as recomputing"
    yield f"{text}."
    if found.balanced_per_s is not None:
        yield (
            f"Route by session: {found.rate_per_s:.3g} sessions/s, against {found.balanced_per_s:.3g} if each turn may "
            "go to any replica."
        )


def load_in_words(load: AtLoad) -> str:
    """Return what is kept at the user's load: by its rate, and over the whole log if there is one."""
    text = f"{load.rate_per_s:.3g}/s" + (f" in the {load.window}" if load.window else "")
    if load.confidence is not None:
        text += f": holds in {tenths(load.confidence)}"
    if load.share_kept is not None and load.worst_share_kept is not None:
        kept, least = _percent(load.share_kept), _percent(load.worst_share_kept)
        text += f". Replayed whole, {kept} of its requests keep the bounds"
        text += "" if kept == least else f", {least} in the worst window ({load.worst_window})"
    return text


def _reasons(found: Recommendation) -> Iterator[str]:
    if found.sizes:
        likely = [size for size in found.sizes if size.confidence >= 0.05] or found.sizes[-1:]
        each = [f"{size.num_devices}: {tenths(size.confidence)}" for size in likely]
        yield f"Devices that hold it: {'; '.join(each)}."
    if found.limit_per_s is not None and found.limit_gap is not None and found.action != "keep":
        gap = f"Within {100 * found.limit_gap:.1f}% of optimal" if found.limit_gap >= 0.0005 else "Optimal"
        where = f" on {found.best.num_devices} devices" if found.best.num_devices > 1 else ""
        most = found.limit_per_s / (1 if found.best.sessions is None else found.best.sessions.turns)
        yield f"{gap}{where}: with these step times no schedule searched exceeds {most:.3g}."
    if found.with_more_work is not None:
        yield f"With more work: {_in_short(found.with_more_work)}."
    if found.runner_up is not None:
        yield f"Next best: {_in_short(found.runner_up)}."
    if found.would_change:
        yield f"Would change it: {'; '.join(found.would_change[:2])}."
    for warning in found.warnings[:1]:
        yield f"Warning: {warning}"


def decision_lines(decision: Decision, width: int = WIDTH) -> list[str]:
    """Return the lines on a judgement of a running plan: keep it or change to which, the gain, and for which load."""
    best = decision.best
    if decision.action == "keep" or best is None:
        said = [f"Keep what runs now: {decision.reason}."]
    else:
        names = ", ".join(f"{each.name} {getattr(best.policy, each.name)}" for each in best.policy.variables)
        pause = f", which pauses requests for {decision.pause_s:.2g} s" if decision.pause_s else ""
        said = [f"Change to {best.policy.kind} ({names}){pause}: {decision.reason}."]
    if best is not None:
        start = "The best plan's gain" if decision.action == "keep" else "Gain"
        rates = [each.arrival_rate_per_s or each.throughput_rps for each in (decision.running, best)]
        if rates[0] > 0:
            of = f"{rates[1]:.3g} against {rates[0]:.3g} requests/s"
            said.append(f"{start}: {1 + decision.gain:.2f} times ({of}).")
        else:
            said.append(f"{start}: {rates[1]:.3g} requests/s, where what runs now keeps the bounds at no rate.")
    load = "" if decision.arrival_rate_per_s is None else f", {decision.arrival_rate_per_s:.3g} requests/s"
    lengths = f"{decision.input_mean:.0f} input and {decision.output_mean:.0f} output tokens on average"
    said.append(f"For {decision.num_requests:,} {decision.lengths} requests: {lengths}{load}.")
    if decision.slowdown != 1:
        said.append(f"Steps take {decision.slowdown:.2f} times as long as in the profile.")
    return [line for text in said for line in _wrapped(text, width)]


def _in_short(offer: Offer) -> str:
    scheduler = ", with xgpt's scheduler" if offer.needs_xgpt else ""
    if offer.sessions is not None:
        return f"{offer.name}{scheduler}: {offer.sessions.rate_per_s:.3g} sessions/s"
    return f"{offer.name}{scheduler}: {offer.rate_per_s.value:.3g} requests/s"


def gain_in_words(found: Recommendation) -> str:
    """Return the gain over the present deployment, in its own unit and without a ratio to zero."""
    gain = found.gain
    assert gain is not None
    start = "The best plan's gain" if found.action == "keep" else "Gain"
    if gain.factor is None:
        return f"{start}: {gain.then:.3g} {gain.unit}, where what runs now keeps the bounds at no rate"
    low, high = gain.factor.low, gain.factor.high
    likely = "" if low is None else f", likely {low:.2f} to {high:.2f}" if high is not None else f", at least {low:.2f}"
    unit = gain.unit.replace(" within the bounds", "")
    return f"{start}: {gain.factor.value:.2f} times{likely} ({gain.then:.3g} against {gain.now:.3g} {unit})"


def in_words(figure: Ranged, unit: str) -> str:
    text = f"{figure.value:.3g} {unit}"
    if figure.low is None or figure.high is None:
        return text
    if figure.low <= 0:
        return f"{text} (likely at most {figure.high:.3g}; in the worst case none)"
    return f"{text} (likely {figure.low:.3g} to {figure.high:.3g})"


def bounds_in_words(bounds: tuple[BoundKept, ...]) -> str:
    """Return bounds as in "TTFT within 2 s and TPOT within 100 ms for 99% of requests"."""
    names = [f"{bound.name} within {seconds(bound.bound_s)}" for bound in bounds]
    shares = {bound.quantile for bound in bounds}
    if len(shares) == 1:
        return f"{' and '.join(names)} for {100 * shares.pop():g}% of requests"
    return " and ".join(f"{name} for {100 * bound.quantile:g}%" for name, bound in zip(names, bounds, strict=True))


def seconds(value: float) -> str:
    """Return a duration as in 200 ms or 2 s."""
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.4g} s"


def cards(found: Recommendation) -> list[dict[str, str]]:
    """Return what a page shows first, as values with labels: the user's bounds with their margins, load and cost."""
    best, load = found.best, found.best.at_load
    rate = best.rate_per_s
    shown = [("requests/s" + (" within the bounds, at most" if found.bounds else ", saturated"), f"{rate.value:.3g}")]
    if rate.low is not None and rate.high is not None:
        shown.append(("likely range of this rate", f"{rate.low:.3g} to {rate.high:.3g}"))
    at = "at that rate" if load is None else "at your load"
    for bound in found.bounds:
        if bound.predicted_s is not None:
            margin = f"margin {100 * (1 - bound.predicted_s / bound.bound_s):.0f}%"
            label = f"{bound.name}, p{100 * bound.quantile:g} {at}; bound {seconds(bound.bound_s)}, {margin}"
            shown.append((label, seconds(bound.predicted_s)))
    if load is not None:
        shown.append(("your load, requests/s", f"{load.rate_per_s:.3g}"))
        if load.confidence is not None:
            shown.append(("holds your load in", tenths(load.confidence)))
    if best.cost_per_hour is not None:
        shown.append(("cost of an hour", f"{best.cost_per_hour:.4g}"))
    if best.cost_per_million_tokens is not None:
        shown.append(("cost of a million output tokens", f"{best.cost_per_million_tokens:.3g}"))
    if found.limit_per_s is not None:
        shown.append(("requests/s, proven upper bound with these step times", f"{found.limit_per_s:.3g}"))
    return [{"label": label, "value": value} for label, value in shown]


def tenths(share: float) -> str:
    """Return a probability as in "9 of 10 cases". It never says certain."""
    if share >= 0.985:
        return "99 of 100 cases"
    if share >= 0.945:
        return "19 of 20 cases"
    return "hardly any case" if share < 0.05 else f"{max(1, min(9, int(10 * share + 1e-9)))} of 10 cases"


def _percent(share: float) -> str:
    return "all" if share >= 1 else f"{100 * min(share, 0.9999):.4g}%"


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters. A command continues with a backslash."""
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
    """Return the words of a command, each flag together with its value."""
    found: list[str] = []
    for word in shlex.split(command):
        quoted = word if word == "&&" or word.startswith("CUDA_") else shlex.quote(word)
        if found and not word.startswith("-") and found[-1].startswith("--") and " " not in found[-1]:
            found[-1] += f" {quoted}"
        else:
            found.append(quoted)
    return found
