"""The OpenAI-compatible endpoint over `xrunner.engine.Engine`.

HTTP requests enter; token streams, metrics and the plan leave. May be imported by xgpt.app.
"""

from xrunner.server.app import create_app, serve
from xrunner.server.chat import ChatTemplate
from xrunner.server.engine_thread import EngineStopped, EngineThread, single_thread
from xrunner.server.text import TextCodec, load_tokenizer

__all__ = [
    "ChatTemplate",
    "EngineStopped",
    "EngineThread",
    "TextCodec",
    "create_app",
    "load_tokenizer",
    "serve",
    "single_thread",
]
