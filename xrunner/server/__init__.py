"""The OpenAI-compatible endpoint over an engine behind `xrunner.channel`.

Its input is HTTP requests. Its output is token streams, metrics and the plan. May be imported by xgpt.
"""

from xrunner.logs import log_json
from xrunner.server.access.hosts import AllowedHosts, check_exposure
from xrunner.server.access.keys import ApiKeys, Classes
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import ServedModel, TextCodec, load_tokenizer
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.app import create_app
from xrunner.server.http.connections import check_address
from xrunner.server.http.process import DRAIN_S, serve
from xrunner.server.observe.watch import Watch
from xrunner.server.submission import Limits

__all__ = [
    "DRAIN_S",
    "AllowedHosts",
    "ApiKeys",
    "ChatTemplate",
    "Classes",
    "EngineClient",
    "Limits",
    "ServedModel",
    "TextCodec",
    "Watch",
    "check_address",
    "check_exposure",
    "create_app",
    "load_tokenizer",
    "log_json",
    "serve",
]
