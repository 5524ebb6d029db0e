"""Trace workloads in the live A/B: due times, prompts that share what the trace says, warm-up, and what does not fit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from disagg.ab.trace_plan import check_workload, duration_s, plan_round, plan_warm_up
from disagg.ab.trace_workload import TraceWorkload, load_any_workload
from disagg.config import SloClass
from disagg.errors import ConfigError

CLASSES = (SloClass(name="chat"), SloClass(name="document"))
ROWS = ((1000.0, 40, 5, (7, 8, 9)), (1500.0, 33, 6, (7, 8, 1)), (4000.0, 16, 7, (2,)), (5000.0, 20, 1, (2, 3)))


def workload_of(tmp_path: Path, extra: str = "") -> TraceWorkload:
    lines = [json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": list(h)}) for t, i, o, h in ROWS]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    path = tmp_path / "w.yaml"
    path.write_text(f"name: mine\nslo_class: document\ntrace: {{file: t.jsonl{extra}}}\n")
    workload = load_any_workload(str(path))
    assert isinstance(workload, TraceWorkload)
    return workload


def test_a_round_has_the_traces_times_lengths_and_class(tmp_path: Path) -> None:
    workload = workload_of(tmp_path, ", rate_factor: 2")
    planned = plan_round(workload, CLASSES, seed=0, round_=1)
    assert [(r.due_s, r.input_tokens, r.output_tokens) for r in planned] == [(0, 40, 5), (0.25, 33, 6), (1.5, 16, 7), (2.0, 20, 1)]
    assert {(r.round, r.slo_class) for r in planned} == {(1, "document")}
    assert [r.index for r in planned] == [0, 1, 2, 3]
    assert duration_s(workload, CLASSES) == pytest.approx(2.0)


def test_prompts_share_exactly_the_blocks_that_the_trace_shares(tmp_path: Path) -> None:
    planned = plan_round(workload_of(tmp_path), CLASSES, seed=0, round_=0)
    prompts = [r.prompt_ids(50_000) for r in planned]
    assert [len(p) for p in prompts] == [r.input_tokens for r in planned]
    for (a, ids_a), (b, ids_b) in itertools.combinations(zip(prompts, (h for *_, h in ROWS), strict=True), 2):
        blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids_a, ids_b, strict=False)))
        tokens = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        assert tokens == min(blocks * 16, len(a), len(b))
    again = plan_round(workload_of(tmp_path), CLASSES, seed=0, round_=1)[0].prompt_ids(50_000)
    assert again[:16] != prompts[0][:16], "another round repeats no prompt"


def test_warm_up_rehearses_short_median_and_long_with_other_prompts(tmp_path: Path) -> None:
    workload = workload_of(tmp_path)
    warm = plan_warm_up(workload, CLASSES, seed=0, copies=2)
    assert [r.input_tokens for r in warm] == [16, 16, 33, 33, 40, 40]
    prompts = [r.prompt_ids(50_000) for r in (*warm, *plan_round(workload, CLASSES, 0, 0))]
    assert len({p[:16] for p in prompts[:6]}) == 6
    assert not {p[:16] for p in prompts[:6]} & {p[:16] for p in prompts[6:]}


def test_what_does_not_fit_the_context_is_said_before_anything_starts(tmp_path: Path) -> None:
    workload = workload_of(tmp_path)
    check_workload(workload, CLASSES, 45)
    with pytest.raises(ConfigError) as caught:
        check_workload(workload, CLASSES, 44)
    assert caught.value.key == "trace.max_total_tokens"
    check_workload(workload_of(tmp_path, ", max_total_tokens: 44"), CLASSES, 44)
