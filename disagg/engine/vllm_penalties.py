"""Presence and frequency penalties of a request that continues an answer.

They count *output* tokens, but what was sampled elsewhere (the first token on the prefill worker, or what came before a fail-over) lies
in this request's prompt. Such a request therefore carries neutral penalties for vLLM and its real ones for this logits processor,
which calls vLLM's own function with the right division into prompt and output: same numbers as colocated serving.

For vLLM's V1 model runner; `vllm_sampling` refuses such requests where the V2 runner is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.penalties import apply_all_penalties

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

PENALTIES = "disagg_penalties"  # extra_args: [presence, frequency, repetition, number of prompt tokens that are output]


@dataclass(slots=True)
class _Row:
    """One request of the batch. `prompt`: [1, tokens], the client's; `earlier`: output sampled elsewhere; `output`: vLLM's live list."""

    presence: float
    frequency: float
    repetition: float
    prompt: torch.Tensor
    earlier: list[int]
    output: list[int]


class ContinuedPenalties(LogitsProcessor):  # type: ignore[misc]
    """Applies the penalties of continued requests; costs nothing while there is none."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def _row(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
        given = (params.extra_args or {}).get(PENALTIES)
        if given is None or prompt is None:
            return None
        presence, frequency, repetition, num_earlier = given
        border = len(prompt) - num_earlier
        own = torch.tensor([prompt[:border]], dtype=torch.int64, device=self._device)
        return _Row(presence, frequency, repetition, own, list(prompt[border:]), output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # logits: [rows, vocabulary]
        for index, row in self._rows.items():
            apply_all_penalties(
                logits[index : index + 1],
                row.prompt,
                self._scalar(row.presence, logits),
                self._scalar(row.frequency, logits),
                self._scalar(row.repetition, logits),
                [row.earlier + row.output],
            )
        return logits

    @staticmethod
    def _scalar(value: float, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([value], dtype=logits.dtype, device=logits.device)
