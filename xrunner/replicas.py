"""Run several replicas of a plan as one engine, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from xgpt.core.policies.routing import BLOCKS_A_KEY, ReplicaRouter
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import Chain, StepRecord
from xrunner.engine import Engine
from xrunner.executor import Use
from xrunner.generation import Generation, Token
from xrunner.prefixes import Prefixes

IDLE_S = 0.1
"""Longest time that an idle replica sleeps before it checks whether it must end."""

ReplicaEvent = list[Token] | StepRecord | Exception


def _sum(name: str) -> property:
    return property(lambda pools: sum(getattr(engine.pool, name) for engine in pools._engines))


class Pools:
    """The pools of all replicas together.

    The replicas' threads change the pools at the same time, so only sizes are read. Such reads are atomic.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    num_running, num_waiting, num_preemptions, reserved_blocks, kept_blocks = map(
        _sum, ("num_running", "num_waiting", "num_preemptions", "reserved_blocks", "kept_blocks")
    )


class Replicas:
    """The interface of `engine.Engine` over several replicas. Their steps share one log. Each record names its replica.

    Args:
        build: `build(number, on_step)` builds a replica's engine, in the thread that will run it. The engine calls
            `on_step` with each step's record.
        router: chooses the replica of a request. None means the one with the fewest requests.
    """

    def __init__(
        self,
        build: Callable[[int, Callable[[StepRecord], None]], Engine],
        count: int,
        *,
        on_step: Callable[[StepRecord], None] | None = None,
        router: ReplicaRouter | None = None,
    ) -> None:
        self._prefixes = None if router is None else Prefixes()
        self._router = router or ReplicaRouter(count, 0.0)
        self._on_step = on_step or (lambda record: None)
        self._outcomes: SimpleQueue[ReplicaEvent] = SimpleQueue()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._home: dict[int, int] = {}
        self._engines: list[Engine] = []
        built: SimpleQueue[tuple[int, Engine | BaseException]] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(build, number, built), name=f"replica {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        engines = dict(built.get() for _ in self._threads)
        for _, result in sorted(engines.items()):
            if isinstance(result, BaseException):
                self._engines = [engine for engine in engines.values() if isinstance(engine, Engine)]
                self.close()
                raise result
            self._engines.append(result)
        self.pool = Pools(self._engines)

    @property
    def on_refused(self) -> Callable[[str], None]:
        return self._engines[0].on_refused

    @on_refused.setter
    def on_refused(self, then: Callable[[str], None]) -> None:
        for engine in self._engines:
            engine.on_refused = then

    @property
    def on_begin(self) -> Callable[[list[int]], None]:
        return self._engines[0].on_begin

    @on_begin.setter
    def on_begin(self, then: Callable[[list[int]], None]) -> None:
        for engine in self._engines:
            engine.on_begin = then

    def go_over_to(self, plan: Plan) -> None:
        """See `Engine.go_over_to`. Each replica adopts the plan on its own. The number of replicas does not change."""
        for engine in self._engines:
            engine.go_over_to(plan)

    takes_seeds = True

    @property
    def scores_prompts(self) -> bool:
        return self._engines[0].scores_prompts

    @property
    def resumes(self) -> bool:
        return self._engines[0].resumes

    @property
    def is_emptying(self) -> bool:
        return any(engine.is_emptying for engine in self._engines)

    @property
    def is_changing(self) -> bool:
        return any(engine.is_changing for engine in self._engines)

    def submit(self, generation: Generation) -> None:
        chain: Chain = ()
        if self._prefixes is not None:
            size = BLOCKS_A_KEY * self._engines[0].pool.block_size
            chain = self._prefixes.extend((), generation.prompt, size, generation.account)
        with self._lock:
            number = self._home[generation.id] = self._router.route(chain)
        self._engines[number].submit(generation)

    def cancel(self, id_: int) -> None:
        number = self._forget(id_)
        if number is not None:
            self._engines[number].cancel(id_)

    def wait(self, timeout_s: float) -> None:
        self._wake.wait(timeout_s)

    def step(self) -> list[Token] | None:
        while True:
            self._wake.clear()
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                return None
            match outcome:
                case Exception():
                    raise outcome
                case StepRecord():
                    self._on_step(outcome)
                case tokens:
                    for token in tokens:
                        if token.finish is not None:
                            self._forget(token.id)
                    return tokens

    def uses(self) -> list[Use]:
        return [
            use._replace(process=f"replica {number}, {use.process}")
            for number, engine in enumerate(self._engines)
            for use in engine.uses()
        ]

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for engine in self._engines:
            engine.close()

    def _forget(self, id_: int) -> int | None:
        with self._lock:
            number = self._home.pop(id_, None)
            if number is not None:
                self._router.leave(number)
            return number

    def _run(
        self,
        build: Callable[[int, Callable[[StepRecord], None]], Engine],
        number: int,
        built: SimpleQueue[tuple[int, Engine | BaseException]],
    ) -> None:
        try:
            engine = build(number, lambda record: self._outcomes.put(record._replace(replica=number)))
        except BaseException as error:
            built.put((number, error))
            return
        built.put((number, engine))
        try:
            while not self._stopping.is_set():
                tokens = engine.step()
                if tokens is None:
                    engine.wait(IDLE_S)
                else:
                    self._outcomes.put(tokens)
                    self._wake.set()
        except Exception as error:
            self._outcomes.put(error)
            self._wake.set()
