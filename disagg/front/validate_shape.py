"""The sampling fields that shape an answer (biases, forbidden and allowed tokens, forms, prompt logprobs), checked. Pure.

Only a real engine has them: a simulated one's next token follows from its KV alone, so it refuses them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from disagg.errors import InvalidRequestError
from disagg.front.checks import between, number
from disagg.pb import inference_pb2 as pb
from disagg.types import Structure, StructureKind

MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_SPEC_CHARS = 64 << 10
MAX_CHOICES = 1024
MAX_JSON_DEPTH = 64
_STRUCTURES = {
    "json_schema": StructureKind.JSON,
    "json_object": StructureKind.JSON_OBJECT,
    "regex": StructureKind.REGEX,
    "choice": StructureKind.CHOICE,
    "grammar": StructureKind.GRAMMAR,
    "structural_tag": StructureKind.STRUCTURAL_TAG,
}

Encode = Callable[[str], list[int]]  # a word to token ids, without special tokens


def check_unshaped(given: pb.SamplingParams) -> None:
    """Refuse every field of this module: the engine is simulated. Raises InvalidRequestError."""
    set_fields = [name for name in ("logit_bias", "bad_words", "allowed_token_ids") if len(getattr(given, name))]
    structure = given.WhichOneof("structure")
    set_fields += [structure] if structure is not None else []
    set_fields += ["prompt_logprobs"] if given.HasField("prompt_logprobs") else []
    if set_fields:
        message = f"{set_fields[0]}: a simulated engine has no logits to shape; expected no value"
        raise InvalidRequestError(message, field=set_fields[0], value="set", expected="no value")


def shape(given: pb.SamplingParams, vocab_size: int, max_logprobs: int, encode: Encode | None) -> dict[str, Any]:
    """Fields of `Sampling`. Raises InvalidRequestError. `encode` is None where the model has no tokenizer."""
    return {
        "logit_bias": _logit_bias(given, vocab_size),
        "bad_words": _bad_words(given.bad_words, encode),
        "allowed_token_ids": _allowed(given.allowed_token_ids, vocab_size),
        "structure": _structure(given, encode),
        "prompt_logprobs": between("prompt_logprobs", given.prompt_logprobs, 0, max_logprobs)
        if given.HasField("prompt_logprobs")
        else None,
    }


def _logit_bias(given: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(given.logit_bias) > MAX_BIASES:
        raise InvalidRequestError(field="logit_bias", value=f"{len(given.logit_bias)} entries", expected=f"at most {MAX_BIASES}")
    pairs = sorted(given.logit_bias.items())
    for token_id, bias in pairs:
        between("logit_bias", token_id, 0, vocab_size - 1)
        number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    return tuple(pairs)


def _allowed(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > vocab_size:
        raise InvalidRequestError(field="allowed_token_ids", value=f"{len(ids)} ids", expected=f"at most {vocab_size}")
    for index, token_id in enumerate(ids):
        between(f"allowed_token_ids[{index}]", token_id, 0, vocab_size - 1)
    return tuple(ids)


def _bad_words(words: Sequence[str], encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences as vLLM makes them: each word at the beginning of a text, and in it where that gives another first token."""
    if words and encode is None:
        raise InvalidRequestError(field="bad_words", value=list(words), expected="no value: the served model has no tokenizer")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(field="bad_words", value=list(words), expected=f"at most {MAX_BAD_WORDS} words")
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(dict.fromkeys(words)):
        assert encode is not None
        plain = tuple(encode(word.lstrip()))
        if not word or not plain:
            raise InvalidRequestError(field=f"bad_words[{index}]", value=word, expected="text of at least one token")
        found.append(plain)
        spaced = tuple(encode(" " + word.lstrip()))
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)


def _structure(given: pb.SamplingParams, encode: Encode | None) -> Structure | None:
    name = given.WhichOneof("structure")
    if name is None:
        return None
    if encode is None:
        raise InvalidRequestError(field=name, value="set", expected="no value: the served model has no tokenizer, which a form needs")
    if name == "json_object":
        if not given.json_object:
            raise InvalidRequestError(field=name, value=False, expected="true, or no value")
        return Structure(StructureKind.JSON_OBJECT)
    spec = json.dumps(_choices(given.choice.texts)) if name == "choice" else getattr(given, name)
    if not spec or len(spec) > MAX_SPEC_CHARS or "\0" in spec:
        raise InvalidRequestError(field=name, value=spec, expected=f"from 1 to {MAX_SPEC_CHARS} characters, none of them NUL")
    if name in ("json_schema", "structural_tag"):
        _check_json(name, spec)
    return Structure(_STRUCTURES[name], spec)


def _choices(texts: Sequence[str]) -> list[str]:
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequestError(field="choice", value=list(texts), expected=f"from 1 to {MAX_CHOICES} texts, none of them empty")
    return list(texts)


def _check_json(name: str, spec: str) -> None:
    try:
        found = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field=name, value=spec, expected=f"a JSON object ({error})") from error
    if not isinstance(found, dict) or _depth(found) > MAX_JSON_DEPTH:
        raise InvalidRequestError(field=name, value=spec, expected=f"a JSON object, nested at most {MAX_JSON_DEPTH} deep")


def _depth(tree: Any) -> int:
    """Levels of objects and lists, counted without recursion."""
    depth, level = 0, [tree]
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth
