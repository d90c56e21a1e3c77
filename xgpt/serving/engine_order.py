"""Define what the server tells an engine's process to run."""

from __future__ import annotations

from xgpt.core.schema import Batching, Frozen, Plan


class EngineOrder(Frozen):
    plan: Plan
    batching: Batching
    reuse: bool
    log_level: str
    ray: str | None = None
    core_waits: bool = False
    rule: str | None = None
