"""A recorded run sent again to a gateway over real gRPC: the same requests at the same times, and both runs in one result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from disagg.ab.replay import load_recording
from disagg.ab.result import read_result
from disagg.ab.rows import RowFile, read_rows
from disagg.cli import app
from tests.ab_rig import FakeGateway, arms, by_round, comparison, run
from tests.openai_stub import OpenAiServer, serving
from tests.synthetic_rows import Machine, served


async def test_a_run_is_sent_again_token_for_token(tmp_path: Path):
    async with arms() as source:
        await run(comparison(rounds=2), source, tmp_path / "first")
    recorded = tmp_path / "first" / "requests.jsonl"
    assert load_recording(recorded, "colocated").same_prompts
    gateway = FakeGateway()
    address = await gateway.start()
    arguments = ["ab", "replay", str(recorded), "--to", address, "--arm", "colocated", "--out", str(tmp_path / "again")]
    try:
        ran = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    finally:
        await gateway.server.stop(None)
    assert ran.exit_code == 0, ran.output
    rows = read_rows(tmp_path / "again" / "requests.jsonl")
    for round_ in (1, 2):
        before, after = (by_round(rows, arm, round_) for arm in ("colocated", "replay"))
        sent = [
            [(r.index, r.due_s, r.slo_class, r.input_tokens, r.max_output_tokens, r.prompt_digest) for r in own] for own in (before, after)
        ]
        assert sent[0] == sent[1]
        assert all(r.is_whole for r in after)
    result = read_result(tmp_path / "again" / "result.json")
    assert set(result.arms) == {"colocated", "replay"}
    assert result.arms["replay"].littles_law is not None
    assert result.environment["replayed_to"] == address
    assert not any("other tokens" in w for w in result.warnings)


async def test_a_run_is_sent_again_to_a_server_that_is_not_ours(tmp_path: Path):
    async with arms() as source:
        await run(comparison(rounds=1, duration_s=0.4), source, tmp_path / "first")
    recorded = tmp_path / "first" / "requests.jsonl"
    server = OpenAiServer()
    async with serving(server) as url:
        arguments = ["ab", "replay", str(recorded), "--to", url, "--out", str(tmp_path / "again")]
        ran = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert ran.exit_code == 0, ran.output
        server.fault, server.sound_requests = "broken", len(server.bodies) + 6  # a warm-up's
        broken = await asyncio.to_thread(CliRunner().invoke, app, [*arguments[:-1], str(tmp_path / "broken")])
    rows = read_rows(tmp_path / "again" / "requests.jsonl")
    sent = {arm: {r.index: r.prompt_digest for r in rows if r.arm == arm} for arm in ("disagg", "replay")}
    assert sent["disagg"] == sent["replay"]  # token for token, though nobody says how large that model's vocabulary is
    result = read_result(tmp_path / "again" / "result.json")
    assert result.arms["replay"].completed == result.arms["disagg"].sent
    assert result.environment["model"] == "a-model"
    assert broken.exit_code == 0, broken.output
    failed = read_result(tmp_path / "broken" / "result.json").arms["replay"]
    assert (failed.failed, failed.errors, failed.ttft_s.count) == (failed.sent, {"EngineError": failed.sent}, 0)


async def test_prompts_that_cannot_be_made_again_are_told(tmp_path: Path):
    async with arms() as source:
        await run(comparison(rounds=1, duration_s=0.4), source, tmp_path / "first")
    recorded = tmp_path / "requests.jsonl"
    recorded.write_text((tmp_path / "first" / "requests.jsonl").read_text())
    gateway = FakeGateway()
    address = await gateway.start()
    try:
        ran = await asyncio.to_thread(
            CliRunner().invoke, app, ["ab", "replay", str(recorded), "--to", address, "--out", str(tmp_path / "again")]
        )
    finally:
        await gateway.server.stop(None)
    assert ran.exit_code == 0, ran.output
    raw = json.loads((tmp_path / "again" / "result.json").read_text())
    assert any("have other tokens" in w for w in raw["warnings"])


def test_what_is_wrong_with_a_replay_is_named(tmp_path: Path):
    def said(*arguments: str) -> str:
        ran = CliRunner().invoke(app, ["ab", "replay", *arguments])
        assert ran.exit_code == 2, ran.output
        return ran.output

    (tmp_path / "empty.jsonl").write_text("")
    assert "exactly one of --to ADDRESS and --topology FILE" in said(str(tmp_path / "empty.jsonl"))
    assert "at least one row" in said(str(tmp_path / "empty.jsonl"), "--to", "127.0.0.1:1")
    assert "absent.jsonl" in said(str(tmp_path / "absent.jsonl"), "--to", "127.0.0.1:1")
    with RowFile(tmp_path / "one.jsonl") as file:
        file.append(served("disagg", Machine(), 1, rounds=1, duration_s=5)[0])
    assert "the URL of a server with OpenAI's API that is up" in said(str(tmp_path / "one.jsonl"), "--to", "http://127.0.0.1:9")
    nobody = CliRunner().invoke(app, ["ab", "replay", str(tmp_path / "one.jsonl"), "--to", "127.0.0.1:9"])
    assert "127.0.0.1:9" in nobody.output
    assert nobody.exit_code != 0
