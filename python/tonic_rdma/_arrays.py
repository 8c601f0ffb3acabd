"""Arrays in registered memory, which other processes read in place."""

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

from tonic_rdma import _native
from tonic_rdma._native import Array


class MemoryStatistics(NamedTuple):
    """The registered memory of this process's arrays."""

    arrays: int  #: of `empty`, `zeros` and `asarray`, that something still holds: a view, a lease, an operation
    bytes: int  #: their memory
    reserved_bytes: int  #: with the memory that is kept for the next ones
    copied_bytes: int  #: copied since the process began, because the elements lay elsewhere


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any = "float32") -> Array:
    """An array in registered memory, with any content.

    `dtype` is a name, such as "float32", or a type of numpy or torch. A wrong one is a ValueError, and so is a
    negative length; a process out of memory gets a MemoryError.
    """
    return _native.empty(shape, dtype)


def zeros(shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any = "float32") -> Array:
    """An array of zeros in registered memory. As `empty` otherwise."""
    return _native.zeros(shape, dtype)


def asarray(object: Any) -> Array:
    """The elements of an object in host memory, as an array in registered memory.

    `object` is an `Array`, has the buffer protocol (numpy's arrays, bytes, array.array), or has `__dlpack__`
    (tensors of torch, arrays of jax). Elements that lie in one piece in registered memory, such as a view of an
    `Array`, stay where they are. Others are copied, which `memory_statistics().copied_bytes` counts. An object
    without such elements is a TypeError or a BufferError, and more than 16 dimensions are a ValueError.
    """
    return _native.asarray(object)


def memory_statistics() -> MemoryStatistics:
    """What arrays in registered memory there are."""
    return MemoryStatistics(*_native.memory_statistics())
