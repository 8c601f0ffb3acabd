"""Connects, and compares results with the expected ones, for all cases."""

import contextlib

import grpc

from service import LIMIT


@contextlib.contextmanager
def connect(arguments):
    # Each case has its own connection. By default C-core shares a connection between channels with the same
    # options.
    options = [*LIMIT, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if host := arguments.server_host_override:
        options += [("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)]
    address = f"{arguments.server_host}:{arguments.server_port}"
    if arguments.credentials:
        opened = arguments.implementation.secure_channel(address, arguments.credentials, options=options)
    else:
        opened = arguments.implementation.insecure_channel(address, options=options)
    with opened as channel:
        yield channel
        # A call with a short deadline, or that is cancelled at once, may end before there is a connection.
        if arguments.require and (made := channel.connection):
            expect("connection", "native" if made.native else made.verdict, arguments.require)


def expect(what, got, wanted, seen=None):
    if got is not True and got != wanted or got is False:
        raise AssertionError(f"{what}: expected {wanted!r}, got {got if seen is None else seen!r}")


def refused(code, call):
    """Returns the error of a call, which must end with the status `code`."""
    try:
        reply = call()
    except grpc.RpcError as error:
        expect("status", error.code(), code, f"{error.code()}: {error.details()}")
        return error
    raise AssertionError(f"status: expected {code}, got an answer: {str(reply)[:200]!r}")
