"""Headers of GGUF files, read with limits: fields as offsets in the file, tensors as shapes and offsets.

Arrays are skipped over by the size of numbers and the lengths of texts. A field's value is read on access. The file is
not kept open or mapped.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..files import CheckpointError
from ..messages import compose

# GGUF's numbers of the kinds of values, with their `struct` formats.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY, _ALIGNED_BY = 8, 9, "general.alignment"
_VERSIONS, _ALIGNMENT = (2, 3), 32
# Limits of a header's bytes, fields, tensors, texts in arrays and dimensions: several times the largest published ones.
MAX_HEADER_BYTES, MAX_FIELDS, MAX_TENSORS, MAX_TEXTS, MAX_DIMENSIONS = 2**27, 2**14, 2**14, 2**21, 4
_LONGEST_NAME = 2**16
_AT_ONCE = 2**18
_LENGTH = struct.Struct("<Q")


class HeaderError(ValueError):
    """Bytes that are not a valid GGUF header."""


class FieldPlace(NamedTuple):
    """The location of a field's value."""

    kind: int  # GGUF's number
    entries: int  # kind of an array's entries, else 0
    num_entries: int  # of an array's entries, else 1
    start: int  # offset in bytes
    stop: int


class GgufTensorInfo(NamedTuple):
    """A tensor's description."""

    shape: tuple[int, ...]  # last dimension last
    kind: int  # number of its format
    offset: int  # in the file's data section


class Fields(Mapping[str, Any]):
    """A file's fields by name: numbers, texts, and lists of these, each read on access."""

    def __init__(self, path: Path, stamp: tuple[int, int], places: Mapping[str, FieldPlace]) -> None:
        """Take the file's size and modification time as `stamp`."""
        self._path, self._stamp, self._places = path, stamp, places

    def __getitem__(self, name: str) -> Any:
        """Return a value. Raises `KeyError` for an unknown field, `CheckpointError` if the file has changed."""
        place = self._places[name]
        with self._path.open("rb") as file:
            data = b""
            if _stamp(file) == self._stamp:
                file.seek(place.start)
                data = file.read(place.stop - place.start)
        if len(data) != place.stop - place.start:
            raise CheckpointError(compose("file.changed_while_read", path=self._path))
        try:
            return _value(place, data)
        except UnicodeDecodeError:
            raise CheckpointError(compose("file.field_not_utf8", path=self._path, name=name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def length(self, name: str) -> int:
        """Return the number of a list's entries; 1 for other values, 0 for an unknown field."""
        return self._places[name].num_entries if name in self._places else 0

    def below(self, prefix: str) -> "Fields":
        """Return the fields whose names start with `prefix`, without it."""
        places = {name.removeprefix(prefix): place for name, place in self._places.items() if name.startswith(prefix)}
        return Fields(self._path, self._stamp, places)


class Header(NamedTuple):
    """A file's fields, tensors, and offset of the data section."""

    fields: Fields
    tensors: dict[str, GgufTensorInfo]
    data: int


def read_gguf_header(path: Path) -> Header:
    """Return the header of a file. Raises `HeaderError` for other bytes, `OSError` if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        stamp = _stamp(file)
        cursor = _Cursor(file, stamp[0])
        if cursor.bytes(4) != b"GGUF":
            raise HeaderError("it does not begin with GGUF")
        version = cursor.number("I")
        if version & 0xFFFF == 0:
            raise HeaderError("its bytes are in big-endian order, and only little-endian files are read")
        if version not in _VERSIONS:
            raise HeaderError(f"its version is {version}, and versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        places = dict(_unique(cursor.field() for _ in _check_count(num_fields, MAX_FIELDS, "fields")))
        tensors = dict(_unique(cursor.tensor() for _ in _check_count(num_tensors, MAX_TENSORS, "tensors")))
        fields = Fields(path, stamp, places)
        alignment = fields.get(_ALIGNED_BY, _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise HeaderError(f"{_ALIGNED_BY} is {str(alignment)[:80]}, and must be a power of two")
        return Header(fields, tensors, -(-cursor.offset // alignment) * alignment)


class _Cursor:
    """A reading position in a file. Raises `HeaderError` at the end of the file or of the longest allowed header."""

    def __init__(self, file: FileIO, size: int) -> None:
        self._file, self._end = file, min(size, MAX_HEADER_BYTES)
        self._buffer, self._start, self._at, self._texts = b"", 0, 0, 0

    @property
    def offset(self) -> int:
        return self._start + self._at

    def _need(self, count: int) -> None:
        """Buffer at least `count` bytes from the position on."""
        if self._at + count <= len(self._buffer):
            return
        if (offset := self.offset) + count > self._end:
            self._raise_end()
        self._file.seek(offset)
        self._buffer = self._file.read(max(count, _AT_ONCE))
        self._start, self._at = offset, 0
        if len(self._buffer) < count:
            self._raise_end()

    def _raise_end(self) -> None:
        if self._end == MAX_HEADER_BYTES:
            raise HeaderError(f"its header is longer than {MAX_HEADER_BYTES // 2**20} MiB, which no published one is")
        raise HeaderError(f"it ends within its header, after {self._end} bytes")

    def bytes(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0]

    def skip(self, count: int) -> None:
        if self.offset + count > self._end:
            self._raise_end()
        self._at += count

    def skip_texts(self, count: int) -> None:
        self._texts += count
        if self._texts > MAX_TEXTS:
            raise HeaderError(f"its lists have {self._texts} texts, and {MAX_TEXTS} are read at most")
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            if self._at + 8 > len(self._buffer):
                self._need(8)
            self._at += 8 + unpack(self._buffer, self._at)[0]
        self.skip(0)

    def name(self) -> str:
        if (length := self.number("Q")) > _LONGEST_NAME:
            raise HeaderError(f"a name has {length} bytes, and {_LONGEST_NAME} are read at most")
        try:
            return self.bytes(length).decode()
        except UnicodeDecodeError:
            raise HeaderError("a name is not UTF-8 text") from None

    def field(self) -> tuple[str, FieldPlace]:
        name, kind = self.name(), self.number("I")
        entries, count, start = 0, 1, self.offset
        if kind == _ARRAY:
            entries, count, start = self.number("I"), self.number("Q"), self.offset
        self._pass_over(entries if kind == _ARRAY else kind, count)
        return name, FieldPlace(kind, entries, count, start, self.offset)

    def _pass_over(self, kind: int, count: int) -> None:
        if kind == _TEXT:
            self.skip_texts(count)
        elif kind in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        else:
            raise HeaderError(f"a field is of kind {kind}, which is not a number, text or list of these")

    def tensor(self) -> tuple[str, GgufTensorInfo]:
        name, dimensions = self.name(), self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise HeaderError(f"a tensor has {dimensions} dimensions, and {MAX_DIMENSIONS} are read at most")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, GgufTensorInfo(shape, self.number("I"), self.number("Q"))


def _check_count(count: int, most: int, what: str) -> range:
    if count > most:
        raise HeaderError(f"it has {count} {what}, and {most} are read at most")
    return range(count)


def _unique(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    names = set()
    for name, value in named:
        if name in names:
            raise HeaderError(f"it has {name[:80]!r} twice")
        names.add(name)
        yield name, value


def _stamp(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def _value(place: FieldPlace, data: bytes) -> Any:
    if place.kind == _TEXT:
        return data[8:].decode()
    if place.kind != _ARRAY:
        return struct.unpack(f"<{_NUMBERS[place.kind]}", data)[0]
    if place.entries != _TEXT:
        return np.frombuffer(data, np.dtype(_NUMBERS[place.entries]).newbyteorder("<")).tolist()
    texts, offset = [], 0
    for _ in range(place.num_entries):
        end = offset + 8 + _LENGTH.unpack_from(data, offset)[0]
        texts.append(data[offset + 8 : end].decode())
        offset = end
    return texts
