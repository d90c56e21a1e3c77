"""The scheduling rules in pure Python: they take requests and return steps.

The package uses no torch, no clock and no global state. xsimulator, xscheduler, xrunner and xgpt may import this
package.
"""

from xgpt.core.policies.blocks import Blocks, BlockTable
from xgpt.core.policies.build import build, build_rows
from xgpt.core.policies.kv_memory import KvLimits
from xgpt.core.policies.lane_settings import LaneSettings, as_run_by, lane_settings
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import Chunk, MicroBatch, Request, Step
from xgpt.core.policies.rule import OneLaneRule, Rule
from xgpt.core.policies.schedule import OneLane, Schedule
from xgpt.core.policies.waa import TwoLane, TwoLaneSettings
