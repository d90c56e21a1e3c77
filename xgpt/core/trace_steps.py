"""Read the requests of a server's step log (`xgpt serve --step-log`) as rows of a trace, with their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec

from xgpt.core.errors import InputError
from xgpt.core.io import read_step_log
from xgpt.core.schema.step_log import Arrival, Chain, StepRecord

Key = tuple[int, int]


def is_step(line: str) -> bool:
    try:
        msgspec.json.decode(line, type=StepRecord)
    except msgspec.MsgspecError:
        return False
    return True


def requests_of(path: Path) -> Iterator[dict[str, object]]:
    """Yield the requests that ended, in Mooncake's format if the server shares prompts.

    Raises:
        InputError: a line is no step.
    """
    arrived, made, ended, said = dict[Key, Arrival](), Counter[Key](), dict[Key, None](), dict[Key, Chain]()
    try:
        steps = read_step_log(path)
    except msgspec.MsgspecError as error:
        raise InputError("workload", str(path), f"a line of this step log is no step: {error}") from None
    for step in steps:
        arrived |= {(step.replica, one.id): one for one in step.arrivals}
        made.update((step.replica, id_) for id_ in step.decode)
        for id_, start, length in step.encode:
            key = step.replica, id_
            made[key] += start + length >= arrived[key].input_length + made[key]
        ended |= dict.fromkeys((step.replica, id_) for id_ in step.finished)
        said |= {(step.replica, id_): chain for id_, chain in step.outputs}
    # With this size, prompts have as many full blocks as the log states.
    size = min((one.input_length // len(one.chain) for one in arrived.values() if one.chain), default=0)
    ids, rest = dict[bytes, int](), count(1)
    for key in ended:
        one, output = arrived[key], made[key]
        row: dict[str, object] = {
            "input_length": one.input_length,
            "output_length": output,
            "arrival_time_ns": one.arrival_ns,
        }
        if size:
            full, whole = one.input_length // size, -(-(one.input_length + output) // size)
            needed = {"hash_ids": -(-one.input_length // size), "output_hash_ids": whole - full}
            row["block_size"] = size
            for (name, most), chain in zip(needed.items(), (one.chain, said.get(key, ())), strict=True):
                known = [ids.setdefault(each, len(ids)) for each in chain[:most]]
                row[name] = known + [-next(rest) for _ in range(most - len(known))]
        yield row
