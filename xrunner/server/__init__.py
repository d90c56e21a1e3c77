"""The OpenAI-compatible endpoint over an engine behind `xrunner.channel`.

Its input is HTTP requests. Its output is token streams, metrics and the plan. May be imported by xgpt."""
