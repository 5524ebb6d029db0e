"""`disagg generate`: one prompt to a running gateway, from the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from disagg.client import Answer

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
    chat_model: str | None = typer.Option(None, "--chat-model", help="Folder or name of the template's model [default: the served one]."),
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
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    asked = _chat_prompt(address, text, chat_model) if chat else text
    answer = _ask(address, asked, options, timeout_s, show=stream and not as_json)
    if as_json:
        typer.echo(_as_json(answer))
        return
    typer.echo("" if stream else answer.text)
    if logprobs is not None:
        _print_logprobs(answer)
    typer.echo(summary(answer), err=True)


def _chat_prompt(address: str, text: str, model: str | None) -> list[int]:
    """The token ids of a conversation of one message; the model's folder must be on this machine."""
    from pathlib import Path

    from disagg.client import Client
    from disagg.client_chat import chat_token_ids
    from disagg.errors import ConfigError
    from disagg.models import resolve_model

    if model is None:
        with Client(address) as client:
            model = client.model_info().model
    folder = resolve_model(model, Path.cwd(), check_hub=False)
    if not isinstance(folder, Path):
        expected = "a folder with the model's tokenizer.json and chat template"
        raise ConfigError(f"--chat: {model} is not on this machine; give its folder by --chat-model", key="--chat-model", expected=expected)
    return chat_token_ids(folder, [{"role": "user", "content": text}])


def _ask(address: str, prompt: str | list[int], options: dict[str, Any], timeout_s: float | None, *, show: bool) -> Answer:
    """The answer; its text is printed as it comes when `show`."""
    import time
    from contextlib import closing

    from disagg.client import AnswerBuilder, Client

    with Client(address) as client:
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
