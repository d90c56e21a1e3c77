"""Compute a profile from published latencies: AIConfigurator's tables, from its wheel or a folder.

The folder of a kind of device holds `<family of operators>/<framework>/<version>/<operator>_perf.parquet` with
latencies in milliseconds. Matrix products, attention and all-reduces come from these tables. All other times (norms,
activations, hops between stages, K/V transfer) come from the datasheet, as `provenance` states.

Between a table's points, logarithms of latencies are interpolated, which is exact for power laws. Beyond the last
point, latencies are proportional to size.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec, DType, EngineSpec, ModelSpec, Profile
from xprofiler import analytic
from xprofiler.imported_layers import TOKENS, ImportedLayers, head
from xprofiler.tables import Tables

PACKAGE = "aiconfigurator_core"

SYSTEMS = {
    "a100-sxm4-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100-80gb-hbm3": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
"""The tables' folder for each kind of device."""

TABLE_DTYPES: Mapping[DType, str] = {"float16": "bfloat16", "bfloat16": "bfloat16", "float8": "fp8"}
"""The tables' name for each dtype. Both half-precision types are equally fast."""


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    engine: EngineSpec,
    folder: Path | None = None,
    kv_dtype: DType | None = None,
) -> Profile:
    """Return a profile from the tables, for every tensor-parallel degree that fits in a node and each way to divide the
    experts.

    Args:
        kv_dtype: type of K/V. None means the dtype.
        engine: the engine. Its framework's kernels and the times of its loop are used.
        folder: tables of one kind of device, or of several by the names in `SYSTEMS`. None means those of the installed
            wheel.

    Raises:
        InputError: there are no tables for this device, framework, dtype or model, or pyarrow is not installed.
    """
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "tables can be imported only for decoder-only models")
    if dtype not in TABLE_DTYPES:
        raise InputError("dtype", dtype, f"tables can be imported only for {', '.join(TABLE_DTYPES)}")
    root = _folder_of(cluster.device.name, folder)
    kept = TABLE_DTYPES[kv_dtype or dtype]
    tables = Tables(root, engine.framework, TABLE_DTYPES[dtype], kept, cluster.device, engine.version)
    kernels = analytic.Kernels(cluster, dtype)
    layers = tuple(ImportedLayers(spec, cluster, tables, kernels, engine).all())
    return Profile(
        source="imported",
        model=spec.shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine=engine.framework,
        engine_version=engine.version,
        layers=layers,
        embedding=analytic.curve(lambda n: kernels.copy(2 * n * spec.hidden_size), TOKENS),
        head=head(spec, tables, kernels, 1),
        overhead=analytic.loop(engine.step_s or 0.0, engine),
        **analytic.transfers(spec, cluster, dtype, kv_dtype),
        provenance={
            **tables.provenance,
            "norms, activations, embedding, hops, K/V transfer": "datasheet",
            "serving loop": f"configs/engines/{engine.name}.yaml",
        },
        environment=_package() if folder is None else {"folder": root.name},
    )


def wheel_folder() -> Path:
    """Return the folder of the installed wheel's tables.

    Raises:
        InputError: the wheel is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InputError(
            "import_from", "aiconfigurator", "it is not installed: pip install --no-deps aiconfigurator-core"
        )
    return Path(found.submodule_search_locations[0]) / "systems"


def _package() -> dict[str, str]:
    try:
        return {"aiconfigurator-core": version("aiconfigurator-core")}
    except PackageNotFoundError:
        return {}


def _folder_of(device: str, folder: Path | None) -> Path:
    if folder is not None and (folder / "gemm").is_dir():
        return folder
    base = wheel_folder() / "data" if folder is None else folder
    root = base / SYSTEMS.get(device, device)
    if not (root / "gemm").is_dir():
        systems = sorted(name for name, system in SYSTEMS.items() if (base / system / "gemm").is_dir())
        raise InputError(
            "cluster.device", device, f"{base} has tables for {', '.join(systems) or 'no device'}; choose one of these"
        )
    return root
