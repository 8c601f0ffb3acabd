"""Calls under way at a client: futures of one response, and iterators of responses."""

import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc

from . import _native
from ._callbacks import completions
from ._errors import Future, Metadata, Status, debug_error_string, represent, status_of, traceback_of

LOGGER = logging.getLogger(__name__)

Serializer = Callable[[Any], bytes] | None
Deserializer = Callable[[bytes], Any] | None

CANCELLED = "Locally cancelled by application!"
SERIALIZING = "Exception serializing request!"
DESERIALIZING = "Exception deserializing response!"
_DROPPED = "Cancelled upon garbage collection!"
_ITERATING = "Exception iterating requests!"


def serialized(request: Any, serializer: Serializer) -> bytes | None:
    """The bytes, or None if there is an exception: then it is logged."""
    if serializer is None:
        return request  # type: ignore[no-any-return]  # the native part checks that these are bytes
    try:
        return serializer(request)
    except Exception:
        LOGGER.exception(SERIALIZING)
        return None


def deserialized(message: bytes, deserializer: Deserializer) -> Any:
    """The response, or None if there is an exception: then it is logged."""
    if deserializer is None:
        return message
    try:
        return deserializer(message)
    except Exception:
        LOGGER.exception(DESERIALIZING)
        return None


def send_all(native: _native.Call, requests: Iterator[Any], serializer: Serializer) -> None:
    """Sends the requests on a thread of their own: the iterator may wait for responses of this call."""
    context = contextvars.copy_context()
    arguments = (_send_all, native, requests, serializer)
    threading.Thread(target=context.run, args=arguments, daemon=True).start()


def _send_all(native: _native.Call, requests: Iterator[Any], serializer: Serializer) -> None:
    # This holds the native call, not the user's: if the user drops that one, the call ends, and so does this.
    while True:
        try:
            request = next(requests)
        except StopIteration:
            native.close_send()
            return
        except BaseException:
            LOGGER.exception(_ITERATING)
            native.cancel(_code(grpc.StatusCode.UNKNOWN), _ITERATING)
            return
        message = serialized(request, serializer)
        try:
            if message is not None:
                if not native.send(message):
                    return
                del request, message  # they may be large, and the next request far away
                continue
        except TypeError:
            LOGGER.exception(SERIALIZING)
        native.cancel(_code(grpc.StatusCode.INTERNAL), SERIALIZING)
        return


def _code(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


def _run(callback: Callable[[], Any], _: object) -> None:
    try:
        callback()
    except Exception as error:
        LOGGER.error("Exception in callback %s: %s", getattr(callback, "func", callback), repr(error))


class Call(grpc.RpcError, grpc.Call, Future):
    """A call with one response. It is the exception too, if it fails. Dropping it cancels it.

    `_end` is how it ended, with its response. Who needs it first makes it: no thread waits for each call.
    """

    _end: tuple[Status, Any] | None = None

    def __init__(self, native: _native.Call, deserializer: Deserializer, timeout: float | None) -> None:
        self._native = native
        self._deserializer = deserializer
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._cancelled = False

    def _ended(self, timeout: float | None = None) -> tuple[Status, Any]:
        if self._end is not None:
            return self._end
        outcome = self._native.outcome(timeout)
        if outcome is None:
            raise grpc.FutureTimeoutError()
        return self._settle(outcome)

    def _settle(self, outcome: _native.Outcome) -> tuple[Status, Any]:
        status, response = status_of(outcome), None
        if outcome.response is not None and outcome.code == 0:
            response = deserialized(outcome.response, self._deserializer)
            if response is None:
                status = status._replace(code=grpc.StatusCode.INTERNAL, details=DESERIALIZING)
        return self._decide(status, response)

    def _decide(self, status: Status, response: Any) -> tuple[Status, Any]:
        # Several threads may come here. The first one decides, and all get the same response.
        end: tuple[Status, Any] = self.__dict__.setdefault("_end", (status, response))
        return end

    def done(self) -> bool:
        return self._end is not None or self._native.outcome_now() is not None

    def running(self) -> bool:
        return not self.done()

    is_active = running

    def time_remaining(self) -> float | None:  # type: ignore[override]
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0)

    def cancel(self) -> bool:
        if self.done():
            return False
        # Set before: whoever waits for the call's end may see it before this thread goes on.
        before, self._cancelled = self._cancelled, True
        if not self._native.cancel(_code(grpc.StatusCode.CANCELLED), CANCELLED):
            self._cancelled = before
            return False
        return True

    def cancelled(self) -> bool:
        return self._cancelled and self.done() and self._ended()[0].code is grpc.StatusCode.CANCELLED

    def result(self, timeout: float | None = None) -> Any:
        status, response = self._ended(timeout)
        if status.code is grpc.StatusCode.OK:
            return response
        if self._cancelled:
            raise grpc.FutureCancelledError()
        raise self

    def exception(self, timeout: float | None = None) -> Exception | None:
        status, _ = self._ended(timeout)
        if status.code is grpc.StatusCode.OK:
            return None
        if self._cancelled:
            raise grpc.FutureCancelledError()
        return self

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        error = self.exception(timeout)
        return None if error is None else traceback_of(error)

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        if self.done():
            fn(self)
        else:
            self._then(functools.partial(fn, self))

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        if self.done():
            return False
        self._then(callback)
        return True

    def _then(self, callback: Callable[[], Any]) -> None:
        self._native.outcome_then(completions(), functools.partial(_run, callback))

    def initial_metadata(self) -> Metadata:
        return self._native.initial_metadata() if self._end is None else self._end[0].initial_metadata

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]
        return self._ended()[0].trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._ended()[0].code

    def details(self) -> str:
        return self._ended()[0].details

    def debug_error_string(self) -> str:
        return debug_error_string(self._ended()[0])

    def __repr__(self) -> str:
        return represent(type(self).__name__, self._ended()[0] if self.done() else None)

    __str__ = __repr__

    def __del__(self) -> None:
        # The thread that sends its requests may hold the native call.
        if self._end is None:
            try:
                self._native.cancel(_code(grpc.StatusCode.CANCELLED), _DROPPED)
            except RuntimeError:
                pass  # in a child after a fork: the parent has this call


class ResponseIterator(Call):
    """A call with a stream of responses. It has no result but its end."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        message = self._native.receive()
        if message is not None:
            response = deserialized(message, self._deserializer)
            if response is not None:
                return response
            status = Status(grpc.StatusCode.INTERNAL, DESERIALIZING, self.initial_metadata(), ())
            self._decide(status, None)
            self._native.cancel(_code(status.code), status.details)
            raise self
        if self._ended()[0].code is grpc.StatusCode.OK:
            raise StopIteration
        raise self

    next = __next__
