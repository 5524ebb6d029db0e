"""Text to tokens and back, at the front door only: workers never see text.

`load_tokenizer(folder)` reads a model's tokenizer.json; `SyntheticTokenizer` serves simulated engines. `TextStream` turns an answer's
tokens into text as they come: text appears once it is certain, nothing is lost at the end, and stop strings end the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from disagg.errors import ModelError
from disagg.types import FinishReason, Token

# Tokens before the new ones that are decoded with them, so that a tokenizer's rule about a text's start (a stripped space) does not apply.
CONTEXT_TOKENS = 6
# A character takes at most four bytes, so at most four tokens: longer runs without a whole character are not text at all.
MAX_CHAR_TOKENS = 4
MAX_PENDING_TOKENS = 2 * MAX_CHAR_TOKENS
UNFINISHED = "\ufffd"


class Tokenizer(Protocol):
    """Text to token ids and back. Both directions may be called from any thread."""

    @property
    def max_token_bytes(self) -> int:
        """Most UTF-8 bytes of a text that one token can stand for."""
        ...

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Token ids; with the special tokens that a plain prompt begins with when `is_whole`. Long texts: not in an event loop."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text; bytes that are no whole character become U+FFFD."""
        ...


class ModelTokenizer:
    """A model's tokenizer.json, by the `tokenizers` library."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelError(f"model: {file} cannot be read: {error}", key="model", value=str(file), expected="a tokenizer.json") from error
        # A prompt is never cut silently: too long ones are refused by name.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_token_bytes = self._longest_token_bytes()

    def _longest_token_bytes(self) -> int:
        from tokenizers.decoders import ByteLevel

        tokenizer = self._tokenizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        pieces = tokenizer.get_vocab(with_added_tokens=False)
        # In a byte-level vocabulary one character stands for one byte.
        one_byte_chars = isinstance(tokenizer.decoder, ByteLevel)
        longest = max((len(piece) if one_byte_chars else len(piece.encode()) for piece in pieces), default=1)
        longest = max([longest, *(len(content.encode()) for content in added)])
        # A normalizer may shorten text (width, composition, repeated spaces): leave slack.
        return longest if tokenizer.normalizer is None else 4 * longest

    @property
    def max_token_bytes(self) -> int:
        return self._max_token_bytes

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        # The batch call lets other threads run; the single one holds the interpreter for the whole text.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=is_whole)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special))


def load_tokenizer(folder: Path) -> ModelTokenizer | None:
    """The tokenizer beside a model's weights, or None when there is no tokenizer.json. Raises ModelError when it cannot be read."""
    file = folder / "tokenizer.json"
    return ModelTokenizer(file) if file.is_file() else None


class SyntheticTokenizer:
    """For simulated engines: a prompt's tokens are its UTF-8 bytes, and each token id reads as a short made-up word."""

    max_token_bytes = 1

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(map(_word, token_ids))


@lru_cache(maxsize=1 << 16)
def _word(token_id: int) -> str:
    """A made-up word and a space."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [" "]
    base = len(consonants) * len(vowels)
    rest = token_id + base  # at least two syllables
    while rest:
        rest, digit = divmod(rest, base)
        consonant, vowel = divmod(digit, len(vowels))
        syllables.append(consonants[consonant] + vowels[vowel])
    return "".join(reversed(syllables))


@dataclass(frozen=True, slots=True)
class TextPart:
    """What some tokens gave: the tokens that belong to the answer, newly certain text, and `finish` when the answer ends here."""

    tokens: tuple[Token, ...]
    text: str
    finish: FinishReason | None = None


class TextStream:
    """One answer's text. Feed every chunk to `push`, and stop feeding once a part has `finish`.

    Where the ids stand (all indices into `_ids`, which begins as the prompt's tail):

        | context, said before     | pending: no whole character yet |
        0 .................... _said ............................. len

    `decode(ids)` minus `decode(ids[:_said])` is the pending text: decoding it with its context keeps what depends on neighbours.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keep_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`keep_stop`: what ends the answer, a stop string or token, is part of its text. `skip_special`: special tokens are not."""
        self._decode_ids = partial(tokenizer.decode, skip_special=skip_special)
        self._keep_stop = keep_stop
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._said = self._whole_characters()
        # A prompt of token ids may end inside a character, which the answer then completes.
        self._in_prompt = self._said < len(self._ids)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # certain text that may be the beginning of a stop string

    def _whole_characters(self) -> int:
        """How many of the prompt's last tokens, counted from the front, end with a whole character; all when none do."""
        num = len(self._ids)
        ends = range(num, max(0, num - MAX_CHAR_TOKENS), -1)
        return next((end for end in ends if not self._decode_ids(self._ids[:end]).endswith(UNFINISHED)), num)

    def push(self, tokens: Sequence[Token], finish: FinishReason | None = None) -> TextPart:
        """Add one step's tokens. `finish` as the engine said it; a stop token's own text is not part of the answer, as in vLLM."""
        if not self._stop:  # nothing can end the answer before its last token, so all of them are decoded in one go
            self._num_tokens += len(tokens)
            said_ids = [token.token_id for token in tokens]
            if finish is FinishReason.STOP and not self._keep_stop:
                said_ids = said_ids[:-1]
            said = self._decode(said_ids)
            return TextPart(tuple(tokens), said if finish is None else said + self._flush(), finish)
        kept: list[Token] = []
        text = ""
        for index, token in enumerate(tokens):
            kept.append(token)
            self._num_tokens += 1
            ends_by_token = finish is FinishReason.STOP and index == len(tokens) - 1
            said = "" if ends_by_token and not self._keep_stop else self._decode([token.token_id])
            part, hit = self._through_stops(said)
            text += part
            if hit:
                return TextPart(tuple(kept), text, FinishReason.STOP)
        if finish is None:
            return TextPart(tuple(kept), text)
        part, hit = self._through_stops(self._flush())
        text += part if hit else part + self._held
        return TextPart(tuple(kept), text, FinishReason.STOP if hit else finish)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with some more tokens. Several in one go give the same as one by one, for less."""
        if not token_ids:
            return ""
        self._ids.extend(token_ids)
        text = self._pending(len(self._ids))
        if text.endswith(UNFINISHED):
            if len(token_ids) == 1:
                return self._give_up() if len(self._ids) - self._said >= MAX_PENDING_TOKENS else ""
            del self._ids[-len(token_ids) :]
            return "".join([self._decode([token_id]) for token_id in token_ids])
        if not text:
            # No text of their own (special tokens): as context they would only hide the text before them.
            del self._ids[len(self._ids) - len(token_ids) :]
            return ""
        return self._say(text, self._said, len(self._ids))

    def _pending(self, end: int) -> str:
        """The text of the tokens from `_said` to `end`."""
        before = self._decode_ids(self._ids[: self._said])
        return self._decode_ids(self._ids[:end])[len(before) :]

    def _say(self, text: str, start: int, said: int) -> str:
        """Move the marks, forget what is before them, and return `text` without a broken character of the prompt's own."""
        if self._in_prompt:
            text = text.lstrip(UNFINISHED)
            self._in_prompt = False
        del self._ids[:start]
        self._said = said - start
        return text

    def _give_up(self) -> str:
        """Say the pending tokens that can no longer become a character, and go on with the youngest."""
        cut = len(self._ids) - MAX_CHAR_TOKENS
        return self._say(self._pending(cut), cut, cut)

    def _flush(self) -> str:
        """The pending text at the end, whole characters or not."""
        if self._said == len(self._ids):
            return ""
        return self._say(self._pending(len(self._ids)), self._said, len(self._ids))

    def _through_stops(self, said: str) -> tuple[str, bool]:
        """(text to give out, whether a stop string is complete). Holds back what may be a stop string's beginning."""
        self._held += said
        if self._num_tokens <= self._min_tokens:
            # Too early to stop; what was said so far cannot be taken back, and may not be part of a later match.
            given, self._held = self._held, ""
            return given, False
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            # The one that is complete first, as if tokens came one by one.
            end, begin = min(ends)
            given, self._held = self._held[: end if self._keep_stop else begin], ""
            return given, True
        keep = self._possible_beginning()
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given, False

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        most = min(len(self._held), max(map(len, self._stop)) - 1)
        return next((n for n in range(most, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
