"""CPU kernels, compiled by numba. `LAYOUTS` has the ways to pack weights. `BACKENDS` has the attention backends.

Other packages import only these two tables. Without numba, both are empty, and the engine uses only torch.

`layouts` names the ways to pack a weight: `panels` multiply in vector registers (AVX-512), `matrix_panels` in Intel's
matrix registers (AMX), and `highest` finds the highest logit. `attention` computes a step's attention: `decodes`
handles queries that share their keys with no other query. `prompts` handles queries that share keys, in tiles that stay
in vector registers (`tiles`) or in matrix registers (`amx`). Inner loops are LLVM vector instructions or assembly
(`simd`), because compilers move sums from registers to memory.
"""

from __future__ import annotations

from xrunner.attention.base import AttentionBackend
from xrunner.packing.base import WeightLayout

LAYOUTS: dict[str, WeightLayout] = {}
"""Weight layouts by name, the fastest first."""
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
