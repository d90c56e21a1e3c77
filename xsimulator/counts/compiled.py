"""Compile loops with numba, and store the compiled code on disk.

A helper is compiled into its callers. A function that Python calls is compiled when it first runs. This takes some
seconds. The compiled code is stored on disk (`xgpt.core.compiled_code`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_WITHOUT_ENTRY: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
helper = njit(forceinline=True, **_WITHOUT_ENTRY)
"""Compile a function into its callers. Compiling an entry point for Python, too, would take a third of the time."""


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that Python can call. The code is stored on disk if numba finds a writable
    cache directory.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether the compiled form of a `kept` function is on disk."""
    directory, code = function.stats.cache_path, function.__code__  # type: ignore[attr-defined]
    name = f"{Path(code.co_filename).stem}.{code.co_name}-*.nbi"
    return directory is not None and any(Path(directory).glob(name))


def _borrowed(typing_context: Any, arrays: Any) -> Any:
    """Return the same named tuple, but with arrays without reference counts. The caller must keep the arrays alive.

    Whenever an array is read from a tuple, numba changes a reference count atomically. This would take most of the
    loops' time.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        [found] = values
        for i, kind in enumerate(signature.args[0].types):
            if isinstance(kind, types.Array):
                array = context.make_array(kind)(context, builder, value=builder.extract_value(found, i))
                array.meminfo = ir.Constant(array.meminfo.type, None)
                array.parent = ir.Constant(array.parent.type, None)
                found = builder.insert_value(found, array._getvalue(), i)
        return found

    return arrays(arrays), generate


borrowed: Callable[[Any], Any] = intrinsic(_borrowed)  # type: ignore[assignment]
