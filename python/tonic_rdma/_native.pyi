"""The part of this package that is written in Rust. It knows bytes, not messages; the modules beside it are grpc's API over it.

Nothing here is public. Rules that hold everywhere:
- Functions that can wait release the interpreter's lock while they wait, and raise KeyboardInterrupt on Ctrl-C.
- A function `X_then(completions, callback, ...)` does what `X(...)` does without waiting: `callback(result)` runs when
  `completions` is drained (by an event loop or by a thread). A callback runs once. An exception goes to sys.unraisablehook.
- Metadata comes out as a tuple of pairs (key, value), value `bytes` for keys that end in `-bin`, else `str`. It goes in as
  a sequence of such pairs (`grpc.aio.Metadata` too), or None. Wrong metadata is a ValueError or TypeError that names the key.
- `code` is the number of a gRPC status code. `compression` is 0 none, 1 deflate, 2 gzip (grpc.Compression's numbers).
- Times are seconds as float.
- After a fork of a process that has used this package, each use raises RuntimeError.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias, final

from tonic_rdma._metadatum import Metadatum

Metadata: TypeAlias = tuple[Metadatum, ...]
MetadataIn: TypeAlias = Iterable[tuple[str, str | bytes]] | None

__version__: str

def after_fork_in_child() -> None: ...  # registered with os.register_at_fork by __init__.py
def capabilities() -> list[tuple[str, bool, str]]: ...  # (what, present, why): devices, peers level, TLS, ...

@final
class Completions:
    """Results that wait for the thread that takes them."""
    def __new__(cls) -> Completions: ...
    def fileno(self) -> int: ...  # readable while results wait: for loop.add_reader
    def run_ready(self) -> int: ...  # runs the callbacks of all results that are there; returns how many
    def run_until_closed(self) -> None: ...  # waits for results and runs their callbacks, until close()
    def push(self, callback: Callable[[Any], object], value: object) -> None: ...  # from any thread
    def close(self) -> None: ...  # takes no more results
    def discard(self) -> None: ...  # closes, and drops the results that are there: their callbacks do not run

@final
class Outcome:
    """How a call ended."""
    code: int
    details: str
    initial_metadata: Metadata
    trailing_metadata: Metadata
    response: bytes | None  # of calls with one response

@final
class Connection:
    """What carries a channel's calls, or a call at a server."""
    verdict: str  # "rdma" or "tcp"
    reason: str
    native: bool
    in_process: bool
    device: str | None
    provider: str | None
    tls: bool
    peer: str  # such as "ipv4:127.0.0.1:50051"
    local: str

@final
class Channel:
    """It connects when the first call or `state(True)` needs it, redials by back-off, and balances over several addresses."""
    def __new__(
        cls,
        addresses: Sequence[str],  # "host:port"; more than one are balanced
        *,
        tls: tuple[bytes | None, bytes | None, bytes | None] | None = None,  # PEM: roots (needed), key, chain
        authority: str | None = None,  # grpc.ssl_target_name_override, grpc.default_authority
        user_agent: str | None = None,  # goes in front of ours
        max_send: int = -1,  # bytes; -1: no limit
        max_receive: int = 4 << 20,
        keepalive: tuple[float, float] | None = None,  # HTTP/2 alone: interval, timeout
        unusable: str | None = None,  # why the target is none: calls end with UNAVAILABLE and this text
    ) -> Channel: ...
    def method(self, path: str) -> Method: ...
    def state(self, connect: bool) -> int: ...  # 0 idle, 1 connecting, 2 ready, 3 transient failure, 4 shutdown
    def wait_for_state_change(self, last: int, timeout: float | None) -> int: ...  # the state now (== last after the timeout)
    def wait_for_state_change_then(self, completions: Completions, callback: Callable[[int], object], last: int) -> Waiting: ...
    def connection(self) -> Connection | None: ...
    def close(self) -> None: ...  # calls in flight end with CANCELLED, "Channel closed!"

@final
class Waiting:
    """A wait that goes on until it is cancelled, or dropped. Then its callback does not run."""
    def cancel(self) -> None: ...

@final
class Method:
    """One method of one channel."""
    def unary(
        self, request: bytes, timeout: float | None, metadata: MetadataIn, wait_for_ready: bool, compression: int
    ) -> bytes | Outcome: ...  # waits; the response's bytes if the code is 0, otherwise the outcome
    def unary_with_call(
        self, request: bytes, timeout: float | None, metadata: MetadataIn, wait_for_ready: bool, compression: int
    ) -> Outcome: ...  # waits
    def start(
        self,
        request: bytes | None,  # the one request, or None: they come by send()
        unary_response: bool,
        timeout: float | None,
        metadata: MetadataIn,
        wait_for_ready: bool,
        compression: int,
    ) -> Call: ...  # does not wait

@final
class Call:
    """A call under way at the client. It goes on by itself; dropping it cancels it."""
    def send(self, message: bytes) -> bool: ...  # waits for room; False: the call is over
    def send_then(self, completions: Completions, callback: Callable[[bool], object], message: bytes) -> None: ...
    def send_now(self, message: bytes) -> bool | None: ...  # None: no room
    def receive_now(self) -> bytes | None: ...  # None: not there yet, or no more
    def close_send(self) -> None: ...
    def receive(self) -> bytes | None: ...  # None: no more messages; see outcome()
    def receive_then(self, completions: Completions, callback: Callable[[bytes | None], object]) -> None: ...
    def initial_metadata(self) -> Metadata: ...  # waits; () if the call ended without
    def initial_metadata_then(self, completions: Completions, callback: Callable[[Metadata], object]) -> None: ...
    def outcome(self, timeout: float | None = None) -> Outcome | None: ...  # waits; None after the timeout
    def outcome_then(self, completions: Completions, callback: Callable[[Outcome], object]) -> None: ...
    def outcome_now(self) -> Outcome | None: ...  # None: under way
    def cancel(self, code: int = 1, details: str = ...) -> bool: ...  # False: was over
    def peer(self) -> str | None: ...  # of the channel's last connection

@final
class Server:
    def __new__(
        cls,
        *,
        max_send: int = -1,
        max_receive: int = 4 << 20,
        max_concurrent: int | None = None,  # calls; more get RESOURCE_EXHAUSTED
        keepalive: tuple[float, float] | None = None,
        reuse_port: bool = False,  # SO_REUSEPORT
    ) -> Server: ...
    def bind(self, address: str, tls: tuple[bytes, bytes, bytes | None, bool] | None = None) -> int: ...
    # "host:port", port 0: any; tls: PEM key, chain, client roots, client certificate required. The port. RuntimeError: it can't, or the server has started. ValueError: the certificate.
    def start(self) -> None: ...
    def next_call(self, timeout: float | None = None) -> ServerCall | None: ...  # waits; None: after the timeout, or stopped
    def calls_to(self, completions: Completions, callback: Callable[[ServerCall], object]) -> None: ...  # instead of next_call
    def stop(self, grace: float | None) -> None: ...  # does not wait: no new calls; those in flight are cancelled after `grace`
    def wait_stopped(self, timeout: float | None = None) -> bool: ...
    def wait_stopped_then(self, completions: Completions, callback: Callable[[bool], object]) -> Waiting: ...

@final
class ServerCall:
    method: str  # "/package.Service/Method"
    host: str
    metadata: Metadata
    peer: str
    connection: Connection | None
    identities: tuple[bytes, ...]  # the peer's certificates, PEM, leaf first
    def time_remaining(self) -> float | None: ...
    def is_active(self) -> bool: ...
    def receive(self) -> bytes | None: ...  # waits; None: no more, or the call is over (is_active)
    def receive_then(self, completions: Completions, callback: Callable[[bytes | None], object]) -> None: ...
    def receive_now(self) -> bytes | None: ...  # None: not there yet, or no more
    def set_compression(self, compression: int) -> None: ...  # before the first message
    def disable_next_compression(self) -> None: ...
    def send_initial_metadata(self, metadata: MetadataIn) -> bool: ...  # False: the call is over
    def send(self, message: bytes) -> bool: ...  # waits for room
    def send_then(self, completions: Completions, callback: Callable[[bool], object], message: bytes) -> None: ...
    def send_now(self, message: bytes) -> bool | None: ...  # None: no room
    def finish(self, message: bytes | None, code: int, details: str, trailing: MetadataIn) -> bool: ...
    def cancel(self) -> None: ...
    def done_then(self, completions: Completions, callback: Callable[[bool], object]) -> None: ...  # True: was cancelled
    def cancelled_then(self, completions: Completions, callback: Callable[[bool], object]) -> None: ...  # only if cancelled before finish()

@final
class Array:
    """Elements in one piece, row-major. numpy, torch, jax and others view them without a copy, by the buffer protocol and
    by DLPack. The memory stays as long as the array or any view of it.

    `empty`, `zeros` and `asarray` make arrays in registered memory. What arrives from another process is an array too,
    which is read-only.
    """

    shape: tuple[int, ...]
    dtype: str  # numpy's name, such as "float32"; also "bfloat16", "float8_e4m3fn" and "float8_e5m2"
    nbytes: int
    ndim: int
    readonly: bool
    registered: bool  # devices read the memory in place
    def numpy(self) -> Any: ...  # in the same memory; bfloat16 and float8 need the package ml_dtypes
    def tobytes(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...  # True
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __jax_array__(self) -> Any: ...  # a copy; jax.dlpack.from_dlpack makes none
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...  # BufferError: read-only and max_version < (1, 0), unless copy
    def __dlpack_device__(self) -> tuple[int, int]: ...

def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Array: ...
def zeros(shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Array: ...
def asarray(object: Any) -> Array: ...
def memory_statistics() -> tuple[int, int, int, int]: ...  # arrays, bytes, bytes reserved, bytes copied

@final
class Pending:
    """An operation that has not begun. Its timeout counts from its beginning."""
    def wait(self) -> Any: ...  # carries it out on this thread; its value
    def start(self, completions: Completions, callback: Callable[[Any], object]) -> Waiting: ...  # the callback gets the value, or an exception

@final
class BufferPool:
    """Its own port, or that of `server`. Without references, or closed, it ends its leases."""
    def __new__(cls, address: str | None, server: Server | None, limit: int) -> BufferPool: ...
    uri: str
    def share(
        self,
        object: Any,
        readers: int | None,
        time_limit: float | None,
        writable: bool,
        checksum: bool,
        only_for: list[str] | None,
    ) -> tuple[RemoteBuffer, BufferLease]: ...
    def admit(self, name: str) -> bytes: ...  # the secret
    def dismiss(self, name: str) -> None: ...
    def statistics(self) -> tuple[int, int, int]: ...  # leases, their bytes, bytes that share() copied
    def close(self) -> None: ...  # waits until the pool's own port is free

@final
class BufferLease:
    """Dropped, it ends, unless it has a time limit or a count of readers."""
    def revoke(self) -> None: ...
    def close(self) -> None: ...
    def readers(self) -> list[tuple[str | None, str | None, int, int, int]]: ...  # name, address, fetches: running, complete, bytes
    def writes(self) -> int: ...
    def ended(self, timeout: float | None) -> Pending: ...  # None
    def written(self, known: int, timeout: float | None) -> Pending: ...  # how often

@final
class RemoteBuffer:
    def __new__(cls, data: bytes) -> RemoteBuffer: ...
    def data(self) -> bytes: ...
    owner: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

@final
class BufferClient:
    def __new__(
        cls,
        timeout: float,
        max_fetch_bytes: int,
        landing_budget: int,
        secrets: list[Any],  # (owner, name, secret)
        tls: tuple[bytes, bytes | None, bytes | None] | None,  # PEM: roots, key, chain
        calls_itself: bool,
    ) -> BufferClient: ...
    def fetch(self, buffer: RemoteBuffer, timeout: float | None) -> Pending: ...  # Array
    def fetch_into(self, buffer: RemoteBuffer, object: Any, offset: int, timeout: float | None) -> Pending: ...
    def fetch_blocks(self, buffer: RemoteBuffer, ranges: list[tuple[int, int]], timeout: float | None) -> Pending: ...
    def fetch_all(self, buffers: list[RemoteBuffer], timeout: float | None) -> Pending: ...  # an Array or exception for each
    def write_back(self, buffer: RemoteBuffer, offset: int, object: Any, timeout: float | None) -> Pending: ...
    def owners(self) -> list[tuple[str, Connection | None, int, int]]: ...  # URI, connection, bytes: landed, copied after that

_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
_Counts: TypeAlias = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # (tensors, bytes): in place, copied, inline

@final
class Device:
    def __new__(
        cls,
        address: str,
        *,
        queue_pairs: int | None,
        answer_timeout: float,
        named_tensor_timeout: float,
        max_tensor_bytes: int,
        checksums: bool,
    ) -> Device: ...
    endpoint: str
    def empty(self, shape: _Shape, dtype: Any) -> Array: ...
    def static_receiver(self, name: str, shape: _Shape, dtype: Any, depth: int) -> StaticReceiver: ...
    def dynamic_receiver(self, name: str, depth: int) -> DynamicReceiver: ...
    def export(self, name: str, array: Array, read: bool, write: bool) -> ExportedRegion: ...
    def put(self, name: str, step: int, array: Any, readers: int) -> None: ...
    def withdraw(self, name: str, step: int) -> int | None: ...
    def offers(self) -> tuple[int, int, int]: ...
    def channel(self, endpoint: str, queue_pair: int, timeout: float | None) -> Pending: ...  # of TensorChannel
    def close(self) -> None: ...

@final
class TensorChannel:
    endpoint: str
    device: str
    is_open: bool
    def static_sender(self, name: str, shape: _Shape, dtype: Any, timeout: float | None) -> Pending: ...  # of StaticSender
    def dynamic_sender(self, name: str, timeout: float | None) -> Pending: ...  # of DynamicSender
    def request(self, name: str, step: int, timeout: float | None) -> Pending: ...  # of Array, lists of bytes, or None
    def region(self, name: str, timeout: float | None) -> Pending: ...  # of RemoteRegion
    def write(
        self, region: RemoteRegion, array: Any, offset: int, blocks: Any, notify: bool, timeout: float | None
    ) -> Pending: ...
    def read(self, region: RemoteRegion, array: Any, offset: int, blocks: Any, timeout: float | None) -> Pending: ...
    def close(self) -> None: ...

@final
class RemoteRegion:
    name: str
    nbytes: int
    readable: bool
    writable: bool
    def close(self) -> None: ...

@final
class ExportedRegion:
    def notice(self, timeout: float | None) -> Pending: ...
    def arrived(self, timeout: float | None) -> Pending: ...  # takes nothing
    def try_notice(self) -> bool: ...
    def close(self) -> None: ...

@final
class StaticReceiver:
    def recv(self, timeout: float | None) -> Pending: ...  # of Array
    def recv_into(self, array: Any, timeout: float | None) -> Pending: ...
    def arrived(self, timeout: float | None) -> Pending: ...  # takes nothing
    def try_recv(self) -> Array | None: ...
    def try_recv_into(self, array: Any) -> bool: ...
    def close(self) -> None: ...

@final
class DynamicReceiver:
    def recv(self, timeout: float | None) -> Pending: ...  # of Array, or lists of bytes
    def arrived(self, timeout: float | None) -> Pending: ...  # takes nothing
    def try_recv(self) -> Any: ...
    def close(self) -> None: ...

@final
class StaticSender:
    def send(self, array: Any, wait: bool, timeout: float | None) -> Pending: ...
    def flush(self, timeout: float | None) -> Pending: ...
    def sent(self) -> _Counts: ...
    def close(self) -> None: ...

@final
class DynamicSender:
    def send(self, array: Any, wait: bool, timeout: float | None) -> Pending: ...
    def flush(self, timeout: float | None) -> Pending: ...
    def sent(self) -> _Counts: ...
    def close(self) -> None: ...

@final
class Operation:
    """An operation of a group, which has started. It goes on also when this object is dropped.

    `wait()` waits on this thread, and `await` in an event loop. Both return the array with the result.
    """
    def wait(self, timeout: float | None = None) -> Any: ...
    # The array with the result; None of a barrier. TimeoutError: it goes on. CollectiveError, RankLost: it failed.
    def exception(self, timeout: float | None = None) -> BaseException | None: ...  # waits, as wait does
    def done(self) -> bool: ...
    def add_done_callback(self, function: Callable[[Operation], object]) -> None: ...  # function(operation), on a thread of this package
    def then(self, completions: Completions, callback: Callable[[Any], object]) -> None: ...  # callback(array or exception)
    def __await__(self) -> Generator[Any, None, Any]: ...

@final
class Communicator:
    rank: int
    size: int
    @staticmethod
    def connect(
        launch: tuple[int, int, str] | None,
        job: str | None,
        deadline: float | None,
        bootstrap_timeout: float | None,
        answer_timeout: float | None,
        plans: str | None,
    ) -> Pending: ...
    def shrink(self) -> Pending: ...
    def all_reduce(self, array: Any, op: str, out: Any, deadline: float | None) -> Operation: ...
    def reduce_scatter(self, array: Any, op: str, out: Any, deadline: float | None) -> Operation: ...
    def all_gather(self, array: Any, out: Any, deadline: float | None) -> Operation: ...
    def broadcast(self, array: Any, root: int, deadline: float | None) -> Operation: ...
    def send(self, to: int, array: Any, deadline: float | None) -> Operation: ...
    def recv(self, source: int, array: Any, deadline: float | None) -> Operation: ...
    def barrier(self, deadline: float | None) -> Operation: ...
    def part(self, elements: int, rank: int) -> tuple[int, int]: ...
    def plans(self) -> str: ...
    def statistics(self) -> list[int]: ...
    def close(self) -> None: ...
