"""Find a scheduling rule of one's own by its name, MODULE:NAME."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from xgpt.core.errors import InputError
from xgpt.core.policies.rule import Rule


def load_rule(given: Rule | str) -> Rule:
    """Return a rule: the object itself, or the one that MODULE:NAME names (a rule, or a class without arguments).

    The module is also looked for in the current directory.

    Raises:
        InputError: there is no such module or name, or it is no rule.
    """
    if isinstance(given, Rule):
        return given
    module_name, _, name = given.partition(":")
    if not name:
        raise InputError("rule", given, "write MODULE:NAME, as in myrules:ShortestFirst for a class in myrules.py")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), name)
        rule = found() if isinstance(found, type) else found
    except Exception as error:
        raise InputError("rule", given, f"it cannot be loaded ({type(error).__name__}: {error})") from None
    if not isinstance(rule, Rule):
        raise InputError("rule", given, "it is no xgpt.Rule")
    return rule


def name_of(rule: Rule | str) -> str:
    """Return the name MODULE:NAME by which another process finds a rule."""
    if isinstance(rule, str):
        return rule
    kind = type(rule)
    names = vars(sys.modules[kind.__module__])
    name = next((name for name, value in names.items() if value is rule), None)
    if name is None and names.get(kind.__name__) is kind and _is_as_made(rule):
        name = kind.__name__
    if name is None or kind.__module__ == "__main__":
        accepted = "a server's process must find it: put the rule into a module of its own and pass 'MODULE:NAME'"
        raise InputError("rule", f"{kind.__module__}:{kind.__name__}", accepted)
    return f"{kind.__module__}:{name}"


def _is_as_made(rule: Rule) -> bool:
    try:
        return vars(type(rule)()) == vars(rule)
    except TypeError:  # its class needs arguments
        return False
