"""grpc.Server over the native part."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from contextvars import Context, copy_context
from time import monotonic

import grpc

from . import _handlers
from ._handlers import Handler, HandlerCallDetails
from ._native import ServerCall

_LOGGER = logging.getLogger(__name__)

# A thread of the pool that has served a call takes the next one itself, so steady calls need no hand-over. It
# gives itself back to the pool when no call comes for IDLE, or after TURN: other jobs can run then.
IDLE = 0.003  # seconds
TURN = 0.05  # seconds


class _Service:
    """What the threads of a server hold. It does not hold the `Server`, so one that is dropped stops."""

    def __init__(
        self,
        pool: futures.Executor,
        handlers: Iterable[grpc.GenericRpcHandler] | None,
        interceptors: Sequence[grpc.ServerInterceptor] | None,
        options: _handlers.Options,
        maximum_concurrent_rpcs: int | None,
        compression: grpc.Compression | None,
    ) -> None:
        self.native = _handlers.native_server(options, maximum_concurrent_rpcs)
        self.registered: dict[str, Handler] = {}
        self.generic = list(_handlers.generic_handlers(handlers))
        self.stopped = threading.Event()
        self.dispatcher: threading.Thread | None = None
        self._pool = pool
        self._interceptors = tuple(interceptors or ())
        self._compression = int(compression or 0)
        self._waiting: deque[ServerCall] = deque()  # calls for which no thread of the pool waited

    def start(self) -> None:
        self.native.start()
        self.dispatcher = threading.Thread(target=self._dispatch, name="tonic-rdma-server", daemon=True)
        _running.add(self)
        self.dispatcher.start()

    def _dispatch(self) -> None:
        try:
            self._take_calls()
            self.native.wait_stopped()
        except RuntimeError:
            _LOGGER.exception("The server can't go on.")
        finally:
            _running.discard(self)
            self.stopped.set()

    def _take_calls(self) -> None:
        """Takes the calls for which no thread of the pool waits, and submits a job for each."""
        while (call := self.native.next_call()) is not None:
            self._waiting.append(call)
            del call  # the next one may be long in coming
            try:
                self._pool.submit(self._work)
            except RuntimeError as error:  # the pool, or the interpreter, has shut down
                # Threads that still run take from the left, and perhaps took this call.
                try:
                    refused = self._waiting.pop()
                except IndexError:
                    continue
                details = f"the server's thread pool takes no call: {error}"
                refused.finish(None, _handlers.UNAVAILABLE, details, None)

    def _work(self) -> None:
        """A job of the pool. There is one for each call put into `_waiting`, which another may have taken."""
        waiting, next_call = self._waiting, self.native.next_call
        call: ServerCall | None
        try:
            call = waiting.popleft()
        except IndexError:
            return
        end = monotonic() + TURN
        while call is not None:
            Context().run(self._serve, call)
            if monotonic() > end:
                return
            try:
                call = waiting.popleft()
            except IndexError:
                call = next_call(IDLE)

    def _serve(self, call: ServerCall) -> None:
        handler: Handler | None
        try:
            if self._interceptors:
                handler = self._intercepted(0, HandlerCallDetails(call.method, call.metadata))
            else:
                handler = self.registered.get(call.method)
                if handler is None:
                    handler = self._find(HandlerCallDetails(call.method, call.metadata))
            if handler is None:
                call.finish(None, _handlers.UNIMPLEMENTED, "Method not found!", None)
                return
            if self._compression:
                call.set_compression(self._compression)
            behavior = _handlers.behavior_of(handler)
            context = _handlers.ServicerContext(call)
            own_pool = getattr(behavior, "experimental_thread_pool", None)  # as in grpcio
            if own_pool is not None:
                own_pool.submit(copy_context().run, _handlers.serve, context, handler, behavior)
                return
        except BaseException:
            _LOGGER.exception("Exception servicing handler of %s", call.method)
            call.finish(None, _handlers.UNKNOWN, "Error in service handler!", None)
            return
        _handlers.serve(context, handler, behavior)

    def _find(self, details: grpc.HandlerCallDetails) -> Handler | None:
        return _handlers.find(self.registered, self.generic, details)

    def _intercepted(self, index: int, details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler that the interceptors from `index` on, and then the handlers, give."""
        if index == len(self._interceptors):
            return self._find(details)
        return self._interceptors[index].intercept_service(
            lambda details: self._intercepted(index + 1, details), details
        )


_running: set[_Service] = set()
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end() -> None:
    # A daemon thread must be out of native code before the interpreter ends, or the process aborts.
    for service in list(_running):
        service.native.stop(None)
    for service in list(_running):
        if service.dispatcher is not None:
            service.dispatcher.join(5)


class Server(grpc.Server):
    """A server whose handlers run in a pool of threads. `tonic_rdma.server` makes it."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._lock = threading.Lock()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._service.generic.extend(_handlers.generic_handlers(generic_rpc_handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """The methods of a service by name. After start() this has no effect, as in grpcio."""
        if self._service.dispatcher is not None:
            _LOGGER.warning("Cannot register method handlers once server has started")
        else:
            self._service.registered.update(_handlers.methods(service_name, method_handlers))

    def add_insecure_port(self, address: str) -> int:
        return _handlers.bind(self._service.native, address, None)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listens with TLS. The credentials come from `tonic_rdma.ssl_server_credentials`."""
        return _handlers.bind(self._service.native, address, server_credentials)

    def start(self) -> None:
        with self._lock:
            if self._service.dispatcher is not None or self._service.stopped.is_set():
                raise ValueError("Cannot start already-started server!")
            self._service.start()

    def stop(self, grace: float | None = None) -> threading.Event:
        """Takes no more calls, and cancels those in flight after `grace` seconds. None: at once, and waits.

        The event is set when no call is left. A handler whose call was cancelled may still run.
        """
        with self._lock:
            self._service.native.stop(grace)
            if self._service.dispatcher is None:
                self._service.stopped.set()
        if grace is None:
            self._service.stopped.wait()
        return self._service.stopped

    def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Waits until the server has stopped. True: the timeout came first."""
        return not self._service.stopped.wait(timeout)

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            _handlers.drop(service.native)


def server(
    thread_pool: futures.Executor | None = None,
    handlers: Iterable[grpc.GenericRpcHandler] | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] | None = None,
    options: _handlers.Options = None,
    maximum_concurrent_rpcs: int | None = None,
    compression: grpc.Compression | None = None,
    xds: bool = False,
) -> Server:
    """A server whose handlers run in `thread_pool`, by default one of its own. Arguments: see `grpc.server`.

    More than `maximum_concurrent_rpcs` calls at once get RESOURCE_EXHAUSTED. There is no xDS: ValueError.
    """
    if xds:
        raise ValueError("tonic_rdma has no xDS")
    if thread_pool is None:
        thread_pool = futures.ThreadPoolExecutor(thread_name_prefix="tonic-rdma-handler")
    return Server(_Service(thread_pool, handlers, interceptors, options, maximum_concurrent_rpcs, compression))
