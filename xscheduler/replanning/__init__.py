"""Re-planning: what a running plan does under other lengths, which plans may take over, and whether one should."""

from xscheduler.replanning.decide import Verdict, decide
from xscheduler.replanning.judge import Judge, SaturatedJudge, Terms, replaced
from xscheduler.replanning.reestimate import reestimate
from xscheduler.replanning.situation import Situation, at_pace, within_context

__all__ = [
    "Judge",
    "SaturatedJudge",
    "Situation",
    "Terms",
    "Verdict",
    "at_pace",
    "decide",
    "reestimate",
    "replaced",
    "within_context",
]
