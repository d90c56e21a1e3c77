"""The OpenAI-compatible endpoint over `xrunner.engine.Engine`.

HTTP requests enter; token streams, metrics and the plan leave. May be imported by xgpt.app.
"""

from xrunner.server.access import AllowedHosts, check_exposure
from xrunner.server.app import create_app
from xrunner.server.chat import ChatTemplate
from xrunner.server.engine_thread import EngineThread, single_thread
from xrunner.server.keys import ApiKeys
from xrunner.server.limits import Limits
from xrunner.server.logs import log_json
from xrunner.server.process import DRAIN_S, serve
from xrunner.server.text import TextCodec, load_tokenizer
from xrunner.server.watch import Watch

__all__ = [
    "DRAIN_S",
    "AllowedHosts",
    "ApiKeys",
    "ChatTemplate",
    "EngineThread",
    "Limits",
    "TextCodec",
    "Watch",
    "check_exposure",
    "create_app",
    "load_tokenizer",
    "log_json",
    "serve",
    "single_thread",
]
