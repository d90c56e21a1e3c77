"""Define the order that tells a process which engine to run."""

from __future__ import annotations

from xgpt.core.schema import Batching, Frozen, Plan


class EngineOrder(Frozen):
    """The engine to run, with its plan and options.

    Attributes:
        ray: address of the Ray cluster whose machines run the plan. None means that this machine runs it.
        core_waits: note in the records of steps how long threads waited for a core.
    """

    plan: Plan
    batching: Batching
    reuse: bool
    log_level: str
    ray: str | None = None
    core_waits: bool = False
