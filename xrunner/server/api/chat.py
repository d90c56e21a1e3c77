"""Turn chats into prompts with the checkpoint's template, rendered in the same way as by Hugging Face's tokenizers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, nearest
from xgpt.core.io import read_text
from xrunner.server.api import rendering
from xrunner.server.api.directory import read_settings, special_tokens
from xrunner.server.api.errors import quoted

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
"""Roles that every request may use. Llama 3.1 expects the results of tools in the role `ipython`."""
INSTRUCTIONS = ("system", "developer")
MAX_ROLE = 64
"""Characters of the longest role that is not one of `ROLES`."""
MOST_TEMPLATE = 256 << 10
"""Largest number of characters of a template, which is sent to another process for each prompt. Real ones have at most
some 20,000."""
MAX_ROLES = 32
"""Largest number of roles in a chat: each may have to be compared with `ROLES`, which takes 0.1 ms."""
ADDITIONAL = "additional_chat_templates/*.jinja"
PROBE = "xgptprobe"


class _Template:
    """One template. Rendering a probe text shows in which form the template expects messages, and of which roles."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        with suppress(ValueError):
            rendering.render(source, {})  # raises InputError if it cannot be compiled
        self.takes_parts = not self._shows("user", PROBE) and self._shows("user", [{"type": "text", "text": PROBE}])
        content = self.content(PROBE)
        self.knows_developer = self._shows("developer", content) or not self._shows("system", content)
        later = ("system", "system", "user", "assistant", "system", "user")
        self.takes_instructions_later = self._shows_all(later, content)
        self._quoted = frozenset(re.findall(rf"""['"]([\w.-]{{1,{MAX_ROLE}}})['"]""", source))
        self._shows_any_role = self._shows("xgptrole", content)
        self._known_roles: dict[str, bool] = {}

    def render(self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        given = {"tools": None, "documents": None} | variables | self._special_tokens
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return rendering.render(self.source, given)

    def shown(self, message: Message) -> Message:
        role = message["role"]
        if role == "developer" and not self.knows_developer:
            role = "system"
        shown = message | {"role": role, "content": self.content(message["content"])}
        # The template of gpt-oss uses its own field name, and shows either reasoning or a text beside calls, not both.
        has_room = ".thinking" in self.source and not (message["content"] and "tool_calls" in message)
        return shown | {"thinking": message["reasoning"]} if has_room and "reasoning" in message else shown

    def in_order(self, messages: Sequence[Message]) -> list[Message]:
        """Some templates accept a system message only at the beginning, but agents send several, some of them later.
        For such a template, the first system messages are joined. A later one is appended to the user's message before
        it or, if there is none, becomes a user's message. Texts keep their order, so that the K/V of earlier messages
        can be reused."""
        if self.takes_instructions_later:
            return list(messages)
        groups: list[tuple[Message, list[Content]]] = []
        is_moved = False  # whether the last message is an instruction that is shown as the user's
        for message in messages:
            role, before = message["role"], groups[-1][0]["role"] if groups else None
            is_later = role in INSTRUCTIONS and before is not None
            if (is_later and before in ("user", *INSTRUCTIONS)) or (role == "user" and is_moved):
                groups[-1][1].append(message["content"])
                is_moved = False
            else:
                groups.append((message | {"role": "user"} if is_later else message, [message["content"]]))
                is_moved = is_later
        return [message | {"content": _joined(contents)} for message, contents in groups]

    def knows(self, role: str) -> bool:
        """A name that resembles one of `ROLES` counts as a mistake, unless the template itself contains the name."""
        if role not in self._quoted:
            return self._shows_any_role and len(role) <= MAX_ROLE and not nearest(role, ROLES)
        if role not in self._known_roles:
            self._known_roles[role] = self._shows(role, self.content(PROBE))
        return self._known_roles[role]

    def content(self, content: Content) -> Content:
        if self.takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    def _shows(self, role: str, content: object) -> bool:
        return self._shows_all((role,) if role == "user" else (role, "user"), content)

    def _shows_all(self, roles: Sequence[str], content: object) -> bool:
        messages: list[Message] = [{"role": role, "content": content} for role in roles]
        try:
            return self.render(messages, True, {}).count(PROBE) == len(messages)
        except rendering.NotText as error:
            raise InputError("chat_template", "", str(error)) from None
        except Exception:
            return False


class ChatTemplate:
    """A checkpoint's templates, rendered in a sandbox, since they come with the checkpoint and are not trusted.

    Args:
        special_tokens: texts of special tokens, by the names that the template uses (bos_token, ...).
        named: further templates by name. `tool_use` renders chats with functions.

    Raises:
        InputError: a template is not valid Jinja."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, named: dict[str, str] | None = None
    ) -> None:
        self.source = source
        self.tool_use = tool_use = (named or {}).get("tool_use", source)
        self._template = _Template(source, special_tokens or {})
        self._with_tools = self._template if tool_use == source else _Template(tool_use, special_tokens or {})

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt, in which special tokens are written as text.

        Args:
            messages: messages. The content of each is a text, or a list of parts of the type `text`.
            continue_final_message: whether the prompt ends with the content of the last message, so that the model
                continues it.

        Raises:
            ValueError: the template refuses the messages, in its own words."""
        variables = variables or {}
        template = self._with_tools if variables.get("tools") else self._template
        roles = dict.fromkeys(message["role"] for message in messages)
        if len(roles) > MAX_ROLES:
            raise ValueError(f"{len(roles)} different roles are too many; at most {MAX_ROLES} are accepted")
        for role in roles:
            if role not in ROLES and not template.knows(role):
                raise ValueError(f"it has no messages of the role {quoted(role)}{nearest(role[:MAX_ROLE], ROLES)}")
        shown = template.in_order([template.shown(message) for message in messages])
        try:
            text = template.render(shown, add_generation_prompt and not continue_final_message, variables)
            return _up_to(text, messages[-1]["content"]) if continue_final_message else text
        except InputError as error:
            raise ValueError(str(error)) from None


def _joined(contents: list[Content]) -> Content:
    if len(contents) == 1:
        return contents[0]
    texts = [content for content in contents if isinstance(content, str)]
    return "\n\n".join(texts) or [part for content in contents if isinstance(content, list) for part in content]


def _up_to(text: str, content: Content) -> str:
    """Return a prompt up to the end of its last message. Raises ValueError if the template omits that message."""
    last = content if isinstance(content, str) else content[-1]["text"]
    # `rfind` takes quadratic time, during which no other thread runs.
    after = text[::-1].find(last.strip()[::-1])
    at = len(text) - after - len(last.strip())
    if after < 0:
        raise ValueError("it leaves out the last message, so the message cannot be continued")
    shown = last.lstrip()
    return text[: at + len(shown if text.startswith(shown, at) else last.strip())]


def load_chat_template(checkpoint: Path) -> ChatTemplate | None:
    """Return the templates of a checkpoint directory, or None if it has none.

    The templates are chat_template.jinja and additional_chat_templates/*.jinja, or those of tokenizer_config.json.

    Raises:
        InputError: a file cannot be read, or a template is not valid."""
    config = read_settings(checkpoint)
    path = checkpoint / "chat_template.jinja"
    named = {each.stem: read_text(each, "chat_template") for each in checkpoint.glob(ADDITIONAL)}
    if path.is_file():
        named["default"] = read_text(path, "chat_template")
    if not named:
        named = _listed(config.get("chat_template"))
    if (size := max(map(len, named.values()), default=0)) > MOST_TEMPLATE:
        accepted = f"at most {MOST_TEMPLATE} are accepted: give the template of the checkpoint's model"
        raise InputError("chat_template", f"{size} characters", accepted)
    source = named.pop("default", None)
    return None if source is None else ChatTemplate(source, special_tokens(config), named)


def _listed(found: object) -> dict[str, str]:
    """A template without a name is called `default`."""
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    entries = found if isinstance(found, list) else [None]
    named = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                accepted = "it must be a text, or a list of named templates"
                raise InputError("chat_template", type(entry).__name__, accepted)
    return named
