"""The scheduling rules, pure Python: requests in, steps out.

Both engines drive these same objects, one on a simulated clock and one on a real one. No torch, no clock, no
global state. May be imported by xsimulator, xscheduler, xrunner and xgpt.app.
"""

from xgpt.policies.pool import Pool
from xgpt.policies.request import Chunk, Request, Step
from xgpt.policies.rule import LaneSettings, OneLaneRule, build, lane_settings

__all__ = ["Chunk", "LaneSettings", "OneLaneRule", "Pool", "Request", "Step", "build", "lane_settings"]
