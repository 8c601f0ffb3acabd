"""What the servers share: a call that is served in a thread, credentials, arguments for the native server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import grpc

from . import _native
from ._certificates import auth_properties
from ._options import common_arguments, parse_target

if TYPE_CHECKING:
    from ._native import MetadataIn, ServerCall

_LOGGER = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]] | None
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # at run time the class takes no parameters

CANCELLED = 1
UNKNOWN = 2
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14

# grpcio's own figure for the time that remains where there is no deadline. Handlers compare with it.
_NO_DEADLINE = float(2**63)


class _Details(NamedTuple):
    method: str
    invocation_metadata: _native.Metadata


class HandlerCallDetails(_Details, grpc.HandlerCallDetails):  # type: ignore[misc]
    """What interceptors and generic handlers know of a call."""


class ServerCredentials(grpc.ServerCredentials):
    """The key and certificates of a server, in PEM. `ssl_server_credentials` makes them."""

    def __init__(self, key: bytes, chain: bytes, roots: bytes | None, require_client_auth: bool) -> None:
        self.pem = (key, chain, roots, require_client_auth)


def ssl_server_credentials(
    private_key_certificate_chain_pairs: Sequence[tuple[bytes, bytes]],
    root_certificates: bytes | None = None,
    require_client_auth: bool = False,
) -> ServerCredentials:
    """Credentials for `add_secure_port`, in PEM: one pair of key and chain, and roots for clients' certificates.

    Without `root_certificates` no certificate is asked of clients. With them and `require_client_auth`, a client
    without one is refused. Raises ValueError for none or several pairs, and for a client certificate that is
    required without roots.
    """
    if len(private_key_certificate_chain_pairs) != 1:
        raise ValueError(f"one pair of key and chain is needed, not {len(private_key_certificate_chain_pairs)}")
    if require_client_auth and root_certificates is None:
        raise ValueError("require_client_auth needs root_certificates")
    [(key, chain)] = private_key_certificate_chain_pairs
    return ServerCredentials(key, chain, root_certificates, require_client_auth)


def native_server(options: Options, maximum_concurrent_rpcs: int | None) -> _native.Server:
    """The native server that channel arguments and the bound for concurrent calls describe."""
    arguments = common_arguments(options)
    reuse_port = any(key == "grpc.so_reuseport" and value for key, value in options or ())
    return _native.Server(max_concurrent=maximum_concurrent_rpcs, reuse_port=reuse_port, **arguments)


def bind(server: _native.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listens on `address`, such as `localhost:0`. Returns the port. RuntimeError says why that can't be."""
    if credentials is not None and not isinstance(credentials, ServerCredentials):
        raise TypeError(
            "add_secure_port needs credentials from tonic_rdma.ssl_server_credentials: "
            "the key and certificates in those of grpcio can't be read"
        )
    try:
        [where] = parse_target(address)
    except ValueError as error:
        raise RuntimeError(f"Failed to bind to address {address}: {error}") from None
    return server.bind(where, None if credentials is None else credentials.pem)


def drop(server: _native.Server) -> None:
    """Stops a server that its owner has dropped: it takes no more calls, and those in flight go on."""
    with contextlib.suppress(RuntimeError):  # a child of fork has no server
        server.stop(1e9)


def methods(service_name: str, method_handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """The handlers of a service by path."""
    return {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}


def generic_handlers(handlers: Iterable[grpc.GenericRpcHandler] | None) -> tuple[grpc.GenericRpcHandler, ...]:
    """`handlers`, each of which has a method `service`. AttributeError names one that hasn't."""
    given = tuple(handlers or ())
    for handler in given:
        if not hasattr(handler, "service"):
            raise AttributeError(f'"{handler}" has no method "service", as a grpc.GenericRpcHandler must')
    return given


def find(
    registered: Mapping[str, Handler],
    generic: Iterable[grpc.GenericRpcHandler],
    details: grpc.HandlerCallDetails,
) -> Handler | None:
    """The handler of the method that `details` names. A registered one goes before generic ones."""
    found = registered.get(details.method)
    if found is None:
        for handlers in generic:
            found = handlers.service(details)
            if found is not None:
                break
    return found


def number(code: object) -> int:
    """The number of a status code; UNKNOWN for what is none."""
    return code.value[0] if isinstance(code, grpc.StatusCode) else UNKNOWN


def described(what: str, error: BaseException) -> str:
    """`what`, and the error's text if it has one."""
    try:
        return f"{what}: {error}"
    except Exception:
        return "Calling application raised unprintable Exception!"


def finish(call: ServerCall, message: bytes | None, code: int, details: str, trailing: MetadataIn) -> None:
    """Ends the call. Trailing metadata that can't be sent makes it INTERNAL."""
    try:
        call.finish(message, code, details, trailing)
    except (TypeError, ValueError) as error:
        _LOGGER.exception("Invalid trailing metadata of %s", call.method)
        call.finish(None, INTERNAL, f"Invalid metadata: {error}", None)


class Peer:
    """What a context tells of the client and its call: the same for threads and for asyncio."""

    _call: ServerCall

    def invocation_metadata(self) -> _native.Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return self._call.peer

    def peer_identity_key(self) -> str | None:
        """`x509_subject_alternative_name`, or without such names `x509_common_name`; None: no certificate."""
        properties = self.auth_context()
        keys = ("x509_subject_alternative_name", "x509_common_name")
        return next((key for key in keys if key in properties), None)

    def peer_identities(self) -> Sequence[bytes] | None:
        """The names in the client's certificate; None: it showed none."""
        key = self.peer_identity_key()
        identities: Sequence[bytes] | None = None if key is None else self.auth_context()[key]
        return identities

    def auth_context(self) -> Mapping[str, Any]:
        """The properties, lists of bytes, of the connection's protection and of the client's certificate."""
        call = self._call
        connection = call.connection
        secured = connection is not None and connection.tls
        return {
            "transport_security_type": [b"ssl" if secured else b"insecure"],
            "security_level": [b"TSI_PRIVACY_AND_INTEGRITY" if secured else b"TSI_SECURITY_NONE"],
            **(auth_properties(call.identities[0]) if call.identities else {}),
        }

    def disable_next_message_compression(self) -> None:
        self._call.disable_next_compression()


class _CallOver(grpc.RpcError):
    """What a handler is told when its call has ended."""


class ServicerContext(Peer, grpc.ServicerContext):
    """What a handler that runs in a thread knows and says of its call."""

    # What most handlers never set are attributes of the class, so that a new context costs one assignment.
    _code: object = None
    _details: str | bytes | None = None
    _trailing: MetadataIn = None
    _aborted = False
    _metadata_sent = False
    _no_deadline: Any = _NO_DEADLINE

    def __init__(self, call: ServerCall) -> None:
        self._call = call

    def is_active(self) -> bool:
        return self._call.is_active()

    def time_remaining(self) -> Any:
        """Seconds until the deadline; without one, more than any (None on a server for asyncio)."""
        remaining = self._call.time_remaining()
        return self._no_deadline if remaining is None else remaining

    def cancel(self) -> bool:
        """Ends the call with CANCELLED. False: it had ended."""
        active = self._call.is_active()
        self._call.cancel()
        return active

    def add_callback(self, callback: Callable[[], object]) -> bool:
        from ._callbacks import completions

        def run(_cancelled: bool) -> None:
            try:
                callback()
            except Exception:
                _LOGGER.exception("Exception calling callback!")

        if not self._call.is_active():
            return False
        self._call.done_then(completions(), run)
        return True

    def set_compression(self, compression: grpc.Compression) -> None:
        self._call.set_compression(int(compression))

    def send_initial_metadata(self, initial_metadata: MetadataIn) -> None:
        if self._metadata_sent:
            raise ValueError("Initial metadata no longer allowed!")
        if not self._call.send_initial_metadata(initial_metadata):
            raise _CallOver("the call is over")
        self._metadata_sent = True

    def set_trailing_metadata(self, trailing_metadata: MetadataIn) -> None:
        self._trailing = trailing_metadata

    def trailing_metadata(self) -> Any:
        return self._trailing

    def abort(self, code: grpc.StatusCode, details: str | bytes) -> NoReturn:
        if code == grpc.StatusCode.OK:
            _LOGGER.error("abort() called with StatusCode.OK; returning UNKNOWN")
            code, details = grpc.StatusCode.UNKNOWN, ""
        self._code = code
        self.set_details(details)
        self._aborted = True
        raise Exception  # grpc promises no type

    def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self._trailing = status.trailing_metadata
        self.abort(status.code, status.details)

    def set_code(self, code: object) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def set_details(self, details: str | bytes) -> None:
        if not isinstance(details, (str, bytes)):
            raise TypeError(f"details must be a str, not {type(details).__name__}")
        self._details = details

    def details(self) -> bytes | None:
        return self._details.encode() if isinstance(self._details, str) else self._details

    def _finish(self, message: bytes | None, code: int, details: str) -> None:
        """Ends the call. What the handler has set goes before `code` and `details`."""
        if self._details is not None:
            details = (
                self._details.decode("utf-8", "replace") if isinstance(self._details, bytes) else self._details
            )
        if self._code is not None:
            code = number(self._code) or code
        finish(self._call, message, code, details, self._trailing)

    def _serialized(self, response: Any, serializer: Callable[[Any], bytes] | None) -> bytes | None:
        """The response's bytes, or None: it could not be serialized, so the call has ended."""
        try:
            message = response if serializer is None else serializer(response)
        except Exception:
            _LOGGER.exception("Exception serializing message!")
        else:
            if isinstance(message, bytes):
                return message
            _LOGGER.error("A response of %s is no bytes but %s", self._call.method, type(message).__name__)
        self._finish(None, INTERNAL, "Failed to serialize response!")
        return None

    def _deserialized(self, message: bytes, deserializer: Callable[[bytes], Any] | None) -> Any:
        """The request, or None: it could not be deserialized, so the call has ended."""
        try:
            request = message if deserializer is None else deserializer(message)
        except Exception:
            _LOGGER.exception("Exception deserializing message!")
            request = None
        if request is None:
            self._finish(None, INTERNAL, "Exception deserializing request!")
        return request

    def _raised(self, error: BaseException, what: str) -> None:
        """Ends the call after an exception of its handler."""
        if self._aborted:
            self._finish(None, UNKNOWN, "RPC Aborted")
        elif not isinstance(error, _CallOver) or self._call.is_active():
            details = described(what, error)
            _LOGGER.error(details, exc_info=error)
            self._finish(None, UNKNOWN, details)


class _Requests(Iterator[Any]):
    """The requests of a call. It ends early, by grpc.RpcError, if the call does."""

    __slots__ = ("_context", "_deserializer")

    def __init__(self, context: ServicerContext, deserializer: Callable[[bytes], Any] | None) -> None:
        self._context = context
        self._deserializer = deserializer

    def __next__(self) -> Any:
        context = self._context
        message = context._call.receive()
        if message is None:
            if context._call.is_active():
                raise StopIteration
            raise _CallOver("the call is over")
        request = context._deserialized(message, self._deserializer)
        if request is None:
            raise _CallOver("a request could not be deserialized")
        return request

    next = __next__


def behavior_of(handler: Handler) -> Any:
    """The function that the user wrote."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def serve(context: ServicerContext, handler: Handler, behavior: Any) -> None:
    """Serves a call in this thread, from its first request to its status."""
    call = context._call
    argument: Any
    if handler.request_streaming:
        argument = _Requests(context, handler.request_deserializer)
    else:
        message = call.receive_now()
        if message is None:
            message = call.receive()
        if message is None:
            if call.is_active():
                call.finish(None, UNIMPLEMENTED, f'"{call.method}" requires exactly one request message.', None)
            return
        argument = context._deserialized(message, handler.request_deserializer)
        if argument is None:
            return
    if handler.response_streaming and getattr(behavior, "experimental_non_blocking", False):
        _serve_by_function(context, behavior, argument, handler.response_serializer)
        return
    try:
        response = behavior(argument, context)
    except BaseException as error:
        context._raised(error, "Exception calling application")
        return
    if handler.response_streaming:
        _send_all(context, response, handler.response_serializer)
    elif context._code is None or not number(context._code):
        serialized = context._serialized(response, handler.response_serializer)
        if serialized is not None:
            context._finish(serialized, 0, "")
    else:
        context._finish(None, 0, "")


def _send_all(
    context: ServicerContext, responses: Iterable[Any], serializer: Callable[[Any], bytes] | None
) -> None:
    send = context._call.send
    try:
        for response in responses:
            if response is None:  # grpcio takes it for the end
                break
            message = context._serialized(response, serializer)
            if message is None or not send(message):
                return
            context._metadata_sent = True
    except BaseException as error:
        context._raised(error, "Exception iterating responses")
        return
    context._finish(None, 0, "")


def _serve_by_function(
    context: ServicerContext, behavior: Any, argument: Any, serializer: Callable[[Any], bytes] | None
) -> None:
    """Serves by a handler that gives its responses to a function, and None at the end."""

    def send(response: Any) -> None:
        if response is None:
            context._finish(None, 0, "")
        else:
            message = context._serialized(response, serializer)
            if message is not None:
                context._call.send(message)

    try:
        behavior(argument, context, send)
    except BaseException as error:
        context._raised(error, "Exception calling application")
