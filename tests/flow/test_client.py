"""The sync and async clients, the command line and the examples, against the real door."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from disagg.client import Answer, AsyncClient, Client, OptionArguments, Options
from disagg.client_types import CONNECT_TIMEOUT_S
from disagg.errors import DeadlineError, GatewayUnreachableError, InvalidRequestError, RejectedError, UnavailableError
from disagg.front.chat import ChatTemplate
from disagg.front.model_info import Served
from disagg.front.text import SyntheticTokenizer, load_tokenizer
from disagg.types import Chunk, FinishReason, ModelInfo, Phase, Request, Token
from tests.flow.scripted import serve, topology

ROOT = Path(__file__).parents[2]
TEXT = SyntheticTokenizer().decode


async def endless(request: Request) -> AsyncGenerator[Chunk, None]:
    yield Chunk((Token(1),))
    await asyncio.Event().wait()


async def full(request: Request) -> AsyncGenerator[Chunk, None]:
    raise RejectedError("full", retry_after_s=2.5)
    yield


# -- sync


async def test_sync_client_generates_streams_and_informs() -> None:
    def use(address: str) -> tuple[Answer, list[str], str]:
        with Client(address) as client:
            answer = client.generate("hello", max_tokens=4)
            texts = [part.text for part in client.stream([1, 2], max_tokens=3)]
            return answer, texts, client.model_info().model

    async with serve() as door:
        answer, texts, model = await asyncio.to_thread(use, door.address)
    assert (answer.token_ids, answer.text, answer.finish) == ((0, 1, 2, 3), TEXT(range(4)), FinishReason.LENGTH)
    assert texts == [TEXT([n]) for n in range(3)]
    assert model == "a-model"
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert answer.tpot_s == pytest.approx((answer.e2e_s - answer.ttft_s) / 3)


async def test_sync_client_restores_errors_and_can_be_used_again() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            with pytest.raises(RejectedError) as caught:
                client.generate([1])
            assert caught.value.retry_after_s == 2.5
            with pytest.raises(InvalidRequestError, match="max_tokens"):
                client.generate([1], max_tokens=0)

    async with serve(full) as door:
        await asyncio.to_thread(use, door.address)


async def test_closing_a_sync_stream_cancels() -> None:
    def use(address: str) -> None:
        with Client(address) as client, closing(client.stream([1])) as parts:
            assert next(parts).tokens == (Token(1),)

    async with serve(endless) as door:
        await asyncio.to_thread(use, door.address)
        await door.scripted.wait_ended(1)
        assert door.scripted.ended == [Phase.CANCELLED]


async def test_sync_timeout_is_a_deadline_error() -> None:
    def use(address: str) -> None:
        with Client(address) as client, pytest.raises(DeadlineError):
            client.generate([1], timeout_s=0.3)

    async with serve(endless) as door:
        await asyncio.to_thread(use, door.address)
        await door.scripted.wait_ended(1)


# -- options


async def test_every_option_reaches_the_request() -> None:
    async with serve() as door, AsyncClient(door.address) as client:
        await client.generate(
            [1], max_tokens=3, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, presence_penalty=0.5,
            frequency_penalty=-0.5, repetition_penalty=1.1, stop=["never"], stop_token_ids=[9], ignore_eos=True, logprobs=3,
            slo_class="batch", priority=-4, request_id="mine",
        )  # fmt: skip
        request = door.scripted.requests[0]
    sampling = request.sampling
    assert (request.request_id, request.slo_class, request.priority) == ("mine", "batch", -4)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 1, 0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 11, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.stop, sampling.stop_token_ids) == (1.1, ("never",), (9,))
    assert (sampling.ignore_eos, sampling.logprobs) == (True, 3)


async def test_an_unknown_option_names_the_nearest() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError, match="did you mean 'max_tokens'"):
            await client.generate([1], max_token=3)  # type: ignore[call-arg]


def test_keyword_arguments_are_the_fields_of_options() -> None:

    assert list(OptionArguments.__annotations__) == list(Options.__dataclass_fields__)


# -- a gateway that is not there


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("method", ["generate", "stream", "model_info"])
async def test_nothing_listens(method: str) -> None:
    address = f"127.0.0.1:{free_port()}"

    def use() -> None:
        with Client(address) as client, pytest.raises(GatewayUnreachableError, match="disagg up") as caught:
            {"generate": lambda: client.generate([1]), "stream": lambda: next(client.stream([1])), "model_info": client.model_info}[
                method
            ]()
        assert caught.value.address == address

    await asyncio.to_thread(use)
    async with AsyncClient(address) as client:
        with pytest.raises(GatewayUnreachableError, match=address):
            await {"generate": lambda: client.generate([1]), "stream": lambda: anext(client.stream([1])), "model_info": client.model_info}[
                method
            ]()


async def test_an_address_that_swallows_connections_is_given_up_soon() -> None:
    """A listener that accepts and says nothing: no deadline of the caller is needed to end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address) as client, asyncio.timeout(10 * CONNECT_TIMEOUT_S):
            with pytest.raises(GatewayUnreachableError):
                await client.generate([1])


async def test_something_else_listens() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    async with server, asyncio.timeout(10 * CONNECT_TIMEOUT_S):
        client = AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(GatewayUnreachableError):
            await client.generate([1])
        await client.close()


async def test_a_name_that_does_not_exist() -> None:
    async with AsyncClient("no-such-host.invalid:8500") as client, asyncio.timeout(60):
        with pytest.raises(GatewayUnreachableError):
            await client.generate([1])


async def test_a_gateway_that_goes_away_in_the_middle_is_no_short_answer() -> None:
    async with serve(endless) as door, AsyncClient(door.address) as client:
        parts = client.stream([1])
        assert (await anext(parts)).tokens == (Token(1),)
        await door.server.close(0.0)
        with pytest.raises(UnavailableError):
            await anext(parts)


async def test_a_gateway_that_comes_back_is_used_again() -> None:
    async with serve() as door:
        port = int(door.address.rsplit(":", 1)[1])
        client = AsyncClient(door.address)
        await client.generate([1], max_tokens=1)
    with pytest.raises(UnavailableError):
        await client.generate([1], max_tokens=1)

    async with serve(settings=topology(gateway={"port": port})):
        async with asyncio.timeout(10 * CONNECT_TIMEOUT_S):
            while True:
                try:
                    answer = await client.generate([1], max_tokens=2)
                    break
                except UnavailableError:
                    await asyncio.sleep(0.1)
        assert answer.token_ids == (0, 1)
        await client.close()


# -- command line


async def run(*command: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment.pop("DISAGG_ADDRESS", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def generate_command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "from disagg.cli import app; app()", "generate", *arguments)


@pytest.mark.parametrize("stream", [(), ("--stream",)])
async def test_generate_prints_the_answer_and_what_it_took(stream: tuple[str, ...]) -> None:
    async with serve() as door:
        status, out, err = await run(*generate_command("hello", "--address", door.address, "--max-tokens", "4", *stream))
    assert (status, out) == (0, f"{TEXT(range(4))}\n")
    assert err.startswith("[p0 -> d0] ttft ")
    assert "5 + 4 tokens, ended by length" in err


async def test_generate_reads_standard_input_and_passes_options() -> None:
    async with serve() as door:
        options = (
            "--max-tokens",
            "2",
            "--temperature",
            "0",
            "--seed",
            "3",
            "--stop",
            "a",
            "--slo-class",
            "batch",
            "--ignore-eos",
            "--priority",
            "2",
        )
        status, _, err = await run(*generate_command("-", "--address", door.address, *options), stdin="abc")
        request = door.scripted.requests[0]
    assert status == 0, err
    assert request.prompt_token_ids == tuple(b"abc")
    assert (request.slo_class, request.priority) == ("batch", 2)
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.stop) == (0.0, 3, ("a",))
    assert request.sampling.ignore_eos


async def test_generate_as_json() -> None:
    async with serve() as door:
        status, out, err = await run(*generate_command("hello", "--address", door.address, "--max-tokens", "2", "--json", "--stream"))
    assert status == 0, err
    answer = json.loads(out)
    assert [token["token_id"] for token in answer["tokens"]] == [0, 1]
    assert answer["finish"] == "length"
    assert answer["usage"]["prefill_worker"] == "p0"
    assert answer["tpot_s"] > 0


async def test_generate_chat_uses_the_models_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[user]": 7, "hello": 8, "[you]": 9, "[system]": 5, "short": 6, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[you]")
    model = Served(ModelInfo("m", 100, 100, 1), load_tokenizer(tmp_path), ChatTemplate.beside(tmp_path))
    async with serve(served=model) as door:
        command = generate_command("hello", "--chat", "--system", "short", "--address", door.address, "--max-tokens", "2")
        status, _, err = await run(*command)
        assert status == 0, err
        assert door.scripted.requests[0].prompt_token_ids == (5, 6, 7, 8, 9)
    async with serve() as door:
        status, _, err = await run(*generate_command("hello", "--chat", "--address", door.address))
        assert status == 2
        assert "no chat template" in err


async def test_generate_ends_with_one_line_and_a_status_on_errors() -> None:
    status, out, err = await run(*generate_command("hello", "--address", f"127.0.0.1:{free_port()}"))
    assert (status, out) == (1, "")
    assert "no gateway answers at" in err
    assert "Traceback" not in err
    async with serve() as door:
        status, _, err = await run(*generate_command("hello", "--address", door.address, "--max-tokens", "0"))
    assert status == 2
    assert "max_tokens" in err


# -- examples


@pytest.mark.parametrize("name", ["sync_client.py", "async_client.py"])
async def test_examples_run(name: str) -> None:
    async with serve() as door:
        status, out, err = await run(sys.executable, str(ROOT / "examples" / name), door.address)
    assert status == 0, err
    assert out.strip()
    assert err == ""


async def test_grpcurl_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With grpcurl where it is installed, else with as much of it as the example uses (tests/small_grpcurl.py)."""
    if shutil.which("grpcurl") is None:
        stand_in = tmp_path / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "small_grpcurl.py"}" "$@"\n')
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with serve() as door:
        status, out, err = await run(str(ROOT / "examples" / "grpcurl.sh"), door.address)
    assert status == 0, err
    assert "disagg.v1.Inference" in out
    assert "SERVING" in out
    assert out.count("FINISH_REASON_LENGTH") == 2


async def test_the_client_needs_no_heavy_import() -> None:
    probe = (
        "import sys, disagg.client; print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    assert await run(sys.executable, "-c", probe) == (0, "[]\n", "")
