"""Write `xgpt/comparing/engine_flags.py`: the flags of released engines, read from their sources without running them.

    python -m tools.make_flags --vllm WHEEL... --sglang WHEEL --tensorrt-llm serve.py 1.2

vLLM's wheels are of earlier versions: the flags of the newest are in `vllm_flags.py`, which its own parser checks. A
flag whose source does not show whether it takes a value takes one if one follows.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import click

OUT = Path(__file__).parents[1] / "xgpt" / "comparing" / "engine_flags.py"
Flags = dict[str, tuple[str, list[str]]]
"""What each flag takes, and its other names, by its longest name without dashes."""
WORDS = {"store_true": "nothing", "store_false": "nothing", "BooleanOptionalAction": "switch"}


def argparse_flags(tree: ast.AST) -> Flags:
    """Return the flags of calls of `add_argument`."""
    found: Flags = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [
                argument.value
                for argument in call.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            if names and names[0].startswith("-"):
                _add(found, names, _takes({argument.arg: argument.value for argument in call.keywords}))
    return found


def _takes(keywords: dict[str | None, ast.expr]) -> str:
    action = keywords.get("action")
    if action is not None:
        name = action.value if isinstance(action, ast.Constant) else ast.unparse(action).rpartition(".")[2]
        return WORDS.get(str(name), "optional")
    nargs = keywords.get("nargs")
    if isinstance(nargs, ast.Constant) and nargs.value in ("+", "*"):
        return "many"
    return "optional" if None in keywords else "value"


def click_flags(tree: ast.AST, command: str) -> Flags:
    """Return the options of a click command."""
    found: Flags = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == command:
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "click.option":
                    names = [
                        argument.value
                        for argument in call.args
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    ]
                    is_flag = any(argument.arg == "is_flag" for argument in call.keywords)
                    _add(found, [name for name in names if name.startswith("-")], "nothing" if is_flag else "value")
    return found


def field_flags(tree: ast.AST, only: str | None = None) -> Flags:
    """Return the flags of the annotated fields of classes.

    Args:
        only: the one class; None: all, of which fields are flags if they are annotated `A[type, help]`.
    """
    found: Flags = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or only not in (None, node.name):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            kind, names = ast.unparse(field.annotation), ["--" + field.target.id.replace("_", "-")]
            if only is None:
                if not re.match(r"A\[", kind) or "no_cli=True" in kind:
                    continue
                if named := re.search(r"cli_name='([^']+)'", kind):
                    names = [named[1]]
                if aliases := re.search(r"aliases=(\[[^\]]*\])", kind):
                    names += ast.literal_eval(aliases[1])
                takes = "optional" if "action=" in kind else _kind(kind[2:])
            else:
                takes = "switch" if kind == "bool" else _kind(kind)
            _add(found, names, takes)
    return found


def _kind(annotation: str) -> str:
    head = re.sub(r"^(Optional|Union)\[", "", annotation)
    if head.startswith("bool"):
        return "nothing" if not annotation.startswith("Optional") else "optional"
    return "many" if re.match(r"(List|list)\[", head) else "value"


def _add(found: Flags, names: list[str], takes: str) -> None:
    names = [re.sub("_", "-", name) for name in names]
    longest = max(names, key=len)
    found[longest.lstrip("-")] = takes, [name for name in names if name != longest]


def _modules(wheel: Path, pattern: str) -> Iterator[ast.AST]:
    with ZipFile(wheel) as files:
        for name in files.namelist():
            if re.fullmatch(pattern, name):
                yield ast.parse(files.read(name))


def of_vllm(wheel: Path) -> Flags:
    """Return the flags of `vllm serve` in a wheel."""
    found: Flags = {}
    for tree in _modules(wheel, r"vllm/(engine/arg_utils|entrypoints/openai/cli_args)\.py"):
        found |= argparse_flags(tree) | field_flags(tree, "FrontendArgs") | field_flags(tree, "BaseFrontendArgs")
    return found


def of_sglang(wheel: Path) -> Flags:
    """Return the flags of `python -m sglang.launch_server` in a wheel."""
    found: Flags = {}
    for tree in _modules(wheel, r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py"):
        found |= argparse_flags(tree) | field_flags(tree)
    return found


def _wrapped(words: str, indent: int) -> str:
    return textwrap.indent(textwrap.fill(words, 100, break_on_hyphens=False), " " * indent)


def render(engines: dict[str, tuple[str, Flags]]) -> str:
    """Return the module."""
    head = (
        '"""Flags of engines: made by `python -m tools.make_flags` from released sources. Do not edit."""\n\n'
        "from __future__ import annotations\n\n"
    )
    versions = {engine: version for engine, (version, _) in engines.items()}
    parts = [head, f"VERSIONS = {versions!r}\n\n".replace("'", '"'), "TAKES: dict[str, dict[str, str]] = {\n"]
    for engine, (_, flags) in engines.items():
        parts.append(f'    "{engine}": {{\n')
        for kind in ("nothing", "switch", "value", "optional", "many"):
            names = " ".join(sorted(name for name, (takes, _) in flags.items() if takes == kind))
            parts.append(f'        "{kind}": """\n{_wrapped(names, 12)}\n        """,\n')
        parts.append("    },\n")
    parts.append('}\n"""The names of flags, by what they take."""\n\nALIASES: dict[str, str] = {\n')
    for engine, (_, flags) in engines.items():
        pairs = " ".join(f"{other}={name}" for name, (_, others) in sorted(flags.items()) for other in sorted(others))
        parts.append(f'    "{engine}": """\n{_wrapped(pairs, 8)}\n')
        parts.append('    """,\n')
    parts.append('}\n"""Other names, with their dashes, and the flags that they stand for."""\n')
    return "".join(parts)


@click.command()
@click.option("--vllm", "wheels", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--sglang", type=click.Path(path_type=Path), required=True)
@click.option("--tensorrt-llm", "trt", type=(click.Path(path_type=Path), str), required=True)
def main(wheels: tuple[Path, ...], sglang: Path, trt: tuple[Path, str]) -> None:
    """Write the module."""
    from xgpt.comparing.vllm_flags import ALIASES as KNOWN
    from xgpt.comparing.vllm_flags import TAKES

    earlier: Flags = {}
    for wheel in wheels:
        earlier |= of_vllm(wheel)
    new = {
        name: earlier_flags for name, earlier_flags in earlier.items() if name not in TAKES and f"--{name}" not in KNOWN
    }
    new = {name: (takes, [other for other in others if other not in KNOWN]) for name, (takes, others) in new.items()}
    version = re.compile(r"-([0-9.]+)-")
    engines = {
        "vllm": (", ".join(version.findall(wheel.name)[0] for wheel in wheels), new),
        "sglang": (version.findall(sglang.name)[0], of_sglang(sglang)),
        "tensorrt-llm": (trt[1], click_flags(ast.parse(trt[0].read_text()), "serve")),
    }
    for engine, (_, flags) in engines.items():
        print(engine, len(flags), file=sys.stderr)
    OUT.write_text(render(engines))


if __name__ == "__main__":
    main()
