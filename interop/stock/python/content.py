"""The content of checked payloads (interop/proto/checked.proto)."""

import array
import functools
import sys


@functools.lru_cache(maxsize=64)
def content(seed, length, period=0):
    count = (length + 3) // 4
    fresh = min(count, period) if period else count
    words = array.array("I", ((k * 2654435761 + seed) & 0xFFFFFFFF for k in range(fresh)))
    if sys.byteorder == "big":
        words.byteswap()
    unit = words.tobytes()
    return (unit * -(-count // fresh) if fresh else b"")[:length]


def first_mismatch(seed, payload, period=0):
    """Returns the offset of the first wrong byte, plus one, or 0 if all bytes are right."""
    expected = content(seed, len(payload), period)
    if payload == expected:
        return 0
    return next(at for at, (wanted, got) in enumerate(zip(expected, payload), 1) if wanted != got)
