"""Compile the attention kernels for GPUs that need not be present, and list registers, spills and shared memory.

    python -m benchmarks.kernels [--capability 90] [--json]

This needs triton, which includes NVIDIA's assembler. No kernel is run. There is a row for each model's shape, dtype and
use.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import click
import torch

from xrunner.gpu.attention import PROGRAMS_A_PROCESSOR, Tile, decode_tile, padded_dim, prompt_tile

BLOCK_SIZE = 16
PROCESSORS = 132
"""Number of an H100's multiprocessors."""
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


WHOLE_ROWS = ("q_token_stride", "q_head_stride", "value_start")
"""Arguments that are multiples of 16, as they are in the models."""


class Shape(NamedTuple):
    model: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape("llama-3.1-8b", torch.bfloat16, 32, 8, 128),
    Shape("qwen2.5-0.5b", torch.bfloat16, 14, 2, 64),
    Shape("opt-125m", torch.float16, 12, 12, 64),
    Shape("opt-125m", torch.float32, 12, 12, 64),
)
USES = {
    "prompt": {"IS_DECODE": False, "IS_SPLIT": False, "IS_CAPTURED": False},
    "decode": {"IS_DECODE": True, "IS_SPLIT": False, "IS_CAPTURED": False},
    "decode, split": {"IS_DECODE": True, "IS_SPLIT": True, "IS_CAPTURED": False},
    "prompt, captured": {"IS_DECODE": False, "IS_SPLIT": False, "IS_CAPTURED": True},
    "decode, split, captured": {"IS_DECODE": True, "IS_SPLIT": True, "IS_CAPTURED": True},
}
"""The kernel's constants for each use."""


@click.command()
@click.option(
    "--capability",
    default=90,
    show_default=True,
    help="Compute capability of the GPU: 80 for an A100, 90 for an H100 or H200.",
)
@click.option("--json", "as_json", is_flag=True)
def main(capability: int, as_json: bool) -> None:
    """Print one row for each kernel."""
    rows = []
    for shape in SHAPES:
        for use, constants in USES.items():
            rows.append({"kernel": use, **compiled(shape, constants, capability)})
            if not as_json:
                click.echo("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    if as_json:
        click.echo(json.dumps(rows))


def compiled(shape: Shape, use: dict[str, bool], capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from xrunner.gpu.kernels import attend_kernel

    group = shape.num_heads // shape.num_kv_heads
    tile = (decode_tile if use["IS_DECODE"] else prompt_tile)(shape.head_dim, shape.dtype, group)
    types, constants = arguments(shape, tile, use)
    names = attend_kernel.arg_names
    aligned = [i for i, name in enumerate(names) if "*" in types.get(name, "") or name in WHOLE_ROWS]
    source = ASTSource(
        attend_kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "model": shape.model,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "tile": tuple(tile),
        "shared_bytes": kernel.metadata.shared,
        "tensor_core_products": len(re.findall(r"wgmma\.mma|mma\.sync", kernel.asm["ptx"])),
        **assembled(kernel.asm["ptx"], get_ptxas(capability).path),
    }


def arguments(shape: Shape, tile: Tile, use: dict[str, bool]) -> tuple[dict[str, str], dict[str, Any]]:
    from xrunner.gpu.kernels import TYPES as DOT_TYPES

    kind = f"*{TYPES[shape.dtype]}"
    of_parts = "*fp32" if use["IS_SPLIT"] else kind
    types = {"q": kind, "cache": kind, "out": kind, "parts": of_parts, "masses": of_parts}
    types |= {
        "query_start": "*i32",
        "context_len": "*i32",
        "tables": "*i32",
        "counts": "*i32",
        "scale": "fp32",
        "value_start": "i64",
    }
    counts = ("first_sequence", "num_sequences", "splits", "q_token_stride", "q_head_stride", "table_stride")
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": padded_dim(shape.head_dim),
        "BLOCK_SIZE": BLOCK_SIZE,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "PROGRAMS": PROGRAMS_A_PROCESSOR * PROCESSORS,
        **use,
        "DOT": DOT_TYPES[shape.dtype],
    }
    return types | dict.fromkeys(counts, "i32"), constants


def assembled(ptx: str, assembler: str) -> dict[str, int]:
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None, "every PTX file names its target"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {
        "registers": re.search(r"Used (\d+) registers", said),
        "spilled_bytes": re.search(r"(\d+) bytes spill stores", said),
    }
    assert all(found.values()), said
    return {name: int(match[1]) for name, match in found.items() if match}


if __name__ == "__main__":
    main()
