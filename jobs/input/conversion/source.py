"""`Source`: one input file that is not Parquet. Opens it as bytes, or as decompressed and checked UTF-8 text.

The bytes of a source are hashed as they are read, so that one pass over a file gives its rows and its identity.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa

from ...record import FileVersion
from ...storage.stores import open_store
from ..file_version import file_version, has_changed

Kind = Literal["CSV", "TSV", "JSON Lines", "Arrow", "ORC"]
#: Most bytes of a line of JSON, and of a record of CSV.
MAX_ROW_BYTES = 16 << 20
# A compressed file is refused once it has given both this many bytes and this many times its own size.
_MAX_DECOMPRESSED_BYTES, _MAX_RATIO = 256 << 20, 100
_READ_BYTES = 1 << 20
# First bytes of a compressed file -> its format.
_COMPRESSED: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_ARCHIVE = b"PK\x03\x04"
_ENDINGS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
_OTHER_ENCODINGS: Mapping[bytes, str] = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class UnreadableSourceError(ValueError):
    """A source cannot be converted: what is wrong, where, and what to do, as a sentence without the file's name."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input file that is not Parquet."""

    #: The input behind which it was found, as given.
    input_url: str
    #: Storage options for the input.
    options: Mapping[str, Any] = field(repr=False)
    #: Path of the file in the filesystem of the input.
    path: str
    #: Path or URL of the file, without passwords and signatures.
    shown_url: str
    #: Short name, unique in the job.
    name: str
    #: Format.
    kind: Kind
    #: Called with the number of bytes after each read.
    on_read: Callable[[int], None] = field(default=lambda num_bytes: None, repr=False, compare=False)

    def facts(self) -> tuple[int, FileVersion]:
        """Size in bytes, and version, as storage has them now. Raises what storage raises."""
        fs, _ = open_store(self.input_url, self.options)
        fs.invalidate_cache(self.path)
        return int(fs.info(self.path).get("size") or 0), file_version(fs, self.path)

    def has_changed(self, version: FileVersion) -> bool:
        """Whether the file was replaced or written to since `version`. Raises what storage raises."""
        fs, _ = open_store(self.input_url, self.options)
        return has_changed(fs, self.path, version)

    @contextmanager
    def opened(self) -> Iterator[HashedFile]:
        """The file's bytes. Raises what storage raises."""
        # a filesystem for this thread: a connection of SFTP is for one thread
        fs, _ = open_store(self.input_url, self.options)
        with fs.open(self.path, "rb") as file:
            yield HashedFile(file, self.on_read)

    @contextmanager
    def text(self) -> Iterator[tuple[TextFile, HashedFile]]:
        """The file's text, decompressed, and the bytes from which it comes. Raises as `opened` and `TextFile`."""
        with self.opened() as raw, closing(TextFile(raw, self.path)) as text:
            yield text, raw


#: A source of one Parquet file: a file, a table of this program (`InputTable`), or the URL of a table
#: that was given before.
Item = Source | str


class HashedFile(io.RawIOBase):
    """The bytes of a file, read once from begin to end, and their hash."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]) -> None:
        self._file, self._on_read = file, on_read
        self._hash = hashlib.sha256()
        self._waiting = b""
        #: Bytes read so far.
        self.num_bytes = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def peek(self, size: int) -> bytes:
        """The first bytes, which the next `read` returns again. For a file that was not read yet."""
        self._waiting = self._waiting or self._read(size)
        return self._waiting

    def read(self, size: int = -1) -> bytes:
        """The next bytes: at most `size`, all without a size. Raises what storage raises."""
        if size < 0:
            return b"".join(iter(lambda: self.read(_READ_BYTES), b""))
        found, self._waiting = (self._waiting[:size], self._waiting[size:]) if self._waiting else (b"", b"")
        return found or self._read(size)

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer. Returns their number."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def sha256(self) -> str:
        """Hash of the whole file; reads what is left of it."""
        while self.read(_READ_BYTES):
            pass
        return self._hash.hexdigest()

    def _read(self, size: int) -> bytes:
        found = self._file.read(size)
        self._hash.update(found)
        self.num_bytes += len(found)
        self._on_read(len(found))
        return found


class TextFile(io.RawIOBase):
    """The text of a file as UTF-8 bytes, without a byte order mark. Each read may return fewer bytes than asked for.

    Reading raises `UnreadableSourceError` for damaged compression, a file that decompresses to very many bytes, and
    other encodings.
    """

    def __init__(self, raw: HashedFile, path: str) -> None:
        self._raw = raw
        first = raw.peek(_READ_BYTES)
        self._format = _compression(first, path)
        self._bytes: Any = raw if self._format is None else _decompressed(raw, self._format)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._waiting = b""
        # Bytes of text read so far, with the byte order mark.
        self._num_bytes = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size`; all without a size; none at the end."""
        if size < 0:
            return b"".join(iter(lambda: self.read(_READ_BYTES), b""))
        if not self._waiting:
            self._waiting = self._checked()
        found, self._waiting = self._waiting[:size], self._waiting[size:]
        return found

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer. Returns their number."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def put_back(self, text: bytes) -> None:
        """Have the next reads return these bytes first."""
        self._waiting = text + self._waiting

    def _checked(self) -> bytes:
        """The next piece of the text; empty at the end."""
        try:
            piece = bytes(self._bytes.read(_READ_BYTES))
        except (OSError, EOFError, lzma.LZMAError) as error:
            if self._format is None or getattr(error, "errno", None) is not None:
                raise  # of storage
            raise UnreadableSourceError(
                f"damaged {self._format} at its byte {self._raw.num_bytes} ({error}). Write it again."
            ) from None
        is_first, start = self._num_bytes == 0, self._num_bytes - len(self._decoder.getstate()[0])
        if is_first:
            _check_encoding(piece)
        try:
            self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise _wrong_encoding(start + error.start, error.object[error.start : error.start + 1]) from None
        self._num_bytes += len(piece)
        if self._format is not None and self._num_bytes > max(
            _MAX_DECOMPRESSED_BYTES, _MAX_RATIO * self._raw.num_bytes
        ):
            raise UnreadableSourceError(
                f"gives more than {_MAX_DECOMPRESSED_BYTES >> 20} MiB, and more than {_MAX_RATIO} times its size, when "
                f"it is decompressed ({self._format}). Decompress it before, or write it as Parquet."
            )
        if is_first and piece.startswith(codecs.BOM_UTF8):
            return piece[len(codecs.BOM_UTF8) :] or self._checked()
        return piece


def _compression(first: bytes, path: str) -> str | None:
    """The compression of a file by its first bytes; None for a plain file. Raises `UnreadableSourceError` where the
    name says that the file is compressed and its bytes do not.
    """
    found = next((kind for magic, kind in _COMPRESSED.items() if first.startswith(magic)), None)
    named = next((kind for ending, kind in _ENDINGS.items() if path.lower().endswith(ending)), None)
    if named is None:
        return None if found == "bz2" else found  # a text may begin with these three letters
    if found != named and first:
        raise UnreadableSourceError(f"named as {named}, but its bytes are not. Rename it, or compress it again.")
    return named


def _decompressed(raw: HashedFile, compression: str) -> Any:
    if compression == "xz":
        return lzma.LZMAFile(cast(BinaryIO, raw))
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


def _check_encoding(first: bytes) -> None:
    if first.startswith(_ARCHIVE):
        raise UnreadableSourceError(
            "a ZIP archive, as files of Excel are, not text. Write its table as Parquet or CSV."
        )
    encoding = next((name for mark, name in _OTHER_ENCODINGS.items() if first.startswith(mark)), None)
    if encoding is None and b"\x00" in first[:4]:
        encoding = "UTF-16"  # written without a mark
    if encoding is not None:
        raise UnreadableSourceError(
            f"byte 0: {encoding}, expected UTF-8. Convert it, for example: iconv -f {encoding} -t UTF-8 FILE > NEW."
        )


def _wrong_encoding(offset: int, found: bytes) -> UnreadableSourceError:
    return UnreadableSourceError(
        f"byte {offset}: {'0x' + found.hex() if found else 'the end'} is not UTF-8. If it is a file of Windows or "
        "Excel, convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW."
    )
