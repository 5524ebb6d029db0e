"""A conversation as a prompt, by the chat template beside a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.errors import InvalidRequestError, ModelError

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One model's template. Its text holds the special tokens: it is to be tokenised without adding them once more."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises ModelError for a source that is no template."""
        # The settings with which templates are written (Hugging Face's).
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._tokens = dict(tokens)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"model: its chat template cannot be read: {error}", key="model") from error

    @classmethod
    def beside(cls, folder: Path) -> ChatTemplate | None:
        """The template in a model's folder; None when it has none. Raises ModelError when it cannot be read."""
        config = _tokenizer_config(folder)
        source = _source(folder, config)
        return None if source is None else cls(source, {name: _token_text(config.get(name)) for name in _TOKENS})

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> str:
        """The text, with the opening of the assistant's turn. Raises InvalidRequestError for messages that the template refuses."""
        given = {**self._tokens, "add_generation_prompt": True, **(arguments or {})}
        try:
            return self._template.render(messages=[dict(message) for message in messages], **given)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise InvalidRequestError(
                f"chat: the model's template refuses these messages: {error}",
                field="chat",
                value=[message.get("role") for message in messages],
                expected="messages as the model's template knows them",
            ) from error


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several named ones
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    try:
        return dict(json.loads(file.read_text())) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"model: {file} cannot be read: {error}", key="model", value=str(file)) from error


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value or ""


def _refuse(message: str) -> NoReturn:
    """What templates call on conversations that they don't know."""
    raise TemplateError(message)
