"""Bytes for people."""

GB = 10**9
MIB = 2**20
GIB = 2**30


def readable(size_bytes: float) -> str:
    """A size in GiB, or in MiB where that is small."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= 0.1 * GIB else f"{size_bytes / MIB:.1f} MiB"
