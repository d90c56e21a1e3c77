"""In place of a Python that has vLLM: takes requests on the same channel, and answers them without a model.

A prompt is answered with its tokens' sum, and so on from there (`tests.fakes.expected_tokens`); one that ends with the
beginning of its own answer is answered with what follows. A decode lane answers
so only those whose K/V it is told to be where the encode lane has left it. A prompt that begins with `FAILS` fails in
the lane that it comes to first, one that begins with `DIES` ends the process, one with `HANGS` stalls it.
FAKE_VLLM_STEP_S: seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from xgpt.core.io import load_json
from xgpt.core.policies import LaneSettings, OneLane, Pool, Request, Step
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import Arrival, StepRecord
from xrunner.channel.messages import Alive, Began, Cancel, Ready, Rested, Room, Stepped, Submit
from xrunner.generation import FinishReason, Generation, Token
from xrunner.prefixes import Prefixes
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.channel import VllmEnd
from xrunner.vllm.lane import PlannedLane, VllmRoom

VOCAB_SIZE = 1000
FAILS, DIES, HANGS = 13, 17, 19
ROOM = VllmRoom(num_blocks=800, block_size=32, max_running=64)


def program(directory: Path) -> Path:
    """An executable to be named in XGPT_VLLM_PYTHON."""
    path = directory / "python"
    root = Path(__file__).resolve().parents[1]
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m tests.fake_vllm "$@"\n')
    path.chmod(0o755)
    return path


class FakeVllm:
    """A host and its engine core in one process."""

    def __init__(self, directory: str, lane: str, group: str, config: dict[str, str], *, reuse: bool = False) -> None:
        self.prefixes = Prefixes() if reuse else None
        plan = load_json(Path(config["plan"]), Plan, "plan") if "plan" in config else None
        self.lane = lane
        self.core = VllmEnd(directory, lane, plans=plan is not None)  # type: ignore[arg-type]
        self.host = VllmEnd(directory, lane, group=int(group))  # type: ignore[arg-type]
        self.planned = PlannedLane(plan, ROOM, self.core.send) if plan else None
        self.own = OneLane(LaneSettings(mix=True, max_batch=64), Pool(1000, block_size=16))
        self.parked: list[Submit] = []
        self.requests: dict[int, Submit] = {}
        self.arrivals: list[Arrival] = []
        self.made: dict[int, int] = {}
        self.step_s = float(os.environ.get("FAKE_VLLM_STEP_S", "0.001"))

    @property
    def schedule(self) -> OneLane:
        return self.own if self.planned is None else self.planned.lane

    @property
    def is_emptying(self) -> bool:
        return self.planned is not None and self.planned.is_emptying

    @property
    def room(self) -> Room | None:
        return None if self.planned is None else self.planned.taken

    def run(self) -> None:
        self.host.send(Ready(takes_seeds=False, scores_prompts=False, resumes=True))
        threading.Thread(target=self.report, daemon=True).start()
        while True:
            self.take_in()
            step = self.schedule.next_step("both")
            if step is None:
                time.sleep(0.001)
            else:
                self.execute(step)

    def report(self) -> None:
        while True:
            self.host.send(Alive([]))
            self.core.send(Alive([]))
            time.sleep(0.2)

    def take_in(self) -> None:
        for message in self.host.received():
            match message:
                case Submit():
                    self.parked.append(message)
                case Cancel():
                    self.parked = [one for one in self.parked if one.generation.id != message.id]
                    self.requests.pop(message.id, None)
                    self.schedule.cancel(message.id)
                    if self.planned is not None:
                        self.planned.go_on_if_empty()
                        self.core.send(Rested(self.planned.taken))
        for plan in self.core.plans():
            assert self.planned is not None
            self.planned.go_over_to(plan)
        while self.parked and not self.is_emptying:
            self.submit(self.parked.pop(0))
        for id_ in self.schedule.expire(time.perf_counter_ns()):
            del self.requests[id_]

    def submit(self, message: Submit) -> None:
        request: Generation = message.generation
        if request.prompt[0] == DIES:
            sys.exit("RuntimeError: the device has gone")
        self.requests[request.id] = message
        self.made[request.id] = next_token(request.prompt)
        if self.lane == "decode" and message.transfer != {"remote_block_ids": list(request.prompt)}:
            self.made[request.id] = -1
        sizes, block_size = (len(request.prompt), request.max_output), self.schedule.pool.block_size
        arrival = Arrival(
            request.id,
            *sizes,
            time.perf_counter_ns(),
            request.deadline_ns,
            request.promised_output,
            request.account,
            () if self.prefixes is None else self.prefixes.extend((), request.prompt, block_size, request.account),
        )
        self.arrivals.append(arrival)
        self.schedule.submit(Request(*arrival))

    def execute(self, step: Step) -> None:
        start_ns = time.perf_counter_ns()
        if step.encode:
            self.core.send(Began([chunk.id for chunk in step.encode]))
        hangs = any(self.requests[chunk.id].generation.prompt[0] == HANGS for chunk in step.encode)
        time.sleep(3600 if hangs else self.step_s)
        tokens = [self.token(id_) for id_ in self.schedule.sampled(step) if id_ in self.requests]
        ended = tuple(token.id for token in tokens if token.finish)
        record = StepRecord(
            start_ns,
            time.perf_counter_ns(),
            step.encode,
            step.decode,
            ended,
            tuple(self.arrivals),
            (),
            step.preempted,
            lane=self.lane,  # type: ignore[arg-type]
        )
        self.arrivals.clear()
        self.schedule.settle(step, ended)
        transfers = {id_: {"remote_block_ids": list(self.requests[id_].generation.prompt)} for id_ in ended}
        for id_ in ended:
            self.requests.pop(id_)
        if self.planned is not None:
            self.planned.go_on_if_empty()
        self.core.send(Stepped(tokens, [record], self.room, transfers if self.lane == "encode" else {}))

    def token(self, id_: int) -> Token:
        request, token = self.requests[id_].generation, self.made[id_] % VOCAB_SIZE
        self.made[id_] += 1
        count = 1 + self.schedule.pool.running[id_].generated
        finish: FinishReason | None = None
        if request.prompt[0] == FAILS:
            finish = "error"
        elif token in request.stop_token_ids or count == request.output_length:
            finish = "stop"
        elif count == request.max_output:
            finish = "length"
        return Token(id_, token, finish)


def next_token(tokens: tuple[int, ...]) -> int:
    """Return what follows a prompt, or a prompt and the tokens that it was answered with so far."""
    rest = sum(tokens)
    for number in range(len(tokens) - 1, 0, -1):
        rest -= tokens[number]
        if tokens[number] == rest % VOCAB_SIZE:
            return tokens[-1] + 1
        if tokens[number] != (tokens[number - 1] + 1) % VOCAB_SIZE:
            break
    return sum(tokens)


def main() -> None:
    if sys.argv[1] == "-c":  # which version is it
        print(TESTED_VERSION)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--additional-config", type=json.loads)
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--node-rank", type=int, default=0)
    given, others = parser.parse_known_args()
    if given.node_rank:  # workers of another machine's engine
        signal.pause()
    FakeVllm(*others[-3:], given.additional_config["xgpt"], reuse=given.enable_prefix_caching).run()


if __name__ == "__main__":
    main()
