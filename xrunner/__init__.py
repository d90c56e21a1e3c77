"""Runs a plan: models, K/V cache, attention, engine and server.

A Plan enters; tokens, and a log of the steps that made them, leave. May be imported by xprofiler.measure and
xgpt. Imports torch; never xsimulator or xscheduler.
"""

from xgpt.core.compiled_code import set_directory

set_directory()
