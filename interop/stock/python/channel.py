"""How cases connect, and what they expect."""

import grpc

from service import LIMIT


def connect(arguments):
    # A connection of its own for each case: C-core shares those of channels that are alike.
    options = [*LIMIT, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if host := arguments.server_host_override:
        options += [("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)]
    address = f"{arguments.server_host}:{arguments.server_port}"
    if arguments.credentials:
        return grpc.secure_channel(address, arguments.credentials, options=options)
    return grpc.insecure_channel(address, options=options)


def expect(what, got, wanted, seen=None):
    if got is not True and got != wanted or got is False:
        raise AssertionError(f"{what}: expected {wanted!r}, got {got if seen is None else seen!r}")


def refused(code, call):
    """The error with which the call ends, which has this status."""
    try:
        reply = call()
    except grpc.RpcError as error:
        expect("status", error.code(), code, f"{error.code()}: {error.details()}")
        return error
    raise AssertionError(f"status: expected {code}, got an answer: {str(reply)[:200]!r}")
