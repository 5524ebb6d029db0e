"""Trace files of five formats, the rules that scale them, and every fault with its line and column. Real traces where they are at hand."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.trace import Scaling, Trace, TraceRequest, scale
from disagg.trace_files import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,9,0,9,API log\n"
)
SERVEGEN = "arrival_s,input_tokens,output_tokens,client_id\n0.5,28,3,14\n0.25,552,38,41\n"
TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


def mooncake(*rows: tuple[float, int, int], block: int = 512) -> str:
    lines = []
    for number, (at_ms, given, wanted) in enumerate(rows):
        ids = [0, *range(number * 100 + 1, number * 100 - (-given // block))]
        lines.append(json.dumps({"timestamp": at_ms, "input_length": given, "output_length": wanted, "hash_ids": ids}))
    return "\n".join(lines) + "\n"


def row(**changes: Any) -> str:
    base = {"arm": "disagg", "round": 1, "due_s": 0.5, "input_tokens": 64, "max_output_tokens": 128, "slo_class": "chat", "token_s": []}
    return json.dumps({**base, **changes}) + "\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_(text: str, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_


def test_azure_keeps_the_seventh_digit(write: Any) -> None:
    trace = read_trace(write(AZURE))
    assert trace.requests == (TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 109))
    fine = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1,1\n2023-11-16 18:15:46.6805912,1,1\n"
    assert read_trace(write(fine)).requests[1].arrival_s == pytest.approx(1.2e-6, abs=3e-7)


def test_burstgpt_leaves_failed_requests_out_and_says_so(write: Any) -> None:
    trace = read_trace(write(BURST))
    assert trace.requests == (TraceRequest(5.0, 472, 18),)
    assert trace.notes == ("1 requests without an answer left out",)


def test_servegen_is_sorted(write: Any) -> None:
    assert [r.arrival_s for r in read_trace(write(SERVEGEN)).requests] == [0.25, 0.5]


def test_gzip_and_a_name_that_does_not_say_so(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert len(read_trace(path).requests) == 2


@pytest.mark.parametrize("block", [16, 512])
def test_mooncake_finds_its_block_size(write: Any, block: int) -> None:
    trace = read_trace(write(mooncake((0, 700, 5), (46.9, 2000, 7), (99, 3, 1), block=block), "t.jsonl"))
    assert trace.prefix_block_tokens == block
    assert trace.requests[1].arrival_s == pytest.approx(0.0469)
    assert len(trace.requests[1].prefix_hashes) == -(-2000 // block)
    assert trace.notes == ()


def test_a_rounded_clock_is_spread_inside_its_steps(write: Any) -> None:
    """Seeded, in the file's order, inside each step; and told."""
    path = write(mooncake(*[(3000 * (i // 10), 600, i + 1) for i in range(100)]), "t.jsonl")
    trace = read_trace(path, seed=1)
    assert [r.output_tokens for r in trace.requests] == list(range(1, 101)), "the order stays"
    assert [int(r.arrival_s // 3) for r in trace.requests] == [i // 10 for i in range(100)]
    assert len({r.arrival_s for r in trace.requests}) == 100
    assert "rounded to 3 s" in trace.notes[0]
    assert read_trace(path, seed=1) == trace
    assert read_trace(path, seed=2) != trace


def test_our_own_rows_are_replayed_once(write: Any) -> None:
    rows = row() + row(arm="colocated") + row(due_s=0.1, max_output_tokens=9) + row(round=2)
    trace = read_trace(write(rows, "requests.jsonl"))
    assert trace.requests == (TraceRequest(0.1, 64, 9, "chat"), TraceRequest(0.5, 64, 128, "chat"))
    assert trace.notes == ("round 1 of arm disagg",)
    assert len(read_trace(write(rows, "requests.jsonl"), arm="colocated").requests) == 1


def test_of_a_sweep_one_rate_is_replayed(write: Any) -> None:
    """The same round of every rate in one trace would be their sum."""
    rows = row(rate_rps=0.5) + row(rate_rps=2.0, due_s=0.1) + row(rate_rps=0.5, due_s=0.7)
    trace = read_trace(write(rows, "requests.jsonl"))
    assert [r.arrival_s for r in trace.requests] == [0.5, 0.7]
    assert trace.notes == ("round 1 of arm disagg, 0.5 requests/s",)


@pytest.mark.parametrize("text", [AZURE, BURST, SERVEGEN, mooncake((0, 5, 1)), row()])
def test_a_byte_order_mark_and_the_ends_of_other_systems_lines_change_nothing(tmp_path: Path, text: str) -> None:
    plain, other = tmp_path / "trace.a", tmp_path / "trace.b"
    plain.write_bytes(text.encode())
    other.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_trace(other).requests == read_trace(plain).requests


def test_a_quoted_header_and_an_offset_from_utc(write: Any) -> None:
    header = '"TIMESTAMP","ContextTokens","GeneratedTokens"\n'
    trace = read_trace(write(header + "2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 01:00:01+01:00,1,1\n2024-05-10T00:00:02Z,1,1\n"))
    assert [r.arrival_s for r in trace.requests] == [0.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (AZURE + "2023-11-16 18:15:51,12,x\n", "line 4, column GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:51,0,5\n", "line 4, column ContextTokens"),
        (AZURE + "2023-11-16 18:15:51,1.5,5\n", "line 4, column ContextTokens"),
        (AZURE + "yesterday,12,5\n", "line 4, column TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:51.12x,12,5\n", "line 4, column TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:51,12\n", "line 4, column GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:51,1,234,5\n", "line 4, column 4"),
        ("arrival_s,input_tokens,output_tokens\n-1,5,5\n", "line 2, column arrival_s"),
        ("arrival_s,input_tokens,output_tokens\nnan,5,5\n", "line 2, column arrival_s"),
        ("arrival_s,input_tokens,output_tokens\n", "line 1"),
        ("", "line 1"),
        ("\n" + SERVEGEN, "line 1"),
        ("time,tokens\n1,2\n", "line 1"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1, column output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": true}\n', "line 1, column output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n', "line 1, column hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "x"}\n', "line 1, column hash_ids"),
        (mooncake((0, 5, 1)) + "{broken\n", "line 2, column 2"),
        (mooncake((0, 5, 1)) + "[1]\n", "line 2"),
        (mooncake((0, 5, 1)) + "[" * 100_000 + "\n", "line 2, column 1"),
        ('{"timestamp": 0, "input_length": 1' + "0" * 400 + ', "output_length": 1}\n', "line 1, column input_length"),
        (row() + row(due_s=None), "line 2, column due_s"),
        (row() + row(slo_class=3), "line 2, column slo_class"),
    ],
)
def test_a_fault_names_file_line_and_column(write: Any, text: str, where: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert caught.value.key == where
    assert str(path) in caught.value.message
    assert where in caught.value.message or where == "line 1"


def test_files_that_cannot_be_read(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_trace(tmp_path / "absent.csv")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(AZURE.encode() * 100)[:-20])
    with pytest.raises(ConfigError, match=r"cut\.gz"):
        read_trace(cut)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(AZURE.encode() + b"2023-11-16 18:15:51,\xff\xfe,1\n")
    with pytest.raises(ConfigError, match="line 4, byte 21: not UTF-8"):
        read_trace(binary)
    with pytest.raises(ConfigError, match="needs arrival_s"):
        read_trace(write(AZURE), "servegen")
    with pytest.raises(ConfigError, match="no row of arm 'x'"):
        read_trace(write(row()), arm="x")


# ---- scaling

PLAIN = Trace(
    "t", tuple(TraceRequest(float(i), 1000 * (i + 1), 100 * (i + 1), None, tuple(range(-(-1000 * (i + 1) // 512)))) for i in range(5)), 512
)


def test_scaling_does_what_it_says_and_says_what_it_did() -> None:
    scaled = scale(PLAIN, Scaling(start_s=1, window_s=3, max_input_tokens=2500, rate_factor=2))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in scaled.requests] == [(0, 2000, 200), (0.5, 2500, 300), (1, 2500, 400)]
    assert scaled.notes == (
        "3 of 5 requests: those from 1 s to 4 s",
        "at most 2500 tokens in: 2 longer requests clipped",
        "arrivals 2 x as fast",
    )
    assert [len(r.prefix_hashes) for r in scaled.requests] == [4, 5, 5]


def test_dropping_and_the_total() -> None:
    dropped = scale(PLAIN, Scaling(max_total_tokens=3000, over="drop"))
    assert [r.input_tokens for r in dropped.requests] == [1000, 2000]
    assert dropped.notes == ("at most 3000 tokens in and out together: 3 longer requests dropped",)
    clipped = scale(PLAIN, Scaling(max_total_tokens=3000))
    assert [r.input_tokens + r.output_tokens for r in clipped.requests] == [1100, 2200, 3000, 3000, 3000]
    tiny = scale(PLAIN, Scaling(max_total_tokens=2)).requests
    assert {(r.input_tokens, r.output_tokens) for r in tiny} == {(1, 1)}


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.7, 3.0])
def test_shared_prefixes_stay_shared_when_lengths_are_scaled(factor: float) -> None:
    rng = random.Random(2)
    common = tuple(range(6))
    requests = tuple(TraceRequest(float(n), 512 * 10, 5, None, (*common, *(n * 100 + i + 50 for i in range(4)))) for n in range(1, 4))
    scaled = scale(Trace("t", requests, 512), Scaling(input_factor=factor)).requests
    for r in scaled:
        assert len(r.prefix_hashes) == -(-r.input_tokens // 512)
        assert len(set(r.prefix_hashes)) == len(r.prefix_hashes)
    first, second = rng.sample(scaled, 2)
    shared = sum(a == b for a, b in zip(first.prefix_hashes, second.prefix_hashes, strict=True))
    assert shared == pytest.approx(0.6 * len(first.prefix_hashes), abs=1)
    assert first.prefix_hashes[shared:] != second.prefix_hashes[shared:] or shared == len(first.prefix_hashes)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Scaling(rate_factor=0), "rate_factor"),
        (lambda: Scaling(input_factor=float("inf")), "input_factor"),
        (lambda: Scaling(max_total_tokens=1), "max_total_tokens"),
        (lambda: Scaling(start_s=-1), "start_s"),
        (lambda: Scaling(over="keep"), "over"),
        (lambda: scale(PLAIN, Scaling(start_s=99)), "window_s"),
        (lambda: scale(PLAIN, Scaling(max_total_tokens=2, over="drop")), "window_s"),
    ],
)
def test_bad_scaling_is_named(build: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not at hand")
@pytest.mark.parametrize(
    ("file", "count", "mean_in", "mean_out", "rate_rps", "block"),
    [
        ("azure2023_conv/AzureLLMInferenceTrace_conv.csv.gz", 19_366, 1155, 211, 5.53, 0),
        ("azure2023_code/AzureLLMInferenceTrace_code.csv.gz", 8_819, 2048, 27.88, 2.57, 0),
        ("mooncake_conversation/conversation_trace.jsonl.gz", 12_031, 12_035, 343, 3.40, 512),
        ("servegen_deepseek_r1/servegen_deepseek_r1_10h-11h_8rps.csv.gz", 28_859, 1105, 2957, 8.0, 0),
        ("sharegpt_llmservingsim/sharegpt-llama-3.1-8b-300-sps10.blk16.jsonl", 300, 858, 653, 10.3, 16),
    ],
)
def test_real_traces_have_the_published_figures(
    file: str, count: int, mean_in: float, mean_out: float, rate_rps: float, block: int
) -> None:
    trace = read_trace(TRACES / file)
    assert len(trace.requests) == count
    assert sum(r.input_tokens for r in trace.requests) / count == pytest.approx(mean_in, rel=2e-3)
    assert sum(r.output_tokens for r in trace.requests) / count == pytest.approx(mean_out, rel=2e-3)
    assert trace.mean_rate_rps == pytest.approx(rate_rps, rel=0.01)
    assert trace.prefix_block_tokens == block
