"""How far the router's expectations were from what requests got: TTFT and TPOT expected at admission against measured.

    python -m bench.prediction OUT [OUT ...]

Each OUT is a folder of `disagg ab` or `disagg sim`. For each arm, class and rate: median size of the error and its bias (the median with
its sign), in percent of what was measured; `all` is of every answer of the arm. Asked for: |error| at most 25 % on real engines and 15 % in
simulations, bias within 10 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from disagg.ab.prediction import Errors, tpot_errors, ttft_errors
from disagg.ab.rows import Row, read_rows


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """For people, an arm after the other."""
    for arm in dict.fromkeys(r.arm for r in rows):
        own = [r for r in rows if r.arm == arm]
        yield _line(arm, "all", own)
        for rate, name in dict.fromkeys((r.rate_rps, r.slo_class) for r in own):
            at = name if rate is None else f"{name} at {rate:g}/s"
            yield _line(arm, at, [r for r in own if r.rate_rps == rate and r.slo_class == name])


def _line(arm: str, name: str, rows: Sequence[Row]) -> str:
    return f"{arm:12s} {name:24s} TTFT {_text(ttft_errors(rows))}   TPOT {_text(tpot_errors(rows))}"


def _text(errors: Errors | None) -> str:
    return "-" if errors is None else f"|error| {errors.median_abs:6.1%} bias {errors.bias:+7.1%} ({errors.count})"


def main() -> int:
    """Print the errors of each folder's answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="+", type=Path)
    for folder in parser.parse_args().out:
        print(folder)
        print("\n".join(lines(read_rows(folder / "requests.jsonl"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
