"""vLLM general plugin: the first code of ours that an engine process runs, before it loads weights."""

from __future__ import annotations

import os
import threading

from disagg.engine.vllm_channel import ADDRESS_ENV, hold_lifeline


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing in processes that no worker of ours has started."""
    if not os.environ.get(ADDRESS_ENV):
        return
    hold_lifeline()
    keep_progress_bars_to_threads()
    from disagg.engine.vllm_events import register_publisher
    from disagg.engine.vllm_patches import patch_compiled_model_loading

    register_publisher()
    patch_compiled_model_loading()


def keep_progress_bars_to_threads() -> None:
    """Let tqdm make no semaphore for locking between processes: its name stays in /dev/shm when an engine is killed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return
    tqdm.set_lock(threading.RLock())
