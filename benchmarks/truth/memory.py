"""Compare K/V blocks that vLLM 0.15.1 logged on H100 with predictions.

From docs/plans/2026-03-04-sim-to-real-accuracy-validation-design.md of inference-sim/sim-to-real-accuracy-validation:
half precision, 2,048 tokens and 128 requests in a step, 90% of the memory. The engine's own memory was fitted to the
dense models, and Mixtral verifies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.truth.loads import Served
from benchmarks.truth.sources import Figures, Row, predicted

LOGGED = {("llama-2-7b", 1): 7463, ("codellama-34b", 2): 26603, ("llama-2-70b", 4): 31357, ("mixtral-8x7b", 2): 27511}
VERIFYING = {"mixtral-8x7b"}


def rows(path: Path) -> Iterator[Row]:
    """Yield one row for each log. The logs are in this file, and `path` is not read."""
    for (model, tp), blocks in LOGGED.items():
        served = Served(model, "h100x8", "float16", tp, "vllm-0.15", 128, 2048)
        found, why_not = predicted(partial(_blocks, served))
        is_fitted = model not in VERIFYING
        yield Row("K/V blocks", model, is_fitted, {"blocks": float(blocks)}, found, f"TP {tp}", why_not)


def _blocks(served: Served) -> Figures:
    return {"blocks": float(served.kv.blocks)}
