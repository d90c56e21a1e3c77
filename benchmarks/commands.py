"""Commands that people publish, read as `xgpt compare --current` reads them: how many are scored, and why others not.

    python -m benchmarks.commands FOLDER... [--cluster h200x8] [--markdown]

Every distinct command in the Markdown, shell scripts and YAML of the folders (checkouts of vllm-project/recipes,
llm-d/llm-d-benchmark, vllm-project/production-stack, for example) that starts vLLM, SGLang or TensorRT-LLM: in fenced
blocks, in texts of YAML, and as containers or Helm values. Refusals are listed by reason, with one command each.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from xgpt.comparing.launched import Launched, in_manifest, in_shell
from xgpt.comparing.read import READERS
from xgpt.core.errors import InputError
from xgpt.resolve import load_cluster

STARTS = re.compile(
    r"vllm serve|vllm\.entrypoints|sglang\.launch_server|sglang serve|dynamo\.(vllm|sglang|trtllm)|trtllm-serve|"
    r"docker run"
)
FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.S | re.M)


def commands(folder: Path) -> Iterator[tuple[Path, Launched]]:
    """Yield the engines that the files of a folder start, each with its file."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".yaml", ".yml", ".md", ".sh"):
            text = path.read_text(encoding="utf-8", errors="replace")
            for found in _in_yaml(text) if path.suffix in (".yaml", ".yml") else _in_text(text, path.suffix == ".md"):
                yield path.relative_to(folder), found


def _in_yaml(text: str) -> Iterator[Launched]:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        return
    for document in documents:
        yield from in_manifest(document)
        for value in _strings(document):
            yield from _in_text(value, "```" in value)


def _in_text(text: str, is_fenced: bool) -> Iterator[Launched]:
    for block in FENCED.findall(text) if is_fenced else [text]:
        if STARTS.search(block):
            try:
                yield from in_shell(block)
            except InputError:  # prose, or another language than a shell's
                continue


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _strings(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--cluster", default="h200x8")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    edge = "| " if given.markdown else ""
    cluster = load_cluster(given.cluster)
    for folder in given.folders:
        distinct = {(each.engine, tuple(each.words)): path for path, each in commands(folder)}
        refused: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (engine, words), path in distinct.items():
            try:
                READERS[engine](list(words), cluster)
            except InputError as error:
                refused[error.field, error.accepted].append(f"{path}: {error.value}")
        read = len(distinct) - sum(map(len, refused.values()))
        print(f"{folder}: {len(distinct)} distinct commands, {read} read")
        for (field, why), rows in sorted(refused.items(), key=lambda item: -len(item[1])):
            print(f"{edge}{len(rows)} | {field} | {why} | {rows[0]}"[:300] + (" |" if edge else ""))


if __name__ == "__main__":
    main()
