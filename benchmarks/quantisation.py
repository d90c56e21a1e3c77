"""Measure the effect of quantisation on a small model that is trained here, run in each precision.

    python -m benchmarks.quantisation [--steps 600]

Random weights show little about quantisation, so a byte-level Llama is trained on the sources of Python's standard
library (minutes on two cores). It is stored for the next run, and also every KEPT steps, so that an interrupted run
continues. On unseen text, the benchmark computes perplexity, the divergence of the next-token distribution from
float32's, how often the likeliest token is the same, and the cosine between each layer's output and its output in
float32, for the layer with the lowest cosine. It does the same for a small random checkpoint of every family on random
tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lib.results import record
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import cache_dir
from xgpt.core.schema import RunDType
from xrunner.attention import Sequences, make_batch
from xrunner.build import WorkerSettings, build_worker
from xrunner.worker import Worker

CONTEXT, BATCH, BLOCK_SIZE = 256, 16, 16
NUM_WINDOWS = 64
KEPT = 10
"""Number of training steps between two stored states."""
HELD_OUT = 20
"""One in this number of files is not used for training."""
PRECISIONS: tuple[tuple[RunDType, RunDType | None], ...] = (
    ("float32", None),
    ("float32", "int8"),
    ("bfloat16", None),
    ("int8", None),
    ("int8", "int8"),
)
"""Data types of matrix products, and of K/V if it is not the default."""


@click.command()
@click.option("--steps", default=600, show_default=True, help="Of training.")
def main(steps: int) -> None:
    """Train the model if it is not stored, then compare precisions."""
    train, test = texts()
    checkpoint = trained(train, steps)
    windows = test[: NUM_WINDOWS * CONTEXT].reshape(NUM_WINDOWS, CONTEXT)
    rows = [{"model": "trained"} | row for row in compare(checkpoint, windows)] + list(families())
    columns = "model", "precision", "perplexity", "over float32", "KL, nats", "same likeliest token", "cosine", "least"
    lines = [f"| {' | '.join(columns)} |", ""]
    lines += [
        f"| {row['model']} | {row['precision']} | {row['perplexity']:.4f} | {100 * row['over_float32']:+.2f}% | "
        f"{row['kl']:.6f} | {100 * row['same_token']:.2f}% | {row['cosine']:.6f} | {row['least_cosine']:.6f} |"
        for row in rows
    ]
    int8 = next(row for row in rows if row["precision"] == "int8")
    record(
        "engine/bits",
        "In int8, the trained model's perplexity changes by {change}.",
        lines,
        change=f"{int8['over_float32']:+.2%}",
    )


def families() -> Iterator[dict[str, Any]]:
    """Yield the rows of a random checkpoint of each family, except encoder-decoders, which have two stacks of
    layers."""
    from tests.numerics.checkpoints import CONTEXT as MOST
    from tests.numerics.checkpoints import FAMILIES, VOCABULARY, save

    for family, (_, _, shapes) in FAMILIES.items():
        if family == "t5":
            continue
        with TemporaryDirectory() as name:
            directory, _ = save(Path(name) / "model", family, next(iter(shapes.values())))
            windows = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_WINDOWS // 4, MOST // 2))
            for row in compare(directory, windows)[1:]:
                yield {"model": family} | row


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes for training, and other bytes. # uint8"""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    train, test = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, test


def trained(text: np.ndarray, steps: int) -> Path:
    import transformers

    directory = cache_dir() / "quantisation" / str(steps)
    if (directory / "config.json").exists():
        return directory
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    rng = np.random.default_rng(0)
    parts: tuple[Any, ...] = (model, optimizer, schedule)
    unfinished, done = directory.with_suffix(".pt"), 0
    if unfinished.exists():
        done, *states, rng = torch.load(unfinished, weights_only=False)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    with click.progressbar(range(done, steps), label="training") as bar:
        for step in bar:
            starts = rng.integers(0, len(text) - CONTEXT, BATCH)
            tokens = torch.from_numpy(np.stack([text[start : start + CONTEXT] for start in starts]).astype(np.int64))
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % KEPT == KEPT - 1:
                states = [part.state_dict() for part in parts]
                unfinished.parent.mkdir(parents=True, exist_ok=True)
                torch.save([step + 1, *states, rng], unfinished)
    model.save_pretrained(directory)
    unfinished.unlink(missing_ok=True)
    return directory


def compare(checkpoint: Path, windows: np.ndarray) -> list[dict[str, Any]]:
    """Return a row for each precision. float32 is the reference."""
    reference: tuple[Tensor, Tensor] | None = None
    rows: list[dict[str, Any]] = []
    targets = torch.from_numpy(windows[:, 1:].astype(np.int64)).flatten()
    for dtype, kv_dtype in PRECISIONS:
        spec = read_spec(checkpoint)
        worker = build_worker(
            WorkerSettings(
                spec=spec,
                dtype=dtype,
                kv_dtype=kv_dtype,
                checkpoint=checkpoint,
                num_blocks=windows.shape[1] // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
            )
        )
        results = [outputs(worker, window) for window in windows]
        log_p, layers = (torch.cat(parts, dim=-2) for parts in zip(*results, strict=True))
        reference = reference or (log_p, layers)
        cosine = F.cosine_similarity(layers, reference[1], dim=-1)  # [layers, tokens]
        perplexity = float(F.nll_loss(log_p, targets).exp())
        rows.append(
            {
                "precision": dtype if kv_dtype is None else f"{dtype}, K/V in {kv_dtype}",
                "perplexity": perplexity,
                "over_float32": perplexity / (rows[0]["perplexity"] if rows else perplexity) - 1,
                "kl": float(F.kl_div(log_p, reference[0], log_target=True, reduction="batchmean")),
                "same_token": float((log_p.argmax(dim=1) == reference[0].argmax(dim=1)).double().mean()),
                "cosine": float(cosine.mean(dim=1).min()),
                "least_cosine": float(cosine.min()),
            }
        )
    return rows


def outputs(worker: Worker, window: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all next tokens after each token of a prompt but the last, and the layers'
    outputs.

    # [tokens - 1, vocab], [layers, tokens, hidden]
    """
    layers: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, hidden: layers.append(hidden.clone()))
        for layer in worker.model.get_submodule("layers").children()
    ]
    length = np.asarray([len(window)], np.int32)
    blocks = np.arange(len(window) // BLOCK_SIZE, dtype=np.int32)[None]
    batch = make_batch(window.astype(np.int64), Sequences(length, length, blocks), block_size=BLOCK_SIZE, num_decodes=0)
    batch.logit_rows = torch.arange(len(window) - 1)
    with torch.inference_mode():
        logits = worker.logits(batch)
    for hook in hooks:
        hook.remove()
    assert logits is not None
    return logits.log_softmax(dim=-1), torch.stack(layers)


if __name__ == "__main__":
    main()
