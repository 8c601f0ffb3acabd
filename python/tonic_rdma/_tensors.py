"""Devices, channels, slots, named tensors and regions: the API of the crate tonic-rdma-tensor in Python."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, cast

from tonic_rdma import _native
from tonic_rdma._native import Array
from tonic_rdma._waits import finish

Shape: TypeAlias = int | Sequence[int]
Strings: TypeAlias = Any  # `bytes`, or lists of them, nested as the dimensions are
Blocks: TypeAlias = Sequence[tuple[int, int, int]] | Any


class Sent(NamedTuple):
    """A number of tensors, and the bytes of their elements."""

    tensors: int
    bytes: int


class SentCounts(NamedTuple):
    """What a sender has sent: from where the tensors lay, after a copy, and within the request."""

    in_place: Sent
    copied: Sent
    inline: Sent


class _Closing:
    """What is closed by `close()`, by the end of a `with` block, or when it is collected."""

    __slots__ = ("_native", "__weakref__")
    _native: Any

    def close(self) -> None:
        """Closes it. Operations under way raise TensorError of kind "closed", and so do later ones."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Device(_Closing):
    """This process as a device with memory, which peers reach at `endpoint`.

    Every name is one slot's or one region's. Whatever waits has an argument `timeout`, in seconds, and a twin
    with the end `_async` for event loops; after it TensorTimeout is raised. Without it, what Rust waits for
    counts: an answer of a peer for `answer_timeout`, a named tensor for `named_tensor_timeout`, and anything
    else for ever, or until the peer is lost. Operations that gave up may still use their memory for a moment.

    An array that was given to an operation must not be changed before the operation has ended.

    Links of a device that is closed or collected end. Receivers, exported regions and channels keep it.
    """

    __slots__ = ()

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        queue_pairs: int | None = None,
        answer_timeout: float = 10.0,
        named_tensor_timeout: float = 60.0,
        max_tensor_bytes: int = 64 << 30,
        checksums: bool = False,
    ) -> None:
        """Listens on `address`, "host:port"; with port 0 on a free one.

        queue_pairs: to each peer, whose operations happen side by side, from 1 to 64; by default as the
            variable RDMA_QUEUE_PAIRS_PER_PEER says.
        answer_timeout: seconds for a peer's answer when a link, a sender or a remote region is made.
        named_tensor_timeout: seconds for which an offer waits for its readers, and a request for its tensor.
        max_tensor_bytes: the longest tensor that a peer may announce.
        checksums: whether named tensors carry a checksum, which the receiver verifies.
        """
        self._native = _native.Device(
            address,
            queue_pairs=queue_pairs,
            answer_timeout=answer_timeout,
            named_tensor_timeout=named_tensor_timeout,
            max_tensor_bytes=max_tensor_bytes,
            checksums=checksums,
        )

    @property
    def endpoint(self) -> str:
        """The address that peers reach this device at: `peer.channel(device.endpoint)`."""
        return cast(str, self._native.endpoint)

    def empty(self, shape: Shape, dtype: object = "float32") -> Array:
        """Makes an array of zeros in memory of the device, from which regions are written and to which they are
        read without a copy, and which can be exported. It stays valid after the device is closed."""
        return cast(Array, self._native.empty(shape, dtype))

    def static_receiver(
        self, name: str, shape: Shape, dtype: object = "float32", depth: int = 1
    ) -> "StaticReceiver":
        """Makes a slot for tensors of one type and shape, of which `depth`, from 1 to 1024, can wait."""
        return StaticReceiver(self._native.static_receiver(name, shape, dtype, depth))

    def dynamic_receiver(self, name: str, depth: int = 1) -> "DynamicReceiver":
        """Makes a slot for tensors of any type and shape, of which `depth`, from 1 to 1024, can wait."""
        return DynamicReceiver(self._native.dynamic_receiver(name, depth))

    def put(self, name: str, step: int, array: object | None, readers: int = 1) -> None:
        """Offers a tensor to the first `readers` peers that request it by name and step, then or before.

        An array of `tonic_rdma.empty`, or a view of it in one piece, must not be changed until they have it. Any
        other is copied once. None is a dead tensor: its branch was not taken.
        """
        self._native.put(name, step, array, readers)

    def withdraw(self, name: str, step: int) -> int | None:
        """Ends an offer. Returns how many readers had not asked yet; None if there was no such offer."""
        return cast(int | None, self._native.withdraw(name, step))

    def offers(self) -> tuple[int, int, int]:
        """The number of offers, the bytes of their tensors, and the number of requests that wait."""
        return cast(tuple[int, int, int], self._native.offers())

    def export(self, name: str, array: Array, read: bool = True, write: bool = False) -> "ExportedRegion":
        """Offers the memory of an array of `empty` to all peers, which may read or write it at any time."""
        return ExportedRegion(self._native.export(name, array, read, write), array)

    def channel(self, endpoint: str, queue_pair: int = 0, timeout: float | None = None) -> "TensorChannel":
        """Opens a channel to the device at `endpoint`. Channels to one device have one link.

        Raises TensorError of kind "no_rdma" if there is no RDMA between the two, or no device at the endpoint.
        """
        return TensorChannel(self._native.channel(endpoint, queue_pair, timeout).wait())

    async def channel_async(
        self, endpoint: str, queue_pair: int = 0, timeout: float | None = None
    ) -> "TensorChannel":
        return TensorChannel(await finish(self._native.channel(endpoint, queue_pair, timeout)))

    def __repr__(self) -> str:
        return f"<tonic_rdma.tensors.Device at {self.endpoint}>"


class TensorChannel(_Closing):
    """Operations on the memory of one peer, from `Device.channel`."""

    __slots__ = ()

    def __init__(self, native: _native.TensorChannel) -> None:
        self._native = native

    @property
    def endpoint(self) -> str:
        """The peer's address."""
        return cast(str, self._native.endpoint)

    @property
    def device(self) -> str:
        """The RDMA device that carries the tensors, such as "soft0"."""
        return cast(str, self._native.device)

    @property
    def is_open(self) -> bool:
        """Whether the link to the peer has not ended."""
        return cast(bool, self._native.is_open)

    def static_sender(
        self, name: str, shape: Shape, dtype: object = "float32", timeout: float | None = None
    ) -> "StaticSender":
        """Attaches to a static slot of the peer, which must have this type and shape. A slot has one sender."""
        return StaticSender(self._native.static_sender(name, shape, dtype, timeout).wait())

    async def static_sender_async(
        self, name: str, shape: Shape, dtype: object = "float32", timeout: float | None = None
    ) -> "StaticSender":
        return StaticSender(await finish(self._native.static_sender(name, shape, dtype, timeout)))

    def dynamic_sender(self, name: str, timeout: float | None = None) -> "DynamicSender":
        """Attaches to a dynamic slot of the peer. A slot has one sender."""
        return DynamicSender(self._native.dynamic_sender(name, timeout).wait())

    async def dynamic_sender_async(self, name: str, timeout: float | None = None) -> "DynamicSender":
        return DynamicSender(await finish(self._native.dynamic_sender(name, timeout)))

    def request(self, name: str, step: int, timeout: float | None = None) -> Array | Strings | None:
        """Waits for a tensor that the peer offers by `Device.put`, then or later. None if it is dead.

        A request that timed out, or whose task was cancelled, may have taken the tensor as one of its readers.
        """
        return self._native.request(name, step, timeout).wait()

    async def request_async(self, name: str, step: int, timeout: float | None = None) -> Array | Strings | None:
        return await finish(self._native.request(name, step, timeout))

    def region(self, name: str, timeout: float | None = None) -> "RemoteRegion":
        """Finds a region that the peer has exported."""
        return RemoteRegion(self._native.region(name, timeout).wait())

    async def region_async(self, name: str, timeout: float | None = None) -> "RemoteRegion":
        return RemoteRegion(await finish(self._native.region(name, timeout)))

    def write(
        self,
        region: "RemoteRegion",
        array: object,
        offset: int = 0,
        blocks: Blocks | None = None,
        notify: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Writes an array to `offset` of the peer's region, in bytes. When it returns, the bytes are there.

        An array of `Device.empty`, or a view of one in one piece, is written from where it lies, unless it is
        exported. Another operation on such an array waits. Any other array is copied first.

        blocks: which bytes of the array go where: a sequence of (offset in the array, offset in the region,
            length), or an array of integers of shape (n, 3). The second one counts from `offset`. Thousands are
            one operation.
        notify: the peer gets a notice (`ExportedRegion.notice`) when all bytes are there.

        ValueError: bytes that do not lie within the array and the region, or the region of another link.
        TensorError of kind "not_permitted": the peer gave no right to write.
        """
        self._native.write(_remote(region), array, offset, blocks, notify, timeout).wait()

    async def write_async(
        self,
        region: "RemoteRegion",
        array: object,
        offset: int = 0,
        blocks: Blocks | None = None,
        notify: bool = False,
        timeout: float | None = None,
    ) -> None:
        await finish(self._native.write(_remote(region), array, offset, blocks, notify, timeout))

    def read(
        self,
        region: "RemoteRegion",
        array: object,
        offset: int = 0,
        blocks: Blocks | None = None,
        timeout: float | None = None,
    ) -> None:
        """Reads from `offset` of the peer's region, in bytes, into a writable array. `write` says more."""
        self._native.read(_remote(region), array, offset, blocks, timeout).wait()

    async def read_async(
        self,
        region: "RemoteRegion",
        array: object,
        offset: int = 0,
        blocks: Blocks | None = None,
        timeout: float | None = None,
    ) -> None:
        await finish(self._native.read(_remote(region), array, offset, blocks, timeout))


class RemoteRegion(_Closing):
    """A region of a peer, from `TensorChannel.region`."""

    __slots__ = ()

    def __init__(self, native: _native.RemoteRegion) -> None:
        self._native = native

    @property
    def name(self) -> str:
        return cast(str, self._native.name)

    @property
    def nbytes(self) -> int:
        return cast(int, self._native.nbytes)

    @property
    def readable(self) -> bool:
        """Whether the peer gave the right to read."""
        return cast(bool, self._native.readable)

    @property
    def writable(self) -> bool:
        """Whether the peer gave the right to write."""
        return cast(bool, self._native.writable)


def _remote(region: RemoteRegion) -> Any:
    if not isinstance(region, RemoteRegion):
        raise TypeError(f"region: expected a RemoteRegion of TensorChannel.region, not {type(region).__name__}")
    return region._native


class ExportedRegion(_Closing):
    """An array on offer to peers, from `Device.export`. Withdraw it after the last operation of the peers on
    it, because an operation on a region that is gone ends the link."""

    __slots__ = ("_array",)

    def __init__(self, native: _native.ExportedRegion, array: Array) -> None:
        self._native = native
        self._array = array

    @property
    def array(self) -> Array:
        """The array, which peers with the right to write may change at any time."""
        return self._array

    def notice(self, timeout: float | None = None) -> None:
        """Waits for a notice of a peer (`TensorChannel.write` with `notify`), and takes it.

        Raises PeerLost if the last peer is lost.
        """
        self._native.notice(timeout).wait()

    async def notice_async(self, timeout: float | None = None) -> None:
        await _arrived(self._native, lambda: self._native.try_notice() or None, timeout)

    def try_notice(self) -> bool:
        """Takes a notice if there is one."""
        return cast(bool, self._native.try_notice())

    def withdraw(self) -> None:
        """Ends the offer, and the rights of all peers. The same as `close`."""
        self.close()


class StaticReceiver(_Closing):
    """The receiving side of a static slot, from `Device.static_receiver`. Threads that receive take turns."""

    __slots__ = ()

    def __init__(self, native: _native.StaticReceiver) -> None:
        self._native = native

    def recv(self, timeout: float | None = None) -> Array:
        """Waits for the next tensor, and copies it, because the sender writes the slot again."""
        return cast(Array, self._native.recv(timeout).wait())

    async def recv_async(self, timeout: float | None = None) -> Array:
        return cast(Array, await _arrived(self._native, self._native.try_recv, timeout))

    def recv_into(self, array: object, timeout: float | None = None) -> None:
        """Waits for the next tensor, and copies it to `array`, which has the type and shape of the slot."""
        self._native.recv_into(array, timeout).wait()

    async def recv_into_async(self, array: object, timeout: float | None = None) -> None:
        self._native.recv_into(array, timeout)  # refuses a wrong array before the wait

        def take() -> bool | None:
            return self._native.try_recv_into(array) or None

        await _arrived(self._native, take, timeout)

    def try_recv(self) -> Array | None:
        """Takes the next tensor if it is there. None also if another thread waits for it."""
        return cast(Array | None, self._native.try_recv())


class DynamicReceiver(_Closing):
    """The receiving side of a dynamic slot, from `Device.dynamic_receiver`. Threads that receive take turns.

    A tensor that arrives stays where it arrived, and is read-only. Tensors of strings are lists of `bytes`.
    """

    __slots__ = ()

    def __init__(self, native: _native.DynamicReceiver) -> None:
        self._native = native

    def recv(self, timeout: float | None = None) -> Array | Strings:
        """Waits for the next tensor."""
        return self._native.recv(timeout).wait()

    async def recv_async(self, timeout: float | None = None) -> Array | Strings:
        return await _arrived(self._native, self._native.try_recv, timeout)

    def try_recv(self) -> Array | Strings | None:
        """Takes the next tensor if it is there. None also if another thread waits for it."""
        return self._native.try_recv()


async def _arrived(native: Any, take: Any, timeout: float | None) -> Any:
    """Takes the next tensor or notice. A task that is cancelled takes none, so none is lost."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        await finish(native.arrived(left))
        taken = take()
        if taken is not None:
            return taken


class _Sender(_Closing):
    __slots__ = ()

    def send(self, array: object, wait: bool = True, timeout: float | None = None) -> None:
        """Sends a tensor, once the slot has room. When it returns, the array may be changed.

        An array of `tonic_rdma.empty`, or a view of it, is sent from where it lies, and this waits until that
        is over. Any other array is copied. With wait=False an array that is not copied must not be changed
        before `flush`.
        """
        self._native.send(array, wait, timeout).wait()

    async def send_async(self, array: object, wait: bool = True, timeout: float | None = None) -> None:
        await finish(self._native.send(array, wait, timeout))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the receiver has taken all tensors."""
        self._native.flush(timeout).wait()

    async def flush_async(self, timeout: float | None = None) -> None:
        await finish(self._native.flush(timeout))

    def sent(self) -> SentCounts:
        """What has been sent, with and without a copy at this side."""
        return SentCounts(*(Sent(*pair) for pair in self._native.sent()))


class StaticSender(_Sender):
    """The sending side of a static slot, from `TensorChannel.static_sender`. Threads that send take turns.

    Arrays must have the slot's type and shape. `send` waits until the device has written the tensor to the
    receiver's memory. An array of `Device.empty`, or a view that begins where it does, is not copied either.
    """

    __slots__ = ()

    def __init__(self, native: _native.StaticSender) -> None:
        self._native = native


class DynamicSender(_Sender):
    """The sending side of a dynamic slot, from `TensorChannel.dynamic_sender`. Threads that send take turns.

    It takes lists of `bytes` and `str` too, and numpy's arrays of strings; these become lists of `bytes`.
    `send` of an array that is not copied waits until the receiver has read the tensor: in each call of the
    receiver's `recv`, and while that waits.
    """

    __slots__ = ()

    def __init__(self, native: _native.DynamicSender) -> None:
        self._native = native
