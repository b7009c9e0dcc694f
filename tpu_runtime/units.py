"""Sizes in bytes, and their text for users."""

GB = 10**9
MIB = 2**20
GIB = 2**30


def format_size(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 0.1 GiB."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= 0.1 * GIB else f"{size_bytes / MIB:.1f} MiB"


def format_load_rate(size_bytes: float, span_s: float) -> str:
    """Return the loaded size and its rate.

    The rate is left out for a span of less than one second, which is too short.
    """
    size = f"{size_bytes / GB:.1f} GB" if size_bytes >= 0.1 * GB else f"{size_bytes / 1e6:.1f} MB"
    return f"{size} loaded at {size_bytes / GB / span_s:.2f} GB/s" if span_s >= 1 else f"{size} loaded"
