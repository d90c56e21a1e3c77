"""Plan, prove and run the schedule of a large language model.

    import xgpt
    plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8)

`xgpt` is the shell around four rooms: `xprofiler` measures step times, `xsimulator` predicts what a schedule
does with them, `xscheduler` finds the best schedule under a bound, `xrunner` executes it. `xgpt.api` documents the
functions below; they are loaded at their first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgpt.api import (
        autoscale,
        bench,
        calibrate,
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
        ui,
    )
    from xgpt.core.errors import InfeasibleError, InputError, MachineError, XgptError

__version__ = "0.1.0"

# Read by GNU's OpenMP when torch loads it: how often a thread that waits for the engine's others looks before it
# sleeps. Its own 300,000 times are some ten milliseconds, in which it keeps a core from a thread that another process
# has put off its own. With a core wanted elsewhere for a third of the time, one step in a hundred took 14 to 17 times
# as long as on quiet cores, and 3 to 4 times with this. On quiet cores both are equally fast; sleeping at once costs a
# third.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__all__ = [
    "InfeasibleError",
    "InputError",
    "MachineError",
    "XgptError",
    "autoscale",
    "bench",
    "calibrate",
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
    "ui",
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
