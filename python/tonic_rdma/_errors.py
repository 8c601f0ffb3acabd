"""Status codes, and calls that have ended: those that failed are exceptions."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import grpc

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class Status(NamedTuple):
    """How a call ended, as users see it. Unlike `_native.Outcome`, it can come from this side."""

    code: grpc.StatusCode
    details: str
    initial_metadata: Metadata
    trailing_metadata: Metadata


def status_of(outcome: Any) -> Status:
    """Of a `_native.Outcome`."""
    code = CODES.get(outcome.code)
    details = outcome.details
    if code is None:
        details = f'Server sent unknown code {outcome.code} and details "{details}"'
        code = grpc.StatusCode.UNKNOWN
    return Status(code, details, outcome.initial_metadata, outcome.trailing_metadata)


def represent(name: str, status: Status | None) -> str:
    """As grpcio does: logs of programs are searched for it."""
    if status is None:
        return f"<{name} object>"
    text = f'<{name} of RPC that terminated with:\n\tstatus = {status.code}\n\tdetails = "{status.details}"\n'
    if status.code is not grpc.StatusCode.OK:
        text += f'\tdebug_error_string = "{debug_error_string(status)}"\n'
    return text + ">"


def debug_error_string(status: Status) -> str:
    return "" if status.code is grpc.StatusCode.OK else f"{status.code.name}:{status.details}"


if TYPE_CHECKING:
    Future = grpc.Future[Any]
else:
    Future = grpc.Future  # which has no type parameters at run time


class EndedCall(grpc.Call, Future):
    """The call that `with_call` returns: it has ended well."""

    def __init__(self, status: Status, response: Any = None) -> None:
        self._status = status
        self._response = response

    def initial_metadata(self) -> Metadata:
        return self._status.initial_metadata

    def trailing_metadata(self) -> Metadata:
        return self._status.trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def debug_error_string(self) -> str:
        return debug_error_string(self._status)

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float | None:  # type: ignore[override]
        return None

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._response

    def exception(self, timeout: float | None = None) -> Exception | None:
        return None

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        return None

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        fn(self)

    def __repr__(self) -> str:
        return represent(type(self).__name__, self._status)

    __str__ = __repr__


class InactiveRpcError(EndedCall, grpc.RpcError):  # type: ignore[misc]
    """A call that failed: a `grpc.RpcError`, `grpc.Call` and `grpc.Future`, and an iterator that raises."""

    def __iter__(self) -> "InactiveRpcError":
        return self

    def __next__(self) -> NoReturn:
        raise self

    def result(self, timeout: float | None = None) -> NoReturn:
        raise self

    def exception(self, timeout: float | None = None) -> Exception:
        return self

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        return traceback_of(self)


def traceback_of(error: Exception) -> TracebackType | None:
    try:
        raise error
    except Exception:
        return sys.exc_info()[2]


def inactive(code: grpc.StatusCode, details: str) -> InactiveRpcError:
    """The error of a call that ended on this side."""
    return InactiveRpcError(Status(code, details, (), ()))
