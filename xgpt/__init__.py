"""Plan, prove and run the schedule of a large language model.

`xgpt` is the shell around four rooms: `xprofiler` measures step times, `xsimulator` predicts what a schedule
does with them, `xscheduler` finds the best schedule under a bound, `xrunner` executes it.
"""

__version__ = "0.1.0"
