"""Run a plan: models, K/V cache, attention, engine and server.

`xprofiler.measure` and `xgpt` may import this package. It imports torch, and never xsimulator or xscheduler.
"""

from xgpt.core.compiled_code import set_directory

set_directory()
