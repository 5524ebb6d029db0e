"""Speculative decoding in the step times: k drafted tokens are verified in one step, of which a given share is accepted. Pure.

    tokens of a step and sequence   E = (1 - a^(k + 1)) / (1 - a)        (Leviathan, Kalman and Matias 2023, equation 1)
    verifying step                  V(B) = a step that computes k + 1 tokens of each of B sequences, and reads each one's KV once
    drafting                        k times one layer and the output projection for B tokens (an EAGLE-like head)
    time for each token             (V(B) + drafting) / E

`a`: chance that a drafted token is accepted, given that those before it were. Simulated engines give one token a step, so one of their
steps lasts as long as the E-th part of a verifying step, and prompt tokens beside it cost what they add. That keeps rates and
mean times; that tokens come E at a time is lost, and so is that a step made long by a prompt brings E tokens too: times per token
beside prompts are on the high side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.perf.roofline import PrefillChunk, StepModel

MOST_DRAFTED = 16


@dataclass(frozen=True, slots=True)
class Speculation:
    """`tokens` drafted for each step and sequence, each accepted with the chance `acceptance`."""

    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_DRAFTED:
            raise ConfigError(key="speculative", value=self.tokens, expected=f"1 to {MOST_DRAFTED} drafted tokens")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(key="speculative", value=self.acceptance, expected="an acceptance from 0 to 1")

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that one sequence gains in a step: the accepted ones, and the one that the target model adds."""
        a, k = self.acceptance, self.tokens
        return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def parse_speculation(text: str) -> Speculation:
    """`TOKENS:ACCEPTANCE`, such as `4:0.7`. Raises ConfigError."""
    tokens, _, acceptance = text.partition(":")
    try:
        return Speculation(int(tokens), float(acceptance))
    except ValueError:
        raise ConfigError(key="speculative", value=text, expected="TOKENS:ACCEPTANCE, for example 4:0.7") from None


@dataclass(frozen=True, slots=True)
class SpeculativeSteps:
    """StepTimes of `model` with speculation. See the module."""

    model: StepModel
    speculation: Speculation

    def step_s(self, chunks: Sequence[PrefillChunk], num_decodes: int = 0, decode_context_tokens: int = 0) -> float:
        """Seconds of the part of a step that brings one token to each of `num_decodes` requests."""
        if not num_decodes:
            return self.model.step_s(chunks)
        whole_s = self._verify_s(chunks, num_decodes, decode_context_tokens)
        if not chunks:
            return whole_s / self.speculation.tokens_per_step
        # What the prompts add is paid in full, what the decodes cost by the share of their tokens.
        alone_s = self._verify_s((), num_decodes, decode_context_tokens)
        return whole_s - (1 - 1 / self.speculation.tokens_per_step) * alone_s

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for each token of `batch` requests whose contexts sum to `context_tokens`."""
        return self.step_s((), batch, context_tokens)

    def _verify_s(self, chunks: Sequence[PrefillChunk], batch: int, context_tokens: int) -> float:
        model, drafted = self.model, self.speculation.tokens
        tokens = batch + sum([c.num_tokens for c in chunks])
        rows = batch + len(chunks)
        more = drafted * batch
        draft_s = drafted * (model.layers_s(batch) / model.shape.num_layers + model.head_s(batch))
        layers_s = model.layers_s(tokens + more) - model.layers_s(tokens)
        head_s = model.head_s(rows + more) - model.head_s(rows)
        return model.step_s(chunks, batch, context_tokens) + layers_s + head_s + draft_s
