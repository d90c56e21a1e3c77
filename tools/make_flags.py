"""Write `xgpt/comparing/engine_flags.json`: flags of released engines, read from their sources without running them.

    python -m tools.make_flags --vllm WHEEL... --sglang WHEEL [--tensorrt-llm serve.py 1.2]

vLLM's newest wheel comes first. From earlier wheels, only flags that the newest no longer has are kept. If the source
does not show whether a flag takes a value, the flag takes a value if one follows. tests/vllm compares the newest flags
with vLLM's own parser.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

import click

OUT = Path(__file__).parents[1] / "xgpt" / "comparing" / "engine_flags.json"
Flags = dict[str, tuple[str, list[str]]]
"""For each flag, by its first long name without dashes: what it takes, and its other names."""
Fields = dict[tuple[str, str], str]
"""The annotations of fields, by class and name."""
WORDS = {"store_true": "nothing", "store_false": "nothing", "BooleanOptionalAction": "switch"}


def argparse_flags(tree: ast.AST, fields: Fields | None = None) -> Flags:
    """Return the flags of calls of `add_argument`.

    Args:
        fields: annotations of vLLM's configs, from which vLLM creates keywords by `get_kwargs(Config)["field"]`.
    """
    flags: Flags = {}
    sources = _sources(tree)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = _texts(call)
            if names and names[0].startswith("-"):
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                place = None if None not in keywords else _place(keywords[None], sources)
                annotation = None if place is None else (fields or {}).get(place)
                _add(flags, names, _takes(keywords) if annotation is None else _of_annotation(annotation))
    return flags


def _texts(call: ast.Call) -> list[str]:
    return [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]


def _sources(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """Return the config, and its field if given, of each variable to which a module assigns `get_kwargs`."""
    sources: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if (call := re.fullmatch(r"get_kwargs\((\w+)\)(?:\['(\w+)'\])?", ast.unparse(node.value))) is not None:
                sources[node.targets[0].id] = call[1], call[2] or ""
            elif (place := _place(node.value, sources)) is not None:
                sources[node.targets[0].id] = place
    return sources


def _place(keywords: ast.expr, sources: dict[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return the config and the field whose keywords an expression has."""
    text = ast.unparse(keywords)
    for name, (config, field) in sources.items():
        if field and re.search(rf"\b{name}\b", text):
            return config, field
        if (part := re.search(rf"\b{name}\['(\w+)'\]", text)) is not None:
            return config, part[1]
    return None


def config_fields(trees: Iterable[ast.AST]) -> Fields:
    """Return the annotations of the fields of all classes, including fields of base classes."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    annotations: Fields = {}
    for name, node in classes.items():
        parents = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        for one in (*parents, node):
            for field in one.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    annotations[name, field.target.id] = ast.unparse(field.annotation)
    return annotations


def _of_annotation(annotation: str) -> str:
    """Return what vLLM's parser takes for a field of this type."""
    kinds = {
        kind.strip() for kind in re.split(r"\|(?![^\[]*\])", re.sub(r"^Optional\[(.*)\]$", r"\1 | None", annotation))
    }
    if kinds == {"bool", "str", "None"}:
        return "optional"
    if "bool" in kinds:
        return "switch"
    return "many" if any(re.match(r"(list|tuple|set|List)\[", kind) for kind in kinds) else "value"


def _takes(keywords: dict[str | None, ast.expr]) -> str:
    action = keywords.get("action")
    if action is not None:
        name = action.value if isinstance(action, ast.Constant) else ast.unparse(action).rpartition(".")[2]
        return WORDS.get(str(name), "value" if "metavar" in keywords else "optional")
    nargs = keywords.get("nargs")
    if isinstance(nargs, ast.Constant) and nargs.value in ("+", "*"):
        return "many"
    return "optional" if None in keywords else "value"


def click_flags(tree: ast.AST, command: str) -> Flags:
    """Return the options of a click command."""
    flags: Flags = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == command:
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "click.option":
                    names = _texts(call)
                    is_flag = any(keyword.arg == "is_flag" for keyword in call.keywords)
                    _add(flags, [name for name in names if name.startswith("-")], "nothing" if is_flag else "value")
    return flags


def field_flags(tree: ast.AST, only: str | None = None) -> Flags:
    """Return the flags of the annotated fields of classes.

    Args:
        only: the only class to read. None means all classes, in which fields annotated `A[type, help]` are flags.
    """
    flags: Flags = {}
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
            _add(flags, names, takes)
    return flags


def _kind(annotation: str) -> str:
    head = re.sub(r"^(Optional|Union)\[", "", annotation)
    if head.startswith("bool"):
        return "nothing" if not annotation.startswith("Optional") else "optional"
    return "many" if re.match(r"(List|list)\[", head) else "value"


def _add(flags: Flags, names: list[str], takes: str) -> None:
    names = [re.sub("_", "-", name) for name in names]
    first = next((name for name in names if name.startswith("--")), names[0])
    flags[first.lstrip("-")] = takes, [name for name in names if name != first]


def _modules(wheel: Path, pattern: str) -> Iterator[ast.AST]:
    with ZipFile(wheel) as files:
        for name in files.namelist():
            if re.fullmatch(pattern, name):
                yield ast.parse(files.read(name))


def of_vllm(wheel: Path) -> Flags:
    """Return the flags of `vllm serve` in a wheel."""
    flags: Flags = {}
    fields = config_fields(_modules(wheel, r"vllm/config(/\w+)?\.py"))
    for tree in _modules(wheel, r"vllm/(engine/arg_utils|entrypoints/(openai|launchers)/cli_args)\.py"):
        flags |= (
            argparse_flags(tree, fields) | field_flags(tree, "FrontendArgs") | field_flags(tree, "BaseFrontendArgs")
        )
        for name in re.findall(r"del frontend_kwargs\['(\w+)'\]\['nargs'\]", ast.unparse(tree)):
            flags[name.replace("_", "-")] = "value", []
    return flags


def of_sglang(wheel: Path) -> Flags:
    """Return the flags of `python -m sglang.launch_server` in a wheel."""
    flags: Flags = {}
    for tree in _modules(wheel, r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py"):
        flags |= argparse_flags(tree) | field_flags(tree)
    return flags


def quantizations(wheel: Path) -> set[str]:
    """Return the names that --quantization takes in a wheel."""
    (tree,) = _modules(wheel, r"vllm/model_executor/layers/quantization/__init__\.py")
    listed = re.search(r"QuantizationMethods = Literal\[(.*?)\]|QUANTIZATION_METHODS.*? = \[(.*?)\]", ast.unparse(tree))
    assert listed is not None
    return set(re.findall(r"'([\w-]+)'", listed[0]))


@click.command()
@click.option("--vllm", "wheels", type=click.Path(path_type=Path), multiple=True, required=True, help="newest first")
@click.option("--sglang", type=click.Path(path_type=Path), required=True)
@click.option("--tensorrt-llm", "trt", type=(click.Path(path_type=Path), str))
def main(wheels: tuple[Path, ...], sglang: Path, trt: tuple[Path, str] | None) -> None:
    """Write the file. Without TensorRT-LLM's serve.py, its table stays unchanged."""
    newest = of_vllm(wheels[0])
    known = {f"--{name}" for name in newest} | {other for _, others in newest.values() for other in others}
    earlier: Flags = {}
    for wheel in wheels[1:]:
        for name, (takes, others) in of_vllm(wheel).items():
            if f"--{name}" not in known:
                earlier[name] = takes, [other for other in others if other not in known]
    version = re.compile(r"-([0-9.]+)-")
    engines = {
        "vllm": (version.findall(wheels[0].name)[0], newest),
        "vllm, earlier": (", ".join(version.findall(wheel.name)[0] for wheel in wheels[1:]), earlier),
        "sglang": (version.findall(sglang.name)[0], of_sglang(sglang)),
        "sglang, earlier": _kept("sglang, earlier"),
        "tensorrt-llm": _kept("tensorrt-llm")
        if trt is None
        else (trt[1], click_flags(ast.parse(trt[0].read_text()), "serve")),
    }
    for engine, (_, flags) in engines.items():
        print(engine, len(flags), file=sys.stderr)
    document = {
        "versions": {engine: release for engine, (release, _) in engines.items()},
        "takes": {
            engine: {name: takes for name, (takes, _) in flags.items()} for engine, (_, flags) in engines.items()
        },
        "aliases": {
            engine: {other: name for name, (_, others) in flags.items() for other in others}
            for engine, (_, flags) in engines.items()
        },
        "quantizations": sorted(set().union(*(quantizations(wheel) for wheel in wheels))),
    }
    OUT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _kept(engine: str) -> tuple[str, Flags]:
    """Return an engine's version and flags in the present file."""
    document = json.loads(OUT.read_text())
    others: dict[str, list[str]] = {}
    for other, name in document["aliases"][engine].items():
        others.setdefault(name, []).append(other)
    flags = {name: (takes, others.get(name, [])) for name, takes in document["takes"][engine].items()}
    return document["versions"][engine], flags


if __name__ == "__main__":
    main()
