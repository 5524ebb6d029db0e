"""Chat prompts are what the model's own template makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.errors import InvalidRequestError, ModelError
from disagg.front.chat import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def beside(folder: Path) -> ChatTemplate:
    template = ChatTemplate.beside(folder)
    assert template is not None
    return template


def test_template_of_the_config_with_its_tokens(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if true %}\n[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}{{ eos_token }}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert beside(tmp_path).render(HELLO) == "<s>[user] Hello</s>"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ mood }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert beside(tmp_path).render(HELLO, {"mood": "please"}) == "yes please"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[7].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_messages_that_the_template_refuses(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequestError, match="template refuses"):
        beside(tmp_path).render(HELLO)


def test_a_source_that_is_no_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate.beside(tmp_path)


def test_no_template_is_none(tmp_path: Path) -> None:
    assert ChatTemplate.beside(tmp_path) is None
