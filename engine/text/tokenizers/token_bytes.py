"""Says which bytes tokens stand for, by the decoder of their tokenizer. A token may be a part of a character."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from tokenizers import Tokenizer as TokenizerFile

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_by_token(backend: TokenizerFile) -> Callable[[int], bytes]:
    """A function from a token to the bytes that it adds to a text; none for a number that is no token."""
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    decoder = "" if backend.decoder is None else str(backend.decoder.__getstate__())
    is_byte_level, has_byte_tokens, is_word_piece = (
        kind in decoder for kind in ("ByteLevel", "ByteFallback", "WordPiece")
    )

    def bytes_of(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        text = backend.id_to_token(token_id)
        if text is None:
            return b""
        if is_byte_level:
            numbers = [_byte_of().get(character) for character in text]
            return text.encode() if None in numbers else bytes(number for number in numbers if number is not None)
        if has_byte_tokens and (found := _BYTE.fullmatch(text)):
            return bytes.fromhex(found[1])
        if is_word_piece:
            return text.removeprefix("##").encode()
        return str(text).replace("▁", " ").encode()

    return bytes_of


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Character by which byte-level tokenizers write a byte -> the byte, as in GPT-2's `bytes_to_unicode`."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
