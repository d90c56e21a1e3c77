"""The scheduling rules, pure Python: requests in, steps out.

Both engines drive these same objects, one on a simulated clock and one on a real one. No torch, no clock, no
global state. May be imported by xsimulator, xscheduler, xrunner and xgpt.
"""

from xgpt.core.policies.blocks import Blocks, BlockTable
from xgpt.core.policies.build import build, build_rows
from xgpt.core.policies.lane_settings import LaneSettings, as_run_by, lane_settings
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import Chunk, MicroBatch, Request, Step
from xgpt.core.policies.rule import OneLaneRule
from xgpt.core.policies.schedule import OneLane, Schedule
from xgpt.core.policies.waa import TwoLane, TwoLaneSettings

__all__ = [
    "BlockTable",
    "Blocks",
    "Chunk",
    "LaneSettings",
    "MicroBatch",
    "OneLane",
    "OneLaneRule",
    "Pool",
    "Request",
    "Schedule",
    "Step",
    "TwoLane",
    "TwoLaneSettings",
    "as_run_by",
    "build",
    "build_rows",
    "lane_settings",
]
