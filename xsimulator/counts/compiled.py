"""xsimulator.counts.compiled: loops compiled by numba, and how they are kept.

A helper is compiled into what calls it. What Python calls is compiled when it is first run, some seconds, and kept on
disk (`xgpt.core.compiled_code`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

helper = njit(forceinline=True)


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls, and keep it on disk; not if no directory can be written.

    Threads run it side by side.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether what `kept` has compiled lies on disk; else it is compiled when it is first run."""
    directory, file = function.stats.cache_path, function.__code__.co_filename  # type: ignore[attr-defined]
    return directory is not None and any(Path(directory).glob(f"{Path(file).stem}.*.nbi"))


def _borrowed(typing_context: Any, arrays: Any) -> Any:
    """The same named tuple with arrays that no references are counted of: its caller holds them.

    Numba counts one atomically whenever an array is read out of a tuple, which took most of the time of these loops.
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
