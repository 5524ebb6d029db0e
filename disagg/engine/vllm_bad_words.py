"""Bad words of several tokens, in a request that continues an answer.

vLLM looks for a word's beginning among *output* tokens. What was sampled elsewhere (the first token on the prefill worker, or what came
before a fail-over) lies in this request's prompt, so a word that began there would be missed; this logits processor looks there too.
Words of one token need nothing: vLLM's own mask holds for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from disagg.engine.vllm_sampling import BAD_WORDS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


@dataclass(slots=True)
class _Row:
    """One request of the batch. `earlier`: the end of the output sampled elsewhere; `output`: vLLM's live list."""

    words: list[list[int]]
    earlier: list[int]
    output: list[int]

    def forbidden(self) -> list[int]:
        """Tokens that would complete a word now."""
        past = self.earlier + self.output
        return [word[-1] for word in self.words if past[-(len(word) - 1) :] == word[:-1]]


class ContinuedBadWords(LogitsProcessor):  # type: ignore[misc]
    """Masks what would complete a bad word; costs nothing while no request has one."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    @staticmethod
    def _row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
        given = (params.extra_args or {}).get(BAD_WORDS)
        if given is None or prompt is None:
            return None
        words, num_earlier = given
        return _Row(words, list(prompt[len(prompt) - num_earlier :]), output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # logits: [rows, vocabulary]
        for index, row in self._rows.items():
            forbidden = row.forbidden()
            if forbidden:
                logits[index, forbidden] = float("-inf")
        return logits
