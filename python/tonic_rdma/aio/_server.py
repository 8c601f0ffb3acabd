"""grpc.aio.Server over the native part."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from .. import _handlers
from .._handlers import Handler, HandlerCallDetails
from . import _loop

if TYPE_CHECKING:
    from .._native import MetadataIn, ServerCall

_LOGGER = logging.getLogger(__name__)


class ServicerContext(_handlers.Peer, grpc.aio.ServicerContext):  # type: ignore[type-arg, misc]
    """What a handler on an event loop knows and says of its call."""

    # What most handlers never set are attributes of the class, so that a new context costs little.
    _code: object = None
    _details = ""
    _trailing: Any = ()
    _aborted: grpc.aio.AbortError | None = None
    _metadata_sent = False
    _cancelled = False
    _callbacks: list[Callable[[Any], object]] | None = None
    _deserializer: Callable[[bytes], Any] | None = None
    _serializer: Callable[[Any], bytes] | None = None
    # One request that has arrived, in a tuple, until it is read: a read that is cancelled loses none.
    _message: tuple[bytes | None] | None = None
    _receiving = False
    _waiter: asyncio.Future[None] | None = None
    _task: asyncio.Task[None] | None = None  # None until the handler has taken its first step

    def __init__(self, call: ServerCall, service: _Service) -> None:
        self._call = call
        self._service = service

    async def read(self) -> Any:
        """The next request, or grpc.aio.EOF."""
        self._raise_if_ended()
        message = await self._receive()
        if message is None:
            return grpc.aio.EOF
        return message if self._deserializer is None else self._deserializer(message)

    async def write(self, message: Any) -> None:
        self._raise_if_ended()
        data = message if self._serializer is None else self._serializer(message)
        self._metadata_sent = True
        sent = self._call.send_now(data)
        if sent is None:
            room = self._service.loop.create_future()
            self._call.send_then(self._service.completions, partial(_set_result, room), data)
            sent = await room
        if not sent:
            self._raise_over()

    async def send_initial_metadata(self, initial_metadata: MetadataIn) -> None:
        self._raise_if_ended()
        if self._metadata_sent:
            raise grpc.aio.UsageError("Send initial metadata failed: already sent")
        if not self._call.send_initial_metadata(initial_metadata):
            self._raise_over()
        self._metadata_sent = True

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: MetadataIn = ()
    ) -> NoReturn:
        """Ends the call with `code`, and the handler with grpc.aio.AbortError.

        What was set before stands in for what is not given here.
        """
        if self._aborted is not None:
            raise grpc.aio.UsageError("Abort already called!")
        if code == grpc.StatusCode.OK:
            raise ValueError("abort() needs a code other than OK")
        if not isinstance(details, str):
            raise TypeError(f"details must be a str, not {type(details).__name__}")
        self._trailing = _checked(trailing_metadata or ()) or self._trailing
        self._code = code
        self._details = details or self._details
        self._aborted = grpc.aio.AbortError("Locally aborted.")
        _handlers.finish(self._call, None, number(code) or _handlers.UNKNOWN, self._details, self._trailing)
        raise self._aborted

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: MetadataIn) -> None:
        self._trailing = _checked(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._trailing

    def set_code(self, code: object) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def set_details(self, details: str) -> None:
        if not isinstance(details, str):
            raise TypeError(f"details must be a str, not {type(details).__name__}")
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        if self._metadata_sent:
            raise RuntimeError("Compression setting must be specified before sending initial metadata")
        self._call.set_compression(int(compression))

    def time_remaining(self) -> Any:
        """Seconds until the deadline; None: there is none."""
        return self._call.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """`callback(context)` runs when the handler has ended. After one that raises, no more are run."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)

    def done(self) -> bool:
        return not self._call.is_active()

    def cancelled(self) -> bool:
        return self._cancelled or self._code == grpc.StatusCode.CANCELLED

    def _cancel(self, _: bool) -> None:
        """The client, its deadline, or the server's end has cancelled the call."""
        if not self._cancelled:
            self._cancelled = True
            assert self._task is not None
            self._task.cancel()

    def _raise_if_ended(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        if not self._call.is_active():
            if self._task is not None and self._task.done():
                raise grpc.aio.UsageError("RPC already finished.")
            self._raise_over()

    def _raise_over(self) -> NoReturn:
        # `_cancel` is on its way, or has told the handler.
        self._cancelled = True
        raise asyncio.CancelledError

    async def _receive(self) -> bytes | None:
        """The next request's bytes, or None: there are no more."""
        call = self._call
        if self._message is None and not self._receiving:
            message = call.receive_now()
            if message is not None:
                return message
        while self._message is None:
            self._waiter = self._service.loop.create_future()
            if not self._receiving:
                self._receiving = True
                call.receive_then(self._service.completions, self._received)
            await self._waiter
        [message], self._message = self._message, None
        if message is None and not call.is_active():
            self._raise_over()
        return message

    def _received(self, message: bytes | None) -> None:
        self._receiving = False
        self._message = (message,)
        if self._waiter is not None:
            _set_result(self._waiter, None)

    def _finish(self, message: bytes | None) -> None:
        """Ends the call as the handler, which has returned, has said."""
        code = 0 if self._code is None else number(self._code)
        _handlers.finish(self._call, None if code else message, code, self._details, self._trailing)

    def _raised(self, error: BaseException) -> None:
        """Ends the call after an exception of the handler, of an interceptor or of a (de)serializer."""
        call = self._call
        if error is self._aborted:
            error.__traceback__ = None  # its frames hold this context: a cycle
            return
        if isinstance(error, asyncio.CancelledError):
            _LOGGER.debug("RPC cancelled for servicer method [%s]", call.method)
            call.finish(None, _handlers.CANCELLED, "The handler was cancelled.", None)
            return
        name = type(error).__name__
        _LOGGER.error("Unexpected [%s] raised by servicer method [%s]", name, call.method, exc_info=error)
        code = _handlers.UNKNOWN if self._code is None else number(self._code) or _handlers.UNKNOWN
        details = _handlers.described(f"Unexpected {type(error)}", error)
        _handlers.finish(call, None, code, details, self._trailing)
        if not isinstance(error, Exception):
            raise error

    def _ended(self) -> None:
        try:
            for callback in self._callbacks or ():
                callback(self)
        except Exception:
            _LOGGER.exception("Error in callback for method [%s]", self._call.method)


class _Requests(AsyncIterator[Any]):
    __slots__ = ("_context",)

    def __init__(self, context: ServicerContext) -> None:
        self._context = context

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return request


def _checked(trailing_metadata: Any) -> tuple[Any, ...]:
    """The pairs of trailing metadata. TypeError for what is none."""
    if not isinstance(trailing_metadata, Iterable) or isinstance(trailing_metadata, dict):
        raise TypeError(f"trailing metadata are pairs of a key and a value, not {trailing_metadata!r}")
    pairs = tuple(trailing_metadata)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"trailing metadata are pairs of a key and a value, but one is {pair!r}")
    return pairs


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():  # it may have been cancelled
        future.set_result(value)


def number(code: object) -> int:
    """The number of a status code, which may be one already; UNKNOWN for what is none."""
    if isinstance(code, int):
        return code if 0 <= code <= 16 else _handlers.UNKNOWN
    return _handlers.number(code)


def _is_async(behavior: Any) -> bool:
    """Whether it is a coroutine function or an asynchronous generator. Other functions run in a thread."""
    return inspect.iscoroutinefunction(behavior) or inspect.isasyncgenfunction(behavior)


class _ThreadContext(_handlers.ServicerContext):
    """For functions that run in a thread."""

    _no_deadline = None


class _Service:
    """What the native server holds. It does not hold the `Server`, so one that is dropped stops."""

    loop: asyncio.AbstractEventLoop
    completions: Any
    _task: Callable[[Any], asyncio.Task[None]]  # makes a task of a coroutine

    def __init__(
        self,
        pool: futures.Executor | None,
        handlers: Iterable[grpc.GenericRpcHandler] | None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] | None,
        options: _handlers.Options,
        maximum_concurrent_rpcs: int | None,
        compression: grpc.Compression | None,
    ) -> None:
        wrong = [given for given in interceptors or () if not isinstance(given, grpc.aio.ServerInterceptor)]
        if wrong:
            raise ValueError(f"interceptors must be grpc.aio.ServerInterceptors, these are not: {wrong}")
        if maximum_concurrent_rpcs is not None and maximum_concurrent_rpcs <= 0:
            raise ValueError("maximum_concurrent_rpcs should be a positive integer")
        self.native = _handlers.native_server(options, maximum_concurrent_rpcs)
        self.registered: dict[str, Handler] = {}
        self.generic = list(_handlers.generic_handlers(handlers))
        self.async_handlers: dict[str, Handler] = {}  # of those registered, found without work for each call
        self._interceptors = tuple(interceptors or ())
        self._pool = pool
        self._compression = int(compression or 0)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.completions = _loop.completions(self.loop)
        if not self._interceptors:
            known = self.registered.items()
            self.async_handlers = {path: one for path, one in known if _is_async(_handlers.behavior_of(one))}
        # From 3.12 on, a task can take its first step at once, which for most handlers is the only one.
        eager: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
        own = self.loop.get_task_factory() is None
        self._task = partial(asyncio.Task, loop=self.loop, **eager) if own else self.loop.create_task
        self.native.start()
        self.native.calls_to(self.completions, self._arrived)

    def _arrived(self, call: ServerCall) -> None:
        """Starts a task for a call, in an empty context of variables."""
        context = ServicerContext(call, self)
        handler = self.async_handlers.get(call.method)
        coroutine = self._serve(context) if handler is None else self._run(context, handler)
        context._task = task = Context().run(self._task, coroutine)
        if not task.done():
            call.cancelled_then(self.completions, context._cancel)

    async def _run(self, context: ServicerContext, handler: Handler) -> None:
        """Serves a call by an asynchronous handler."""
        try:
            await self._run_handler(context, handler)
        except BaseException as error:
            context._raised(error)
        finally:
            if context._callbacks is not None:
                context._ended()

    async def _serve(self, context: ServicerContext) -> None:
        """Finds the handler, and serves a call by it."""
        call = context._call
        try:
            handler = await self._intercepted(0, HandlerCallDetails(call.method, call.metadata))
            if handler is None:
                call.finish(None, _handlers.UNIMPLEMENTED, "Method not found!", None)
            elif _is_async(behavior := _handlers.behavior_of(handler)):
                await self._run_handler(context, handler)
            else:
                if self._compression:
                    call.set_compression(self._compression)
                # The thread serves the call to its end; this task has no more to do.
                serve = partial(_handlers.serve, _ThreadContext(call), handler, behavior)
                self.loop.run_in_executor(self._pool, copy_context().run, serve)
        except BaseException as error:
            context._raised(error)
        finally:
            if context._callbacks is not None:
                context._ended()

    async def _run_handler(self, context: ServicerContext, handler: Handler) -> None:
        call = context._call
        if self._compression:
            call.set_compression(self._compression)
        behavior = _handlers.behavior_of(handler)
        argument: Any
        if handler.request_streaming:
            context._deserializer = handler.request_deserializer
            argument = _Requests(context)
        else:
            argument = call.receive_now()
            if argument is None:
                argument = await context._receive()
                if argument is None:
                    details = f'"{call.method}" requires exactly one request message.'
                    call.finish(None, _handlers.UNIMPLEMENTED, details, None)
                    return
            if handler.request_deserializer is not None:
                argument = handler.request_deserializer(argument)
        serializer = handler.response_serializer
        if handler.response_streaming:
            context._serializer = serializer
            await _respond(context, behavior, argument)
            message = None
        else:
            response = await behavior(argument, context)
            if context._code is not None and number(context._code):
                message = None
            elif serializer is not None:
                message = serializer(response)
            else:
                message = b"" if response is None else response
        if context._aborted is None:
            context._finish(message)
        else:
            _LOGGER.error("Abort error unexpectedly suppressed in servicer method [%s]", call.method)

    async def _intercepted(self, index: int, details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler that the interceptors from `index` on, and then the handlers, give."""
        if index == len(self._interceptors):
            return _handlers.find(self.registered, self.generic, details)
        then: Any = partial(self._intercepted, index + 1)
        return await self._interceptors[index].intercept_service(then, details)


async def _respond(context: ServicerContext, behavior: Any, argument: Any) -> None:
    """Runs a handler with a stream of responses: a generator, or a coroutine that writes them."""
    if inspect.iscoroutinefunction(behavior):
        await behavior(argument, context)
        return
    responses = behavior(argument, context)
    try:
        async for response in responses:
            await context.write(response)
    finally:
        await responses.aclose()


class Server(grpc.aio.Server):
    """A server whose handlers run on an event loop. `tonic_rdma.aio.server` makes it."""

    _state = "new"

    def __init__(self, service: _Service) -> None:
        self._service = service

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._service.generic.extend(_handlers.generic_handlers(generic_rpc_handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """The methods of a service by name. After start() this has no effect, as in grpcio."""
        if self._state != "new":
            _LOGGER.warning("Cannot register method handlers once server has started")
        else:
            self._service.registered.update(_handlers.methods(service_name, method_handlers))

    def add_insecure_port(self, address: str) -> int:
        return _handlers.bind(self._service.native, address, None)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listens with TLS. The credentials come from `tonic_rdma.ssl_server_credentials`."""
        return _handlers.bind(self._service.native, address, server_credentials)

    async def start(self) -> None:
        if self._state == "stopped":
            raise grpc.aio.UsageError("Server not in ready state")
        if self._state == "new":
            self._service.start()
            self._state = "started"

    async def stop(self, grace: float | None = None) -> None:
        """Takes no more calls, waits up to `grace` seconds (None: 0) for those in flight, and cancels the rest.

        A handler whose call was cancelled may still run.
        """
        if self._state != "new":
            self._state = "stopped"
            self._service.native.stop(grace)
            await self._stopped()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Waits until the server has stopped. True: the timeout came first."""
        try:
            await asyncio.wait_for(self._stopped(), timeout)
        except asyncio.TimeoutError:
            return True
        return False

    async def _stopped(self) -> None:
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[bool] = loop.create_future()
        waiting = self._service.native.wait_stopped_then(_loop.completions(loop), partial(_set_result, stopped))
        try:
            await stopped
        finally:
            waiting.cancel()

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            _handlers.drop(service.native)


def server(
    migration_thread_pool: futures.Executor | None = None,
    handlers: Iterable[grpc.GenericRpcHandler] | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] | None = None,
    options: _handlers.Options = None,
    maximum_concurrent_rpcs: int | None = None,
    compression: grpc.Compression | None = None,
) -> Server:
    """A server whose handlers run on the event loop that starts it. Arguments: see `grpc.aio.server`.

    Handlers that are not asynchronous run in `migration_thread_pool`, by default the loop's. More than
    `maximum_concurrent_rpcs` calls at once get RESOURCE_EXHAUSTED.
    """
    return Server(
        _Service(migration_thread_pool, handlers, interceptors, options, maximum_concurrent_rpcs, compression)
    )
