"""`disagg generate`: one prompt to a running gateway, from the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from disagg.client import Answer
    from disagg.client_types import Prompt

DEFAULT_ADDRESS = "127.0.0.1:8500"


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    prompt: str = typer.Argument(help="The prompt; `-` reads it from standard input."),
    address: str = typer.Option(DEFAULT_ADDRESS, "--address", envvar="DISAGG_ADDRESS", help="Where the gateway listens, HOST:PORT."),
    stream: bool = typer.Option(False, "--stream", help="Print tokens as they come."),
    max_tokens: int | None = typer.Option(None, "--max-tokens", help="Most tokens to answer with [default: 128]."),
    temperature: float | None = typer.Option(None, "--temperature", help="0 is greedy [default: 1]."),
    top_p: float | None = typer.Option(None, "--top-p"),
    top_k: int | None = typer.Option(None, "--top-k"),
    seed: int | None = typer.Option(None, "--seed", help="Makes sampling repeatable."),
    stop: list[str] = typer.Option([], "--stop", help="End the answer before this string; may be given several times."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on to --max-tokens, whatever the model says."),
    logprobs: int | None = typer.Option(None, "--logprobs", help="Show each token's logprob and so many alternatives."),
    slo_class: str | None = typer.Option(None, "--slo-class", help="An SLO class of the topology."),
    priority: int | None = typer.Option(None, "--priority", help="Higher goes first."),
    chat: bool = typer.Option(False, "--chat", help="Take the prompt as a user's message, by the model's chat template."),
    system: str | None = typer.Option(None, "--system", help="A system message before it, with --chat."),
    json_schema: Path | None = typer.Option(None, "--json-schema", help="A file: the answer follows this JSON schema."),
    regex: str | None = typer.Option(None, "--regex", help="The answer matches this regular expression."),
    token: str | None = typer.Option(None, "--token", envvar="DISAGG_TOKEN", help="A bearer token, where the gateway asks for one."),
    ca: str | None = typer.Option(None, "--ca", envvar="DISAGG_CA", help="PEM file of the authority to trust; speaks TLS."),
    cert: str | None = typer.Option(None, "--cert", envvar="DISAGG_CERT", help="PEM file of this client's certificate."),
    key: str | None = typer.Option(None, "--key", envvar="DISAGG_KEY", help="PEM file of its key."),
    timeout_s: float | None = typer.Option(None, "--timeout", help="Give up after so many seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print the whole answer as JSON."),
) -> None:
    """Send a prompt to a running gateway and print the answer; what it took goes to standard error."""
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos or None,
        "logprobs": logprobs,
        "slo_class": slo_class,
        "priority": priority,
        "json_schema": json_schema.read_text() if json_schema is not None else None,
        "regex": regex,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    system_message = [{"role": "system", "content": system}] if system is not None else []
    asked = [*system_message, {"role": "user", "content": text}] if chat else text
    access = {"token": token, "ca": ca, "cert": cert, "key": key}
    answer = _ask(address, asked, options, access, timeout_s, show=stream and not as_json)
    if as_json:
        typer.echo(_as_json(answer))
        return
    typer.echo("" if stream else answer.text)
    if logprobs is not None:
        _print_logprobs(answer)
    typer.echo(summary(answer), err=True)


def _ask(
    address: str, prompt: Prompt, options: dict[str, Any], access: dict[str, str | None], timeout_s: float | None, *, show: bool
) -> Answer:
    """The answer; its text is printed as it comes when `show`."""
    import time
    from contextlib import closing

    from disagg.client import AnswerBuilder, Client

    with Client(address, **access) as client:
        builder = AnswerBuilder(time.monotonic())
        with closing(client.stream(prompt, timeout_s=timeout_s, **options)) as parts:
            for part in parts:
                builder.add(part, time.monotonic())
                if show:
                    typer.echo(part.text, nl=False)
                    sys.stdout.flush()
    return builder.answer()


def summary(answer: Answer) -> str:
    """One line: route, times, tokens."""
    usage = answer.usage
    pair = usage.prefill_worker, usage.decode_worker
    route = pair[0] if pair[0] == pair[1] else " -> ".join(pair)
    tpot = "" if answer.tpot_s is None else f", tpot {answer.tpot_s * 1e3:.1f} ms"
    tried = "" if usage.attempts == 1 else f", {usage.attempts} routes tried"
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    tokens = f"{usage.prompt_tokens}{cached} + {usage.output_tokens} tokens"
    return f"[{route}] ttft {answer.ttft_s * 1e3:.0f} ms{tpot}, {tokens}, ended by {answer.finish}{tried}"


def _print_logprobs(answer: Answer) -> None:
    for token in answer.tokens:
        top = "  ".join(f"{t.token_id}:{t.logprob:.4f}" for t in token.top)
        typer.echo(f"{token.token_id}\t{token.logprob:.6f}\t{top}" if token.logprob is not None else f"{token.token_id}")


def _as_json(answer: Answer) -> str:
    import json
    from dataclasses import asdict

    return json.dumps({**asdict(answer), "tpot_s": answer.tpot_s}, ensure_ascii=False)
