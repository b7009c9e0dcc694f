"""Reads the size of an image from the first bytes of its file, for PNG, JPEG and WebP.

Only a still image that LoadImage returns as stored has a size here: an animated or rotated one has none.
"""

import struct
from collections.abc import Iterator

from .known import MAX_SIDE, ImageSize

# Bytes of a file that are looked at: comments and profiles come before a JPEG's size.
MAX_BYTES = 2**20
# Chunks, segments and fill bytes of a file that are looked at.
_MAX_PARTS = 2000
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112


def read_size(start: bytes) -> ImageSize | None:
    """Return the size that the first bytes of a file state, `MAX_BYTES` of them or the whole file; None if unknown."""
    try:
        if start.startswith(_PNG):
            size = _png(start)
        elif start.startswith(b"\xff\xd8"):
            size = _jpeg(start)
        elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            size = _webp(start)
        else:
            return None
    except (struct.error, IndexError):
        return None
    if size is None or not all(1 <= side <= MAX_SIDE for side in size):
        return None
    return ImageSize(width=size[0], height=size[1])


def _png(start: bytes) -> tuple[int, int] | None:
    position = len(_PNG)
    for _ in range(_MAX_PARTS):
        (length,), kind = struct.unpack_from(">I", start, position), start[position + 4 : position + 8]
        if kind in (b"acTL", b"eXIf"):
            return None
        if kind == b"IDAT":
            return struct.unpack_from(">II", start, len(_PNG) + 8) if start[12:16] == b"IHDR" else None
        position += 12 + length
    return None


def _jpeg(start: bytes) -> tuple[int, int] | None:
    for marker, segment in _segments(start):
        if marker == 0xE1 and segment.startswith(b"Exif\0\0") and not _is_upright(segment[6:]):
            return None
        if marker == 0xE2 and segment.startswith(b"MPF\0"):
            return None  # several images
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", segment, 1)
            return width, height
    return None


def _segments(start: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the marker and the content of each segment of a JPEG."""
    position = 2
    for _ in range(_MAX_PARTS):
        if start[position] != 0xFF:
            return
        marker = start[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        (length,) = struct.unpack_from(">H", start, position + 2)
        yield marker, start[position + 4 : position + 2 + length]
        position += 2 + max(length, 2)


def _is_upright(exif: bytes) -> bool:
    """Return whether EXIF states that an image is stored upright, or nothing about it."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return False
    (offset,) = struct.unpack_from(f"{order}I", exif, 4)
    (number,) = struct.unpack_from(f"{order}H", exif, offset)
    for entry in range(min(number, 200)):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, offset + 2 + 12 * entry)
        if tag == _ORIENTATION:
            return value == 1
    return number <= 200


def _webp(start: bytes) -> tuple[int, int] | None:
    kind = start[12:16]
    if kind == b"VP8X":
        is_animated, has_exif = start[20] & 0x02, start[20] & 0x08
        sides = (int.from_bytes(start[at : at + 3], "little") + 1 for at in (24, 27))
        width, height = sides
        return None if is_animated or has_exif or len(start) < 30 else (width, height)
    if kind == b"VP8L":
        bits = int.from_bytes(start[21:25], "little")
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if start[20] == 0x2F else None
    if kind == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", start, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None
