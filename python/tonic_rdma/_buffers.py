"""Arrays by reference: a message carries a handle of some 100 bytes, and its reader fetches the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from . import _native
from ._arrays import empty
from ._failures import TensorError
from ._native import Array
from ._waits import finish

if TYPE_CHECKING:
    import grpc

    from . import buffer_pb2

_MESSAGE = "tonic_rdma.buffer.v1.RemoteBuffer"

# The pool and the client of the process. A child of a fork makes its own.
_of_process: dict[str, Any] = {}
os.register_at_fork(after_in_child=_of_process.clear)


class ReaderSecret(NamedTuple):
    """By it a reader proves its name to an owner. Give it to that reader alone; it can be pickled."""

    owner: str  # URI
    name: str
    secret: bytes

    def __repr__(self) -> str:
        return f"<ReaderSecret of {self.name!r} at {self.owner}>"


class Reader(NamedTuple):
    """Who has read a buffer: a connection, or the owner's own process."""

    name: str | None  # by which the owner has admitted it
    address: str | None  # such as "ipv4:10.0.0.7:40312"; None: the owner's process
    running: int  # fetches
    complete: int  # fetches whose last bytes were handed to the transport
    bytes: int  # handed to the transport


class PoolStatistics(NamedTuple):
    leases: int  # that have not ended
    bytes: int  # of these leases
    copied_bytes: int  # that `share` had to copy, because they did not lie in registered memory


class OwnerStatus(NamedTuple):
    """An owner that a client is connected to."""

    owner: str  # URI
    connection: _native.Connection | None  # what carries the calls, and why; None: not connected yet
    landed_bytes: int  # that native calls brought into registered memory
    copied_bytes: int  # of these, copied once more, because the client kept more than its `landing_budget`


class BufferPool:
    """Memory that this process shares by reference, at an address that readers connect to.

    The pool has a port of its own at `address`, "host:port" (default: any free port of 127.0.0.1, for readers
    on this machine). With `server`, one of `tonic_rdma.server` or `tonic_rdma.aio.server` that has a port and
    has not started, the pool is served on the first port of that server, and `address` is needed only if
    readers reach it by another one. `limit` bounds the bytes of copies and of writes.

    `close`, or the end of the last reference (buffers with a lease have one too), ends all leases.
    """

    def __init__(self, address: str | None = None, *, server: Any = None, limit: int = 1 << 30) -> None:
        native = getattr(getattr(server, "_service", None), "native", None)
        if server is not None and not isinstance(native, _native.Server):
            raise TypeError(
                f"server: expected one of tonic_rdma.server or tonic_rdma.aio.server, not {server!r}"
            )
        self._native = _native.BufferPool(address, native, _count("limit", limit, 0))

    @property
    def uri(self) -> str:
        """Where readers connect to, such as "http://127.0.0.1:50051"."""
        return self._native.uri

    def admit(self, name: str) -> ReaderSecret:
        """Admits a reader for buffers that are shared `only_for` it. Its earlier secrets are refused then."""
        return ReaderSecret(self.uri, name, self._native.admit(name))

    def dismiss(self, name: str) -> None:
        """Admits the reader of this name no longer."""
        self._native.dismiss(name)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(*self._native.statistics())

    def close(self) -> None:
        """Ends all leases and closes the pool's own port. Fetches that run fail, after at most a second."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tonic_rdma.BufferPool at {self.uri}>"


def share(
    object: Any,
    *,
    pool: BufferPool | None = None,
    readers: int | None = None,
    time_limit: float | None = None,
    writable: bool = False,
    checksum: bool = False,
    only_for: Iterable[str] | None = None,
) -> RemoteBuffer:
    """Shares an array with whoever gets the handle, until the returned object is closed or collected.

    `object` is a tonic_rdma.Array, or has the buffer protocol or DLPack. An Array and views of it stay where
    they are, others are copied once (`BufferPool.statistics` counts). Don't write to the array while it is
    shared.

    The lease ends after `readers` fetches, or `time_limit` seconds, and with one of both it does not need the
    returned object. `writable` lets readers write; the array itself stays as it is, and fetches see what was
    written. `checksum` makes fetches of the whole compare XXH3. `only_for` names the readers
    (`BufferPool.admit`). Without `pool`, the process's own is used, which readers on this machine reach.

    TypeError, ValueError: an argument is wrong. MemoryError: the pool's limit is used up. TensorError: it is
    closed.
    """
    if pool is None:
        pool = _of_process.get("pool") or _of_process.setdefault("pool", BufferPool())
    if readers is not None:
        readers = _count("readers", readers, 1)
    if time_limit is not None and not time_limit >= 0:
        raise ValueError(f"time_limit: expected seconds, not {time_limit!r}")
    if isinstance(only_for, str):
        raise TypeError(f"only_for: expected the names of readers, such as [{only_for!r}], not a str")
    names = None if only_for is None else list(only_for)
    handle, lease = pool._native.share(object, readers, time_limit, writable, checksum, names)
    buffer = RemoteBuffer.__new__(RemoteBuffer)
    buffer._handle, buffer._lease, buffer._pool = handle, lease, pool
    return buffer


class RemoteBuffer:
    """A handle of an array in a process, perhaps another one.

    It is made of its message (`tonic_rdma.buffer_pb2.RemoteBuffer`) or of its bytes, and goes into a message by
    `message`, into any other way by `bytes(buffer)` or pickle. Whoever has a handle can read the array, so keep
    it secret. What `share` returned has the lease too: it is the owner's. Copies and pickles of it have not.

    Fetches raise `Gone`, `Revoked`, `Restarted`, `PeerLost` or `TensorTimeout`, or a TensorError of the kinds
    "not_permitted", "busy" or "protocol". `timeout` is seconds for the whole; None: until the owner sends
    nothing for 10 s. `BufferClient` has the same methods with other settings. Methods that end in `_async` are
    awaited.
    """

    __slots__ = ("__weakref__", "_handle", "_lease", "_pool")
    _handle: _native.RemoteBuffer
    _lease: _native.BufferLease | None
    _pool: BufferPool | None  # which lives as long as the lease

    def __init__(self, handle: buffer_pb2.RemoteBuffer | bytes) -> None:
        kind: Any = getattr(handle, "DESCRIPTOR", None)
        if kind is not None and kind.full_name != _MESSAGE:
            raise TypeError(f"handle: expected the message {_MESSAGE} or its bytes, not {kind.full_name}")
        data: Any = handle if kind is None else handle.SerializeToString()  # type: ignore[union-attr]
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"handle: expected the message {_MESSAGE} or its bytes, not {type(handle).__name__}"
            )
        self._handle = _native.RemoteBuffer(bytes(data))
        self._lease = self._pool = None

    @property
    def message(self) -> buffer_pb2.RemoteBuffer:
        """The message, for a field of another one: `Image(pixels=buffer.message)`. It needs protobuf."""
        from . import buffer_pb2

        return buffer_pb2.RemoteBuffer.FromString(bytes(self))

    def __bytes__(self) -> bytes:
        return self._handle.data()

    def __reduce__(self) -> tuple[type[RemoteBuffer], tuple[bytes]]:
        return RemoteBuffer, (bytes(self),)

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(other) if isinstance(other, RemoteBuffer) else NotImplemented

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return f"<tonic_rdma.RemoteBuffer {self.dtype} {list(self.shape)} at {self.owner}>"  # without the token

    @property
    def owner(self) -> str:
        """The URI of the owner."""
        return self._handle.owner

    @property
    def shape(self) -> tuple[int, ...]:
        return self._handle.shape

    @property
    def dtype(self) -> str:
        """numpy's name of the type of the elements; "uint8" if bytes were shared that are no array."""
        return self._handle.dtype

    @property
    def nbytes(self) -> int:
        return self._handle.nbytes

    # For readers.

    def fetch(self, timeout: float | None = None) -> Array:
        """Fetches the array. It is read-only, and valid whatever becomes of its owner.

        In the owner's process it is the shared memory itself.
        """
        return _client().fetch(self, timeout)

    def numpy(self, timeout: float | None = None) -> Any:
        """Fetches the array, as one of numpy, which is read-only."""
        return self.fetch(timeout).numpy()

    def __dlpack__(self, **arguments: Any) -> Any:
        """Fetches the array, for `torch.from_dlpack(buffer)` or `jax.dlpack.from_dlpack(buffer)`.

        Who takes no read-only arrays (DLPack before 1.0, as jax and older torch) gets a copy of its own.
        """
        if (arguments.get("max_version") or (0,))[0] >= 1:
            return self.fetch().__dlpack__(**arguments)
        array = empty(self.shape, self.dtype)
        self.fetch_into(array)
        return array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # memory of the host

    def fetch_into(self, array: Any, offset: int = 0, timeout: float | None = None) -> None:
        """Fetches as many bytes as `array` has, from byte `offset` on, into its memory, which is contiguous.

        If that fails, the array may have a part of them. Its elements are of the same type, or uint8.
        """
        _client().fetch_into(self, array, offset, timeout)

    def fetch_blocks(self, ranges: Iterable[tuple[int, int]], timeout: float | None = None) -> list[Array]:
        """Fetches up to 65 536 ranges of bytes, pairs (start, stop), by one call, each as an array of uint8."""
        return _client().fetch_blocks(self, ranges, timeout)

    def write_back(self, offset: int, object: Any, timeout: float | None = None) -> None:
        """Writes the elements of an array into the owner's buffer, from byte `offset` on, if it is `writable`.

        Later fetches see all of them; fetches that run see none. After `PeerLost` and `TensorTimeout` they may
        have been written.
        """
        _client().write_back(self, offset, object, timeout)

    async def fetch_async(self, timeout: float | None = None) -> Array:
        return await _client().fetch_async(self, timeout)

    async def fetch_into_async(self, array: Any, offset: int = 0, timeout: float | None = None) -> None:
        await _client().fetch_into_async(self, array, offset, timeout)

    async def fetch_blocks_async(
        self, ranges: Iterable[tuple[int, int]], timeout: float | None = None
    ) -> list[Array]:
        return await _client().fetch_blocks_async(self, ranges, timeout)

    async def write_back_async(self, offset: int, object: Any, timeout: float | None = None) -> None:
        await _client().write_back_async(self, offset, object, timeout)

    # For the owner. ValueError: this object has no lease.

    def revoke(self) -> None:
        """Ends the lease, with `Revoked` for fetches that run and for later ones."""
        self._owned().revoke()

    def close(self) -> None:
        """Ends the lease, with `Gone` for fetches that run and for later ones. Without one it does nothing."""
        if self._lease is not None:
            self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def readers(self) -> list[Reader]:
        """Who has read, the first one first, at most 64. The lease may have ended."""
        return [Reader(*reader) for reader in self._owned().readers()]

    def writes(self) -> int:
        """How often readers have written."""
        return self._owned().writes()

    def wait_ended(self, timeout: float | None = None) -> None:
        """Waits until the lease has ended and no fetch runs. TensorTimeout: that did not happen in time."""
        self._owned().ended(timeout).wait()

    def wait_written(self, known: int, timeout: float | None = None) -> int:
        """Waits until readers have written more than `known` times. Returns how often. `Gone`: it has ended."""
        writes: int = self._owned().written(_count("known", known, 0), timeout).wait()
        return writes

    async def wait_ended_async(self, timeout: float | None = None) -> None:
        await finish(self._owned().ended(timeout))

    async def wait_written_async(self, known: int, timeout: float | None = None) -> int:
        writes: int = await finish(self._owned().written(_count("known", known, 0), timeout))
        return writes

    def _owned(self) -> _native.BufferLease:
        if self._lease is None:
            raise ValueError("this handle has no lease: the owner's object, which `share` returned, has it")
        return self._lease


class BufferClient:
    """Fetches the arrays of handles, with settings of its own, over one connection to each owner.

    `timeout`: seconds for which an owner may send nothing, and 1 s more for each 16 MiB. `max_fetch_bytes`: the
    most that one fetch may ask for. `landing_budget`: bytes of registered memory that fetches from one owner
    land in and that fetched arrays keep. What is beyond it, or beyond a third of RDMA_PINNED_LIMIT for the
    whole process, is copied to ordinary memory. `owners`: called with the URI of an owner, says whether the
    client may connect to it; a reader that gets handles from strangers needs this. `secrets`: of
    `BufferPool.admit`. `credentials`: of grpc.ssl_channel_credentials, for owners whose URI begins with
    "https". `calls_itself`: calls the owner also if it is this process, which is slower, for tests.
    """

    _owners: Callable[[str], bool] | None = None

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        max_fetch_bytes: int = 4 << 30,
        landing_budget: int = 2 << 30,
        owners: Callable[[str], bool] | None = None,
        secrets: Iterable[ReaderSecret] = (),
        credentials: grpc.ChannelCredentials | None = None,
        calls_itself: bool = False,
    ) -> None:
        from ._options import _channel_credentials

        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds above 0, not {timeout!r}")
        tls, calls = _channel_credentials(credentials)
        if calls:
            raise ValueError("credentials: those of calls are not sent to owners of buffers")
        self._owners = owners
        self._native = _native.BufferClient(
            timeout,
            _count("max_fetch_bytes", max_fetch_bytes, 0),
            _count("landing_budget", landing_budget, 1 << 20),
            list(secrets),
            tls,
            calls_itself,
        )

    def owners(self) -> list[OwnerStatus]:
        """The owners that the client is connected to. It closes a connection that was not used for a minute."""
        return [OwnerStatus(*owner) for owner in self._native.owners()]

    def fetch(self, buffer: RemoteBuffer, timeout: float | None = None) -> Array:
        array: Array = self._fetch(buffer, timeout).wait()
        return array

    def fetch_into(
        self, buffer: RemoteBuffer, array: Any, offset: int = 0, timeout: float | None = None
    ) -> None:
        self._fetch_into(buffer, array, offset, timeout).wait()

    def fetch_blocks(
        self, buffer: RemoteBuffer, ranges: Iterable[tuple[int, int]], timeout: float | None = None
    ) -> list[Array]:
        return _raised(self._fetch_blocks(buffer, ranges, timeout).wait())

    def fetch_all(
        self, buffers: Iterable[RemoteBuffer], timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[Any]:
        """Fetches many arrays, by one call to each owner, at the same time.

        The first error is raised, or with `return_exceptions` each is in the place of its array.
        """
        fetched: list[Any] = self._fetch_all(buffers, timeout).wait()
        return fetched if return_exceptions else _raised(fetched)

    def write_back(self, buffer: RemoteBuffer, offset: int, object: Any, timeout: float | None = None) -> None:
        self._write_back(buffer, offset, object, timeout).wait()

    async def fetch_async(self, buffer: RemoteBuffer, timeout: float | None = None) -> Array:
        array: Array = await finish(self._fetch(buffer, timeout))
        return array

    async def fetch_into_async(
        self, buffer: RemoteBuffer, array: Any, offset: int = 0, timeout: float | None = None
    ) -> None:
        await finish(self._fetch_into(buffer, array, offset, timeout))

    async def fetch_blocks_async(
        self, buffer: RemoteBuffer, ranges: Iterable[tuple[int, int]], timeout: float | None = None
    ) -> list[Array]:
        return _raised(await finish(self._fetch_blocks(buffer, ranges, timeout)))

    async def fetch_all_async(
        self, buffers: Iterable[RemoteBuffer], timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[Any]:
        fetched: list[Any] = await finish(self._fetch_all(buffers, timeout))
        return fetched if return_exceptions else _raised(fetched)

    async def write_back_async(
        self, buffer: RemoteBuffer, offset: int, object: Any, timeout: float | None = None
    ) -> None:
        await finish(self._write_back(buffer, offset, object, timeout))

    def _fetch(self, buffer: RemoteBuffer, timeout: float | None) -> _native.Pending:
        return self._native.fetch(self._handle(buffer), timeout)

    def _fetch_into(
        self, buffer: RemoteBuffer, array: Any, offset: int, timeout: float | None
    ) -> _native.Pending:
        return self._native.fetch_into(self._handle(buffer), array, _count("offset", offset, 0), timeout)

    def _fetch_blocks(
        self, buffer: RemoteBuffer, ranges: Iterable[tuple[int, int]], timeout: float | None
    ) -> _native.Pending:
        handle, pairs = self._handle(buffer), [(start, stop) for start, stop in ranges]
        for start, stop in pairs:
            if not 0 <= start <= stop <= handle.nbytes:
                raise ValueError(f"ranges: {(start, stop)} is no range of bytes in a buffer of {handle.nbytes}")
        return self._native.fetch_blocks(handle, pairs, timeout)

    def _fetch_all(self, buffers: Iterable[RemoteBuffer], timeout: float | None) -> _native.Pending:
        return self._native.fetch_all([self._handle(buffer) for buffer in buffers], timeout)

    def _write_back(
        self, buffer: RemoteBuffer, offset: int, object: Any, timeout: float | None
    ) -> _native.Pending:
        return self._native.write_back(self._handle(buffer), _count("offset", offset, 0), object, timeout)

    def _handle(self, buffer: RemoteBuffer) -> _native.RemoteBuffer:
        if not isinstance(buffer, RemoteBuffer):
            raise TypeError(f"buffer: expected a tonic_rdma.RemoteBuffer, not {type(buffer).__name__}")
        if self._owners is not None and not self._owners(buffer.owner):
            raise TensorError(
                f"the client may not connect to {buffer.owner}: `owners` says so", "not_permitted"
            )
        return buffer._handle


def _client() -> BufferClient:
    """The client that all of the process share."""
    client: BufferClient | None = _of_process.get("client")
    return client or _of_process.setdefault("client", BufferClient())


def fetch_all(
    buffers: Iterable[RemoteBuffer], timeout: float | None = None, *, return_exceptions: bool = False
) -> list[Any]:
    """Fetches many arrays: see `BufferClient.fetch_all`."""
    return _client().fetch_all(buffers, timeout, return_exceptions=return_exceptions)


async def fetch_all_async(
    buffers: Iterable[RemoteBuffer], timeout: float | None = None, *, return_exceptions: bool = False
) -> list[Any]:
    return await _client().fetch_all_async(buffers, timeout, return_exceptions=return_exceptions)


def _raised(fetched: list[Any]) -> list[Any]:
    for array in fetched:
        if isinstance(array, BaseException):
            raise array
    return fetched


def _count(name: str, value: int, least: int) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a number, not {value!r}")
    value = int(value)
    if not least <= value < 1 << 63:
        raise ValueError(f"{name}: expected a number from {least} on, not {value}")
    return value
