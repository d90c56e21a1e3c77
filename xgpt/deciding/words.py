"""Render a recommendation as the lines that a command prints first: the answer, then its conditions."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xgpt.core.schema import Decision, Offer, Recommendation
from xgpt.core.schema.estimate import SessionEstimate
from xgpt.core.schema.recommendation import AtLoad, BoundKept, OfferedCluster, Sized
from xgpt.deciding.phrases import (
    MOST_LINES,
    MOST_SPANS,
    WIDTH,
    bounds_in_words,
    in_sessions,
    in_words,
    kept_in_words,
    late_in_words,
    likely_in_words,
    load_in_words,
    per_s,
    percent,
    seconds,
    span,
    tenths,
    when_lost,
    wrapped,
)
from xscheduler.objectives.sizing import LESS_SURE

FAR = 1.0
"""A plan that a proof leaves further from the optimum than this share is not called near it."""
MOST_COMMANDS = 2
"""Most commands that are printed. --json has all."""
MOST_CLUSTERS = 3
"""Most compared clusters of which more than the cost is printed. plan.json has all."""
CEILING = 6
"""Rank of how near the best plan is to the best possible."""
SPARED, ALWAYS, VERIFIED, NEEDED = 9, 10, 11, 12
"""Ranks of what is left out only if nothing else makes an answer fit: first, then, and last (the best verified plan
beside one that is not), and of what is never left out.
"""


def lines(found: Recommendation, width: int = WIDTH, most: int | None = MOST_LINES, end: str = "") -> list[str]:
    """Return the lines: whether what runs now holds, what to run, what it keeps, what it gains, what would change it.

    Args:
        most: number of lines after which the least important sentences are left out, and the others are said briefly.
            None means that all are said.
        end: a last sentence, such as where to read more. It is never left out.
    """

    def shown(said: list[tuple[int, str]]) -> list[str]:
        texts = [text for _, text in said]
        if CEILING not in (rank for rank, _ in said):
            texts = [_with_gap(text, found, width) for text in texts]
        if end and texts[-1].endswith(".") and len(wrapped(texts[-1], width)[-1]) + 1 + len(end) <= width:
            texts[-1] += f" {end}"
        elif end:
            texts.append(end)
        return [line for text in texts for line in wrapped(text, width)]

    every = list(_sentences(found, None if most is None else MOST_CLUSTERS))
    said, is_brief = every[:], False
    while most is not None and len(shown(said)) > most:
        least = min(reversed(said), key=lambda each: each[0])
        if least[0] < SPARED or (is_brief and least[0] < NEEDED):
            said.remove(least)
        elif is_brief:
            break
        else:
            every, is_brief = list(_sentences(found, 0, is_brief=True)), True
            said = [each for each in every if each[0] >= SPARED]
    for more in sorted(every, key=lambda each: -each[0]):  # a long sentence that was left out may leave room for others
        fuller = [each for each in every if each in said or each is more]
        if most is not None and more not in said and len(shown(fuller)) <= most:
            said = fuller
    return shown(said)


def told(found: Recommendation, explained: bool, more: str = "") -> list[str]:
    """Return what a command prints first: fifteen lines at most, or all of them before it explains them."""
    end = " ".join(part for part in (more, "" if explained else "More: --explain.") if part)
    return lines(found, most=None if explained else MOST_LINES, end=end)


def _sentences(
    found: Recommendation, most_clusters: int | None, *, is_brief: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield sentences with their ranks: the lowest are left out first.

    Args:
        most_clusters: number of clusters, the cheapest, of which more than the cost is said. None means all, 0 that the
            chosen one is only named with what to run.
        is_brief: whether only one command is said, and not that what is lost is the best that was found.
    """
    best, load, keeps = found.best, found.best.at_load, found.action == "keep"
    most_spans = None if most_clusters is None else MOST_SPANS
    if found.now is not None and found.now.at_load is not None:
        is_why_said = keeps or not is_brief
        yield NEEDED, f"Yours {_kept_now(found.now, found.now.at_load, found.bounds, is_why_said=is_why_said)}."
        if late := late_in_words(found.now.at_load, most_spans):
            yield 2, f"{late}."
    would, lost = _would_hold(found), load is not None and not load.holds
    more = f"; {_would_hold(found, 'the plan below')}" if would and lost else ""
    if found.nearest:
        yield NEEDED, f"{_never_kept(found)}{more}."
    elif load is not None and lost:
        where = _where_lost(load, found.bounds)
        yield NEEDED, f"No schedule found on your {_devices(found)} holds your load{where}{more}."
    yield from ((NEEDED, text) for text in _answer(found, is_brief=is_brief))
    spare = f", with {f'{100 * found.headroom:.3g}%' if found.headroom else 'nothing'} to spare,"
    wanted = min((bound.quantile for bound in found.bounds), default=0.0)
    if (sessions := best.sessions) is not None:
        rate = in_words(in_sessions(best.rate_per_s, sessions), "sessions/s")
        kept = f"{bounds_in_words(found.bounds, sessions)}{spare}"
        yield NEEDED, f"Keeps {kept} up to {rate}, about {sessions.at_once:.3g} at once."
        yield from session_lines(sessions, wanted)
    elif found.bounds and not found.nearest:
        is_replayed = load is not None and load.share_kept is not None
        lasts = "" if best.simulated_s is None or is_replayed else f", over {span(best.simulated_s)} of arrivals"
        rate = in_words(best.rate_per_s, "requests/s")
        up_to = f"{spare} up to {rate}{lasts}" if best.rate_per_s.value else f" at no rate{spare[:-1]}"
        if best.rate_per_s.value or not (lost and is_replayed):  # another plan may keep them, but less of the log
            yield (SPARED if lost else NEEDED), f"Keeps {bounds_in_words(found.bounds)}{up_to}."
    elif not found.bounds:
        yield NEEDED, f"Serves up to {in_words(best.rate_per_s, 'requests/s')}; no bound is given."
    if load is not None:
        # the first line has the number of requests
        known = load if found.now is None else load.but(num_requests=None)
        is_lost = found.now is not None and found.now.at_load is not None and not found.now.at_load.holds
        is_lost = is_lost and not is_brief
        said = load_in_words(
            known,
            is_kept_said=keeps,
            is_lost=is_lost,
            sessions=sessions,
            wanted=found.wanted,
            is_brief=is_brief,
            whose="your own" if found.nearest else "the",
        )
        yield NEEDED, f"Your load: {said}."
        if found.now is None and (late := late_in_words(load, most_spans)):
            yield 2, f"{late}."
    if found.alone_share is not None and load is not None and not load.holds and not would:
        alone = percent(found.alone_share)
        yield ALWAYS, f"No number of copies would hold it: where no request waits, {alone} keep the bounds."
    if found.now is not None and found.now.sessions is not None and not keeps:
        now, waiting = found.now.sessions, next((b for b in found.bounds if b.name == "session waiting"), None)
        text = f"Yours: up to {now.rate_per_s:.3g} sessions/s; then turn {len(now.reused_by_turn)} finds "
        text += f"{100 * now.reused_by_turn[-1]:.0f}%"
        if waiting is not None:
            text += f", and {percent(waiting.quantile)} of sessions wait at most {seconds(now.wait_s)} in all"
        yield ALWAYS, "; ".join(filter(None, (text, _replayed(now, wanted)))) + "."
    is_unsure = load is not None and load.holds and (load.confidence or 1.0) < (found.wanted or 0.0)
    if found.sizes:
        what = "Devices tried (best plan on each number)" if keeps else "Devices tried"
        yield 8 if is_unsure else 7, f"{what}: {_sizes(found.sizes)}."
    if found.gain is not None and found.gain.then > 0 and not _is_alike(found):
        by_share = lost and load is not None and load.share_kept is not None  # rates then decide nothing
        is_lower = found.action == "change" and found.gain.factor is not None and found.gain.factor.value < 1
        yield (ALWAYS if is_lower else 5 if by_share else SPARED), f"{gain_in_words(found)}."
    if load is not None and load.holds and would:
        yield ALWAYS, f"{would[0].upper()}{would[1:].replace(' would', ' would hold it', 1)}."
    elif is_unsure:
        yield 8, "No number of copies found holds it as surely as wanted."
    if found.runner_up is not None and _keeps_any(found.runner_up):
        is_sure = found.would_hold is not None and _is_surer(found.runner_up.at_load, load)
        is_known = bool((found.rejected or best).unverified and not found.runner_up.unverified)
        yield (
            (VERIFIED if is_known else ALWAYS if is_sure else 3),
            _runner_up(found, found.runner_up, is_brief=is_brief),
        )
    clusters = sorted(found.clusters, key=lambda each: each.why_not != "")  # the chosen one first
    full = len(clusters) if most_clusters is None else most_clusters
    for each in clusters[:full]:
        yield ALWAYS, _cluster(each)
    if others := clusters[max(full, 1) :]:
        yield NEEDED, f"Others: {', '.join(_cost(each) for each in others)}."
    if found.limit_per_s is not None and found.limit_gap is not None and not keeps:
        gap, where = _gap(found), _where_searched(found)
        most = found.limit_per_s / (1 if sessions is None else sessions.turns)
        what = "searched" if found.with_more_work is None else "that the engine runs by itself"
        if found.saturated_per_s is None:
            high = best.rate_per_s.high or 0.0  # steps may be faster than predicted, and the ceiling rises with them
            when = " at the predicted step times" if high > found.limit_per_s else ""
            text = f"no schedule {what} exceeds {most:.3g}/s"
            yield CEILING, f"{gap}{where}: {text}{when}." if _is_near(found) else f"N{text[1:]}{where}{when}."
        else:
            here = f"serves over {most:.3g}/s at saturation, this one {found.saturated_per_s:.3g}"
            yield CEILING, f"{gap}{where}: no schedule {what} {here}."
    if (other := found.with_more_work) is not None:
        yield 4, f"With more work: {_in_short(other, best)}{_beside_load(other.at_load, found.bounds)}."
    if found.would_change:
        yield 2, f"Would change it: {'; '.join(found.would_change[:2])}."
    if found.measurement is not None:
        start = "Once it runs, measure" if found.now is None else "Measure, with what runs now,"
        text = f"{start} {found.measurement.narrows}:\n$ {found.measurement.command}"
        yield ALWAYS if _is_for_sureness(found) else 8 if is_unsure else 1, text
    for warning in found.warnings[:1]:
        yield 8, f"Warning: {warning}"


def _is_for_sureness(found: Recommendation) -> bool:
    """Return whether more devices are only to hold a load more surely, which a measurement of what runs may settle."""
    now = found.now
    if found.action != "change" or now is None or now.at_load is None:
        return False
    return now.at_load.holds and found.best.num_devices > now.num_devices


def _gap(found: Recommendation) -> str:
    gap = found.limit_gap or 0.0
    return f"Within {100 * gap:.1f}% of optimal" if gap >= 0.0005 else "Optimal"


def _is_near(found: Recommendation) -> bool:
    load = found.best.at_load
    return found.limit_gap is not None and found.limit_gap <= FAR and (load is None or load.holds)


def _where_searched(found: Recommendation) -> str:
    number = found.limit_devices or found.best.num_devices
    return f" on {'up to ' if found.limit_devices else ''}{number} devices" if number > 1 else ""


def _with_gap(text: str, found: Recommendation, width: int) -> str:
    """Return the sentence on what the best plan keeps with how near this is to the best possible, if it is near, and if
    the sentence takes no further line.
    """
    is_known = found.limit_per_s is not None and found.saturated_per_s is None and found.action != "keep"
    if not text.startswith("Keeps ") or not is_known or not _is_near(found):
        return text
    of = "" if found.with_more_work is None else " for the engine by itself"
    where = _where_searched(found) if found.limit_devices else ""
    longer = f"{text[:-1]}, {_gap(found).lower()}{of}{where}."
    return longer if len(wrapped(longer, width)) == len(wrapped(text, width)) else text


def _never_kept(found: Recommendation) -> str:
    nearest = bounds_in_words(found.nearest).partition(" for ")[0]
    kept = bounds_in_words(found.bounds, found.best.sessions)
    text = f"No schedule found on your {_devices(found)} keeps {kept}, at any rate"
    asked = {each.name: each.bound_s for each in found.bounds}
    factors = [each.bound_s / asked[each.name] for each in found.nearest if each.name in asked]
    is_alike = len(factors) > 1 and max(factors) < 1.02 * min(factors)
    if is_alike:  # one alone may be tighter
        return f"{text}; each bound {max(factors):.3g} times as long can be kept: {nearest}"
    return (
        f"{text}; the nearest bound{'s' if len(found.nearest) > 1 else ''} found that one keeps at some rate: {nearest}"
    )


def _devices(found: Recommendation) -> str:
    offers = [offer.num_devices for offer in (found.best, found.rejected) if offer is not None]
    number = max(*offers, found.limit_devices or 0)
    return f"{number} device{'s' if number > 1 else ''}"


def _would_hold(found: Recommendation, this: str = "this plan") -> str:
    """Return which copies would hold the load as surely as wanted, and on how many devices, or ""."""
    offers = {"best": found.best, "rejected": found.rejected, "runner_up": found.runner_up, "steady": found.steady}
    of = offers[found.would_hold_of]
    if not found.would_hold or of is None:
        return ""
    is_now = of == found.now or (found.action == "keep" and of is found.best)
    name = "what runs now" if is_now else "the best plan" if found.action == "keep" else this
    if of is found.runner_up and not is_now:
        name = HERE.sub("", _in_short(of, found.best).rpartition(":")[0])
    scheduler = ", with xgpt's scheduler" if of.needs_xgpt else ""
    name = f"{of.name} ({PLACED.sub('', of.settings)}){scheduler}" if of is found.steady else name
    sure = "" if found.would_hold_confidence is None else f" in {tenths(found.would_hold_confidence)}"
    # of what runs, nobody asks; of the plan to run, the answer says what is not verified
    unsaid = "" if set(of.unverified) <= set(found.best.unverified) else " (not verified)"
    copies, rest = divmod(found.would_hold, of.num_devices)
    several = f"{copies} copies of {name}"
    if rest:
        more = f"{found.would_hold_replicas} replicas"
        several = REPLICAS.sub(more, name, 1) if REPLICAS.search(name) else f"{more} as in {name}"
    return f"{several}{unsaid}, on {found.would_hold} devices, would{sure}"


def _where_lost(load: AtLoad, bounds: tuple[BoundKept, ...]) -> str:
    """Return where a load is not held that is held on average, as the share of all its requests says."""
    if not load.window or load.share_kept is None or not bounds:
        return ""
    return " in each window" if load.share_kept >= min(bound.quantile for bound in bounds) else ""


def _kept_now(now: Offer, load: AtLoad, bounds: tuple[BoundKept, ...], *, is_why_said: bool) -> str:
    if kept := kept_in_words(load, is_why_said=is_why_said):
        lost = f": it does not hold your load{when_lost(load) or _where_lost(load, bounds)}"
        return f"keeps the bounds for {kept}{'' if load.holds else lost}"
    rate = now.rate_per_s.value
    most = f"keeps the bounds {f'up to {per_s(rate, now.sessions)}' if rate else 'at no rate'}"
    asked = load.rate_per_s / (1 if now.sessions is None else now.sessions.turns)
    return f"{most}: {'enough' if load.holds else 'too little'} for your {asked:.3g}"


def _answer(found: Recommendation, *, is_brief: bool) -> Iterator[str]:
    best, why = found.best, found.why
    engine = f", {best.engine}" if best.engine else ""
    devices = found.devices
    if found.now is not None and best.num_devices < found.now.num_devices:
        devices = devices.replace(" x ", f" of your {found.now.num_devices} ", 1)
    what = f"{best.name} on {devices}{_at_cost(best)}{engine}"
    if found.now is not None and best.num_devices > found.now.num_devices and not is_brief:
        what += f" (yours: {found.now.num_devices}{_at_cost(found.now)})"
    if found.action == "keep":
        yield f"Keep what runs now, {what}: {why}."
        return
    start = "Run " + found.model + ":" if found.action == "run" else "Change to"
    start = "The plan for these bounds:" if found.nearest and found.action == "run" else start
    lost = [each for each in (best, found.now) if each is not None and each.at_load and not each.at_load.holds]
    why = "" if is_brief and lost else why  # the first sentences have said so
    joint = ": " if why else ". " if best.unverified else ""
    if best.unverified:
        why += f"{'; m' if why else 'M'}easure first: measurements do not verify {' and '.join(best.unverified)}"
    yield f"{start} {what}{joint}{why}."
    if not (found.nearest and best.needs_xgpt):  # then no plan.json is written
        yield from _commands(best, 1 if is_brief else MOST_COMMANDS)


def _at_cost(offer: Offer) -> str:
    return "" if offer.cost_per_hour is None else f" at {offer.cost_per_hour:.4g} an hour"


CLEAR_GAIN = 0.05
"""Gains in rates up to this share decide nothing."""
WORTH_IT = 0.02
"""Gains in rates up to this share may be due to the precision of the simulated rates."""


def _replayed(found: SessionEstimate, wanted: float) -> str:
    """Return what is kept of a log that was replayed, or ""."""
    if found.log_turns_kept is None or found.log_sessions_kept is None:
        return ""
    turns, sessions = percent(found.log_turns_kept), percent(found.log_sessions_kept)
    lost = "" if min(found.log_turns_kept, found.log_sessions_kept) >= wanted else ": it does not hold your log"
    return f"replayed whole, {turns} of your log's turns and {sessions} of its sessions keep their bounds{lost}"


def session_lines(found: SessionEstimate, wanted: float) -> Iterator[tuple[int, str]]:
    """Yield what turns find in the cache, and what keeping it gains, with ranks as `_sentences` does.

    Args:
        wanted: share of a log's turns and of its sessions that must keep their bounds.
    """
    first, *later = (f"{100 * share:.0f}%" for share in found.reused_by_turn)
    text = f"Turns find {first} of their first prompt"
    if later:
        text += f" and {later[-1]} of prompt {1 + len(later)}"
    if found.kept_tokens >= 1:
        text += f" in {found.kept_tokens:,.0f} tokens kept between turns"
    if found.alone_per_s == 0:
        text += ", without which no rate keeps the bounds"
    elif found.alone_per_s is not None:
        gain = found.rate_per_s / found.alone_per_s
        serves = f"{gain:.2g} times as many sessions as" if gain > 1 + WORTH_IT else "no more sessions than"
        text += f", which serves {serves} recomputing"
    yield ALWAYS, f"{text}."
    if replayed := _replayed(found, wanted):
        yield ALWAYS, f"{replayed[0].upper()}{replayed[1:]}."
    if found.from_host_per_s is not None:
        gain = found.from_host_per_s / found.rate_per_s - 1
        text = "K/V moved to host memory between turns would "
        if gain > WORTH_IT and found.host_bytes is not None:
            text += f"serve {100 * gain:.0f}% more sessions ({found.from_host_per_s:.3g} sessions/s), in about "
            text += f"{found.host_bytes / 2**30:,.0f} GiB (vLLM: --kv-offloading-size; simulated, not measured)"
        yield 5, f"{text}." if gain > WORTH_IT else f"{text}serve no more sessions: loading it takes as long."
    if found.routed:
        best = min(found.routed, key=lambda name: found.routed[name][1])
        said = [f"{seconds(wait)} by {name} ({100 * share:.0f}% found)" for name, (share, wait) in found.routed.items()]
        yield 5, f"Route turns by {best}: sessions then wait {'; '.join(said)}."


def _runner_up(found: Recommendation, offer: Offer, *, is_brief: bool) -> str:
    start, first = "Next best", found.rejected or found.best
    more = tuple(what for what in offer.unverified if what not in first.unverified)
    if first.unverified and not offer.unverified:
        start = "Best that measurements verify"
    elif more:
        is_lost = first.at_load is not None and not first.at_load.holds  # then what is kept of the load decides
        is_higher = not is_lost and offer.rate_per_s.value > first.rate_per_s.value
        start = f"{'Higher' if is_higher else start}{_not_verified(more)}"
    if offer == found.now:
        return f"{start}: what runs now."
    gain, load = found.runner_up_gain, offer.at_load
    if offer.num_devices != found.best.num_devices:
        offer = offer.but(cluster=offer.cluster or next((each.name for each in found.clusters if not each.why_not), ""))
    short = _in_short(offer, found.best)
    if load is not None and not load.holds and load.share_kept is not None:  # then what it keeps decides, no rate
        short = short.rpartition(":")[0]
    text = f"{start}: {short.removesuffix(':')}"
    if (
        not is_brief
        and gain is not None
        and gain.factor is not None
        and (load is None or load.holds or load.share_kept is None)
    ):
        text += f", {gain.factor.value:.2f} times yours"
    return f"{text}{_beside_load(load, found.bounds)}."


def _keeps_any(offer: Offer) -> bool:
    return offer.rate_per_s.value > 0 or offer.at_load is None or (offer.at_load.share_kept or 0.0) > 0


def _is_surer(load: AtLoad | None, than: AtLoad | None) -> bool:
    return load is not None and than is not None and (load.confidence or 0.0) > (than.confidence or 0.0)


def _beside_load(load: AtLoad | None, bounds: tuple[BoundKept, ...]) -> str:
    """Return what another candidate keeps of the user's load, in a few words."""
    if load is None:
        return ""
    if not load.holds:
        if load.share_kept is None:
            return ", too little for your load"
        kept = f", keeps {percent(load.share_kept)} of your load"
        worst = load.worst_share_kept if _where_lost(load, bounds) else None
        return kept if worst is None else f"{kept}, but {percent(worst)} in the worst window"
    return "" if load.confidence is None else f", held in {tenths(load.confidence)}"


FEW = "too few"
HERE = re.compile(r" on \d+(?! of )")
REPLICAS = re.compile(r"\d+ replicas")
PLACED = re.compile(r", (\d+ x )?\[.*$")


def _not_verified(unverified: tuple[str, ...]) -> str:
    return f" (not verified by measurements: {', '.join(unverified)})" if unverified else ""


def _sizes(sizes: tuple[Sized, ...]) -> str:
    """Return how surely each number of devices that was searched holds the load. More hold it no less surely, so
    numbers between two equal ones are as these. If a number is too few, so are all below it.
    """
    spans = list[tuple[int, int, str]]()
    for size in sizes:
        words = f"in {tenths(size.confidence)}" if size.confidence else FEW
        if spans and spans[-1][2] == words:
            spans[-1] = spans[-1][0], size.num_devices, words
        else:
            spans.append((1 if words == FEW else size.num_devices, size.num_devices, words))
    said = list[str]()
    for first, last, words in spans:
        numbers = str(first) if first == last else f"{first} {'or' if last == first + 1 else 'to'} {last}"
        is_first = words != FEW and not any(" hold" in each for each in said)
        verb = (" hold it" if last > first else " holds it") if is_first else ""
        fewer = "" if said or first == 1 else " (fewer no more surely)"
        said.append(f"{numbers}{verb} {words}{fewer}")
    before, cases, rest = ", ".join(said).partition(" cases")
    return before + cases + rest.replace(" cases", "")


def _cluster(each: OfferedCluster) -> str:
    if each.num_devices is None or each.cost_per_hour is None:
        return f"{each.name} at {each.price_per_device_hour:g} an hour each: {each.why_not.partition(';')[0]}."
    text = f"{each.name}: {each.num_devices} at {each.price_per_device_hour:g} = {each.cost_per_hour:.4g} an hour"
    text += "" if each.confidence is None else f", in {tenths(each.confidence)}"
    text += " (not verified)" if each.unverified else ""
    return f"{text}; {each.why_not}." if each.why_not else f"{text}: chosen."


def _cost(each: OfferedCluster) -> str:
    cost = "too few or too slow" if each.cost_per_hour is None else f"{each.cost_per_hour:.4g} an hour"
    return f"{each.name} {cost}{' (less surely)' if each.why_not == LESS_SURE else ''}"


def decision_lines(decision: Decision, then: Offer | None = None, width: int = WIDTH) -> list[str]:
    """Return the lines on a judgement of a running plan: keep it or change to which, the gain, and for which load.

    Args:
        then: the plan to change to.
    """
    best = decision.best
    if then is None or best is None:
        said = [f"Keep what runs now: {decision.reason}."]
    else:
        said = [f"Change to {then.name} ({then.settings}): {decision.reason}.", *_commands(then)]
        said += filter(None, [change_in_words(decision)])
    if best is not None:
        start = "The best plan's gain" if then is None else "Gain"
        rates = [each.arrival_rate_per_s or each.throughput_rps for each in (decision.running, best)]
        if rates[0] > 0:
            of = f"{rates[1]:.3g} against {rates[0]:.3g} requests/s"
            said.append(f"{start}: {1 + decision.gain:.2f} times ({of}).")
        else:
            said.append(f"{start}: {rates[1]:.3g} requests/s, where what runs now keeps the bounds at no rate.")
    lengths = f"{decision.input_mean:.0f} input and {decision.output_mean:.0f} output tokens on average"
    rate = "" if decision.arrival_rate_per_s is None else f", {decision.arrival_rate_per_s:.3g} requests/s"
    said.append(f"For {decision.num_requests:,} {decision.lengths} requests: {lengths}{rate}.")
    if decision.slowdown != 1:
        said.append(f"Steps take {decision.slowdown:.2f} times as long as in the profile.")
    return [line for text in said for line in wrapped(text, width)]


def change_in_words(decision: Decision) -> str:
    """Return how long a change of plan delays requests, or "" if it takes effect between two steps."""
    pause_s, start_s = decision.pause_s, decision.start_s
    if start_s:
        return f"A new start: {start_s:.0f} s, after {pause_s - start_s:.0f} s for running requests."
    said = f"{pause_s:.0f}" if pause_s >= 10 else f"{pause_s:.2g}"
    return f"The change pauses requests for {said} s." if pause_s else ""


def _commands(offer: Offer, most: int = MOST_COMMANDS) -> Iterator[str]:
    """Yield the commands of the first processes. A command that several machines run alike is yielded once."""
    commands = Counter(process.command for process in offer.processes)
    shown, rest = list(commands)[:most], list(commands)[most:]
    for command, count in list(commands.items())[:most]:
        yield f"$ {command}"
        if count > 1:
            yield f"on each of {count} machines"
        elif max(commands.values()) > 1:
            yield "on one more machine"
    if rest:
        count, like = sum(commands[command] for command in rest), _unlike(shown[-1], rest)
        yield f"and {count} more {like}, each on its own devices and port (all: --json)"


def _unlike(shown: str, rest: Sequence[str]) -> str:
    """Return how further commands differ from the shown one, but for devices and port."""
    one, others = _options(shown), [_options(command) for command in rest]
    names = {name for other in others for name, _ in one.items() ^ other.items()}
    if len(names) != 1:
        return "that differ" if names else "like it"
    (name,) = names
    values = dict.fromkeys(other[name] for other in others if name in other)
    return f"with {name} {', '.join(values)}".rstrip() if values else f"without {name}"


def _options(command: str) -> dict[str, str]:
    words = [*shlex.split(command), "--"]
    each = {name: "" if value.startswith("--") else value for name, value in pairwise(words) if name.startswith("--")}
    return {name: value for name, value in each.items() if name != "--port"}


def _in_short(offer: Offer, beside: Offer) -> str:
    name = offer.name.removeprefix(f"{beside.policy}, ")
    name += f" with {offer.settings.partition(', [')[0]}" if offer.name == beside.name else ""
    scheduler = ", with xgpt's scheduler" if offer.needs_xgpt else ""
    devices = f" on {offer.num_devices}" if offer.num_devices != beside.num_devices or offer.cluster else ""
    devices += f" of {offer.cluster}" if offer.cluster else ""
    devices += _at_cost(offer) if offer.cost_per_hour != beside.cost_per_hour else ""
    if not offer.rate_per_s.value:
        return f"{name}{devices}{scheduler}:"
    rate = f"{offer.rate_per_s.value:.3g}" if offer.sessions is None else f"{offer.sessions.rate_per_s:.3g} sessions"
    return f"{name}{devices}{scheduler}: {rate}/s"


def _is_alike(found: Recommendation) -> bool:
    """Return whether the best other plan has the placement of what runs now, and gains nothing."""
    if found.rejected is None or found.gain is None or found.gain.factor is None:
        return False
    return found.rejected.name == found.best.name and f"{found.gain.factor.value:.2f}" == "1.00"


def gain_in_words(found: Recommendation) -> str:
    """Return the gain over the present deployment, on all devices and per device, without a ratio to zero."""
    gain = found.gain
    assert gain is not None
    known = () if found.now is None else found.now.unverified
    start = "Gain" if set(found.best.unverified) <= set(known) else "Gain (not verified)"
    is_lost = found.best.at_load is not None and not found.best.at_load.holds
    if (other := found.rejected) is not None:
        is_less = is_lost or (gain.factor is not None and gain.factor.value < 1)  # what is kept of a log decides
        which = "The best other plan" if is_less else "The best plan"
        start = f"{which}, {_in_short(other, found.best).rpartition(':')[0]}{_not_verified(other.unverified)}"
        if is_lost:
            start += _beside_load(other.at_load, found.bounds)
    if gain.factor is None:
        margin = f" with {100 * found.headroom:.3g}% to spare" if found.headroom and found.bounds else ""
        return f"{start}: {gain.then:.3g} {gain.unit}, where what runs now keeps the bounds at no rate{margin}"
    unit = gain.unit.replace(" within the bounds", "")
    rates = f"{gain.then:.3g} against {gain.now:.3g} {unit}"
    if gain.factor.value < 1 + CLEAR_GAIN and other is None and is_lost:  # then what it keeps of the log decides
        return f"Rates at which {percent(found.bounds[0].quantile)} keep the bounds: {rates}"
    if gain.factor.value < 1 and other is None:
        start = start.replace("Gain", "Rate", 1)
    text = f"{start}: {gain.factor.value:.2f} times{likely_in_words(gain.factor)}: {rates}"
    if gain.per_device is None:
        return text
    sure = "" if other is None or other.at_load is None or not other.at_load.holds else _beside_load(other.at_load, ())
    return f"{text}, per device {gain.per_device.value:.2f} times{sure}"


def cards(found: Recommendation) -> list[dict[str, str]]:
    """Return what a page shows first, as values with labels: the user's bounds with their margins, load and cost."""
    best, load = found.best, found.best.at_load
    rate, unit, turns = best.rate_per_s, "requests/s", 1.0
    if best.sessions is not None:
        rate, unit, turns = in_sessions(rate, best.sessions), "sessions/s", best.sessions.turns
    shown = [(unit + (" within the bounds, at most" if found.bounds else ", saturated"), f"{rate.value:.3g}")]
    if rate.low is not None and rate.high is not None:
        shown.append(("likely range of this rate", f"{rate.low:.3g} to {rate.high:.3g}"))
    is_over = load is None or load.rate_per_s > best.rate_per_s.value
    at = "at that rate" if load is None or is_over else f"at {load.rate_per_s / turns:.3g}/s (Poisson)"
    for bound in found.bounds:
        if bound.predicted_s is not None:
            margin = f"margin {100 * (1 - bound.predicted_s / bound.bound_s):.0f}%"
            label = f"{bound.name}, p{100 * bound.quantile:g} {at}; bound {seconds(bound.bound_s)}, {margin}"
            shown.append((label, seconds(bound.predicted_s)))
    if load is not None:
        shown.append((f"your load, {unit}", f"{load.rate_per_s / turns:.3g}"))
        if load.confidence is not None and load.holds:
            shown.append(("holds your load in", tenths(load.confidence)))
    if best.cost_per_hour is not None:
        shown.append(("cost of an hour", f"{best.cost_per_hour:.4g}"))
    if best.cost_per_million_tokens is not None:
        label = "cost of a million output tokens while requests always wait"
        shown.append((label, f"{best.cost_per_million_tokens:.3g}"))
    if found.limit_per_s is not None:
        most = f"{found.limit_per_s / turns:.3g}"
        shown.append((f"{unit}, proven upper bound with these step times", most))
    return [{"label": label, "value": value} for label, value in shown]
