"""Forms in an engine: which backend compiles one depends on the form alone, and one of no use is the client's error."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from disagg.engine import vllm_structure
from disagg.engine.vllm_sampling import finish_of
from disagg.errors import EngineError, InvalidRequestError
from disagg.types import Request, Sampling, Structure, StructureKind

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")]

VOCABULARY = 49152
FORMS = {
    "xgrammar": {"regex": "[ab]{3}"},
    "guidance": {"grammar": "root ::= "},  # an empty rule: xgrammar refuses it
}
SETTINGS = SimpleNamespace(backend="auto", disable_any_whitespace=False, disable_additional_properties=False, enable_in_reasoning=False)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(smollm2))


@pytest.fixture
def manager(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    """As in an engine's process, with our patches, which end with the test."""
    for name in ("grammar_init", "_create_grammar"):
        monkeypatch.setattr(StructuredOutputManager, name, getattr(StructuredOutputManager, name))
    monkeypatch.setattr(StructuredOutputManager, "_disagg_patched", False, raising=False)
    vllm_structure.patch_structured_output()
    model = SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False, hf_config=SimpleNamespace(model_type="llama"))
    model.get_vocab_size = lambda: VOCABULARY
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(distributed_executor_backend="external_launcher"),  # grammars are compiled at once
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        structured_outputs_config=SETTINGS,
        speculative_config=None,
        num_speculative_tokens=0,
    )
    made = StructuredOutputManager(config)
    made.tokenizer = tokenizer
    return made


def request_of(manager: StructuredOutputManager, form: dict[str, Any]) -> Any:
    """A request whose form vLLM has checked, as before it reaches an engine."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    params._validate_structured_outputs(manager.vllm_config.model_config, SETTINGS, manager.tokenizer)
    structured = StructuredOutputRequest.from_sampling_params(params)
    return SimpleNamespace(request_id="r", sampling_params=params, structured_output_request=structured, use_structured_output=True)


@pytest.mark.parametrize("order", list(itertools.permutations(FORMS)), ids=", ".join)
def test_each_form_has_the_backend_that_took_it(manager: StructuredOutputManager, order: tuple[str, ...]) -> None:
    requests = {}
    for name in (*order, *order):
        request = requests[name] = request_of(manager, FORMS[name])
        assert request.sampling_params.structured_outputs._backend == name
        manager.grammar_init(request)
        grammar = request.structured_output_request.grammar
        assert type(grammar).__name__ == f"{name.capitalize()}Grammar", grammar
    masks = manager.grammar_bitmask(requests, list(requests), {})
    assert masks.shape[0] == len(FORMS), "both fill one batch's masks"
    allowed = dict(zip(requests, (sum(int(word & 0xFFFFFFFF).bit_count() for word in mask.tolist()) for mask in masks), strict=True))
    assert allowed["guidance"] == 1, "an empty answer ends at once"
    assert 2 <= allowed["xgrammar"] < 100


def test_masks_of_another_width_leave_it_to_the_first_backend(manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.grammar_init(request_of(manager, FORMS["xgrammar"]))
    first, widths = manager.backend, iter((7, 8))
    monkeypatch.setattr(vllm_structure, "_mask_width", lambda _: next(widths))
    request = request_of(manager, FORMS["guidance"])
    manager.grammar_init(request)
    assert manager.backend is first
    assert isinstance(request.structured_output_request.grammar, Exception), "xgrammar refuses it, and this request alone fails"


@pytest.mark.parametrize(
    ("tokens", "is_continued", "error"),
    [
        ([], False, InvalidRequestError),  # it did not compile
        ([0], False, InvalidRequestError),  # it refused the first token, ...
        ([0], True, InvalidRequestError),  # ... or a later one, after another engine's
        ([], True, EngineError),  # the KV may not have come
    ],
)
def test_whose_fault_it_is_that_a_form_ended_in_an_error(tokens: list[int], is_continued: bool, error: type[Exception]) -> None:
    request = Request("r", (5, 6), Sampling(structure=Structure(StructureKind.GRAMMAR, "root ::= root")))
    output = CompletionOutput(0, "", tokens, None, None, finish_reason="error")
    with pytest.raises(error, match="grammar" if error is InvalidRequestError else "error"):
        finish_of(output, request, is_continued=is_continued)
