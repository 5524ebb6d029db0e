"""Serve one LLM from separate prefill and decode pools of vLLM workers.

Start reading at `disagg/types.py` (the vocabulary), then `disagg/engine/engine.py` (the protocol that engines,
workers and their remote clients share) and `disagg/serving/coordinator.py` (one request, end to end).
"""

__version__ = "0.1.0"
