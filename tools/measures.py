"""Measure the product's code: files, lines, long functions and classes, late imports, and names with two meanings.

    python -m tools.measures [COMMIT]

With a commit, this also measures the commit, and divides this tree's lines into those of files that existed then
(git follows renames) and those of new files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache

PACKAGES = ("xgpt", "xprofiler", "xrunner", "xscheduler", "xsimulator")
PARAMETERS = 7


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


@cache
def functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def classes(text: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("command" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether numba or Triton compiles the function, or the function creates an intrinsic for numba."""
    names = {name for each in function.decorator_list for name in re.findall(r"\w+", ast.unparse(each))}
    return bool(names & {"njit", "inlined", "jit"})


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def imports_within(text: str) -> int:
    """Return the number of imports inside functions."""
    found = {each for function in functions(text) for each in ast.walk(function)}
    return len([each for each in found if isinstance(each, ast.Import | ast.ImportFrom)])


def repeated(names: list[str]) -> int:
    """Return how many names occur more than once."""
    return len([name for name, count in Counter(names).items() if count > 1])


def measures(commit: str) -> dict[str, int]:
    names = git("ls-tree", "-r", "--name-only", commit, *PACKAGES).split()
    texts = {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}
    lines = {name: text.count("\n") for name, text in texts.items()}
    found = [function for text in texts.values() for function in functions(text)]
    all_classes = [each for text in texts.values() for each in classes(text)]

    def longer(than: int, among: Sequence[ast.stmt] = found) -> int:
        return sum((each.end_lineno or 0) - each.lineno + 1 > than for each in among)

    wide = [each for each in found if num_parameters(each) > PARAMETERS and not is_command(each)]
    return {
        "files": len(texts),
        "lines": sum(lines.values()),
        "files over 400 lines": sum(number > 400 for number in lines.values()),
        "functions over 50 lines": longer(50),
        "functions over 80 lines": longer(80),
        "classes over 300 lines": longer(300, all_classes),
        "class names that stand for two things": repeated([each.name for each in all_classes]),
        "imports inside functions": sum(map(imports_within, texts.values())),
        f"functions over {PARAMETERS} parameters, click's commands apart": len(wide),
        "of these compiled kernels": sum(map(is_kernel, wide)),
    }


def divided(then: str) -> dict[str, int]:
    """Return the files and lines of this tree that existed in the commit, and the new ones."""
    changes = [line.split("\t") for line in git("diff", "--name-status", "-M40%", then, "HEAD", *PACKAGES).splitlines()]
    new = {names[-1] for status, *names in changes if status[0] in "AC"}
    names = [name for name in git("ls-tree", "-r", "--name-only", "HEAD", *PACKAGES).split() if name.endswith(".py")]
    lines = {name: git("show", f"HEAD:{name}").count("\n") for name in names}
    of_new = [number for name, number in lines.items() if name in new]
    return {
        "files that stood then": len(lines) - len(of_new),
        "their lines": sum(lines.values()) - sum(of_new),
        "new files": len(of_new),
        "new files' lines": sum(of_new),
    }


if __name__ == "__main__":
    columns = [measures(commit) for commit in (*sys.argv[1:2], "HEAD")]
    for name in columns[0]:
        print(f"{name:60} {'  '.join(f'{column[name]:>8,}' for column in columns)}")
    if sys.argv[1:]:
        for name, number in divided(sys.argv[1]).items():
            print(f"{name:60} {number:>18,}")
