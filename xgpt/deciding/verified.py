"""Say which parts of a prediction published measurements have not checked."""

from __future__ import annotations

from xgpt.core.schema import PlanDraft
from xgpt.deciding.commands import ENGINES
from xprofiler.ranges import MODELS, Cell, cell_of, rows_of

LEAST = 10
"""Number of published rows from which a class of predictions counts as verified."""
UNTIMED = "plans without an engine's own times"
"""Label of plans for xgpt's engine or for none: all published rows are of engines whose own times are known."""


def unverified(plan: PlanDraft) -> tuple[str, ...]:
    """Return what of a plan fewer than ten published rows check (docs/results/truth.md), in words. Devices whose
    efficiency is derived from another device's are named however many rows there are.

    Empty if the plan's step times were measured where it runs.
    """
    if (cell := cell_of(plan)) is None:
        return ()
    shape, efficiency = unverified_shape(plan), plan.cluster.device.efficiency
    found = [*[shape] * bool(shape), *["drafts"] * (plan.speculation is not None), *unverified_class(plan)]
    if efficiency is not None and efficiency.like is not None:  # last, since a clause follows the name
        found.append(f"{cell.device}, whose efficiency is derived from that of {efficiency.like}")
    return tuple(found)


def unverified_class(plan: PlanDraft) -> tuple[str, ...]:
    """Return the class of a plan's model, engine and devices if fewer than ten published rows check it, in words. It is
    that of all plans of a problem.
    """
    few = None if (cell := cell_of(plan)) is None else too_few(cell)
    return () if few is None else few[:1]


def too_few(cell: Cell) -> tuple[str, int] | None:
    """Return a cell's class in words and its number of published rows, if these are fewer than ten."""
    models = MODELS[cell.family]
    if cell.engine == "xgpt" and (rows := rows_of(engine="xgpt")) < LEAST:
        return UNTIMED, rows
    rows = rows_of(family=cell.family, engine=cell.engine)
    if cell.engine in ENGINES and rows < LEAST:
        return f"{models} in {ENGINES[cell.engine]}", rows
    rows = rows_of(family=cell.family, vendor=cell.vendor, profile=cell.profile)
    if rows >= LEAST:
        return None
    where = " on AMD" if cell.vendor == "AMD" else ""
    return f"{models}{where} planned from {'datasheets' if cell.profile == 'analytic' else 'imported tables'}", rows


def unverified_shape(plan: PlanDraft) -> str:
    """Return the class of a plan's placement if few measurements check it, in words, or ""."""
    if plan.profile.source == "measured":
        return ""
    if len({stage.lane for stage in plan.stages}) > 1:
        return "prefill and decode on separate devices"
    if len(plan.stages) > 1:
        return "pipelines"
    return "attention by data with shared experts" if any(stage.ep > stage.tp for stage in plan.stages) else ""
