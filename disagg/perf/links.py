"""Links that KV moves over: bytes/s one way, for one GPU or its network card. Pure data.

Peaks are the vendors'. `share` is what bulk transfers reach of them: Mooncake's public table of 1P1D transfers reaches 164 of 200 GB/s over
4 x 400GbE RoCE (0.82); its 8 x CX-7 reaches 142 of 400 GB/s, which says more about the sender than about the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Link:
    """`bandwidth`: peak bytes/s one way; `share` of it that large transfers reach."""

    name: str
    bandwidth: float
    share: float = 0.82

    @property
    def usable(self) -> float:
        """Bytes/s."""
        return self.bandwidth * self.share


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", 300e9),  # A100: 600 GB/s both ways
        Link("nvlink4", 450e9),  # H100, H200
        Link("nvlink5", 900e9),  # B200
        Link("pcie4", 31.5e9),  # x16
        Link("pcie5", 63e9),
        Link("ib-hdr", 25e9),  # 200 Gb/s
        Link("ib-ndr", 50e9),  # 400 Gb/s
        Link("ib-xdr", 100e9),  # 800 Gb/s
        Link("roce-200", 25e9),
        Link("roce-400", 50e9),
        Link("eth-10", 1.25e9),
        Link("eth-25", 3.125e9),
        Link("eth-100", 12.5e9),
    )
}
USUAL_LINK = "ib-ndr"  # where none is named
USUAL_LINKS = ("nvlink4", "pcie5", "ib-ndr", "eth-100", "eth-10")


def find_link(text: str) -> Link:
    """A link by name, or by its bandwidth in 10^9 bytes/s ("12.5"), which is then taken as reached. Raises ConfigError."""
    plain = text.lower()
    if plain in LINKS:
        return LINKS[plain]
    try:
        gb_s = float(plain)
    except ValueError:
        raise ConfigError(key="link", value=text, expected=f"GB/s, or one of these: {nearest(plain, LINKS)}") from None
    if not 0 < gb_s < 1e6:
        raise ConfigError(key="link", value=text, expected="a bandwidth above 0, in GB/s")
    return Link(f"{gb_s:g} GB/s", gb_s * 1e9, share=1.0)
