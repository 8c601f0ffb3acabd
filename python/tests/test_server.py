"""The server for threads, called by grpcio's client (HTTP/2) and by ours (natively)."""

import contextvars
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import conftest
import grpc
import pytest

PATH = "/test.Service/"
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
Code = grpc.StatusCode


def handler(kind, behavior, **more):
    return getattr(grpc, f"{kind}_rpc_method_handler")(behavior, **more)


@pytest.fixture(params=conftest.NAMES + (["grpcio"] if "grpcio" not in conftest.NAMES else []))
def connect(request):
    """A function that makes a channel of one implementation."""
    module, why = conftest.available(request.param)
    if module is None or not hasattr(module, "insecure_channel"):
        pytest.skip(why or "no channels yet")
    made = []

    def make(port):
        made.append(module.insecure_channel(f"127.0.0.1:{port}"))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


@pytest.fixture
def serve(implementation):
    """A function that starts a server with handlers by method name, and returns (server, port)."""
    made = []

    def start(handlers, generic=False, threads=8, **more):
        pool = futures.ThreadPoolExecutor(threads)
        server = implementation.server(pool, **more)
        if generic:
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
        else:
            server.add_registered_method_handlers("test.Service", handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        made.append((server, pool))
        return server, port

    yield start
    for server, pool in made:
        server.stop(0)  # without a wait: after an error of a deserializer in a stream, grpcio's would never end
        pool.shutdown(wait=False)


def call(channel, kind, *requests, method=None, **more):
    """The responses to the requests."""
    stub = getattr(channel, kind)(PATH + (method or kind))
    answer = stub(iter(requests) if kind.startswith("stream") else requests[0], timeout=30, **more)
    return list(answer) if kind.endswith("stream") else [answer]


def failure(channel, kind, *requests, **more):
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, kind, *requests, **more)
    return raised.value


def pairs(metadata):
    """Without `date`, which our server sends over HTTP/2."""
    return [tuple(pair) for pair in metadata if pair[0] != "date"]


def once(serve, connect, behavior, kind="unary_unary", **more):
    """A server with one method, and a channel to it."""
    _, port = serve({kind: handler(kind, behavior, **more)})
    return connect(port)


def upper(request, context):
    return request.upper()


def uppers(request, context):
    for _ in range(3):
        yield request.upper()


def joined(requests, context):
    return b"".join(requests)


def each(requests, context):
    for request in requests:
        yield request.upper()


ALL = {
    "unary_unary": handler("unary_unary", upper),
    "unary_stream": handler("unary_stream", uppers),
    "stream_unary": handler("stream_unary", joined),
    "stream_stream": handler("stream_stream", each),
}


@pytest.mark.parametrize("generic", [False, True])
def test_all_kinds(serve, connect, generic):
    _, port = serve(ALL, generic)
    channel = connect(port)
    for _ in range(3):
        assert call(channel, "unary_unary", b"a") == [b"A"]
        assert call(channel, "unary_stream", b"a") == [b"A"] * 3
        assert call(channel, "stream_unary", b"a", b"", b"b") == [b"ab"]
        assert call(channel, "stream_unary") == [b""]
        assert call(channel, "stream_stream", b"a", b"", b"b") == [b"A", b"", b"B"]
    large = bytes(range(256)) * 4096
    assert call(channel, "unary_unary", large) == [large.upper()]


def test_unknown_methods(serve, connect):
    _, port = serve(ALL)
    error = failure(connect(port), "unary_unary", b"", method="absent")
    assert (error.code(), error.details()) == (Code.UNIMPLEMENTED, "Method not found!")


def test_a_unary_method_without_a_request(serve, connect):
    channel = once(serve, connect, upper)
    error = failure(channel, "stream_unary", method="unary_unary")
    assert error.code() == Code.UNIMPLEMENTED
    assert error.details().endswith(" requires exactly one request message.")


def refuse(*_):
    raise ValueError("wrong")


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def raise_unprintable(request, context):
    raise Unprintable


def set_and_raise(request, context):
    context.set_code(Code.NOT_FOUND)
    refuse()


def set_and_return_none(request, context):
    context.set_code(Code.NOT_FOUND)
    context.set_details("nothing there")


def set_odd_code(request, context):
    context.set_code("odd")
    return request


def abort(request, context):
    context.abort(Code.ABORTED, "on purpose")


def abort_ok(request, context):
    context.abort(Code.OK, "on purpose")


def abort_in_spite(request, context):
    context.set_code(Code.NOT_FOUND)
    context.set_details("before")
    context.abort(Code.ABORTED, "")


def yield_and_raise(request, context):
    yield b"1"
    refuse()


def yield_and_abort(request, context):
    yield b"1"
    context.abort(Code.ABORTED, "on purpose")


def exit_thread(request, context):
    raise SystemExit("wrong")


@pytest.mark.parametrize(
    ("kind", "behavior", "more", "code", "details"),
    [
        ("unary_unary", refuse, {}, Code.UNKNOWN, "Exception calling application: wrong"),
        ("unary_stream", refuse, {}, Code.UNKNOWN, "Exception calling application: wrong"),
        (
            "unary_unary",
            raise_unprintable,
            {},
            Code.UNKNOWN,
            "Calling application raised unprintable Exception!",
        ),
        ("unary_unary", set_and_raise, {}, Code.NOT_FOUND, "Exception calling application: wrong"),
        ("unary_unary", set_and_return_none, {}, Code.NOT_FOUND, "nothing there"),
        ("unary_unary", set_odd_code, {}, Code.UNKNOWN, ""),
        ("unary_unary", abort, {}, Code.ABORTED, "on purpose"),
        ("unary_unary", abort_ok, {}, Code.UNKNOWN, ""),
        ("unary_unary", abort_in_spite, {}, Code.ABORTED, ""),
        ("unary_stream", yield_and_raise, {}, Code.UNKNOWN, "Exception iterating responses: wrong"),
        ("unary_stream", yield_and_abort, {}, Code.ABORTED, "on purpose"),
        ("unary_unary", lambda *_: None, {}, Code.INTERNAL, "Failed to serialize response!"),
        ("unary_unary", upper, {"response_serializer": refuse}, Code.INTERNAL, "Failed to serialize response!"),
        (
            "unary_stream",
            uppers,
            {"response_serializer": refuse},
            Code.INTERNAL,
            "Failed to serialize response!",
        ),
        (
            "unary_unary",
            upper,
            {"request_deserializer": refuse},
            Code.INTERNAL,
            "Exception deserializing request!",
        ),
        (
            "stream_unary",
            joined,
            {"request_deserializer": refuse},
            Code.INTERNAL,
            "Exception deserializing request!",
        ),
    ],
)
def test_errors_of_handlers(serve, connect, kind, behavior, more, code, details):
    channel = once(serve, connect, behavior, kind, **{"response_serializer": bytes, **more})
    for _ in range(2):
        error = failure(channel, kind, b"a")
        assert (error.code(), error.details()) == (code, details)


def test_an_exit_in_a_handler_ends_its_call_alone(implementation, serve, connect):
    if implementation is grpc:
        pytest.skip("there the call hangs")
    _, port = serve(ALL | {"exit": handler("unary_unary", exit_thread)})
    channel = connect(port)
    assert failure(channel, "unary_unary", b"", method="exit").code() == Code.UNKNOWN
    assert call(channel, "unary_unary", b"a") == [b"A"]


def test_none_ends_a_stream(serve, connect):
    channel = once(serve, connect, lambda request, context: iter([b"1", None, b"2"]), "unary_stream")
    assert call(channel, "unary_stream", b"") == [b"1"]


def test_a_handler_that_does_not_block(serve, connect):
    def behavior(request, context, respond):
        for response in (b"1", b"2", None):
            respond(response)

    behavior.experimental_non_blocking = True
    assert call(once(serve, connect, behavior, "unary_stream"), "unary_stream", b"") == [b"1", b"2"]


def test_a_handler_with_its_own_pool(serve, connect):
    def behavior(request, context):
        return threading.current_thread().name.encode()

    with futures.ThreadPoolExecutor(1, thread_name_prefix="own") as pool:
        behavior.experimental_thread_pool = pool
        assert call(once(serve, connect, behavior), "unary_unary", b"")[0].startswith(b"own")


def test_metadata(serve, connect):
    seen = {}

    def behavior(request, context):
        seen["all"] = context.invocation_metadata()
        context.send_initial_metadata((("initial", "1"), ("initial-bin", b"\x00\xff")))
        with pytest.raises(ValueError):
            context.send_initial_metadata(())
        context.set_trailing_metadata((("replaced", "1"),))
        context.set_trailing_metadata([("trailing", "2"), ("trailing-bin", b"\x01")])
        seen["trailing"] = context.trailing_metadata()
        return request

    channel = once(serve, connect, behavior)
    sent = (("key", "a"), ("key", "b"), ("key-bin", b"\x80\x00"))
    _, result = channel.unary_unary(PATH + "unary_unary").with_call(b"", timeout=30, metadata=sent)
    assert [pair for pair in seen["all"] if pair[0].startswith("key")] == list(sent)
    assert [(pair.key, pair.value) for pair in seen["all"] if pair.key.startswith("key")] == list(sent)
    assert seen["trailing"] == [("trailing", "2"), ("trailing-bin", b"\x01")]
    assert pairs(result.initial_metadata()) == [("initial", "1"), ("initial-bin", b"\x00\xff")]
    assert pairs(result.trailing_metadata()) == [("trailing", "2"), ("trailing-bin", b"\x01")]


def test_wrong_trailing_metadata(serve, connect):
    channel = once(
        serve, connect, lambda request, context: context.set_trailing_metadata([("UPPER", "x")]) or request
    )
    error = failure(channel, "unary_unary", b"")
    assert error.code() == Code.INTERNAL
    assert error.details().startswith("Invalid metadata")


def test_what_a_context_says_of_its_status(serve, connect):
    seen = []

    def behavior(request, context):
        seen.append((context.code(), context.details(), context.trailing_metadata()))
        context.set_code(Code.OK)
        context.set_details("fine")
        seen.append((context.code(), context.details()))
        return request

    assert call(once(serve, connect, behavior), "unary_unary", b"") == [b""]
    assert seen == [(None, None, None), (Code.OK, b"fine")]


class Status(grpc.Status):
    code = Code.DATA_LOSS
    details = "lost"
    trailing_metadata = (("grpc-status-details-bin", b"\x08\x0f"),)


def test_abort_with_status(serve, connect):
    channel = once(serve, connect, lambda request, context: context.abort_with_status(Status()))
    error = failure(channel, "unary_unary", b"")
    assert (error.code(), error.details()) == (Code.DATA_LOSS, "lost")
    assert pairs(error.trailing_metadata()) == list(Status.trailing_metadata)


def test_what_a_context_says_of_its_call(implementation, serve, connect):
    seen = {}

    def behavior(request, context):
        seen.update(remaining=context.time_remaining(), peer=context.peer(), active=context.is_active())
        seen.update(
            identities=context.peer_identities(), key=context.peer_identity_key(), auth=context.auth_context()
        )
        assert isinstance(context, grpc.ServicerContext)
        return request

    channel = once(serve, connect, behavior)
    call(channel, "unary_unary", b"")
    assert 0 < seen["remaining"] < 31
    assert seen["peer"].startswith("ipv4:127.0.0.1:")
    assert seen["active"] is True
    assert seen["identities"] is None and seen["key"] is None
    assert seen["auth"]["transport_security_type"] == [b"insecure"]
    channel.unary_unary(PATH + "unary_unary")(b"")
    assert seen["remaining"] > 1e9


def until_over(context):
    """Waits for the end of the call, and gives what the context then says."""
    over = threading.Event()
    assert context.add_callback(over.set)
    assert over.wait(30)
    return context.is_active(), context.add_callback(over.set)


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_calls_that_the_client_ends(serve, connect, end):
    began, seen = threading.Event(), futures.Future()

    def behavior(request, context):
        began.set()
        seen.set_result(until_over(context))
        return request

    channel = once(serve, connect, behavior)
    future = channel.unary_unary(PATH + "unary_unary").future(b"", timeout=0.3 if end == "deadline" else 30)
    if end != "deadline":
        assert began.wait(30)
        (future.cancel if end == "cancel" else channel.close)()
    assert seen.result(30) == (False, False)


def test_requests_of_a_cancelled_call(serve, connect):
    seen, began = futures.Future(), threading.Event()

    def behavior(requests, context):
        began.set()
        try:
            list(requests)
        except BaseException as error:
            seen.set_result(error)
            raise
        seen.set_result(None)
        return b""

    channel = once(serve, connect, behavior, "stream_unary")
    stop = threading.Event()

    def requests():
        yield b"1"
        stop.wait(30)

    future = channel.stream_unary(PATH + "stream_unary").future(requests(), timeout=30)
    assert began.wait(30)
    future.cancel()
    assert isinstance(seen.result(30), grpc.RpcError)
    stop.set()


def test_responses_of_a_cancelled_call(serve, connect):
    closed = threading.Event()

    def behavior(request, context):
        try:
            while True:
                yield b"x" * 1000
        finally:
            closed.set()

    responses = once(serve, connect, behavior, "unary_stream").unary_stream(PATH + "unary_stream")(
        b"", timeout=30
    )
    next(responses)
    responses.cancel()
    assert closed.wait(30)


def test_a_handler_cancels_its_call(serve, connect):
    def behavior(request, context):
        context.cancel()
        if request == b"wait":
            until_over(context)
        return request

    channel = once(serve, connect, behavior)
    assert failure(channel, "unary_unary", b"wait").code() == Code.CANCELLED
    assert failure(channel, "unary_unary", b"").code() == Code.CANCELLED


def test_callbacks_run_after_a_call(serve, connect):
    done = threading.Event()

    def behavior(request, context):
        context.add_callback(refuse)  # what it raises harms no other
        assert context.add_callback(done.set)
        return request

    assert call(once(serve, connect, behavior), "unary_unary", b"") == [b""]
    assert done.wait(30)


variable = contextvars.ContextVar("variable", default="none")


class Interceptor(grpc.ServerInterceptor):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def intercept_service(self, continuation, details):
        self.log.append((self.name, details.method, dict(details.invocation_metadata).get("key")))
        variable.set(variable.get() + self.name)
        return continuation(details)


def test_interceptors_and_variables(serve, connect):
    log = []

    def behavior(request, context):
        seen = variable.get()
        variable.set("of a call before")
        return seen.encode()

    handlers = {"unary_unary": handler("unary_unary", behavior)}
    _, port = serve(handlers, interceptors=[Interceptor("1", log), Interceptor("2", log)])
    channel = connect(port)
    for _ in range(5):
        assert call(channel, "unary_unary", b"", metadata=(("key", "v"),)) == [b"none12"]
    assert log == [("1", PATH + "unary_unary", "v"), ("2", PATH + "unary_unary", "v")] * 5


class Other(grpc.ServerInterceptor):
    def __init__(self, then):
        self.then = then

    def intercept_service(self, continuation, details):
        return self.then(continuation, details)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda continuation, details: handler("unary_unary", lambda *_: b"other"), b"other"),
        (lambda continuation, details: None, (Code.UNIMPLEMENTED, "Method not found!")),
        (refuse, (Code.UNKNOWN, "Error in service handler!")),
    ],
)
def test_interceptors_that_decide(serve, connect, then, expected):
    _, port = serve(ALL, interceptors=[Other(then)])
    channel = connect(port)
    if isinstance(expected, bytes):
        assert call(channel, "unary_unary", b"") == [expected]
    else:
        error = failure(channel, "unary_unary", b"")
        assert (error.code(), error.details()) == expected


class Gate:
    """Handlers that wait until `opened`, and how many run at once."""

    def __init__(self):
        self.lock, self.changed, self.opened = threading.Lock(), threading.Semaphore(0), threading.Event()
        self.inside = self.most = 0

    def __call__(self, request, context):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.changed.release()
        self.opened.wait(30)
        with self.lock:
            self.inside -= 1
        return request


def test_the_pool_bounds_the_calls_at_work(serve, connect):
    gate = Gate()
    _, port = serve({"unary_unary": handler("unary_unary", gate)}, threads=2)
    stub = connect(port).unary_unary(PATH + "unary_unary")
    calls = [stub.future(b"%d" % i, timeout=30) for i in range(6)]
    for _ in range(2):
        assert gate.changed.acquire(timeout=30)
    assert not gate.changed.acquire(timeout=0.2)
    gate.opened.set()
    assert [one.result(30) for one in calls] == [b"%d" % i for i in range(6)]
    assert gate.most == 2


def test_the_maximum_of_concurrent_calls(serve, connect):
    gate = Gate()
    _, port = serve({"unary_unary": handler("unary_unary", gate)}, maximum_concurrent_rpcs=2)
    channel = connect(port)
    stub = channel.unary_unary(PATH + "unary_unary")
    calls = [stub.future(b"", timeout=30) for i in range(2)]
    for _ in range(2):
        assert gate.changed.acquire(timeout=30)
    error = failure(channel, "unary_unary", b"")
    assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    gate.opened.set()
    assert [one.result(30) for one in calls] == [b"", b""]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # grpcio counts a call until after its response has arrived
        try:
            assert call(channel, "unary_unary", b"a") == [b"a"]
            break
        except grpc.RpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED


def test_other_jobs_of_the_pool_run_beside_steady_calls(implementation, connect):
    with futures.ThreadPoolExecutor(1) as pool:
        server = implementation.server(pool)
        server.add_registered_method_handlers("test.Service", ALL)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        stub = connect(port).unary_unary(PATH + "unary_unary")
        stub(b"", timeout=30)
        job = pool.submit(lambda: "done")
        deadline = time.monotonic() + 30
        while not job.done() and time.monotonic() < deadline:
            assert stub(b"a", timeout=30) == b"A"
        assert job.result(0) == "done"
        server.stop(None)


def test_a_pool_that_has_shut_down(implementation, connect):
    if implementation is grpc:
        pytest.skip("there calls hang")
    pool = futures.ThreadPoolExecutor(1)
    server = implementation.server(pool)
    server.add_registered_method_handlers("test.Service", ALL)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pool.shutdown()
    error = failure(connect(port), "unary_unary", b"")
    assert error.code() == Code.UNAVAILABLE
    assert "thread pool" in error.details()
    server.stop(None)


def test_a_server_with_its_own_pool(implementation, connect):
    if implementation is grpc:
        pytest.skip("there a pool is needed")
    server = implementation.server()
    server.add_registered_method_handlers("test.Service", ALL)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert call(connect(port), "unary_unary", b"a") == [b"A"]
    assert server.stop(None).is_set()


def test_the_end_with_calls_in_flight(serve, connect):
    gate = Gate()
    server, port = serve({"unary_unary": handler("unary_unary", gate)})
    stub = connect(port).unary_unary(PATH + "unary_unary")
    one = stub.future(b"1", timeout=30)
    assert gate.changed.acquire(timeout=30)
    stopped = server.stop(60)
    assert not stopped.is_set()
    assert server.wait_for_termination(0.05) is True
    gate.opened.set()
    assert one.result(30) == b"1"
    assert stopped.wait(30)
    assert server.wait_for_termination(30) is False
    assert failure(connect(port), "unary_unary", b"").code() == Code.UNAVAILABLE
    assert server.stop(None).wait(30)


@pytest.mark.parametrize("grace", [None, 0.1])
def test_the_end_of_a_call_that_does_not_end(serve, connect, grace):
    began = threading.Event()

    def behavior(request, context):
        began.set()
        until_over(context)
        return request

    server, port = serve({"unary_unary": handler("unary_unary", behavior)})
    one = connect(port).unary_unary(PATH + "unary_unary").future(b"", timeout=30)
    assert began.wait(30)
    assert server.stop(grace).wait(30)
    with pytest.raises(grpc.RpcError) as raised:
        one.result(30)
    assert raised.value.code() in (Code.UNAVAILABLE, Code.CANCELLED)


def test_a_shorter_grace_goes_before_a_longer_one(serve, connect):
    gate = Gate()
    server, port = serve({"unary_unary": handler("unary_unary", gate)})
    one = connect(port).unary_unary(PATH + "unary_unary").future(b"", timeout=30)
    assert gate.changed.acquire(timeout=30)
    first = server.stop(1000)
    assert not first.is_set()
    assert server.stop(None).wait(30)
    assert first.wait(30)
    gate.opened.set()
    assert isinstance(one.exception(30), grpc.RpcError)


def test_starts_and_ends_out_of_order(implementation):
    server = implementation.server(futures.ThreadPoolExecutor(1))
    assert server.wait_for_termination(0.01) is True
    assert server.stop(None).is_set()
    server = implementation.server(futures.ThreadPoolExecutor(1))
    server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(ValueError, match="already-started"):
        server.start()
    assert server.stop(0).wait(30)


def test_a_server_that_is_dropped_stops(serve, implementation, connect):
    server = implementation.server(futures.ThreadPoolExecutor(1))
    server.add_registered_method_handlers("test.Service", ALL)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert call(connect(port), "unary_unary", b"a") == [b"A"]
    del server
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            call(connect(port), "unary_unary", b"a")
        except grpc.RpcError as error:
            assert error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
            return
    raise AssertionError("it still serves")


def test_addresses(implementation):
    server = implementation.server(futures.ThreadPoolExecutor(1))
    first, second = server.add_insecure_port("localhost:0"), server.add_insecure_port("127.0.0.1:0")
    assert first > 0 and second > 0 and first != second
    for wrong in ("nosuch.invalid:1", "127.0.0.1:x"):
        with pytest.raises(RuntimeError, match="Failed to bind to address"):
            server.add_insecure_port(wrong)
    server.stop(None)


def test_servers_that_share_a_port(implementation, connect):
    servers, port = [], 0
    for _ in range(2):
        server = implementation.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 1)])
        server.add_registered_method_handlers("test.Service", ALL)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        servers.append(server)
    assert call(connect(port), "unary_unary", b"a") == [b"A"]
    other = implementation.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    with pytest.raises(RuntimeError):
        other.add_insecure_port(f"127.0.0.1:{port}")
    for server in servers:
        server.stop(None)


def test_wrong_arguments(implementation):
    pool = futures.ThreadPoolExecutor(1)
    with pytest.raises(AttributeError, match="service"):
        implementation.server(pool, handlers=[3])
    with pytest.raises(AttributeError, match="service"):
        implementation.server(pool).add_generic_rpc_handlers([3])
    with pytest.raises(TypeError):
        implementation.server(pool, options=[3])
    with pytest.raises(ValueError):
        implementation.ssl_server_credentials([])
    with pytest.raises(ValueError):
        implementation.ssl_server_credentials([(b"", b"")], require_client_auth=True)


def test_handlers_of_grpcio_types(implementation):
    assert isinstance(implementation.server(futures.ThreadPoolExecutor(1)), grpc.Server)


@pytest.fixture
def secure(implementation, tls):
    """A function that starts a server with TLS and gives its port. It answers with the client's identity."""
    made = []

    def start(*more):
        def behavior(request, context):
            auth = context.auth_context()
            assert auth["transport_security_type"] == [b"ssl"]
            key = context.peer_identity_key()
            if key is None:
                assert context.peer_identities() is None
                return b""
            assert list(context.peer_identities()) == list(auth[key])
            assert auth["x509_common_name"] == [b"tonic-rdma client"]
            assert auth["x509_pem_cert"][0].strip() == tls.client.strip()
            return key.encode() + b" " + b" ".join(context.peer_identities())

        server = implementation.server(futures.ThreadPoolExecutor(2))
        server.add_registered_method_handlers("test.Service", {"unary_unary": handler("unary_unary", behavior)})
        credentials = implementation.ssl_server_credentials([(tls.server_key, tls.server)], *more)
        port = server.add_secure_port("localhost:0", credentials)
        server.start()
        made.append(server)
        return port

    yield start
    for server in made:
        server.stop(None)


@pytest.mark.parametrize(
    "name", [name for name in ("grpcio", "tonic_rdma") if name in conftest.NAMES + ["grpcio"]]
)
def test_tls(secure, tls, name):
    module, why = conftest.available(name)
    if module is None or not hasattr(module, "secure_channel"):
        pytest.skip(why or "no channels yet")

    def answer(port, *identity):
        credentials = grpc.ssl_channel_credentials(tls.ca, *identity)
        with module.secure_channel(f"localhost:{port}", credentials) as channel:
            return call(channel, "unary_unary", b"")[0]

    mine = (tls.client_key, tls.client)
    assert answer(secure()) == b""
    assert answer(secure(tls.ca, False)) == b""
    assert answer(secure(tls.ca, True), *mine) == b"x509_subject_alternative_name client.example"
    with pytest.raises(grpc.RpcError) as raised:
        answer(secure(tls.ca, True))
    assert raised.value.code() == Code.UNAVAILABLE


def test_credentials_that_cannot_be_read(implementation, tls):
    if implementation is grpc:
        pytest.skip("they are its own")
    server = implementation.server(futures.ThreadPoolExecutor(1))
    with pytest.raises(TypeError, match="tonic_rdma.ssl_server_credentials"):
        server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(tls.server_key, tls.server)]))


@pytest.mark.parametrize("by", ["server", "call", "call, one message not"])
def test_compression(serve, connect, by):
    def behavior(request, context):
        if by != "server":
            context.set_compression(grpc.Compression.Gzip)
        yield b"x" * 100_000
        if by.endswith("not"):
            context.disable_next_message_compression()
        yield b"y" * 100_000

    compression = grpc.Compression.Gzip if by == "server" else None
    _, port = serve({"unary_stream": handler("unary_stream", behavior)}, compression=compression)
    assert call(connect(port), "unary_stream", b"") == [b"x" * 100_000, b"y" * 100_000]


def test_messages_too_large(serve, connect):
    options = (("grpc.max_receive_message_length", 1000), ("grpc.max_send_message_length", 2000))
    _, port = serve(
        {"unary_unary": handler("unary_unary", lambda request, context: bytes(int(request[:5])))},
        options=options,
    )
    channel = connect(port)
    assert call(channel, "unary_unary", b"02000") == [bytes(2000)]
    assert failure(channel, "unary_unary", b"02000" + bytes(1000)).code() == Code.RESOURCE_EXHAUSTED
    assert failure(channel, "unary_unary", b"02001").code() == Code.RESOURCE_EXHAUSTED
    assert call(channel, "unary_unary", b"00001") == [b"\0"]


def test_many_calls_at_once(serve, connect):
    _, port = serve(ALL, threads=4)
    channel = connect(port)

    def client(number):
        for i in range(50):
            data = b"%d-%d" % (number, i)
            assert call(channel, "unary_unary", data) == [data]
            assert call(channel, "stream_stream", data, data) == [data, data]
        return number

    with futures.ThreadPoolExecutor(8) as clients:
        assert list(clients.map(client, range(8))) == list(range(8))


def test_generated_code(implementation, connect):
    import echo_pb2
    import echo_pb2_grpc
    import echo_service

    server, port = echo_service.serve(implementation)
    stub = echo_pb2_grpc.EchoStub(connect(port))
    request = echo_pb2.Request(payload=b"p", replies=2)
    assert stub.Unary(request, timeout=30).payload == b"p"
    assert [reply.payload for reply in stub.ServerStream(request, timeout=30)] == [b"p", b"p"]
    assert stub.ClientStream(iter([request] * 3), timeout=30).payload == b"ppp"
    assert [reply.received for reply in stub.Bidi(iter([request] * 3), timeout=30)] == [1, 2, 3]
    server.stop(None)


PROCESS = """
import os, signal, sys, threading, grpc, {module} as module
from concurrent import futures
def behavior(request, context):
    context.add_callback(lambda: None)
    return request
server = module.server(futures.ThreadPoolExecutor(2))
handlers = {{"m": grpc.unary_unary_rpc_method_handler(behavior)}}
server.add_registered_method_handlers("s", handlers)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = module.insecure_channel(f"127.0.0.1:{{port}}")
print(channel.unary_unary("/s/m")(b"x", timeout=30), flush=True)
"""


def run(implementation, *more):
    """What a process does that has a server and has called it, and then runs `more`."""
    script = PROCESS.format(module=implementation.__name__) + "\n".join(more)
    # Newer Pythons warn of any fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    return subprocess.run(command, capture_output=True, timeout=50, text=True)


def test_a_process_that_ends_without_stop(implementation):
    done = run(implementation)
    assert (done.returncode, done.stdout) == (0, "b'x'\n"), done.stderr


def test_ctrl_c_in_a_process_that_waits(implementation):
    done = run(
        implementation,
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()",
        "server.wait_for_termination()",
    )
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr, done.stderr


def test_a_fork_of_a_process_with_a_server(implementation):
    if implementation is grpc:
        pytest.skip("its forks are its own")
    done = run(
        implementation,
        "if os.fork() == 0:",
        "    try:",
        "        module.server().add_insecure_port('127.0.0.1:0')",
        "    except RuntimeError as error:",
        "        print('forked' in str(error))",
        "    sys.exit()",
        "os.wait()",
        "print(channel.unary_unary('/s/m')(b'y', timeout=30))",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'x'\nTrue\nb'y'\n", "")
