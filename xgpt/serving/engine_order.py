"""Define what the server tells an engine's process to run."""

from __future__ import annotations

from xgpt.core.schema import Batching, Frozen, Plan


class EngineOrder(Frozen):
    """The plan that an engine's process runs, with its options.

    Attributes:
        ray: address of the Ray cluster whose machines run the plan. None means that this machine runs it.
        rule: MODULE:NAME of a rule of one's own in place of the plan's.
        core_waits: whether each step's record states how long the step's threads waited for a core.
    """

    plan: Plan
    batching: Batching
    reuse: bool
    log_level: str
    ray: str | None = None
    core_waits: bool = False
    rule: str | None = None
