"""Imports point one way: what each package may import, held over every file, relative and late imports included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")

CORE = {"xgpt.core"}
LOW = CORE | {"xgpt.checkpoints", "xgpt.observation", "xgpt.connection"}

ROOM = {f"xrunner.{name}" for name in ("cpu", "activations", "attention.base", "eight_bits", "memory", "packing.base")}
"""What the kernels for CPUs import."""
DOORS = {"xrunner.cpu", "xrunner.cpu.BACKENDS", "xrunner.cpu.LAYOUTS"}
"""All that is imported of them elsewhere."""

ALLOWED: dict[str, set[str]] = {
    "xgpt.core": CORE,
    "xgpt.core.schema": {"xgpt.core.schema", "xgpt.core.documents"},
    "xgpt.core.errors": set(),
    "xgpt.core.numbers": set(),
    "xgpt.core.processes": set(),
    "xgpt.core.refusals": {"xgpt.core.errors"},
    "xgpt.core.documents": set(),
    "xgpt.core.io": {"xgpt.core.documents", "xgpt.core.schema", "xgpt.core.errors", "xgpt.core.refusals"},
    "xgpt.checkpoints": CORE | {"xgpt.checkpoints"},
    "xgpt.observation": CORE | {"xgpt.observation"},
    "xgpt.client": CORE | {"xgpt.connection", "xgpt.metrics_pages"},
    "xgpt.metrics_pages": {"xgpt.connection"},
    "xgpt.connection": CORE,
    "xgpt.health": set(),
    "xgpt.pages": {"xgpt.pages"},
    "xgpt.resolve": CORE | {"xgpt.checkpoints"},
    "xsimulator": CORE | {"xgpt.resolve", "xsimulator"},
    "xscheduler": LOW | {"xgpt.resolve", "xsimulator", "xscheduler"},
    "xrunner": LOW | {"xgpt.pages", "xrunner"},
    "xrunner.channel": LOW | {"xrunner.channel", "xrunner.executor", "xrunner.generation"},
    "xrunner.server.api": LOW | {"xrunner.generation", "xrunner.grammar", "xrunner.server.api"},
    "xrunner.server.access": LOW | {"xrunner.server.access", "xrunner.server.api.errors"},
    "xrunner.server.observe": LOW | {"xrunner.server.observe", "xrunner.server.request_info", "xrunner.channel"},
    "xrunner.cpu": LOW | ROOM,
    "xrunner.vllm": LOW | {"xrunner.vllm", "xrunner.channel", "xrunner.generation"},
    "xprofiler": LOW | {"xgpt.resolve", "xprofiler"},
    "xprofiler.vllm": LOW | {"xprofiler", "xrunner.vllm"},
    "xprofiler.ranks": LOW | {"xprofiler", "xrunner"},
    "xprofiler.compile_attention": LOW | {"xprofiler", "xrunner"},
    "xprofiler.bench": LOW | {"xprofiler", "xrunner"},
    "xprofiler.encoder_decoder": LOW | {"xprofiler", "xrunner"},
    "xprofiler.measure": LOW | {"xprofiler", "xrunner"},
    "xgpt": {"xgpt", *PACKAGES},
}
"""Longest prefix wins."""

MAY_IMPORT_TORCH = (
    "xrunner",
    *(f"xprofiler.{name}" for name in ("bench", "compile_attention", "encoder_decoder", "measure", "ranks")),
)
LIGHT = {"xgpt.cli", *(f"xgpt.cli.{name}" for name in ("commands", "options", "values"))}
"""What help and shell completion import."""
HEAVY = {"torch", "numpy", "scipy", "numba", "pydantic", "optuna", "starlette", "transformers", "matplotlib"}


def may_import_torch(module: str) -> bool:
    """vLLM brings a torch of its own, which what runs inside it leaves to vLLM."""
    return any(is_in(module, package) for package in MAY_IMPORT_TORCH) and not is_in(module, "xrunner.vllm")


class Import(NamedTuple):
    module: str
    late: bool
    line: int


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def last_name(node: ast.expr) -> str:
    """Return the last name of `a` or `a.b`; empty for any other expression."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def type_checking_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


@cache
def imports_of(path: Path, root: Path) -> list[Import]:
    """All imports of a file as absolute names; `from a import b` is a.b, whether b is a module or not."""
    package = name_of(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    found: list[Import] = []

    def walk(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, late, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.extend(Import(f"{base}.{alias.name}", late, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            target = node.args[0]
            if isinstance(target, ast.JoinedStr):
                target = target.values[0]  # the package, if the text begins with one
            named = target.value if isinstance(target, ast.Constant) else "<computed>"
            found.append(Import(str(named), late, node.lineno))
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or type_checking_only(node)
        for child in ast.iter_child_nodes(node):
            if child._fields:
                walk(child, late)

    walk(tree_of(path), False)
    return found


def complaints(root: Path) -> list[str]:
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            module = name_of(path, root)
            rule = max((prefix for prefix in ALLOWED if is_in(module, prefix)), key=len)
            for imported in imports_of(path, root):
                ours = imported.module.split(".")[0] in PACKAGES
                if ours and not any(is_in(imported.module, allowed) for allowed in ALLOWED[rule]):
                    found.append(f"{path.relative_to(root)}:{imported.line}: {module} imports {imported.module}")
                inside = is_in(imported.module, "xrunner.cpu") and not is_in(module, "xrunner.cpu")
                if inside and imported.module not in DOORS:
                    found.append(f"{path.relative_to(root)}:{imported.line}: {imported.module} is behind a door")
                if is_in(imported.module, "torch") and not may_import_torch(module):
                    found.append(f"{path.relative_to(root)}:{imported.line}: {module} imports torch")
                if imported.module == "<computed>" and not ALLOWED[rule].issuperset(PACKAGES):
                    found.append(f"{path.relative_to(root)}:{imported.line}: {module} imports by a computed name")
                heavy = imported.module.split(".")[0] in HEAVY or imported.module.split(".")[0] in PACKAGES[1:]
                if module in LIGHT and heavy and not imported.late:
                    found.append(f"{path.relative_to(root)}:{imported.line}: {imported.module} must be a late import")
    return found


def test_imports_point_one_way() -> None:
    assert complaints(ROOT) == []


def test_a_class_name_stands_for_one_thing() -> None:
    texts = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("xgpt/core/schema/a.py", "from xgpt.core.io import load_json", "imports xgpt.core.io.load_json"),
        ("xgpt/core/schema/a.py", "from ..policies import rule", "xgpt.core.schema.a imports xgpt.core.policies.rule"),
        ("xgpt/core/policies/__init__.py", "from ...solving import solve", "imports xgpt.solving.solve"),
        ("xgpt/core/policies/a.py", "def f():\n    import torch.nn", "imports torch"),
        ("xsimulator/a.py", "def f():\n    from xscheduler import space", "xsimulator.a imports xscheduler.space"),
        ("xrunner/server/a.py", "from xgpt.solving import solve", "imports xgpt.solving.solve"),
        ("xrunner/a.py", "import importlib\nimportlib.import_module('xsimulator.clock')", "imports xsimulator.clock"),
        ("xrunner/a.py", "def f(n):\n    return __import__(n)", "by a computed name"),
        ("xrunner/a.py", "def f(n):\n    return __import__(f'{n}.a')", "by a computed name"),
        ("xprofiler/a.py", "def f(n):\n    return __import__(f'xrunner.models.{n}')", "imports xrunner.models."),
        ("xprofiler/analytic.py", "import xrunner.models.layers", "imports xrunner.models.layers"),
        ("xprofiler/imported.py", "from torch import nn", "imports torch"),
        ("xrunner/models/a.py", "from xrunner.cpu import panels", "xrunner.cpu.panels is behind a door"),
        ("xrunner/cpu/a.py", "from xrunner.worker import Worker", "imports xrunner.worker.Worker"),
        ("xrunner/vllm/a.py", "import torch", "imports torch"),
        ("xrunner/vllm/a.py", "from xrunner.engine import Engine", "imports xrunner.engine.Engine"),
        ("xgpt/cli/options.py", "import numpy as np", "numpy must be a late import"),
        ("xgpt/cli/commands.py", "from xscheduler.schedule import schedule", "must be a late import"),
    ],
)  # fmt: skip
def test_the_check_sees(tmp_path: Path, path: str, source: str, says: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    found = complaints(tmp_path)
    assert found and all(says in complaint for complaint in found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("xprofiler/measure.py", "import torch\nfrom xrunner.models.layers import Linear"),
        ("xgpt/cli/values.py", "import click\ndef f():\n    from xscheduler import space"),
        (
            "xrunner/server/http/app.py",
            "import torch\nfrom xgpt.core.version import __version__\nfrom ..engine import Engine",
        ),
        ("xscheduler/box_bounds.py", "from xsimulator.costs.curves import Line\nfrom . import space"),
    ],
)
def test_the_check_lets_pass(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert complaints(tmp_path) == []


FACADES = ("xgpt",)
"""Packages whose `__init__` only names what their modules have."""
TYPED = {"xrunner.server.api.writers": ("xrunner.server.api.choices",)}
"""Imports for types alone that still close a circle."""


def circles(root: Path) -> list[list[str]]:
    """Modules that import each other, at whatever level, for types as well."""
    files = {name_of(path, root): path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for imported in imports_of(path, root):
            target = imported.module
            while target and target not in files:
                target = target.rpartition(".")[0]
            computed = imported.module.endswith(".")
            if not computed and target not in ("", module, *FACADES, *TYPED.get(module, ())):
                graph[module].add(target)
    left = dict(graph)
    while leaves := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in leaves:
            del left[module]
    return [[module, *sorted(targets & left.keys())] for module, targets in left.items()]


def test_no_modules_import_each_other() -> None:
    assert circles(ROOT) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_circle_is_seen(tmp_path: Path, late: bool) -> None:
    (tmp_path / "xscheduler").mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        line = f"from xscheduler.{other} import x"
        (tmp_path / "xscheduler" / f"{name}.py").write_text(f"def f():\n    {line}" if late else line)
    assert {circle[0] for circle in circles(tmp_path)} == {"xscheduler.a", "xscheduler.b", "xscheduler.c"}


@pytest.mark.parametrize("first", ["import xgpt", "from xgpt.cli import main"])
def test_what_is_imported_first_is_light(first: str) -> None:
    code = f"import sys; {first}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_commands_start_without_what_few_of_them_use() -> None:
    code = "import sys, xgpt.cli.run; print(*{'scipy.optimize', 'scipy.sparse', 'scipy.stats'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "\n"
