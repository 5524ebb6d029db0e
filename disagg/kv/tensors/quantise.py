"""Numbers of KV as one byte each, with a scale per group: the reference that every other implementation must equal, in torch.

    scale = max |x| / LIMIT, rounded to bfloat16 (1 where that is 0)
    int8:  code = round half to even (x / scale), within -127 .. 127
    fp8:   code = float8_e4m3fn (x / scale), within -448 .. 448

The division is by the rounded scale, so rounding it costs nothing but a clamp of the largest numbers by less than a code's width.
"""

from __future__ import annotations

from typing import Literal

import torch

Quantised = Literal["fp8", "int8"]
LIMIT = {"fp8": 448.0, "int8": 127.0}
_CODE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def quantise(numbers: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., n] and scales bfloat16 [...] of floats [..., n]: one scale for each run of the last dimension."""
    limit = LIMIT[dtype]
    scales = (numbers.abs().amax(-1).float() / limit).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    scaled = (numbers.float() / scales.float().unsqueeze(-1)).clamp_(-limit, limit)
    if dtype == "int8":
        scaled = scaled.round_()
    return scaled.to(_CODE[dtype]).view(torch.uint8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: str, number: torch.dtype) -> torch.Tensor:
    """Numbers [..., n] of type `number` from codes uint8 [..., n] and scales bfloat16 [...]."""
    return (codes.view(_CODE[dtype]).float() * scales.float().unsqueeze(-1)).to(number)


def encode_rows(numbers: torch.Tensor, out: torch.Tensor, dtype: str) -> None:
    """`numbers` [rows, groups, n] -> `out` uint8 [rows, bytes of a row]: quantised codes, then scales; or as they are for other dtypes."""
    if dtype not in LIMIT:
        out.copy_(numbers.reshape(len(numbers), -1).view(torch.uint8), non_blocking=True)
        return
    codes, scales = quantise(numbers, dtype)
    num_codes = codes[0].numel()
    out[:, :num_codes].copy_(codes.reshape(len(codes), -1), non_blocking=True)
    out[:, num_codes:].copy_(scales.view(torch.uint8).reshape(len(codes), -1), non_blocking=True)


def decode_rows(rows: torch.Tensor, groups: int, dtype: str, number: torch.dtype) -> torch.Tensor:
    """The reverse: uint8 [rows, bytes of a row] -> [rows, groups, n] of type `number`. `dtype` is the entry's (kv/form.py)."""
    if dtype not in LIMIT:
        return rows.contiguous().view(getattr(torch, dtype)).view(len(rows), groups, -1).to(number)
    num_codes = rows.shape[1] - 2 * groups
    codes = rows[:, :num_codes].reshape(len(rows), groups, -1)
    scales = rows[:, num_codes:].contiguous().view(torch.bfloat16)
    return dequantise(codes, scales, dtype, number)
