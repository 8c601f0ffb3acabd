"""Calls that begin in a task: interceptors run first, and call credentials are asked for metadata."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ._call import CANCELLED, EOF, FINISHED, HALF_CLOSED, MIXED, DoneCallback, Requests

Start = Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[grpc.aio.Call]]

_END: Any = object()  # of the requests that are written


class InterceptedCall(grpc.aio.Call):
    """It stands for the call that the first interceptor returns.

    `start(details, request)` begins the real call, `intercept` is the name of the interceptors' method, and
    `request` is the request or the iterator of them.
    """

    __slots__ = (
        "_loop", "_start", "_intercept", "_task", "_inner", "_callbacks", "_responses",
        "_writes", "_half_closed", "_over",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Start,
        intercept: str,
        interceptors: Sequence[Any],
        details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> None:
        self._loop = loop
        self._start = start
        self._intercept = intercept
        self._inner: grpc.aio.Call | None = None  # the newest real call
        self._callbacks: list[tuple[DoneCallback, contextvars.Context]] = []
        self._responses: AsyncIterator[Any] | None = None
        self._task = loop.create_task(self._run(interceptors, details, request))
        self._task.add_done_callback(self._intercepted)

    async def _run(self, interceptors: Sequence[Any], details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        if not interceptors:
            self._inner = await self._start(details, request)
            return self._inner
        intercept = getattr(interceptors[0], self._intercept)
        result = await intercept(partial(self._run, interceptors[1:]), details, request)
        if isinstance(result, grpc.aio.Call):
            return result
        if isinstance(self, _StreamResponse):
            return _Responses(self._inner, result)
        return _Response(None, result)

    def _call(self) -> Any:
        """The call that the interceptors returned, or None: not yet, or they raised."""
        if not self._task.done() or self._task.cancelled() or self._task.exception() is not None:
            return None
        return self._task.result()

    def _intercepted(self, task: asyncio.Task[Any]) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback, context in callbacks:
            context.run(self.add_done_callback, callback)

    def add_done_callback(self, callback: DoneCallback) -> None:
        if not self._task.done():
            self._callbacks.append((callback, contextvars.copy_context()))
        elif (call := self._call()) is None:
            callback(self)
        else:
            call.add_done_callback(lambda call: callback(self))

    def cancel(self) -> bool:
        if not self._task.done():
            return self._task.cancel()
        call = self._call()
        return call is not None and call.cancel()

    def cancelled(self) -> bool:
        if not self._task.done():
            return False
        if self._task.cancelled():
            return True
        error = self._task.exception()
        if error is not None:
            return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.CANCELLED
        return bool(self._task.result().cancelled())

    def done(self) -> bool:
        if not self._task.done():
            return False
        call = self._call()
        return call is None or call.done()

    def time_remaining(self) -> float | None:
        call = self._call() or self._inner
        return None if call is None else call.time_remaining()

    async def _ask(self, what: str, when_cancelled: Any) -> Any:
        try:
            call = await asyncio.shield(self._task)
        except grpc.aio.AioRpcError as error:
            return getattr(error, what)()
        except asyncio.CancelledError:
            if not self._task.cancelled():  # then it is the caller that is cancelled
                raise
            return when_cancelled
        return await getattr(call, what)()

    async def initial_metadata(self) -> Any:
        return await self._ask("initial_metadata", None)

    async def trailing_metadata(self) -> Any:
        return await self._ask("trailing_metadata", None)

    async def code(self) -> Any:
        return await self._ask("code", grpc.StatusCode.CANCELLED)

    async def details(self) -> Any:
        return await self._ask("details", CANCELLED)

    async def debug_error_string(self) -> Any:
        return await self._ask("debug_error_string", "")

    async def wait_for_connection(self) -> None:
        call = await asyncio.shield(self._task)
        await call.wait_for_connection()


class _UnaryResponse(InterceptedCall):
    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._task
        return (yield from call.__await__())


class _StreamResponse(InterceptedCall):
    __slots__ = ()

    async def _iterate(self) -> AsyncIterator[Any]:
        async for response in await self._task:
            yield response

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._responses is None:
            self._responses = self._iterate()
        return self._responses

    async def read(self) -> Any:
        return await anext(aiter(self), EOF)


class _StreamRequest(InterceptedCall):
    """Without an iterator of requests, the interceptors get one of the requests that are written."""

    __slots__ = ()

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Start,
        intercept: str,
        interceptors: Sequence[Any],
        details: grpc.aio.ClientCallDetails,
        requests: Requests | None,
    ) -> None:
        self._half_closed = False
        self._over: asyncio.Task[None] | None = None
        self._writes: asyncio.Queue[Any] | None = None
        if requests is None:
            self._writes = asyncio.Queue(1)
            requests = self._written(self._writes)
        super().__init__(loop, start, intercept, interceptors, details, requests)

    @staticmethod
    async def _written(writes: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        while (request := await writes.get()) is not _END:
            yield request

    async def _wait_over(self) -> None:
        try:
            await self.code()
        except Exception:
            pass  # an interceptor's; whoever awaits the call gets it

    async def _put(self, request: Any) -> None:
        assert self._writes is not None
        try:
            self._writes.put_nowait(request)
            return
        except asyncio.QueueFull:
            pass
        if self._over is None:
            self._over = self._loop.create_task(self._wait_over())
        put = self._loop.create_task(self._writes.put(request))
        try:
            await asyncio.wait((put, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()

    async def write(self, request: Any) -> None:
        if self._writes is None:
            raise grpc.aio.UsageError(MIXED)
        self._check_open()
        if self._half_closed:
            raise asyncio.InvalidStateError(HALF_CLOSED)
        await self._put(request)
        self._check_open()

    def _check_open(self) -> None:
        if self.done():
            error = None if self._task.cancelled() else self._task.exception()
            if error is not None and not isinstance(error, grpc.aio.AioRpcError):
                raise error  # an interceptor's
            raise asyncio.InvalidStateError(FINISHED)

    async def done_writing(self) -> None:
        if self._writes is None:
            raise grpc.aio.UsageError(MIXED)
        if not self._half_closed and not self.done():
            self._half_closed = True
            await self._put(_END)


class InterceptedUnaryUnaryCall(_UnaryResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    __slots__ = ()


class InterceptedUnaryStreamCall(_StreamResponse, grpc.aio.UnaryStreamCall[Any, Any]):
    __slots__ = ()


class InterceptedStreamUnaryCall(_StreamRequest, _UnaryResponse, grpc.aio.StreamUnaryCall[Any, Any]):
    __slots__ = ()


class InterceptedStreamStreamCall(_StreamRequest, _StreamResponse, grpc.aio.StreamStreamCall[Any, Any]):
    __slots__ = ()


class _Answer(grpc.aio.Call):
    """What stands for a call where an interceptor returned something else. `call` is the real one, or None."""

    __slots__ = ("_call", "_answer")

    def __init__(self, call: Any, answer: Any) -> None:
        self._call = call
        self._answer = answer

    def cancel(self) -> bool:
        return self._call is not None and self._call.cancel()

    def cancelled(self) -> bool:
        return self._call is not None and self._call.cancelled()

    def done(self) -> bool:
        return self._call is None or self._call.done()

    def add_done_callback(self, callback: DoneCallback) -> None:
        if self._call is None:
            callback(self)
        else:
            self._call.add_done_callback(callback)

    def time_remaining(self) -> float | None:
        return None if self._call is None else self._call.time_remaining()

    async def initial_metadata(self) -> Any:
        return None if self._call is None else await self._call.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return None if self._call is None else await self._call.trailing_metadata()

    async def code(self) -> Any:
        return grpc.StatusCode.OK if self._call is None else await self._call.code()

    async def details(self) -> Any:
        return "" if self._call is None else await self._call.details()

    async def debug_error_string(self) -> Any:
        return None if self._call is None else await self._call.debug_error_string()

    async def wait_for_connection(self) -> None:
        if self._call is not None:
            await self._call.wait_for_connection()


class _Response(_Answer, grpc.aio.UnaryUnaryCall[Any, Any]):
    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer
        yield  # this makes it a generator


class _Responses(_Answer, grpc.aio.UnaryStreamCall[Any, Any]):
    __slots__ = ()

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._answer)

    async def read(self) -> Any:
        return await anext(aiter(self), EOF)
