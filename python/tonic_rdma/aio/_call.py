"""Calls of asyncio clients. A call with one response costs one future: no task, no lock."""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from .._errors import Metadata, Status, debug_error_string, represent, status_of
from .._native import Call as NativeCall
from .._native import Channel as NativeChannel
from .._native import Completions, Outcome

_LOGGER = logging.getLogger(__name__)

Serializer = Callable[[Any], bytes] | None
Deserializer = Callable[[bytes], Any] | None
DoneCallback = Callable[[Any], None]
Requests = AsyncIterable[Any] | Iterable[Any]

CANCELLED = "Locally cancelled by application!"
FINISHED = "RPC already finished."
HALF_CLOSED = 'RPC is half closed after calling "done_writing".'
MIXED = "The iterator and read/write APIs may not be mixed on a single RPC."
SERIALIZING = "Exception serializing request!"
DESERIALIZING = "Exception deserializing response!"
_READY = grpc.ChannelConnectivity.READY.value[0]
_ABSENT: Any = object()
EOF: Any = grpc.aio.EOF


def make_error(status: Status) -> grpc.aio.AioRpcError:
    initial = grpc.aio.Metadata(*status.initial_metadata)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, initial, trailing, status.details, debug_error_string(status))


def local(code: grpc.StatusCode, details: str) -> Status:
    """The status of a call that this side ended."""
    return Status(code, details, (), ())


def serialize(request: Any, serializer: Serializer) -> Any:
    """The request's bytes; the native part checks that they are. AioRpcError if the serializer raises."""
    if serializer is None:
        return request
    try:
        return serializer(request)
    except Exception as error:
        _LOGGER.exception(SERIALIZING)
        raise make_error(local(grpc.StatusCode.INTERNAL, SERIALIZING)) from error


def resolve(future: asyncio.Future[Any], value: Any = None) -> None:
    if not future.done():
        future.set_result(value)


class Call(grpc.aio.Call):
    """What calls of all four kinds have.

    `active` is the channel's set of calls under way. `deadline` is on `time.monotonic()`.
    """

    __slots__ = (
        "_native", "_channel", "_loop", "_completions", "_active", "_deserializer", "_deadline",
        "_outcome", "_failed", "_cancelled", "_watched", "_waiters", "_callbacks",
        # of the classes below: two bases with slots of their own could not be combined
        "_future", "_response", "_iterated", "_serializer", "_half_closed", "_sender", "_connected",
    )  # fmt: skip

    def __init__(
        self,
        native: NativeCall,
        channel: NativeChannel,
        loop: asyncio.AbstractEventLoop,
        completions: Completions,
        active: Any,  # a set, weak for calls that end when they are dropped
        deserializer: Deserializer,
        timeout: float | None,
    ) -> None:
        self._native = native
        self._channel = channel
        self._loop = loop
        self._completions = completions
        self._active = active
        self._deserializer = deserializer
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._outcome: Outcome | None = None
        self._failed: Status | None = None  # by this side, where the outcome says something else
        self._cancelled = False
        self._watched = False
        self._waiters: list[asyncio.Future[None]] | None = None
        self._callbacks: list[tuple[DoneCallback, contextvars.Context]] | None = None
        active.add(self)

    def _watch(self) -> None:
        # From here to its end the call is kept alive, by the completions.
        if not self._watched:
            self._watched = True
            self._native.outcome_then(self._completions, self._finished)

    def _finished(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._active.discard(self)
        callbacks, self._callbacks = self._callbacks, None
        for callback, context in callbacks or ():
            self._loop.call_soon(callback, self, context=context)
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            resolve(waiter)

    def _outcome_now(self) -> Outcome | None:
        if self._outcome is None:
            self._outcome = self._native.outcome_now()
        return self._outcome

    def _status(self, outcome: Outcome) -> Status:
        return self._failed or status_of(outcome)

    async def _end(self) -> Status:
        outcome = self._outcome_now()
        if outcome is None:
            self._watch()
            await self._waiter()
            outcome = self._outcome
            assert outcome is not None
        return self._status(outcome)

    def _waiter(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if self._waiters is None:
            self._waiters = [future]
        else:
            self._waiters.append(future)
        return future

    def _raise_for(self, status: Status) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            raise make_error(status)

    def _deserialize(self, message: bytes) -> Any:
        if self._deserializer is None:
            return message
        try:
            return self._deserializer(message)
        except Exception as error:
            _LOGGER.exception(DESERIALIZING)
            raise make_error(self._fail(DESERIALIZING)) from error

    def _fail(self, details: str) -> Status:
        """Ends the call with INTERNAL, even if the server has ended it otherwise."""
        self._failed = local(grpc.StatusCode.INTERNAL, details)
        self._native.cancel(grpc.StatusCode.INTERNAL.value[0], details)
        return self._failed

    def cancel(self) -> bool:
        if self._outcome is not None or self._failed is not None or self._cancelled:
            return False
        self._cancelled = True
        if not self._native.cancel(1, CANCELLED):
            # It has ended, but the application does not know yet.
            self._failed = local(grpc.StatusCode.CANCELLED, CANCELLED)
        return True

    def cancelled(self) -> bool:
        outcome = self._outcome_now()
        return self._cancelled or (outcome is not None and outcome.code == 1)

    def done(self) -> bool:
        return self._outcome_now() is not None

    def add_done_callback(self, callback: DoneCallback) -> None:
        """`callback(call)` runs at the call's end, in the caller's context; at once if the call has ended."""
        if self.done():
            callback(self)
            return
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append((callback, contextvars.copy_context()))
        self._watch()

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def initial_metadata(self) -> grpc.aio.Metadata:
        future: asyncio.Future[Metadata] = self._loop.create_future()
        self._native.initial_metadata_then(self._completions, partial(resolve, future))
        return grpc.aio.Metadata(*await future)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._end()).trailing_metadata)

    async def code(self) -> grpc.StatusCode:
        return (await self._end()).code

    async def details(self) -> str:
        return (await self._end()).details

    async def debug_error_string(self) -> str:
        return debug_error_string(await self._end())

    async def wait_for_connection(self) -> None:
        # The server may send no initial metadata before it has read a message, so the channel's state tells.
        self._watch()
        while (outcome := self._outcome_now()) is None:
            state = self._channel.state(False)
            if state == _READY:
                return
            future = self._waiter()
            changed = partial(resolve, future)
            waiting = self._channel.wait_for_state_change_then(self._completions, changed, state)
            await future
            del waiting  # without it the wait ends
        self._raise_for(self._status(outcome))

    def __repr__(self) -> str:
        outcome = self._outcome_now()
        return represent(type(self).__name__, None if outcome is None else self._status(outcome))


class _UnaryResponse(Call):
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._future: asyncio.Future[None] | None = None
        self._response = _ABSENT
        self._watched = True
        self._native.outcome_then(self._completions, self._finished)

    def _finished(self, outcome: Outcome) -> None:
        super()._finished(outcome)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, Any]:
        outcome = self._outcome
        if outcome is None:
            if self._future is None:
                self._future = self._loop.create_future()
            try:
                yield from self._future
            except asyncio.CancelledError:
                self.cancel()
                raise
            outcome = self._outcome
            assert outcome is not None
        if self._response is _ABSENT:
            if outcome.code or self._cancelled or self._failed is not None:
                self._raise_for(self._status(outcome))
            assert outcome.response is not None
            self._response = self._deserialize(outcome.response)
        return self._response


class _StreamResponse(Call):
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._iterated: bool | None = None  # None: neither iterated nor read so far

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._iterated is False:
            raise grpc.aio.UsageError(MIXED)
        self._iterated = True
        return self

    async def __anext__(self) -> Any:
        message = await self._receive()
        if message is None:
            raise StopAsyncIteration
        return self._deserialize(message)

    async def read(self) -> Any:
        if self._iterated:
            if not self.done():
                raise grpc.aio.UsageError(MIXED)
        else:
            self._iterated = False
        message = await self._receive()
        return EOF if message is None else self._deserialize(message)

    async def _receive(self) -> bytes | None:
        """The next message. At the end None if the status is OK, otherwise AioRpcError."""
        message = self._native.receive_now()
        if message is None:
            future: asyncio.Future[bytes | None] = self._loop.create_future()
            self._native.receive_then(self._completions, partial(resolve, future))
            try:
                message = await future
            except asyncio.CancelledError:
                self.cancel()
                raise
        if message is None or self._cancelled:
            self._raise_for(await self._end())
        return message


class _StreamRequest(Call):
    __slots__ = ()

    def _init_requests(self, requests: Requests | None, serializer: Serializer) -> None:
        self._serializer = serializer
        self._half_closed = False
        self._connected = False  # or it is known that it can't connect
        self._sender: asyncio.Task[None] | None = None
        if requests is not None:
            self._sender = self._loop.create_task(self._send_all(requests))

    async def _send_all(self, requests: Requests) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    if not await self._send(request):
                        return
            else:
                for request in requests:
                    if not await self._send(request):
                        return
            self._native.close_send()
        except asyncio.CancelledError:
            self.cancel()
        except BaseException as error:
            # The requests end too early, so the call can't go on.
            _LOGGER.debug("The call's request iterator failed", exc_info=True)
            self.cancel()
            if not isinstance(error, Exception):
                raise

    async def _send(self, request: Any) -> bool:
        """False: the call is over."""
        try:
            message = serialize(request, self._serializer)
        except grpc.aio.AioRpcError:
            self._fail(SERIALIZING)
            raise
        sent = self._native.send_now(message)
        if sent is None:
            future: asyncio.Future[bool] = self._loop.create_future()
            self._native.send_then(self._completions, partial(resolve, future), message)
            try:
                return await future
            except asyncio.CancelledError:
                self.cancel()
                raise
        return sent

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and self._sender is not None:
            self._sender.cancel()
        return cancelled

    async def wait_for_connection(self) -> None:
        self._connected = True
        await super().wait_for_connection()

    async def write(self, request: Any) -> None:
        if self._sender is not None:
            raise grpc.aio.UsageError(MIXED)
        if not self._connected and not self._cancelled and self._channel.state(False) != _READY:
            await self.wait_for_connection()
        self._connected = True
        if self.done():
            raise asyncio.InvalidStateError(FINISHED)
        if self._half_closed:
            raise asyncio.InvalidStateError(HALF_CLOSED)
        if not await self._send(request):
            self._raise_for(await self._end())

    async def done_writing(self) -> None:
        if self._sender is not None:
            raise grpc.aio.UsageError(MIXED)
        if not self._half_closed and not self.done():
            self._half_closed = True
            self._native.close_send()


class UnaryUnaryCall(_UnaryResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    __slots__ = ()

    async def wait_for_connection(self) -> None:
        self._raise_for(await self._end())


class UnaryStreamCall(_StreamResponse, grpc.aio.UnaryStreamCall[Any, Any]):
    __slots__ = ()


class StreamUnaryCall(_StreamRequest, _UnaryResponse, grpc.aio.StreamUnaryCall[Any, Any]):
    __slots__ = ()


class StreamStreamCall(_StreamRequest, _StreamResponse, grpc.aio.StreamStreamCall[Any, Any]):
    __slots__ = ()
