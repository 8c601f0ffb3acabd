"""grpc's channels for threads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from . import _native
from ._call import (
    DESERIALIZING,
    LOGGER,
    SERIALIZING,
    Call,
    Deserializer,
    ResponseIterator,
    Serializer,
    deserialized,
    send_all,
    serialized,
)
from ._callbacks import completions
from ._errors import EndedCall, InactiveRpcError, Metadata, inactive, status_of
from ._options import Authorize, channel_arguments

_STATES: dict[int, grpc.ChannelConnectivity] = {state.value[0]: state for state in grpc.ChannelConnectivity}
_SHUTDOWN = 4


def insecure_channel(
    target: str,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
) -> "Channel":
    """A channel without TLS, as `grpc.insecure_channel` makes one. `target` is such as "localhost:50051"."""
    return Channel(target, options, None, compression)


def secure_channel(
    target: str,
    credentials: grpc.ChannelCredentials,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
) -> "Channel":
    """A channel with TLS. `credentials` are grpcio's, such as `grpc.ssl_channel_credentials()`."""
    if credentials is None:
        raise TypeError("grpc.ChannelCredentials expected, not None")
    return Channel(target, options, credentials, compression)


class _MultiCallable:
    """What the four kinds share."""

    __slots__ = ("_method", "_path", "_serializer", "_deserializer", "_authorize", "_always", "_compression")

    def __init__(
        self,
        method: _native.Method,
        path: str,
        serializer: Serializer,
        deserializer: Deserializer,
        authorize: Authorize,
        compression: int,
    ) -> None:
        self._method = method
        self._path = path
        self._serializer = serializer
        self._deserializer = deserializer
        self._authorize = authorize
        self._always = bool(authorize.plugins)  # the channel has call credentials
        self._compression = compression

    def _start(
        self,
        request: bytes | None,
        unary_response: bool,
        timeout: float | None,
        metadata: Metadata | None,
        credentials: grpc.CallCredentials | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
    ) -> _native.Call:
        """InactiveRpcError if call credentials can't be had."""
        if credentials is not None or self._always:
            metadata = self._authorize(self._path, metadata, credentials, timeout)
        compress = self._compression if compression is None else compression
        return self._method.start(request, unary_response, timeout, metadata, not not wait_for_ready, compress)

    def _request(self, request: Any) -> bytes:
        message = serialized(request, self._serializer)
        if message is None:
            raise inactive(grpc.StatusCode.INTERNAL, SERIALIZING)
        return message

    def _with_call(self, outcome: _native.Outcome) -> tuple[Any, EndedCall]:
        status = status_of(outcome)
        if outcome.code:
            raise InactiveRpcError(status)
        response = None if outcome.response is None else deserialized(outcome.response, self._deserializer)
        if response is None:
            raise InactiveRpcError(status._replace(code=grpc.StatusCode.INTERNAL, details=DESERIALIZING))
        return response, EndedCall(status, response)


class UnaryUnary(_MultiCallable, grpc.UnaryUnaryMultiCallable):  # type: ignore[type-arg]
    __slots__ = ()

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        message = self._request(request)
        if credentials is not None or self._always:
            metadata = self._authorize(self._path, metadata, credentials, timeout)
        compress = self._compression if compression is None else compression
        answer = self._method.unary(message, timeout, metadata, not not wait_for_ready, compress)
        if type(answer) is bytes:
            response = deserialized(answer, self._deserializer)
            if response is not None:
                return response
            raise inactive(grpc.StatusCode.INTERNAL, DESERIALIZING)
        raise InactiveRpcError(status_of(answer))

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> tuple[Any, grpc.Call]:
        message = self._request(request)
        if credentials is not None or self._always:
            metadata = self._authorize(self._path, metadata, credentials, timeout)
        compress = self._compression if compression is None else compression
        return self._with_call(
            self._method.unary_with_call(message, timeout, metadata, not not wait_for_ready, compress)
        )

    def future(  # type: ignore[override]
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Call | InactiveRpcError:
        message = self._request(request)
        try:
            native = self._start(message, True, timeout, metadata, credentials, wait_for_ready, compression)
        except InactiveRpcError as error:
            return error
        return Call(native, self._deserializer, timeout)


class UnaryStream(_MultiCallable, grpc.UnaryStreamMultiCallable):  # type: ignore[type-arg]
    __slots__ = ()

    def __call__(  # type: ignore[override]
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> ResponseIterator | InactiveRpcError:
        message = self._request(request)
        try:
            native = self._start(message, False, timeout, metadata, credentials, wait_for_ready, compression)
        except InactiveRpcError as error:
            return error
        return ResponseIterator(native, self._deserializer, timeout)


class StreamUnary(_MultiCallable, grpc.StreamUnaryMultiCallable):  # type: ignore[type-arg]
    __slots__ = ()

    def __call__(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self.with_call(request_iterator, timeout, metadata, credentials, wait_for_ready, compression)[0]

    def with_call(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> tuple[Any, grpc.Call]:
        native = self._start(None, True, timeout, metadata, credentials, wait_for_ready, compression)
        send_all(native, request_iterator, self._serializer)
        try:
            outcome = native.outcome()
        except BaseException:  # KeyboardInterrupt. The thread that sends holds the call, too.
            native.cancel()
            raise
        assert outcome is not None  # because there is no timeout
        return self._with_call(outcome)

    def future(  # type: ignore[override]
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Call | InactiveRpcError:
        try:
            native = self._start(None, True, timeout, metadata, credentials, wait_for_ready, compression)
        except InactiveRpcError as error:
            return error
        send_all(native, request_iterator, self._serializer)
        return Call(native, self._deserializer, timeout)


class StreamStream(_MultiCallable, grpc.StreamStreamMultiCallable):  # type: ignore[type-arg]
    __slots__ = ()

    def __call__(  # type: ignore[override]
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> ResponseIterator | InactiveRpcError:
        try:
            native = self._start(None, False, timeout, metadata, credentials, wait_for_ready, compression)
        except InactiveRpcError as error:
            return error
        send_all(native, request_iterator, self._serializer)
        return ResponseIterator(native, self._deserializer, timeout)


class _Watch:
    """Tells the subscribers of a channel its state. All callbacks run on the thread of callbacks."""

    def __init__(self, channel: _native.Channel) -> None:
        self._channel = channel
        # A subscriber that ends unsubscribes. That may be while this thread has the lock, because objects are
        # collected at any time.
        self._lock = threading.RLock()
        self._subscribers: list[tuple[Callable[[grpc.ChannelConnectivity], Any], list[int]]] = []  # states told
        self._waits = False
        self._wait: object = None  # dropping it ends the wait

    def add(self, callback: Callable[[grpc.ChannelConnectivity], Any], connect: bool) -> None:
        state = self._channel.state(connect)
        with self._lock:
            self._subscribers.append((callback, []))
            first, self._waits = not self._waits, True
        completions().push(self._changed if first else self._tell, state)

    def remove(self, callback: Callable[[grpc.ChannelConnectivity], Any]) -> None:
        gone = None  # dropped without the lock
        with self._lock:
            for index, (subscriber, _) in enumerate(self._subscribers):
                if subscriber == callback:
                    gone = self._subscribers.pop(index)
                    break
            if not self._subscribers:
                self._waits, self._wait = False, None
        del gone

    def clear(self) -> None:
        with self._lock:
            gone, self._subscribers = self._subscribers, []
            self._waits, self._wait = False, None
        del gone

    def _tell(self, state: int) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for callback, told in subscribers:
            if told != [state]:
                told[:] = [state]
                try:
                    callback(_STATES[state])
                except Exception:
                    LOGGER.exception("Exception calling channel subscription callback!")

    def _changed(self, state: int) -> None:
        self._tell(state)
        with self._lock:
            self._waits = bool(self._subscribers) and state != _SHUTDOWN
            if self._waits:
                self._wait = self._channel.wait_for_state_change_then(completions(), self._changed, state)


class Channel(grpc.Channel):
    """A channel for threads. `insecure_channel` and `secure_channel` make it."""

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] | None,
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
    ) -> None:
        arguments = channel_arguments(target, credentials, options, compression)
        self._native = _native.Channel(arguments.addresses, **arguments.native)
        self._authorize = arguments.authorize
        self._compression = arguments.compression
        self._watch = _Watch(self._native)

    @property
    def connection(self) -> _native.Connection | None:
        """What carries the calls, or None before there is a connection."""
        return self._native.connection()

    @property
    def verdict(self) -> str | None:
        """Either "rdma" or "tcp", or None before there is a connection."""
        connection = self._native.connection()
        return None if connection is None else connection.verdict

    @property
    def reason(self) -> str | None:
        """Why the verdict is so, in a sentence, or None before there is a connection."""
        connection = self._native.connection()
        return None if connection is None else connection.reason

    def _make(self, kind: type[Any], method: str, serializer: Serializer, deserializer: Deserializer) -> Any:
        native = self._native.method(method)
        return kind(native, method, serializer, deserializer, self._authorize, self._compression)

    # `_registered_method` is how generated code says that it knows the method. Here it makes no difference.

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> UnaryUnary:
        made: UnaryUnary = self._make(UnaryUnary, method, request_serializer, response_deserializer)
        return made

    def unary_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> UnaryStream:
        made: UnaryStream = self._make(UnaryStream, method, request_serializer, response_deserializer)
        return made

    def stream_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> StreamUnary:
        made: StreamUnary = self._make(StreamUnary, method, request_serializer, response_deserializer)
        return made

    def stream_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> StreamStream:
        made: StreamStream = self._make(StreamStream, method, request_serializer, response_deserializer)
        return made

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], Any], try_to_connect: bool | None = False
    ) -> None:
        self._watch.add(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], Any]) -> None:
        self._watch.remove(callback)

    def close(self) -> None:
        self._watch.clear()
        self._native.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Stubs go on without it, as with grpcio. Subscribers don't.
        if hasattr(self, "_watch"):
            self._watch.clear()
