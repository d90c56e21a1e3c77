"""Build a worker: choose its attention backend, load its weights, reserve its memory, and compile what its first steps
need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xgpt.core.errors import InputError, MachineError
from xgpt.core.policies import BlockTable, Chunk, Step
from xgpt.core.schema import Batching, DType, ModelSpec, Plan
from xrunner import cpu, memory
from xrunner.ahead import AheadWorker
from xrunner.attention.base import AttentionBackend
from xrunner.attention.reference import ReferenceAttention
from xrunner.generation import Generation
from xrunner.gpu.attention import TritonAttention
from xrunner.gpu.graphs import GraphedModel
from xrunner.grammar import Grammars, grammars_of
from xrunner.kv_cache import KvCache
from xrunner.models import DecoderModel, Model
from xrunner.packing.choice import layouts_of
from xrunner.parallel import Group, Part, Vocabulary, join
from xrunner.sampling import Sampler
from xrunner.stage import Pipe, StageModel
from xrunner.tcb.worker import RowWorker
from xrunner.weights import Checkpoint, SeededWeights, kept_dtype, load_prepacked, state_dtype
from xrunner.worker import Worker

BACKENDS: dict[str, type[AttentionBackend]] = {
    **cpu.BACKENDS,
    "triton": TritonAttention,
    "reference": ReferenceAttention,
}


def usable_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    return [name for name, backend in BACKENDS.items() if backend.supports(device, dtype)]


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    return usable_backends(device, dtype)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker: its model, dtype, weights and device.

    Attributes:
        kv_dtype: dtype of keys and values. None means the default for the weights' dtype.
        checkpoint: directory in Hugging Face layout. None means weights drawn from `seed`.
        backend: a name of `attention.BACKENDS`. None means the fastest that runs on the device.
        threads: CPU threads of this process. None leaves the number unchanged.
        layouts: layout in which a CPU stores weights of each shape (see `xrunner.packing.choice.pack`).
    """

    spec: ModelSpec
    dtype: DType
    kv_dtype: DType | None = None
    checkpoint: Path | None = None
    seed: int = 0
    num_blocks: int
    block_size: int = 16
    backend: str | None = None
    device: str = "cpu"
    threads: int | None = None
    layouts: Mapping[str, str] | None = None

    @classmethod
    def of(cls, plan: Plan, num_blocks: int) -> WorkerSettings:
        return cls(
            spec=plan.model,
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            checkpoint=None if plan.checkpoint is None else Path(plan.checkpoint),
            seed=plan.seed,
            num_blocks=num_blocks,
            block_size=plan.block_size,
            device="cuda" if plan.cluster.device.type == "gpu" else "cpu",
            threads=plan.profile.num_threads,
            layouts=plan.profile.layouts,
        )


def build_worker(
    settings: WorkerSettings, *, part: Part | None = None, group: Group | None = None, pipe: Pipe | None = None
) -> Worker:
    """Return a worker with its weights loaded, on one device.

    Raises:
        InputError: the backend is unknown or does not run on this device in this dtype, or the weights do not fit the
            spec.
        MachineError: this machine does not have the device, or weights and cache do not fit into its memory.
    """
    place, kind = _place(settings)
    name = settings.backend or default_backend(place, kind)
    if name not in BACKENDS:
        raise InputError("backend", name, f"give one of {', '.join(sorted(BACKENDS))}")
    if not BACKENDS[name].supports(place, kind):
        says = f"on {settings.device} in {settings.dtype} give one of {', '.join(usable_backends(place, kind))}"
        raise InputError("backend", name, says)
    kept = kept_dtype(settings.dtype, settings.device, settings.kv_dtype)
    try:
        model = _load(settings, part)
        backend = BACKENDS[name]()
        if part is None:
            grammars = grammars_of(settings.checkpoint, settings.spec)
            sizes = settings.num_blocks, settings.block_size
            return whole_worker(model, backend, *sizes, kept, place, grammars)
        cache = KvCache(model.spec, settings.num_blocks, settings.block_size, kept, place)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"{settings.device} cannot hold {settings.spec.name} and {settings.num_blocks} K/V blocks: {error}; plan "
            "again for this machine"
        ) from None
    stage = None if pipe is None else StageModel(model, pipe)
    vocabulary = None
    if group is not None:
        join(model, group)
        vocabulary = Vocabulary(part, group)
    grammars = grammars_of(settings.checkpoint, settings.spec) if model.has_head else None
    return Worker(
        model,
        cache,
        backend,
        stage=stage,
        vocabulary=vocabulary,
        sampler=Sampler(settings.spec.vocab_size, cache.device, grammars),
    )


def build_row_worker(settings: WorkerSettings, batching: Batching, row_tokens: int) -> RowWorker:
    """Return a worker for row batching (TCB), on one device. Each batch allocates its own K/V memory."""
    place, _ = _place(settings)
    kept = kept_dtype(settings.dtype, settings.device, settings.kv_dtype)
    if (field := settings.spec.special_attention) is not None:
        accepted = "batches in rows support only a plain softmax over all tokens; use flat batches"
        raise InputError(f"model.{field}", getattr(settings.spec, field), accepted)
    try:
        grammars = grammars_of(settings.checkpoint, settings.spec)
        return RowWorker(_load(settings, None), batching, row_tokens, place, kept, grammars)
    except torch.OutOfMemoryError as error:
        says = f"{settings.device} cannot hold {settings.spec.name}: {error}; plan again for this machine"
        raise MachineError(says) from None


def _place(settings: WorkerSettings) -> tuple[torch.device, torch.dtype]:
    return torch.device(settings.device), state_dtype(settings.dtype, settings.device)


def _load(settings: WorkerSettings, part: Part | None) -> Model:
    place, _ = _place(settings)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"torch finds no GPU, which {settings.device} needs")
    if place.type == "cpu":
        memory.keep_freed_memory()
        if settings.dtype != "float16" and not layouts_of(settings.dtype):
            raise MachineError(
                f"this processor or this version of torch cannot multiply in {settings.dtype}; plan with another dtype"
            )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    source = SeededWeights(settings.seed) if settings.checkpoint is None else Checkpoint(settings.checkpoint)
    return load_prepacked(settings.spec, settings.dtype, source, settings.device, part, settings.layouts)


def whole_worker(
    model: Model,
    backend: AttentionBackend,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    grammars: Grammars | None = None,
) -> Worker:
    """Return a worker of a whole model. On a GPU, decode steps are captured as CUDA graphs, and launched ahead of the
    engine's loop.
    """
    spec = model.spec
    reads_back = spec.experts is not None or spec.special_attention is not None
    captures = device.type == "cuda" and backend.capturable and not reads_back
    if not captures or not isinstance(model, DecoderModel):
        cache = KvCache(model.spec, num_blocks, block_size, dtype, device)
        return Worker(model, cache, backend, sampler=Sampler(spec.vocab_size, device, grammars))
    cache = KvCache(model.spec, num_blocks + 1, block_size, dtype, device)
    most = min(model.spec.max_context, num_blocks * block_size)
    run = GraphedModel(model, cache, backend, most_tokens=most)
    return AheadWorker(model, cache, backend, run=run, sampler=Sampler(spec.vocab_size, device, grammars))


def warm_up(worker: Worker | RowWorker, *, encode: bool = True, decode: bool = True) -> None:
    """Run a short prompt if `encode`, and a decode step if `decode`.

    All workers of a pipeline must call this function at the same time.
    """
    request = Generation(id=-1, prompt=(0,) * 4, max_output=2)
    table = BlockTable(range(worker.cache.num_blocks if isinstance(worker, Worker) else 0)[:6])
    if encode:
        worker.start(request, table)
        worker.execute(Step(encode=(Chunk(-1, 0, 4),), decode=()))
    else:
        assert isinstance(worker, Worker)
        worker.adopt(request, table, 4)
        if worker.model.decoder_start:
            worker.encoder_outputs[-1] = torch.zeros(4, worker.model.spec.hidden_size, dtype=worker.dtype)
    if decode:
        worker.execute(Step(encode=(), decode=(-1,)))
    worker.release([-1])
