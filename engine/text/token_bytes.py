"""Says which bytes tokens stand for, by the decoder of their tokenizer. A token may be a part of a character."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer as TokenizerFile

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of one tokenizer."""

    def __init__(self, backend: TokenizerFile) -> None:
        self._backend = backend
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        decoder = "" if backend.decoder is None else str(backend.decoder.__getstate__())
        self._is_byte_level = "ByteLevel" in decoder
        self._has_byte_tokens = "ByteFallback" in decoder
        self._is_word_piece = "WordPiece" in decoder

    def of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for a number that is no token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if self._is_byte_level:
            numbers = [_byte_of().get(character) for character in text]
            return text.encode() if None in numbers else bytes(number for number in numbers if number is not None)
        if self._has_byte_tokens and (found := _BYTE.fullmatch(text)):
            return bytes.fromhex(found[1])
        if self._is_word_piece:
            return text.removeprefix("##").encode()
        return str(text).replace("▁", " ").encode()


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Character by which byte-level tokenizers write a byte -> the byte, as in GPT-2's `bytes_to_unicode`."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
