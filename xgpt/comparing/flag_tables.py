"""The generated flags of engines as tables."""

from __future__ import annotations

from xgpt.comparing.engine_flags import ALIASES, TAKES


def flags_of(engine: str) -> dict[str, str]:
    """Return what each flag of an engine takes, by its long name; of vLLM, only flags of earlier versions."""
    return {name: takes for takes, names in TAKES[engine].items() for name in names.split()}


def aliases_of(engine: str) -> dict[str, str]:
    """Return the other names of an engine's flags, with their dashes."""
    return dict(pair.split("=") for pair in ALIASES[engine].split())
