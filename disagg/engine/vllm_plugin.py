"""vLLM general plugin: the first code of ours that an engine process runs, before it loads weights."""

from __future__ import annotations

import os

from disagg.engine.vllm_channel import ADDRESS_ENV, hold_lifeline


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing in processes that no worker of ours has started."""
    if not os.environ.get(ADDRESS_ENV):
        return
    hold_lifeline()
    from disagg.engine.vllm_patches import patch_compiled_model_loading

    patch_compiled_model_loading()
