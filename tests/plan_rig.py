"""For tests of the planner: questions that are answered in a second or two."""

from __future__ import annotations

from typing import Any

from disagg.config import SloClass
from disagg.perf.hardware import find_device
from disagg.perf.links import find_link
from disagg.perf.shapes import find_shape
from disagg.plan.load import load_of
from disagg.plan.question import Question
from disagg.trace import Trace
from tests.sim_rig import poisson

CHAT = SloClass(name="chat", ttft_ms=500, tpot_ms=50, if_missed="reject")


def question(
    inputs: int = 1000, outputs: int = 100, rate: float = 4.0, slo: SloClass = CHAT, model: str = "llama-3.1-70b", **more: Any
) -> Question:
    """Llama-3.1-70B on 8 H100s in workers of four, Poisson arrivals of equal requests; few requests per simulation."""
    requests = tuple(r.__class__(r.arrival_s, r.input_tokens, r.output_tokens, slo.name) for r in poisson(rate, 200, inputs, outputs))
    shape = find_shape(model)
    load = load_of(Trace("made up", requests), (slo,), shape.max_context_tokens)
    given: dict[str, Any] = {"gpus": 8, "degrees": (4,), "requests": 60, "device": find_device("h100"), "link": find_link("ib-ndr")}
    return Question(shape=shape, shape_ref=shape.name, load=load, **{**given, **more})
