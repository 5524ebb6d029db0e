"""A conversation as a prompt of token ids, by the chat template beside a model's weights. Needs jinja2; no transformers.

Token ids, because a template writes special tokens itself: as text the gateway would add its own once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from disagg.errors import ConfigError, ModelError

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


def chat_token_ids(folder: Path, messages: Sequence[Message]) -> list[int]:
    """The prompt after which the assistant's answer is due. ModelError: no template or tokenizer; ConfigError: no jinja2."""
    from tokenizers import Tokenizer

    text = render_chat(folder, messages)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"model: {folder} has no tokenizer.json", key="model", value=str(folder), expected="a folder with a tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def render_chat(folder: Path, messages: Sequence[Message]) -> str:
    """The template's text for `messages`, with the opening of the assistant's turn."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise ConfigError("--chat needs jinja2: pip install jinja2", key="--chat", expected="jinja2 to be installed") from error
    config = _tokenizer_config(folder)
    # The settings with which templates are written (Hugging Face's).
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        return environment.from_string(_template(folder, config)).render(messages=list(messages), add_generation_prompt=True, **tokens)
    except TemplateError as error:
        raise ModelError(f"model: the chat template of {folder} failed: {error}", key="model", value=str(folder)) from error


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several named ones
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ModelError(
            f"model: {folder} has no chat template; ask without --chat", key="model", value=str(folder), expected="chat_template.jinja"
        )
    return found


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
    from jinja2 import TemplateError

    raise TemplateError(message)
