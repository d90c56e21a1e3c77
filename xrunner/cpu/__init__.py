"""Kernels for CPUs, compiled by numba, with two doors: pack a weight (`LAYOUTS`), and attend (`BACKENDS`).

Nothing else of this package is imported outside of it. Without numba both are empty, and the engine runs on torch only.

`layouts` names the ways to pack: `panels` multiply in vector registers (AVX-512), `matrix_panels` in Intel's matrix
registers (AMX), and `highest` finds the highest logit. `attention` computes a step's attention: `decodes` has a query
that is alone with its keys, `prompts` queries that share keys, in `tiles` of vector registers or in matrix registers
(`amx`). Inner loops are LLVM vector instructions (`simd`) or `assembly`, because compilers spill sums to memory.
"""

from __future__ import annotations

from xrunner.attention.base import AttentionBackend
from xrunner.packing.base import WeightLayout

LAYOUTS: dict[str, WeightLayout] = {}
"""By name, the fastest first."""
BACKENDS: dict[str, type[AttentionBackend]] = {}

try:
    from xrunner.cpu.attention import NumbaAttention
    from xrunner.cpu.layouts import LAYOUTS as _LAYOUTS
except ModuleNotFoundError as error:
    if error.name not in ("numba", "llvmlite"):
        raise
else:
    LAYOUTS |= _LAYOUTS
    BACKENDS["numba"] = NumbaAttention
