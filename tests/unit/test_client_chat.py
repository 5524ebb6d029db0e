"""Chat prompts are what the model's own template makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.client_chat import chat_token_ids, render_chat
from disagg.errors import ModelError

pytest.importorskip("jinja2")

HELLO = [{"role": "user", "content": "Hello"}]


def test_template_of_the_config_with_its_tokens(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if true %}\n[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}{{ eos_token }}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert render_chat(tmp_path, HELLO) == "<s>[user] Hello</s>"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert render_chat(tmp_path, HELLO) == "yes"


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{% for %}", "{{ messages.__class__.__mro__ }}"])
def test_a_template_that_fails_is_a_model_error(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="chat template"):
        render_chat(tmp_path, HELLO)


def test_no_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        render_chat(tmp_path, HELLO)


@pytest.mark.real
def test_the_bundled_model_equals_transformers(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "2 + 2?"}]
    expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat_token_ids(smollm2, talk) == expected
