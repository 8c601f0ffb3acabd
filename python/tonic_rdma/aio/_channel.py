"""Channels of asyncio."""

import asyncio
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from .._native import Channel as NativeChannel
from .._native import Completions, Connection
from .._native import Method as NativeMethod
from .._options import Plugin, channel_arguments, plugin_failed
from . import _call, _interceptors
from ._call import Deserializer, Requests, Serializer
from ._loop import completions

_STATES = {state.value[0]: state for state in grpc.ChannelConnectivity}
_CLOSED = "Channel is closed."


class _MultiCallable:
    """One method of a channel."""

    __slots__ = ("_channel", "_path", "_method", "_serializer", "_deserializer", "_interceptors")

    _request_streams: bool
    _response_streams: bool
    _call: type[Any]
    _interceptor: type[Any]
    _intercept: str  # the method of `_interceptor`
    _intercepted: type[Any]

    def __init__(
        self, channel: "Channel", path: str, serializer: Serializer, deserializer: Deserializer
    ) -> None:
        self._channel = channel
        self._path = path
        self._method = channel._native.method(path)
        self._serializer = serializer
        self._deserializer = deserializer
        self._interceptors = [one for one in channel._interceptors if isinstance(one, self._interceptor)]

    def _invoke(
        self, request: Any, timeout: Any, metadata: Any, credentials: Any, wait_for_ready: Any, compression: Any
    ) -> Any:
        channel = self._channel
        if compression is None:
            compression = channel._compression
        if not self._interceptors and credentials is None and not channel._has_call_credentials:
            return self._begin(self._method, request, timeout, metadata, wait_for_ready, compression)
        if credentials is not None and not channel._secure:
            raise grpc.aio.UsageError("Call credentials are only valid on secure channels")
        if channel._closed:
            raise grpc.aio.UsageError(_CLOSED)
        if not isinstance(metadata, grpc.aio.Metadata):
            metadata = grpc.aio.Metadata(*metadata or ())
        method: Any = self._path.encode()  # as grpcio has it; its types say str
        details = grpc.aio.ClientCallDetails(method, timeout, metadata, credentials, wait_for_ready)
        start = partial(self._begin_later, compression)
        call = self._intercepted(
            channel._here()[0], start, self._intercept, self._interceptors, details, request
        )
        channel._dropped.add(call)
        return call

    async def _begin_later(self, compression: int, details: Any, request: Any) -> Any:
        channel = self._channel
        path = details.method.decode() if isinstance(details.method, bytes) else details.method
        method = self._method if path == self._path else channel._native.method(path)
        metadata = details.metadata
        if details.credentials is not None or channel._has_call_credentials:
            more = await channel._ask_credentials(details.credentials, path, details.timeout)
            metadata = (*(metadata or ()), *more)
        return self._begin(method, request, details.timeout, metadata, details.wait_for_ready, compression)

    def _begin(
        self,
        method: NativeMethod,
        request: Any,
        timeout: Any,
        metadata: Any,
        wait_for_ready: Any,
        compression: int,
    ) -> Any:
        channel = self._channel
        if channel._closed:
            raise grpc.aio.UsageError(_CLOSED)
        message = None
        if not self._request_streams:
            message = _call.serialize(request, self._serializer)
            if message is None:  # which the native part takes for a stream
                raise TypeError("a request must be bytes, not None")
        loop, results = channel._here()
        native = method.start(
            message, not self._response_streams, timeout, metadata, bool(wait_for_ready), compression
        )
        active = channel._dropped if self._response_streams else channel._kept
        call = self._call(native, channel._native, loop, results, active, self._deserializer, timeout)
        if self._request_streams:
            call._init_requests(request, self._serializer)
        return call


class _UnaryRequest(_MultiCallable):
    __slots__ = ()
    _request_streams = False

    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._invoke(request, timeout, metadata, credentials, wait_for_ready, compression)


class _StreamRequest(_MultiCallable):
    __slots__ = ()
    _request_streams = True

    def __call__(
        self,
        request_iterator: Requests | None = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._invoke(request_iterator, timeout, metadata, credentials, wait_for_ready, compression)


# Older versions of grpcio give these classes no parameters at run time.
if TYPE_CHECKING:
    _StreamUnary = grpc.aio.StreamUnaryMultiCallable[Any, Any]
    _StreamStream = grpc.aio.StreamStreamMultiCallable[Any, Any]
else:
    _StreamUnary = grpc.aio.StreamUnaryMultiCallable
    _StreamStream = grpc.aio.StreamStreamMultiCallable


class UnaryUnaryMultiCallable(_UnaryRequest, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    __slots__ = ()
    _response_streams = False
    _call = _call.UnaryUnaryCall
    _interceptor = grpc.aio.UnaryUnaryClientInterceptor
    _intercept = "intercept_unary_unary"
    _intercepted = _interceptors.InterceptedUnaryUnaryCall


class UnaryStreamMultiCallable(_UnaryRequest, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    __slots__ = ()
    _response_streams = True
    _call = _call.UnaryStreamCall
    _interceptor = grpc.aio.UnaryStreamClientInterceptor
    _intercept = "intercept_unary_stream"
    _intercepted = _interceptors.InterceptedUnaryStreamCall


class StreamUnaryMultiCallable(_StreamRequest, _StreamUnary):
    __slots__ = ()
    _response_streams = False
    _call = _call.StreamUnaryCall
    _interceptor = grpc.aio.StreamUnaryClientInterceptor
    _intercept = "intercept_stream_unary"
    _intercepted = _interceptors.InterceptedStreamUnaryCall


class StreamStreamMultiCallable(_StreamRequest, _StreamStream):
    __slots__ = ()
    _response_streams = True
    _call = _call.StreamStreamCall
    _interceptor = grpc.aio.StreamStreamClientInterceptor
    _intercept = "intercept_stream_stream"
    _intercepted = _interceptors.InterceptedStreamStreamCall


_INTERCEPTORS = (
    grpc.aio.UnaryUnaryClientInterceptor,
    grpc.aio.UnaryStreamClientInterceptor,
    grpc.aio.StreamUnaryClientInterceptor,
    grpc.aio.StreamStreamClientInterceptor,
)


class Channel(grpc.aio.Channel):
    """A channel for the event loop that makes the call; several loops, one after the other, can use it."""

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] | None,
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    ) -> None:
        for interceptor in interceptors or ():
            if not isinstance(interceptor, _INTERCEPTORS):
                names = ", ".join(kind.__name__ for kind in _INTERCEPTORS)
                raise ValueError(f"Interceptor {interceptor!r} is none of {names}")
        arguments = channel_arguments(target, credentials, options, compression)
        self._native = NativeChannel(arguments.addresses, **arguments.native)
        self._interceptors = list(interceptors or ())
        self._secure = credentials is not None
        self._compression = arguments.compression
        self._authorize = arguments.authorize
        self._has_call_credentials = bool(arguments.authorize.plugins)
        self._closed = False
        self._bound: tuple[asyncio.AbstractEventLoop, Completions] | None = None
        # Calls under way: those with one response go on when the application drops them, streams end.
        self._kept: set[Any] = set()
        self._dropped: weakref.WeakSet[Any] = weakref.WeakSet()

    def _here(self) -> tuple[asyncio.AbstractEventLoop, Completions]:
        """The running loop and its completions."""
        bound = self._bound
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # A call before its loop runs.
            loop = asyncio.get_event_loop() if bound is None or bound[0].is_closed() else bound[0]
        if bound is None or bound[0] is not loop:
            bound = self._bound = (loop, completions(loop))
        return bound

    async def _ask_credentials(
        self, credentials: grpc.CallCredentials | None, path: str, timeout: float | None
    ) -> list[tuple[str, str | bytes]]:
        """What call credentials add to a call's metadata. AioRpcError if one fails."""
        plugins, url, method = self._authorize.questions(path, credentials)
        pairs: list[tuple[str, str | bytes]] = []
        for plugin in plugins:
            try:
                metadata, code, details = await asyncio.wait_for(_ask(plugin, url, method), timeout)
            except asyncio.TimeoutError as error:
                status = _call.local(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
                raise _call.make_error(status) from error
            if code:
                status = _call.local(grpc.StatusCode.UNAVAILABLE, plugin_failed(details or b""))
                raise _call.make_error(status)
            pairs += metadata or ()
        return pairs

    @property
    def connection(self) -> Connection | None:
        """What carries the calls; None before a connection."""
        return self._native.connection()

    @property
    def verdict(self) -> str | None:
        """`rdma` or `tcp`; None before a connection."""
        connection = self.connection
        return None if connection is None else connection.verdict

    @property
    def reason(self) -> str | None:
        """Why the verdict is what it is; None before a connection."""
        connection = self.connection
        return None if connection is None else connection.reason

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return _STATES[self._native.state(try_to_connect)]

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        if self._closed:
            raise grpc.aio.UsageError(_CLOSED)
        loop, results = self._here()
        future: asyncio.Future[int] = loop.create_future()
        changed = partial(_call.resolve, future)
        waiting = self._native.wait_for_state_change_then(results, changed, last_observed_state.value[0])
        await future
        del waiting  # without it the wait ends

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Ends the channel: no new calls; those under way have `grace` seconds and are then cancelled."""
        if self._closed:
            return
        if grace is not None and grace < 0:
            raise ValueError(f"grace must be non-negative, got {grace}.")
        self._closed = True
        calls = [call for call in (*self._kept, *self._dropped) if not call.done()]
        if grace and calls:
            await asyncio.wait([asyncio.ensure_future(_over(call)) for call in calls], timeout=grace)
        for call in calls:
            call.cancel()
        self._native.close()

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> UnaryUnaryMultiCallable:
        return UnaryUnaryMultiCallable(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> UnaryStreamMultiCallable:
        return UnaryStreamMultiCallable(self, method, request_serializer, response_deserializer)

    def stream_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> StreamUnaryMultiCallable:
        return StreamUnaryMultiCallable(self, method, request_serializer, response_deserializer)

    def stream_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> StreamStreamMultiCallable:
        return StreamStreamMultiCallable(self, method, request_serializer, response_deserializer)


async def _ask(plugin: Plugin, url: str, method: str) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def answer(*answer: Any) -> None:
        loop.call_soon_threadsafe(_call.resolve, future, answer)

    # A plugin may wait for something, such as a new token.
    await asyncio.to_thread(plugin, url, method, answer)
    return await future


async def _over(call: Any) -> None:
    try:
        await call.code()
    except Exception:
        pass  # an interceptor's; whoever awaits the call gets it


def insecure_channel(
    target: str,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
) -> Channel:
    """A channel without TLS, as `grpc.aio.insecure_channel` makes one."""
    return Channel(target, options, None, compression, interceptors)


def secure_channel(
    target: str,
    credentials: grpc.ChannelCredentials,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
) -> Channel:
    """A channel with TLS, as `grpc.aio.secure_channel` makes one."""
    if credentials is None:
        raise TypeError("a secure channel needs credentials")
    return Channel(target, options, credentials, compression, interceptors)
