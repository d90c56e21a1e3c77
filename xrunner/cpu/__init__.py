"""CPU kernels, compiled by numba. `LAYOUTS` lists weight layouts. `BACKENDS` lists attention backends.

Without numba, both are empty, and the engine uses only torch.

`layouts` lists the weight layouts: `panels` multiplies in vector registers (AVX-512), `matrix_panels` in Intel's matrix
registers (AMX). `highest` finds each row's argmax. `attention` computes a step's attention. `prompts` handles queries
that share keys, in tiles that stay in vector registers (`tiles`) or in matrix registers (`amx`). `decodes` handles all
other queries. Inner loops are LLVM vector instructions or assembly (`simd`), because a compiler would keep sums in
memory.
"""

from __future__ import annotations

from xrunner.attention.base import AttentionBackend
from xrunner.packing.base import WeightLayout

LAYOUTS: dict[str, WeightLayout] = {}
"""Weight layouts by name. Each dtype's first available layout is the default."""
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
