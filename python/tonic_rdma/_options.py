"""Targets, channel arguments and credentials of grpcio, as the native part takes them."""

import os
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from ._errors import Metadata, inactive

Plugin = Callable[[str, str, Callable[[Metadata | None, int, bytes | None], None]], None]
"""What grpcio makes of a grpc.AuthMetadataPlugin: (service URL, method, callback(metadata, code, details))."""

_INSECURE = "Established channel does not have a sufficient security level to transfer call credential."
_DEFAULT_PORT = "443"  # grpcio's, with and without TLS
_NO_KEEPALIVE = 2**31 - 1  # milliseconds; grpcio's default


class Arguments(NamedTuple):
    """What `_native.Channel` takes (`native` by keyword), and what the Python side of a channel needs."""

    addresses: list[str]
    native: dict[str, Any]
    compression: int  # of calls that don't name one
    authorize: "Authorize"


def channel_arguments(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, Any]] | None,
    compression: grpc.Compression | None,
) -> Arguments:
    """ValueError or TypeError for what grpcio refuses, and for targets and credentials that are not carried.

    Calls of a channel with a target that names no address end with UNAVAILABLE, as with grpcio.
    """
    arguments = _dictionary(options)
    try:
        addresses, unusable = parse_target(target), None
    except InvalidTarget as error:
        addresses, unusable = [], str(error)
    tls, plugins = _channel_credentials(credentials)
    default = arguments.get("grpc.default_compression_algorithm", 0) if compression is None else compression
    authority = arguments.get("grpc.ssl_target_name_override") if tls else None
    if authority is None:
        authority = arguments.get("grpc.default_authority")
    native = {
        "tls": tls,
        "authority": _text(authority),
        "user_agent": _text(arguments.get("grpc.primary_user_agent")),
        **common_arguments(arguments),
    }
    if unusable is not None:
        native["unusable"] = unusable
    authorize = Authorize(plugins, _text(authority) or "".join(addresses[:1]), tls is not None)
    return Arguments(addresses, native, int(default), authorize)


def common_arguments(options: Sequence[tuple[str, Any]] | dict[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments that `_native.Channel` and `_native.Server` share: sizes of messages, keepalive."""
    arguments = options if isinstance(options, dict) else _dictionary(options)
    keepalive = None
    interval = _number(arguments, "grpc.keepalive_time_ms", _NO_KEEPALIVE)
    if 0 < interval < _NO_KEEPALIVE:
        keepalive = (interval / 1000, _number(arguments, "grpc.keepalive_timeout_ms", 20_000) / 1000)
    return {
        "max_send": _number(arguments, "grpc.max_send_message_length", -1),
        "max_receive": _number(arguments, "grpc.max_receive_message_length", 4 << 20),
        "keepalive": keepalive,
    }


def _dictionary(options: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for pair in options or ():
        try:
            key, value = pair
        except (TypeError, ValueError) as error:
            raise type(error)(f"a channel argument is a pair of a name and a value, not {pair!r}") from None
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"the name of a channel argument is a str, not {type(key).__name__}")
        arguments[key if isinstance(key, str) else key.decode()] = value
    return arguments


def _number(arguments: dict[str, Any], key: str, default: int) -> int:
    value = arguments.get(key, default)
    return int(value) if isinstance(value, int) else default  # grpcio ignores a value of another type, too


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None


class InvalidTarget(ValueError):
    """A target that names no address. grpcio makes channels to it, whose calls fail."""


def parse_target(target: str) -> list[str]:
    """The addresses, "host:port", that a target names. grpcio's resolvers `dns`, `ipv4` and `ipv6` are here."""
    if isinstance(target, bytes):
        target = target.decode()
    scheme, colon, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract", "vsock", "xds", "google-c2p") and colon:
        raise ValueError(f"the target {target!r} is not carried: use 'host:port'")
    if scheme in ("ipv4", "ipv6") and colon:
        addresses = [_address(address, None, target) for address in rest.lstrip("/").split(",")]
    else:
        if scheme == "dns" and colon:
            # Either dns:host:port or dns://server/host:port, whose server is not asked.
            target_name = re.sub(r"^//[^/]*/", "", rest)
        elif "://" in target:
            raise InvalidTarget(f"the target {target!r} has an unknown scheme: use 'host:port'")
        else:
            target_name = target
        addresses = [_address(target_name, _DEFAULT_PORT, target)]
    return addresses


def _address(text: str, default_port: str | None, target: str) -> str:
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"  # an IPv6 address without a port
    match = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]/]+)(?::(\d+))?", text.replace("%25", "%"))
    port = match and (match[2] or default_port)
    if match is None or port is None or int(port) > 65535:
        raise InvalidTarget(f"the target {target!r} is not valid: use 'host:port'")
    return f"{match[1]}:{port}"


# grpcio has no public way to read credentials: `_credentials` and what it holds are the only one.


def _channel_credentials(
    credentials: grpc.ChannelCredentials | None,
) -> tuple[tuple[bytes, bytes | None, bytes | None] | None, tuple[Plugin, ...]]:
    if credentials is None:
        return None, ()
    if not isinstance(credentials, grpc.ChannelCredentials):
        raise TypeError(f"grpc.ChannelCredentials expected, not {type(credentials).__name__}")
    inner: Any = credentials._credentials  # type: ignore[attr-defined]
    plugins: tuple[Plugin, ...] = ()
    while hasattr(inner, "_call_credentialses"):
        plugins = _plugins(inner) + plugins
        inner = inner._channel_credentials
    kind = type(inner).__name__
    if kind == "SSLChannelCredentials":
        roots = inner._pem_root_certificates or _system_roots()
        return (roots, inner._private_key, inner._certificate_chain), plugins
    if kind == "InsecureChannelCredentials":
        return None, plugins
    raise ValueError(f"{kind} are not carried: use grpc.ssl_channel_credentials")


def _system_roots() -> bytes:
    path = os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH") or ssl.get_default_verify_paths().cafile
    if path is None:
        raise ValueError("this system has no file of root certificates: pass root_certificates")
    with open(path, "rb") as file:
        return file.read()


def _plugins(credentials: Any) -> tuple[Plugin, ...]:
    if hasattr(credentials, "_call_credentialses"):
        return tuple(plugin for part in credentials._call_credentialses for plugin in _plugins(part))
    return (credentials._metadata_plugin,)


class Authorize:
    """Adds what call credentials say to a call's metadata."""

    __slots__ = ("plugins", "_authority", "_tls")

    def __init__(self, plugins: tuple[Plugin, ...], authority: str, tls: bool) -> None:
        self.plugins = plugins  # of the channel; usually ()
        self._authority = authority
        self._tls = tls

    def __call__(
        self,
        path: str,
        metadata: Metadata | None,
        credentials: grpc.CallCredentials | None,
        timeout: float | None,
    ) -> Metadata:
        """Metadata for the call. Waits up to `timeout` seconds for each plugin. grpc.RpcError if one fails."""
        if not self._tls:
            raise inactive(grpc.StatusCode.UNAUTHENTICATED, _INSECURE)
        pairs = list(metadata or ())
        plugins, url, method = self.questions(path, credentials)
        for plugin in plugins:
            pairs += _ask(plugin, url, method, timeout)
        return tuple(pairs)

    def questions(
        self, path: str, credentials: grpc.CallCredentials | None
    ) -> tuple[tuple[Plugin, ...], str, str]:
        """Whom to ask about a call, and what: plugins, service URL, method."""
        plugins = self.plugins
        if credentials is not None:
            plugins += _plugins(credentials._credentials)  # type: ignore[attr-defined]
        service, _, method = path.rpartition("/")
        return plugins, f"https://{self._authority.removesuffix(':443')}{service}", method


def _ask(plugin: Plugin, url: str, method: str, timeout: float | None) -> Metadata:
    answer: list[tuple[Metadata | None, bytes | None]] = []
    answered = threading.Event()

    def callback(metadata: Metadata | None, code: int, details: bytes | None) -> None:
        answer.append((metadata, None if code == 0 else details or b""))
        answered.set()

    plugin(url, method, callback)  # it catches what the user's plugin raises, and tells `callback`
    if not answered.wait(timeout):
        raise inactive(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    metadata, error = answer[0]
    if error is not None:
        raise inactive(grpc.StatusCode.UNAVAILABLE, plugin_failed(error))
    return tuple(metadata or ())


def plugin_failed(error: bytes) -> str:
    return "Getting metadata from plugin failed with error: " + error.decode(errors="replace")
