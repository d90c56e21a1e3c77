"""Compile a model's attention: `python -m xprofiler.compile_attention DTYPE KV_DTYPE MODEL` (see `compiling`)."""

from __future__ import annotations

import sys

import torch

from xgpt.core.progress import silent
from xgpt.core.schema import ModelSpec
from xprofiler.encoder_decoder import bench_of
from xrunner.build import WorkerSettings, build_worker

BLOCKS, BLOCK_SIZE = 128, 16


def main() -> None:
    """Run the model's attention with one layer, first on one thread and then on all. Do nothing if the model has
    several kinds of layers.
    """
    dtype, kv_dtype, text = sys.argv[1:]
    spec = ModelSpec.model_validate_json(text)
    if spec.blocks:
        return
    spec = spec.but(num_layers=1, num_encoder_layers=min(1, spec.num_encoder_layers), vocab_size=64)
    settings = WorkerSettings(
        spec=spec,
        dtype=dtype,  # type: ignore[arg-type]
        kv_dtype=kv_dtype or None,  # type: ignore[arg-type]
        checkpoint=None,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        device="cpu",
        layouts={},
    )
    worker = build_worker(settings)
    with torch.inference_mode():
        bench = bench_of(worker)(worker, silent)
        for threads in sorted({1, torch.get_num_threads()}):
            torch.set_num_threads(threads)
            bench.run_attention()


if __name__ == "__main__":
    main()
