"""vLLM general plugin: the first code of ours that an engine process runs, before it loads weights."""

from __future__ import annotations

from disagg.engine.vllm_channel import hold_lifeline


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing in processes that no worker of ours has started."""
    hold_lifeline()
