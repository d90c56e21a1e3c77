"""Append inner loops in assembly to functions that numba compiles, for registers that a compiler does not manage.

Such a loop reads its arguments from an array of int64, whose address is in %rdi.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import llvmlite.binding
from llvmlite import ir


def append(builder: ir.IRBuilder, place: ir.Value, code: str, overwritten: Iterable[str]) -> None:
    """Append assembly to a function that is being compiled.

    Args:
        place: address of the array.
        overwritten: registers other than %rdi that the code overwrites, and other state that it changes.
    """
    kind = ir.FunctionType(ir.VoidType(), [place.type])
    constraints = ",".join(["{rdi}", *[f"~{{{name}}}" for name in overwritten]])
    builder.asm(kind, code, constraints, [place], True)


def argument(number: int) -> str:
    """Return the assembly operand for an element of the array of arguments."""
    return f"{8 * number}(%rdi)"


@cache
def enable() -> None:
    """Let LLVM read assembly. Call this before the first function that contains assembly is compiled."""
    llvmlite.binding.initialize_native_asmparser()
