"""Run a replica's workers as one executor. It sends steps to a lane's first worker and gets results from the lane's
last stage.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
import zmq

from xgpt.core.errors import MachineError, XgptError
from xgpt.core.policies import BlockTable, Step
from xgpt.core.schema import Stage
from xrunner.cluster import messages as m
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.sockets import Sockets, Wakeup
from xrunner.cluster.workers import Workers
from xrunner.executor import Use, WorkerLost
from xrunner.generation import Generation, Logprobs

logger = logging.getLogger(__name__)

CHECK_MS = 100


@dataclass(slots=True)
class _Pending:
    release: list[int]
    begin: list[m.Beginning]


class RemoteExecutor:
    """An `Executor` that runs steps on the workers of a replica and owns these workers. Only one thread may use it.
    Call `deploy` first.
    """

    def __init__(self, workers: Workers, deployment: Deployment) -> None:
        self.logprobs: dict[int, Logprobs] = {}
        self.failed: dict[int, str] = {}
        self._workers = workers
        self._deployment = deployment
        self._lanes: tuple[str, ...] = tuple(dict.fromkeys(stage.lane for stage in deployment.stages))
        self._num_decode_workers = sum(len(stage.devices) for stage in deployment.lane("decode"))
        spec = deployment.settings.spec
        self._decoder_start = (spec.bos_token_id or 0) if spec.is_encoder_decoder else None
        self.resumes = self.scores_prompts = not spec.is_encoder_decoder
        self._reading_lanes = {
            lane for lane in self._lanes if spec.is_encoder_decoder and len(deployment.lane(lane)) > 1
        } & {"both"}
        """Lanes in which prompts go through all stages twice, first through the encoder's layers. Other steps may run
        between the two passes.
        """
        self._sockets: Sockets | None = None
        self._first: dict[str, zmq.Socket[bytes]] = {}
        self._control_bytes = 0
        self._wakeup: Wakeup | None = None

    def deploy(self) -> dict[int, float]:
        self.disconnect()
        self._sockets = sockets = Sockets(self._workers.secret, self._workers.host)
        try:
            self._answers, endpoint = sockets.bind(zmq.PULL)
            seconds = self._workers.deploy(self._deployment, endpoint)
            self._poller = zmq.Poller()
            self._poller.register(self._answers, zmq.POLLIN)
            self._wakeup = Wakeup()
            self._poller.register(self._wakeup.socket, zmq.POLLIN)
        except XgptError:
            self.disconnect()
            raise
        members = self._workers.members
        for lane in self._lanes:
            inbox = members[self._deployment.lane(lane)[0].devices[0]].hello.inbox
            self._first[lane] = sockets.connect(zmq.PUSH, inbox)
        pids = {str(worker): member.hello.pid for worker, member in sorted(members.items())}
        logger.info("workers are ready", extra={"fields": {"pids": pids, "load_s": round(max(seconds.values()), 2)}})
        self._pending = {lane: _Pending([], []) for lane in self._lanes}
        self._under_way: dict[int, Step] = {}
        self._moved: dict[int, int] = {}
        self._after_encoder: dict[int, m.Work] = {}
        self._in_order: dict[str, deque[int]] = {lane: deque() for lane in self._lanes}
        self._done: dict[int, m.Done] = {}
        self._number = 0
        self._generations: dict[int, Generation] = {}
        self._tables: dict[int, tuple[BlockTable, BlockTable]] = {}
        self._last: dict[int, int] = {}
        return seconds

    def redeployed(self, stages: tuple[Stage, ...]) -> RemoteExecutor:
        """Deploy other stages on the same workers. Return the executor that replaces this one.

        Raises:
            MachineError: there are too few workers, or a worker cannot build its part. The caller can `deploy` this
                executor again.
        """
        self.disconnect()
        deployment = Deployment.model_validate(dict(self._deployment) | {"stages": stages})
        if deployment.num_workers > self._workers.num_workers:
            here = self._workers.num_workers
            raise MachineError(f"the other plan needs {deployment.num_workers} devices, but this server has {here}")
        then = RemoteExecutor(self._workers, deployment)
        try:
            then.deploy()
        except XgptError as error:
            self._workers.renew()  # some workers may have built their parts, and others wait for them
            raise MachineError(f"the other plan cannot be deployed: {error}") from None
        return then

    def check(self) -> None:
        self._workers.check()

    def restart(self) -> None:
        while True:
            self._workers.restart()
            try:
                self.deploy()
            except WorkerLost as lost:
                logger.warning("%s; restarting the workers again", lost)
                continue
            return

    def uses(self) -> list[Use]:
        members = sorted(self._workers.members.items())
        return [Use("engine", self._control_bytes, 0, 0.0)] + [
            Use(f"worker {worker}", member.control_bytes, member.tensor_bytes, member.busy_s)
            for worker, member in members
        ]

    def close(self) -> None:
        self.disconnect()
        self._workers.close()

    def disconnect(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None

    def accept(self, generation: Generation) -> None:
        m.encode(m.Beginning(generation))

    def prepare(self, grammar: str) -> object:
        parts = (self._deployment.role(worker).part for worker in range(self._deployment.num_workers))
        choosing = [worker for worker, part in enumerate(parts) if part.is_last and part.runs_decoder]
        return self._workers.prepare(grammar, choosing)

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        self._generations[generation.id] = generation
        self._tables[generation.id] = (table, table if moves_to is None else moves_to)
        self._pending[self._lanes[0]].begin.append(m.Beginning(generation, list(table.blocks)))

    def release(self, ids: Collection[int]) -> None:
        for pending in self._pending.values():
            pending.release.extend(ids)
        for id_ in ids:
            self._generations.pop(id_, None)
            self._tables.pop(id_, None)
            self._last.pop(id_, None)

    def begin(self, step: Step) -> None:
        self._number += 1
        self._under_way[self._number] = step
        if step.lane == "transfer":
            self._begin_transfer(step)
            return
        self._in_order[step.lane].append(self._number)
        release, begin = self._take(step.lane)
        tokens = [self._last[id_] for id_ in step.decode]
        work = m.Work(self._number, release, begin, list(step.encode), list(step.decode), tokens, list(step.grown))
        if step.encode and step.lane in self._reading_lanes:
            later = msgspec.structs.replace(work, release=[], begin=[], grown=[], encoder_ran=True)
            self._after_encoder[self._number] = later
            first = m.RunEncoder(self._number, release, begin, work.encode, work.decode, work.grown)
            self._send(step.lane, first)
        else:
            self._send(step.lane, work)

    def interrupt(self) -> None:
        if wakeup := self._wakeup:
            wakeup.wake()

    def collect(self) -> tuple[Step, dict[int, int]] | None:
        assert self._wakeup is not None
        wakeup = self._wakeup
        while True:
            for numbers in self._in_order.values():
                if numbers and numbers[0] in self._done:
                    return self._end(self._done.pop(numbers.popleft()))
            self.check()
            ready = dict(self._poller.poll(CHECK_MS))
            if self._answers not in ready:  # ended steps come first: the interruption can wait
                if wakeup.socket.fileno() in ready:
                    wakeup.clear()
                    return None
                continue
            match m.decode_answer(self._answers.recv()):
                case m.Done() as done:
                    self._done[done.number] = done
                case m.EncoderRan(number):
                    self._send(self._under_way[number].lane, self._after_encoder.pop(number))
                case m.Moved(number):
                    self._moved[number] = self._moved.get(number, 0) + 1
                    if self._moved[number] == self._num_decode_workers:
                        return self._end_transfer(number)

    def _begin_transfer(self, step: Step) -> None:
        begin: dict[str, list[m.Beginning]] = {lane: [] for lane in self._lanes}
        for id_ in step.transfer:
            generation = self._generations[id_]
            cached = len(generation.prompt)
            if self._decoder_start is None:  # the sampler must know the token that the encode step has generated
                prompt = (*generation.prompt, self._last[id_])
                generation = replace(generation, prompt=prompt, num_resumed=generation.num_resumed + 1)
            source, target = self._tables[id_]
            moved = slice(target.found, -(-cached // self._deployment.settings.block_size))
            begin["encode"].append(m.Beginning(generation, (), cached, source.blocks[moved]))
            begin["decode"].append(m.Beginning(generation, target.blocks, cached, target.blocks[moved]))
        for lane in self._lanes:
            released, _ = self._take(lane, begin=False)
            self._send(lane, m.Transfer(self._number, released, begin[lane]))

    def _end(self, done: m.Done) -> tuple[Step, dict[int, int]]:
        step = self._under_way.pop(done.number)
        self.logprobs, self.failed = done.logprobs, done.failed
        tokens = dict(zip(done.ids, done.tokens, strict=True))
        self._last |= {id_: token for id_, token in tokens.items() if id_ in self._generations}
        if self._decoder_start is not None and step.lane == "encode":
            self._last |= dict.fromkeys((chunk.id for chunk in step.encode), self._decoder_start)
        return step, tokens

    def _end_transfer(self, number: int) -> tuple[Step, dict[int, int]]:
        step = self._under_way.pop(number)
        del self._moved[number]
        self._pending["encode"].release.extend(step.transfer)
        self.logprobs, self.failed = {}, {}
        return step, {}

    def _take(self, lane: str, *, begin: bool = True) -> tuple[list[int], list[m.Beginning]]:
        pending = self._pending[lane]
        taken = pending.release, pending.begin if begin else []
        pending.release = []
        if begin:
            pending.begin = []
        return taken

    def _send(self, lane: str, message: m.Work | m.RunEncoder | m.Transfer) -> None:
        content = m.encode(message)
        self._control_bytes += len(content)
        self._first[lane].send(content)
