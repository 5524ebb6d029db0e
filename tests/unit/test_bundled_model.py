"""The small real model as transformers sees it: it speaks, and its chat prompts are those that we make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.front.chat import ChatTemplate
from disagg.front.text import load_tokenizer

pytestmark = pytest.mark.real

HI = [{"role": "user", "content": "Hi"}]
TALK = [*HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "2 + 2?"}]

# Two tokens, a word and a full stop: without wide vectors for bfloat16 a CPU needs a second or more for each.
TRANSFORMERS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, talks = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer("The capital of France is", return_tensors="pt")
print(json.dumps({
    "dtype": str(model.dtype),
    "said": tokenizer.decode(model.generate(**ids, max_new_tokens=2, do_sample=False)[0]),
    "texts": [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks],
    "ids": [tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False) for talk in talks],
}))
"""


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> dict[str, Any]:
    """What transformers makes of the model; in a process of its own, to give the memory back."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", TRANSFORMERS, str(smollm2), json.dumps([HI, TALK])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_converted_model_speaks(theirs: dict[str, Any]) -> None:
    assert theirs["dtype"] == "torch.bfloat16"
    assert "Paris" in theirs["said"]
    assert "<|im_start|>user\nHi<|im_end|>" in theirs["texts"][0]


def test_chat_prompts_equal_those_of_transformers(smollm2: Path, theirs: dict[str, Any]) -> None:
    template, tokenizer = ChatTemplate.beside(smollm2), load_tokenizer(smollm2)
    assert template is not None
    assert tokenizer is not None
    assert [tokenizer.encode(template.render(talk), is_whole=False) for talk in (HI, TALK)] == theirs["ids"]
