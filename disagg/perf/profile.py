"""A measured worker: what its steps cost, as a file that router, simulator and simulated engine take in the roofline's place. Pure.

    seconds of a step = base_s + over_s x max(0, tokens - ridge_tokens) + prompt_token_s x prompt tokens + pair_s x (query, key) pairs
                      + decode_s x decoding requests + context_s x their context tokens

`disagg profile` makes it (profile_fit.py says how the coefficients are found).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from disagg.errors import ConfigError
from disagg.perf.roofline import PrefillChunk

VERSION = 1
_JSON_KINDS = {str: "string", dict: "object", int: "integer", float: "number"}


class StepTimes(Protocol):
    """What tells the seconds of steps: a roofline, or a profile."""

    def step_s(self, chunks: Sequence[PrefillChunk], num_decodes: int = 0, decode_context_tokens: int = 0) -> float:
        """Seconds of one step."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of a step that only decodes; affine in the context."""
        ...


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds, and `ridge_tokens` in tokens. See the module."""

    base_s: float
    over_s: float
    prompt_token_s: float
    pair_s: float
    decode_s: float
    context_s: float
    ridge_tokens: float = 0.0

    def seconds(self, prompt_tokens: float, pairs: float, decodes: float, context_tokens: float) -> float:
        """Of one step that does so much."""
        return (
            self.base_s
            + self.over_s * max(0.0, prompt_tokens + decodes - self.ridge_tokens)
            + self.prompt_token_s * prompt_tokens
            + self.pair_s * pairs
            + self.decode_s * decodes
            + self.context_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """One worker, measured.

    `model`: its fingerprint as the KV layout has it (NAME@DIGEST). `hardware`: in words, with the cores or devices of the worker. `args`:
    the engine arguments that it ran with. `kv_cache_tokens`, `block_tokens`: of its cache. `kv_bytes_per_token`: real bytes that move.
    `link_bandwidth` (bytes/s) and `link_latency_s` of a transfer between two workers on this host, None where none was measured.
    `num_steps`, `median_error`: what the coefficients were fitted on, and how far off they are there. `measured_at`: ISO date.
    """

    model: str
    hardware: str
    args: dict[str, Any]
    steps: StepCoefficients
    kv_cache_tokens: int
    block_tokens: int
    kv_bytes_per_token: int
    num_steps: int
    median_error: float
    measured_at: str
    link_bandwidth: float | None = None
    link_latency_s: float | None = None

    @property
    def model_name(self) -> str:
        return self.model.partition("@")[0]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree of the measured worker, by its engine's arguments."""
        return int(self.args.get("tensor_parallel_size") or self.args.get("tp") or 1)

    @property
    def is_on_host(self) -> bool:
        """Whether its cache lay in the host's memory: `hardware` names cores then, and devices else."""
        return " cores of " in self.hardware

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a request that the measured worker takes at most; None where its arguments do not say."""
        value = self.args.get("max_model_len")
        return int(value) if value else None

    def step_s(self, chunks: Sequence[PrefillChunk], num_decodes: int = 0, decode_context_tokens: int = 0) -> float:
        """Seconds of one step; an empty one takes no time."""
        prompt_tokens = sum([c.num_tokens for c in chunks])
        if prompt_tokens + num_decodes == 0:
            return 0.0
        return self.steps.seconds(prompt_tokens, sum([c.attention_pairs for c in chunks]), num_decodes, decode_context_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` requests whose contexts sum to `context_tokens`."""
        return self.step_s((), batch, context_tokens)

    def check_model(self, name: str) -> None:
        """Raises ConfigError unless it was measured on the model called `name` (a path's or hub name's last part counts)."""
        if Path(name).name.lower() != self.model_name.lower():
            expected = f"a profile of {Path(name).name}; this one was measured on {self.model_name}"
            raise ConfigError(key="profile", value=self.model, expected=expected)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def load_profile(path: str | Path) -> Profile:
    """Raises ConfigError for a file that is not a profile, of another version, or with a coefficient that no hardware can have."""
    file = Path(path).expanduser()
    try:
        raw: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        expected = "a file that `disagg profile` wrote"
        raise ConfigError(f"profile {file}: {error}; expected {expected}", key=str(file), expected=expected) from error
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        version = raw.get("version") if isinstance(raw, dict) else raw
        raise ConfigError(key=f"{file}: version", value=version, expected=f"{VERSION}; measure again with `disagg profile`")
    known = {f.name for f in fields(Profile)}
    if (wrong := set(raw) - known - {"version"}) or (wrong := known - set(raw)):
        raise ConfigError(key=f"{file}: {min(wrong)}", value=raw.get(min(wrong)), expected=f"exactly the keys {sorted(known)}")
    try:
        steps = StepCoefficients(**{name: float(value) for name, value in raw["steps"].items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(key=f"{file}: steps", value=raw["steps"], expected=f"the coefficients of a step ({error})") from error
    check_physical(steps, f"{file}: steps")
    _check_fields(raw, str(file))
    return Profile(**{**{k: v for k, v in raw.items() if k != "version"}, "steps": steps})


def _check_fields(raw: dict[str, Any], where: str) -> None:
    """Raises ConfigError for the first field that is not of its kind."""
    for name in ("kv_cache_tokens", "block_tokens", "kv_bytes_per_token"):
        if not (isinstance(raw[name], int) and raw[name] > 0):
            raise ConfigError(key=f"{where}: {name}", value=raw[name], expected="a positive integer")
    if raw["link_bandwidth"] is not None and not (isinstance(raw["link_bandwidth"], int | float) and raw["link_bandwidth"] > 0):
        raise ConfigError(key=f"{where}: link_bandwidth", value=raw["link_bandwidth"], expected="bytes/s above 0, or null")
    is_latency = isinstance(raw["link_latency_s"], int | float) and raw["link_latency_s"] >= 0
    if (raw["link_bandwidth"] is None) != (raw["link_latency_s"] is None) or not (is_latency or raw["link_latency_s"] is None):
        raise ConfigError(key=f"{where}: link_latency_s", value=raw["link_latency_s"], expected="seconds, or null where link_bandwidth is")
    for name, kind in (
        ("model", str),
        ("hardware", str),
        ("measured_at", str),
        ("args", dict),
        ("num_steps", int),
        ("median_error", float),
    ):
        if not isinstance(raw[name], (int, float) if kind is float else kind):
            raise ConfigError(key=f"{where}: {name}", value=raw[name], expected=f"a JSON {_JSON_KINDS[kind]}")


def check_physical(steps: StepCoefficients, where: str) -> None:
    """Raises ConfigError naming the coefficient that is negative or not a number, or when a step would cost nothing."""
    for name, value in asdict(steps).items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(key=f"{where}.{name}", value=value, expected="0 or more: no work takes negative time")
    if steps.seconds(0, 0.0, 1, 1) <= 0 or steps.seconds(1, 1.0, 0, 0) <= 0:
        raise ConfigError(key=f"{where}.base_s", value=steps.base_s, expected="above 0: no step is free")
