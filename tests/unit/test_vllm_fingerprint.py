"""Unlike weights have unlike fingerprints, however they are stored; what is no weight does not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.engine.vllm_fingerprint import model_fingerprint


def model(folder: Path, name: str, weights: bytes) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 2, "_name_or_path": "' + str(folder) + '"}')
    (folder / name).write_bytes(weights)
    return str(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.00.pt", "model.gguf"])
def test_a_folders_weights_count_whatever_their_format(tmp_path: Path, name: str) -> None:
    """Only safetensors did: the KV of one fine-tune was taken for another's."""
    one, same, other = (model(tmp_path / where / "m", name, weights) for where, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")))
    assert model_fingerprint(one, {}) == model_fingerprint(same, {})
    assert model_fingerprint(one, {}) != model_fingerprint(other, {})


def test_a_model_in_one_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    for where, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / where).mkdir()
        (tmp_path / where / "m.gguf").write_bytes(weights)
    one, same, other = (model_fingerprint(str(tmp_path / where / "m.gguf"), {}) for where in "abc")
    assert one == same != other


def test_what_training_left_and_other_formats_beside_safetensors_do_not_count(tmp_path: Path) -> None:
    lean, full = (model(tmp_path / where / "m", "model.safetensors", b"1") for where in "ab")
    (Path(full) / "training_args.bin").write_bytes(b"x")
    (Path(full) / "pytorch_model.bin").write_bytes(b"x")
    assert model_fingerprint(lean, {}) == model_fingerprint(full, {})


def test_settings_that_change_numbers_count(tmp_path: Path) -> None:
    where = model(tmp_path / "m", "model.safetensors", b"1")
    assert model_fingerprint(where, {"dtype": "float32"}) != model_fingerprint(where, {"dtype": "bfloat16"})
    assert model_fingerprint(where, {"max_num_seqs": 4}) == model_fingerprint(where, {})
    assert model_fingerprint("org/m", {"revision": "1"}) != model_fingerprint("org/m", {"revision": "2"})
