"""Turn a GGUF file into what vLLM loads: bf16 safetensors, config, tokenizer.

Run as a process (`python -m disagg.models.gguf_convert`), so that torch and a gigabyte of tensors end with it. Each line
on standard output is one line of progress.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path


def convert(gguf: Path, target: Path, num_parameters: int, context_tokens: int) -> None:
    """Write the converted model into the existing, empty folder `target`.

    Raises ValueError when the result does not have exactly `num_parameters` parameters in bf16.
    """
    _say("loading torch and transformers")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF does not carry the limit, and the default of 1e30 hides prompts that are too long.
    tokenizer.model_max_length = context_tokens

    _say("unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tied = model.config.tie_word_embeddings
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    found = sum(tensor.numel() for tensor in weights.values())
    dtypes = {str(tensor.dtype) for tensor in weights.values()}
    if found != num_parameters or dtypes != {"torch.bfloat16"}:
        raise ValueError(
            f"conversion gave {found:,} parameters as {', '.join(sorted(dtypes))}; expected {num_parameters:,} as torch.bfloat16"
        )

    _say("writing safetensors")
    # Saved by hand: save_pretrained refuses a model that it believes to be still quantised.
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    versions = {package: version(package) for package in ("torch", "transformers", "gguf")}
    (target / "converted_with.json").write_text(json.dumps(versions, indent=2) + "\n")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - standard output is this process's progress channel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--num-parameters", type=int, required=True)
    parser.add_argument("--context-tokens", type=int, required=True)
    args = parser.parse_args()
    convert(args.gguf, args.target, args.num_parameters, args.context_tokens)


if __name__ == "__main__":
    main()
