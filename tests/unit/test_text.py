"""Text appears once it is certain, nothing is lost, and stop strings end the answer exactly before themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from disagg.errors import ModelError
from disagg.front.text import ModelTokenizer, SyntheticTokenizer, TextStream, load_tokenizer
from disagg.types import FinishReason, Token

CORPUS = ["hello world, this is a test of text", "the quick brown fox jumps over the lazy dog. Stop here."] * 3
TEXTS = [
    "hello world",
    "  two  spaces ",
    "🎉é漢字 mixed 🏳️‍🌈 flags",
    "Ελληνικά and עברית",
    "tabs\tand\nnewlines\n\n",
    "a",
    "\ufffd is a character too\ufffd!",
]


def byte_level(folder: Path) -> Path:
    """A byte-level tokenizer, as GPT-2, Llama 3, Qwen and SmolLM2 have: almost every character is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def sentencepiece(folder: Path) -> Path:
    """A SentencePiece-like tokenizer with byte fallback, as Llama 2 and Mistral have: the first token's space is stripped."""
    words = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", *"abcdefghijklmnopqrstuvwxyz,.!"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(params=[byte_level, sentencepiece])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTokenizer:
    return ModelTokenizer(request.param(tmp_path))


def texts_of(stream: TextStream, ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH) -> list[str]:
    last = len(ids) - 1
    return [stream.push((Token(i),), finish if at == last else None).text for at, i in enumerate(ids)]


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_is_lost_and_no_character_comes_broken(tokenizer: ModelTokenizer, text: str) -> None:
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode(f"hello{text}")[len(prompt) :]
    assert tokenizer.encode(f"hello{text}")[: len(prompt)] == prompt
    pieces = texts_of(TextStream(tokenizer, prompt), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_step_without_a_token_forgets_nothing(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("hello🎉", is_whole=False)
    stream = TextStream(tokenizer, ids[:1])
    pieces = [stream.push(()).text + stream.push((Token(i),)).text for i in ids[1:]]
    assert "".join([*pieces, stream.push((), FinishReason.LENGTH).text]) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_nothing_is_lost_with_a_real_vocabulary(smollm2: Path, text: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    prompt = tokenizer.encode("hello.")
    ids = tokenizer.encode(f"hello.\n{text}")[len(prompt) :]
    assert "".join(texts_of(TextStream(tokenizer, prompt), ids)) == f"\n{text}"


def test_ascii_text_appears_at_once(tokenizer: ModelTokenizer) -> None:
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode("hello brown fox")[len(prompt) :]
    stream = TextStream(tokenizer, prompt)
    said = ""
    for n, token_id in enumerate(ids, 1):
        said += stream.push((Token(token_id),)).text
        assert said == tokenizer.decode([*prompt, *ids[:n]])[len("hello") :]


def test_a_character_cut_by_the_end_still_comes(tokenizer: ModelTokenizer) -> None:
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode("hello🎉")[len(prompt) :]
    assert len(ids) == 4
    assert set("".join(texts_of(TextStream(tokenizer, prompt), ids[:3]))) == {"\ufffd"}


def test_a_prompt_that_ends_inside_a_character(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("hello🎉 world")
    cut = len(tokenizer.encode("hello🎉")) - 2
    assert "".join(texts_of(TextStream(tokenizer, ids[:cut]), ids[cut:])) == "🎉 world"


def test_a_prompt_that_ends_in_a_replacement_character_does_not_repeat_it(tokenizer: ModelTokenizer) -> None:
    prompt = tokenizer.encode("hello\ufffd")
    ids = tokenizer.encode("hello\ufffd world")[len(prompt) :]
    assert "".join(texts_of(TextStream(tokenizer, prompt), ids)) == " world"


def test_special_tokens_are_not_text_and_keep_the_space_after_them(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    eos = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<eos>")
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode("hello world")[len(prompt) :]
    assert "".join(texts_of(TextStream(tokenizer, prompt), [eos, eos, *ids, eos, eos])) == " world"


def test_bytes_that_are_no_text_neither_stall_nor_grow(tokenizer: ModelTokenizer) -> None:
    """A model that emits continuation bytes for ever: text keeps coming, and characters after it are whole."""
    prompt = tokenizer.encode("hello")
    tail = tokenizer.encode("hello🎉")[-1]
    stream = TextStream(tokenizer, prompt)
    noise = [stream.push((Token(tail),)).text for _ in range(200)]
    assert sum(map(len, noise)) >= 190
    rest = [stream.push((Token(i),)).text for i in tokenizer.encode("hello 🎉 world")[len(prompt) :]]
    assert "".join(rest).lstrip("\ufffd") == " 🎉 world"


def test_random_tokens_equal_the_whole_decoding(tmp_path: Path) -> None:
    """Byte-level only: there a text's bytes are its tokens' bytes, one after the other."""
    tokenizer = ModelTokenizer(byte_level(tmp_path))
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.randrange(1, 320) for _ in range(rng.randrange(1, 40))]
        whole = tokenizer.decode([*tokenizer.encode("hello"), *ids])[len("hello") :]
        streamed = "".join(texts_of(TextStream(tokenizer, tokenizer.encode("hello")), ids))
        assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "")
        cut, stream = rng.randrange(len(ids)), TextStream(tokenizer, tokenizer.encode("hello"))
        parts = [stream.push([*map(Token, part)], finish).text for part, finish in ((ids[:cut], None), (ids[cut:], FinishReason.LENGTH))]
        assert "".join(parts) == streamed


def test_a_stop_tokens_own_text_is_left_out(tokenizer: ModelTokenizer) -> None:
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode("hello world,")[len(prompt) :]
    assert "".join(texts_of(TextStream(tokenizer, prompt), ids, FinishReason.STOP)) == " world"


# -- stop strings, on the synthetic tokenizer: its words are known


SYNTHETIC = SyntheticTokenizer()
IDS = [10, 500, 77, 3000, 4, 21000]
TEXT = SYNTHETIC.decode(IDS)


@pytest.mark.parametrize("start", range(len(TEXT) - 1))
@pytest.mark.parametrize("length", [1, 2, 5, 9])
@pytest.mark.parametrize("per_chunk", [1, 2, 6])
def test_stop_string_ends_the_answer_before_itself(start: int, length: int, per_chunk: int) -> None:
    """At every place, within one token or across several, whatever the chunks: as if the whole text were searched."""
    stop = TEXT[start : start + length]
    stream = TextStream(SYNTHETIC, [1], stop=[stop])
    text, tokens, finish = "", 0, None
    for at in range(0, len(IDS), per_chunk):
        part = stream.push([Token(i) for i in IDS[at : at + per_chunk]])
        text, tokens = text + part.text, tokens + len(part.tokens)
        assert TEXT.startswith(text)
        if part.finish is not None:
            finish = part.finish
            break
    assert finish is FinishReason.STOP
    assert text == TEXT[: TEXT.index(stop)]
    # Tokens up to the one that completes the stop string belong to the answer, as in vLLM.
    needed = next(n for n in range(1, len(IDS) + 1) if stop in SYNTHETIC.decode(IDS[:n]))
    assert tokens == needed


def test_only_a_possible_stop_string_is_held_back() -> None:
    stream = TextStream(SYNTHETIC, [1], stop=["zzz"])
    first = SYNTHETIC.decode(IDS[:1])
    assert stream.push([Token(IDS[0])]).text == first
    held = TextStream(SYNTHETIC, [1], stop=[f"{first[-3:]}never"])
    assert held.push([Token(IDS[0])]).text == first[:-3]
    assert held.push([Token(IDS[4])]).text == first[-3:] + SYNTHETIC.decode([IDS[4]])


def test_held_text_comes_at_the_end() -> None:
    stream = TextStream(SYNTHETIC, [1], stop=[f"{TEXT[-3:]}never"])
    assert "".join(texts_of(stream, IDS)) == TEXT


def test_the_stop_string_that_is_complete_first_wins() -> None:
    long = TEXT[2 : len(TEXT) - 2]
    short = TEXT[6:9]
    stream = TextStream(SYNTHETIC, [1], stop=[long, short])
    part = stream.push([Token(i) for i in IDS])
    assert (part.text, part.finish) == (TEXT[:6], FinishReason.STOP)


def test_stop_strings_wait_for_min_tokens() -> None:
    word = SYNTHETIC.decode([7])
    stream = TextStream(SYNTHETIC, [1], stop=[word.strip()], min_tokens=2)
    parts = [stream.push([Token(7)]) for _ in range(3)]
    assert [part.finish for part in parts] == [None, None, FinishReason.STOP]
    assert "".join(part.text for part in parts) == word * 2


# -- tokenizers


def test_synthetic_tokenizer_counts_bytes_and_reads_well() -> None:
    assert SYNTHETIC.encode("aé") == [97, 0xC3, 0xA9]
    words = [SYNTHETIC.decode([i]) for i in range(32_000)]
    assert len(set(words)) == len(words)
    assert all(word.isprintable() and word.isascii() for word in words)


def test_no_token_stands_for_more_bytes_than_it_says(tokenizer: ModelTokenizer) -> None:
    for text in [*TEXTS, " " * 50, "hello world " * 40]:
        assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    inner = Tokenizer.from_file(str(byte_level(tmp_path)))
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("hello world" * 9)) == "hello world" * 9


def test_no_tokenizer_file_is_none_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
