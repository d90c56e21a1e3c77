"""List the file of each source, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from benchmarks.truth import closed, disaggregated, experts, memory
from benchmarks.truth.sources import Source, offline_rows, open_rows, silicon_rows
from xgpt.core.errors import XgptError
from xprofiler import imported


def _in_folder(name: str) -> Callable[[Path | None], Path | None]:
    def find(folder: Path | None) -> Path | None:
        path = None if folder is None else folder / name
        return path if path is not None and path.is_file() else None

    return find


@cache
def _in_wheel(folder: Path | None) -> Path | None:
    try:
        path = imported.wheel_folder() / "silicon_sample.csv"
    except XgptError:
        return None
    return path if path.is_file() else None


SOURCES = (
    Source(
        "vLLM, open loop",
        _in_folder("vllm_open_loop.csv"),
        open_rows,
        "BLIS: e2e mean 5.5 to 6.5, TTFT mean 9.5 to 12.2; AIConfigurator: e2e mean 7.9, TTFT mean 740 (medians)",
    ),
    Source("K/V blocks", lambda _: Path(memory.__file__), memory.rows),
    Source("TensorRT-LLM, offline", _in_folder("trtllm_max_throughput.csv"), offline_rows),
    Source(
        "TensorRT-LLM, offline, datasheet",
        _in_folder("trtllm_max_throughput.csv"),
        partial(offline_rows, is_imported=False),
    ),
    Source("silicon", _in_wheel, silicon_rows, "AIConfigurator 0.12 on 21 such rows: TPOT 6.3, TTFT 53.6 (means)"),
    Source("silicon, experts", _in_wheel, experts.served_rows),
    Source("disaggregated", _in_wheel, disaggregated.rows),
    Source("closed loops 2026", _in_folder("closed_loops_2026.csv"), closed.rows),
    Source("closed loops 2026, b", _in_folder("closed_loops_2026_b.csv"), closed.rows),
    Source(
        "closed loops 2026, datasheet", _in_folder("closed_loops_2026_b.csv"), partial(closed.rows, is_imported=False)
    ),
)
