"""Ask several commands about one deployment and one log, and name each contradiction in what they say.

All figures are read from what the commands print, in JSON and in lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xgpt.deciding.phrases import MOST_LINES, WIDTH, percent, tenths
from xgpt.deciding.recommend import CLEAR

Run = Callable[..., str]
"""Runs a command of xgpt with these arguments, and returns what it prints."""
Found = Mapping[str, Any]
OFFERED = ("name", "settings", "engine", "num_devices", "rate_per_s", "at_load")


def contradictions(
    run: Run, asked: tuple[str, ...], model: str, command: str, folder: Path, *, in_lines: bool = True
) -> list[str]:
    """Return the contradictions among `plan`, `compare`, `simulate` and `replan`.

    Args:
        asked: options of cluster, log, policy and bounds.
        command: what starts the present deployment.
        in_lines: whether to read the lines of `compare` and `replan`, too.
    """
    now, then, log = str(folder / "current.json"), str(folder / "plan.json"), asked[asked.index("--workload") + 1]
    compared = json.loads(run("compare", *asked, "--current", command, "-o", now, "--force", "--json"))
    told = compared["recommendation"]
    engine = () if compared["current"]["engine"] is None else ("--engine", compared["current"]["engine"]["framework"])
    text = run("plan", *asked, "--model", model, *engine, "-o", then, "--force", "--json")
    Path(then).write_text(text, encoding="utf-8")  # no file is written if nothing keeps the bounds
    planned = json.loads(text)["recommendation"]
    again = json.loads(run("replan", now, "--lengths", log, "--json"))
    first = told["rejected"] if told["action"] == "keep" and told["rejected"] else told["best"]
    found = [*_differences("replan", again["recommendation"], told)]
    found += _differences_of_offers("plan", planned["best"], first)
    for name, path, offer in (("current", now, told["now"]), ("plan", then, planned["best"])):
        seen = json.loads(run("simulate", path, "--workload", log, "--own-times", "--json"))["at_load"]
        said = offer["at_load"]
        for figure in ("share_kept", "worst_window", "worst_share_kept", "num_requests"):
            if seen[figure] != said[figure]:
                found.append(f"simulate {name}: {figure} {seen[figure]}, elsewhere {said[figure]}")
        if seen["holds"] != said["holds"]:
            found.append(f"simulate {name}: holds {seen['holds']}, elsewhere {said['holds']}")
    if (again["action"] == "keep") != (told["action"] == "keep"):
        found.append(f"replan's action {again['action']}, compare's {told['action']}")
    if again["running"]["keeps_bound"] != told["now"]["at_load"]["holds"]:
        found.append("replan and compare differ in whether the present deployment holds the load")
    for name, each in (("compare", told), ("plan", planned)):
        found += [f"{name}: {fault}" for fault in _within(each)]
    asking = (("compare", *asked, "--current", command, "-o", now, "--force"), ("replan", now, "--lengths", log))
    for arguments in asking if in_lines else ():
        text = run(*arguments).replace(f"{folder}/", "")
        found += [f"{arguments[0]}: {fault}" for fault in _told(text, told)]
    return found


def _differences(name: str, seen: Found, told: Found) -> Iterator[str]:
    for figure in ("action", "why", "gain", "would_hold", "would_hold_confidence", "sizes", "limit_per_s"):
        if seen[figure] != told[figure]:
            yield f"{name}: {figure} {seen[figure]}, elsewhere {told[figure]}"
    for offer in ("best", "now", "rejected", "runner_up"):
        if (seen[offer] is None) != (told[offer] is None):
            yield f"{name}: {offer} {seen[offer]}, elsewhere {told[offer]}"
        elif seen[offer] is not None:
            yield from _differences_of_offers(f"{name}: {offer}", seen[offer], told[offer])


def _differences_of_offers(name: str, seen: Found, told: Found) -> Iterator[str]:
    for figure in OFFERED:
        if seen[figure] != told[figure]:
            yield f"{name}: {figure} {seen[figure]}, elsewhere {told[figure]}"


def _within(told: Found) -> Iterator[str]:
    """Yield contradictions within one recommendation."""
    best, second, load = told["best"], told["runner_up"], told["best"]["at_load"]
    shares = [None if each is None else each["at_load"]["share_kept"] for each in (best, second)]
    slack = CLEAR if told["action"] == "keep" else 0.0
    if None not in shares and not load["holds"] and shares[0] + slack < shares[1]:
        yield f"the runner-up keeps {shares[1]} of the log, the best {shares[0]}"
    if second is not None and second["at_load"]["holds"] and not load["holds"]:
        yield "the runner-up holds the load, the best does not"
    sure = [each["confidence"] for each in told["sizes"]]
    if sure != sorted(sure):
        yield f"more devices hold the load less surely: {told['sizes']}"
    sure = (load["confidence"] or 0.0, told["would_hold_confidence"] or 0.0)
    if told["would_hold"] is not None and load["holds"] and sure[0] >= sure[1]:
        yield "it holds the load, and more devices are named that hold it no more surely"


def _told(text: str, told: Found) -> Iterator[str]:
    """Yield in what a command's lines contradict its figures."""
    lines, joined = text.splitlines(), " ".join(text.split())
    if len(lines) > MOST_LINES or max(map(len, lines)) > WIDTH:
        yield f"{len(lines)} lines, the longest of {max(map(len, lines))} characters"
    now, best = told["now"]["at_load"], told["best"]
    says = {
        f"Yours keeps the bounds for {percent(now['share_kept'])} of": True,
        "it does not hold your load": not now["holds"],
        "No schedule found on your": not best["at_load"]["holds"] or "nearest" in told,
        ", at any rate; ": "nearest" in told,
        f"Your load: {best['at_load']['rate_per_s']:.3g}/s": True,
        "Keep what runs now": told["action"] == "keep",
        "Change to": told["action"] == "change",
    }
    if best["at_load"]["holds"] or "nearest" in told:  # a rate of a plan that does not hold the load may be left out
        is_kept = "nearest" not in told and bool(best["rate_per_s"]["value"])
        says[f"up to {best['rate_per_s']['value']:.3g} requests/s"] = is_kept
    if told["would_hold"] and told["would_hold_confidence"] is not None and not best["at_load"]["holds"]:
        says[f"{told['would_hold']} would in {tenths(told['would_hold_confidence'])}"] = True
    for sentence, is_true in says.items():
        if (sentence in joined) != is_true:
            yield f'"{sentence}" is {"not " if is_true else ""}said'
    if re.search(r"(?<![\d.])0\.00 times|nan|inf\b", joined):
        yield "a figure that is none"
