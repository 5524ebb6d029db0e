"""One line of JSON per request, at its end, in the log `disagg.requests`."""

from __future__ import annotations

import json
import logging

from disagg.serving.run import Run

log = logging.getLogger("disagg.requests")


def log_request(run: Run) -> None:
    """Log a run that ended. Durations in seconds, on the gateway's clock."""
    if not log.isEnabledFor(logging.INFO):
        return
    request, timeline, route, predicted = run.request, run.timeline, run.route, run.prediction
    record = {
        "request_id": request.request_id,
        "outcome": run.phase,
        "slo_class": request.slo_class,
        "priority": request.priority,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "output_tokens": run.output_tokens,
        "prefill_worker": route.prefill if route else None,
        "decode_worker": route.decode if route else None,
        "attempts": run.attempts,
        "queue_s": round(timeline.queue_s, 6),
        "prefill_s": round(timeline.prefill_s, 6),
        "transfer_s": round(timeline.transfer_s, 6),
        "decode_s": round(timeline.decode_s, 6),
        "ttft_s": round(timeline.ttft_s, 6) if timeline.first_token_s is not None else None,
        "total_s": round(timeline.total_s, 6),
        "predicted_ttft_s": round(predicted.ttft_s, 6) if predicted else None,
        "predicted_tpot_s": round(predicted.tpot_s, 6) if predicted else None,
    }
    log.info("%s", json.dumps(record, separators=(",", ":")))
