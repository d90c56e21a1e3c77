"""Plan, prove and run the schedule of a large language model.

    import xgpt
    plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8)

`xgpt` connects four packages: `xprofiler` measures step times, `xsimulator` predicts a schedule's figures, `xscheduler`
finds the best schedule under a latency bound, and `xrunner` executes the schedule. `xgpt.api` documents the functions.
They are loaded when they are first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xgpt.core.version import __version__ as __version__

if TYPE_CHECKING:
    from xgpt.api import (
        Rule,
        bench,
        calibrate,
        check,
        compare,
        doctor,
        export,
        fleet,
        plan,
        profile,
        replan,
        report,
        serve,
        served,
        simulate,
        simulate_autoscale,
        solve,
        tune,
        ui,
        watch,
        with_settings,
    )
    from xgpt.core.errors import InfeasibleError, InputError, MachineError, XgptError

# A waiting thread of GNU OpenMP, which torch loads, sleeps after this number of polls. The default of 300,000 polls
# takes about ten milliseconds, in which the thread occupies a core that another thread may need. When another process
# used one core a third of the time, the slowest step in a hundred took 14 to 17 times as long as on idle cores with the
# default, and 3 to 4 times as long with this value. On idle cores both values are equally fast. Without polling, the
# speed falls by a third.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__all__ = [
    "InfeasibleError",
    "InputError",
    "MachineError",
    "Rule",
    "XgptError",
    "bench",
    "calibrate",
    "check",
    "compare",
    "doctor",
    "export",
    "fleet",
    "plan",
    "profile",
    "replan",
    "report",
    "serve",
    "served",
    "simulate",
    "simulate_autoscale",
    "solve",
    "tune",
    "ui",
    "watch",
    "with_settings",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xgpt import api
    from xgpt.core import errors

    globals()[name] = found = getattr(errors if name.endswith("Error") else api, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
