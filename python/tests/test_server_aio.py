"""The server for asyncio, called by grpcio's client (HTTP/2) and by ours (natively).

The server runs on an event loop in a thread of its own; the tests call it from theirs.
"""

import asyncio
import contextvars
import functools
import gc
import logging
import threading
import time
from concurrent import futures

import grpc
import pytest
from test_server import (
    ALL,
    KINDS,
    PATH,
    Code,
    Status,
    call,
    connect,
    failure,
    handler,
    pairs,
    raise_unprintable,
)  # noqa: F401


class Loop:
    """An event loop in a thread."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.run_until_complete(self.end())
        self.loop.close()

    async def end(self):
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def serve(implementation, loop):
    """A function that starts a server with handlers by method name, and returns (server, port)."""
    made = []

    def start(handlers, generic=False, **more):
        async def inner():
            server = implementation.aio.server(**more)
            if generic:
                server.add_generic_rpc_handlers(
                    (grpc.method_handlers_generic_handler("test.Service", handlers),)
                )
            else:
                server.add_registered_method_handlers("test.Service", handlers)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            return server, port

        made.append(loop.run(inner()))
        return made[-1]

    yield start
    for server, _ in made:
        loop.run(server.stop(None))


def once(serve, connect, behavior, kind="unary_unary", **more):
    """A server with one method, and a channel to it."""
    _, port = serve({kind: handler(kind, behavior, **more)})
    return connect(port)


async def upper(request, context):
    return request.upper()


async def uppers(request, context):
    for _ in range(3):
        yield request.upper()


async def joined(requests, context):
    return b"".join([request async for request in requests])


async def each(requests, context):
    async for request in requests:
        yield request.upper()


async def write_uppers(request, context):
    for _ in range(3):
        await context.write(request.upper())


async def read_joined(requests, context):
    all_of_it = b""
    while (request := await context.read()) is not grpc.aio.EOF:
        all_of_it += request
    assert await context.read() is grpc.aio.EOF
    return all_of_it


async def read_and_write(requests, context):
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request.upper())


ASYNC = dict(zip(KINDS, map(handler, KINDS, [upper, uppers, joined, each])))
BY_CONTEXT = dict(zip(KINDS, map(handler, KINDS, [upper, write_uppers, read_joined, read_and_write])))


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("handlers", [ASYNC, BY_CONTEXT, ALL], ids=["generators", "context", "threads"])
def test_all_kinds(serve, connect, handlers, generic):
    with futures.ThreadPoolExecutor(4) as pool:
        _, port = serve(handlers, generic, migration_thread_pool=pool)
        channel = connect(port)
        for _ in range(3):
            assert call(channel, "unary_unary", b"a") == [b"A"]
            assert call(channel, "unary_stream", b"a") == [b"A"] * 3
            assert call(channel, "stream_unary", b"a", b"", b"b") == [b"ab"]
            assert call(channel, "stream_unary") == [b""]
            assert call(channel, "stream_stream", b"a", b"", b"b") == [b"A", b"", b"B"]
        large = bytes(range(256)) * 4096
        assert call(channel, "unary_unary", large) == [large.upper()]
        assert call(channel, "stream_stream", *[large] * 5) == [large.upper()] * 5


def test_threads_without_a_pool(serve, connect):
    _, port = serve(ALL)
    assert call(connect(port), "unary_unary", b"a") == [b"A"]


def test_unknown_methods(serve, connect):
    _, port = serve(ASYNC)
    error = failure(connect(port), "unary_unary", b"", method="absent")
    assert (error.code(), error.details()) == (Code.UNIMPLEMENTED, "Method not found!")


def refuse(*_):
    raise ValueError("wrong")


async def refuse_async(request, context):
    refuse()


async def set_and_raise(request, context):
    context.set_code(Code.NOT_FOUND)
    context.set_details("unused")
    refuse()


async def set_and_return_none(request, context):
    context.set_code(Code.NOT_FOUND)
    context.set_details("nothing there")


async def set_number(request, context):
    context.set_code(5)
    return request


async def set_odd_code(request, context):
    context.set_code("odd")
    return request


async def abort(request, context):
    await context.abort(Code.ABORTED, "on purpose", (("key", "value"),))


async def abort_in_spite(request, context):
    context.set_details("before")
    context.set_code(Code.NOT_FOUND)
    await context.abort(Code.ABORTED)


async def abort_and_go_on(request, context):
    for expected in (grpc.aio.AbortError, grpc.aio.UsageError):
        with pytest.raises(expected):
            await context.abort(Code.ABORTED, "on purpose")
    return request


async def yield_and_raise(request, context):
    yield b"1"
    refuse()


async def yield_and_abort(request, context):
    yield b"1"
    await context.abort(Code.ABORTED, "on purpose")


async def wrong_trailing(request, context):
    for wrong in (3, {}, {"key": "value"}, [{"key": "value"}]):
        with pytest.raises(TypeError):
            context.set_trailing_metadata(wrong)
    await context.abort(Code.ABORTED, "unused", {"key": "value"})


async def initial_twice(request, context):
    await context.send_initial_metadata(())
    await context.send_initial_metadata(())


async def compression_too_late(request, context):
    await context.send_initial_metadata(())
    context.set_compression(grpc.Compression.Gzip)


WRONG = "Unexpected <class 'ValueError'>: wrong"


@pytest.mark.parametrize(
    ("kind", "behavior", "more", "code", "details"),
    [
        ("unary_unary", refuse_async, {}, Code.UNKNOWN, WRONG),
        ("unary_stream", refuse_async, {}, Code.UNKNOWN, WRONG),
        ("unary_stream", yield_and_raise, {}, Code.UNKNOWN, WRONG),
        ("unary_unary", set_and_raise, {}, Code.NOT_FOUND, WRONG),
        ("unary_unary", set_and_return_none, {}, Code.NOT_FOUND, "nothing there"),
        ("unary_unary", set_number, {}, Code.NOT_FOUND, ""),
        ("unary_unary", set_odd_code, {}, Code.UNKNOWN, ""),
        ("unary_unary", abort, {}, Code.ABORTED, "on purpose"),
        ("unary_unary", abort_in_spite, {}, Code.ABORTED, "before"),
        ("unary_unary", abort_and_go_on, {}, Code.ABORTED, "on purpose"),
        ("unary_stream", yield_and_abort, {}, Code.ABORTED, "on purpose"),
        ("unary_unary", upper, {"response_serializer": refuse}, Code.UNKNOWN, WRONG),
        ("unary_stream", uppers, {"response_serializer": refuse}, Code.UNKNOWN, WRONG),
        ("unary_unary", upper, {"request_deserializer": refuse}, Code.UNKNOWN, WRONG),
        ("stream_unary", joined, {"request_deserializer": refuse}, Code.UNKNOWN, WRONG),
        ("unary_unary", wrong_trailing, {}, Code.UNKNOWN, None),
        ("unary_unary", initial_twice, {}, Code.UNKNOWN, None),
        ("unary_unary", compression_too_late, {}, Code.UNKNOWN, None),
    ],
)
def test_errors_of_handlers(serve, connect, kind, behavior, more, code, details):
    channel = once(serve, connect, behavior, kind, **more)
    for _ in range(2):
        error = failure(channel, kind, b"a")
        assert error.code() == code
        assert details is None or error.details() == details


def test_errors_of_handlers_in_threads(serve, connect):
    error = failure(once(serve, connect, refuse), "unary_unary", b"a")
    assert error.code() == Code.UNKNOWN and error.details().endswith(": wrong")
    error = failure(
        once(serve, connect, lambda _, context: context.abort(Code.ABORTED, "no")), "unary_unary", b"a"
    )
    assert (error.code(), error.details()) == (Code.ABORTED, "no")


def test_what_no_handler_should_do(implementation, serve, connect):
    if implementation is grpc:
        pytest.skip("there these calls hang")

    async def abort_ok(request, context):
        await context.abort(Code.OK)

    async def cancelled(request, context):
        raise asyncio.CancelledError

    async def unprintable(request, context):
        raise_unprintable(request, context)

    for behavior in (abort_ok, unprintable):
        assert failure(once(serve, connect, behavior), "unary_unary", b"").code() == Code.UNKNOWN
    assert failure(once(serve, connect, cancelled), "unary_unary", b"").code() == Code.CANCELLED


def test_metadata(serve, connect):
    seen = {}

    async def behavior(request, context):
        seen["all"] = context.invocation_metadata()
        await context.send_initial_metadata((("initial", "1"), ("initial-bin", b"\x00\xff")))
        context.set_trailing_metadata((("replaced", "1"),))
        context.set_trailing_metadata([("trailing", "2"), ("trailing-bin", b"\x01")])
        seen["trailing"] = context.trailing_metadata()
        return request

    channel = once(serve, connect, behavior)
    sent = (("key", "a"), ("key", "b"), ("key-bin", b"\x80\x00"))
    _, result = channel.unary_unary(PATH + "unary_unary").with_call(b"", timeout=30, metadata=sent)
    assert [(pair.key, pair.value) for pair in seen["all"] if pair.key.startswith("key")] == list(sent)
    assert seen["trailing"] == (("trailing", "2"), ("trailing-bin", b"\x01"))
    assert pairs(result.initial_metadata()) == [("initial", "1"), ("initial-bin", b"\x00\xff")]
    assert pairs(result.trailing_metadata()) == [("trailing", "2"), ("trailing-bin", b"\x01")]


def test_metadata_of_an_abort(serve, connect):
    error = failure(once(serve, connect, abort), "unary_unary", b"")
    assert pairs(error.trailing_metadata()) == [("key", "value")]


def test_abort_with_status(serve, connect):
    async def behavior(request, context):
        await context.abort_with_status(Status())

    error = failure(once(serve, connect, behavior), "unary_unary", b"")
    assert (error.code(), error.details()) == (Code.DATA_LOSS, "lost")
    assert pairs(error.trailing_metadata()) == list(Status.trailing_metadata)


def test_what_a_context_says(serve, connect):
    seen = {}

    async def behavior(request, context):
        seen.update(remaining=context.time_remaining(), peer=context.peer(), done=context.done())
        seen.update(
            identities=context.peer_identities(), key=context.peer_identity_key(), auth=context.auth_context()
        )
        seen["status"] = context.code(), context.details(), context.trailing_metadata(), context.cancelled()
        context.set_code(Code.OK)
        context.set_details("fine")
        seen["status then"] = context.code(), context.details()
        return request

    channel = once(serve, connect, behavior)
    call(channel, "unary_unary", b"")
    assert 0 < seen["remaining"] < 31
    assert seen["peer"].startswith("ipv4:127.0.0.1:")
    assert seen["done"] is False
    assert seen["identities"] is None and seen["key"] is None
    assert seen["auth"]["transport_security_type"] == [b"insecure"]
    assert seen["status"] == (None, "", (), False)
    assert seen["status then"] == (Code.OK, "fine")


def test_done_callbacks(serve, connect):
    done = futures.Future()

    async def behavior(request, context):
        context.add_done_callback(
            lambda given: done.set_result((given is context, given.done(), given.cancelled()))
        )
        return request

    assert call(once(serve, connect, behavior), "unary_unary", b"") == [b""]
    assert done.result(30) == (True, True, False)


def test_no_deadline(serve, connect):
    async def behavior(request, context):
        return repr(context.time_remaining()).encode()

    def in_thread(request, context):
        return repr(context.time_remaining()).encode()

    for one in (behavior, in_thread):
        assert once(serve, connect, one).unary_unary(PATH + "unary_unary")(b"") == b"None"


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
@pytest.mark.parametrize("where", ["sleep", "read", "write"])
def test_calls_that_the_client_ends(implementation, serve, connect, where, end):
    if implementation is grpc and where == "read":
        pytest.skip("there the requests seem to have come to their end")
    began, over, done = threading.Event(), futures.Future(), threading.Event()

    async def behavior(requests, context):
        context.add_done_callback(lambda _: done.set())
        try:
            assert await context.read() == b"1"
            began.set()
            while True:
                if where == "sleep":
                    await asyncio.sleep(60)
                elif where == "read":
                    over.set_result(type(await context.read()))
                else:
                    await context.write(b"x" * 100_000)
        except BaseException as error:
            over.set_result(type(error))
            raise

    channel = once(serve, connect, behavior, "stream_stream")
    stop = threading.Event()

    def requests():
        yield b"1"
        stop.wait(30)

    call = channel.stream_stream(PATH + "stream_stream")(requests(), timeout=0.5 if end == "deadline" else 30)
    assert began.wait(30)
    if end != "deadline":
        (call.cancel if end == "cancel" else channel.close)()
    # A write by grpcio may find out by an error of its own.
    assert issubclass(over.result(30), (asyncio.CancelledError, grpc.aio.BaseError))
    assert done.wait(30)
    stop.set()


def test_a_generator_is_closed_after_a_cancellation(serve, connect):
    closed = threading.Event()

    async def behavior(request, context):
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


def test_a_read_that_is_given_up_loses_no_request(implementation, serve, connect):
    if implementation is grpc:
        pytest.skip("there it does")
    gave_up = threading.Event()

    async def behavior(requests, context):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(context.read(), 0.05)
        gave_up.set()
        return await context.read()

    def requests():
        assert gave_up.wait(30)
        yield b"1"

    channel = once(serve, connect, behavior, "stream_unary")
    assert channel.stream_unary(PATH + "stream_unary")(requests(), timeout=30) == b"1"


variable = contextvars.ContextVar("variable", default="none")


class Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, name, log):
        self.name, self.log = name, log

    async def intercept_service(self, continuation, details):
        self.log.append((self.name, details.method, dict(details.invocation_metadata).get("key")))
        variable.set(variable.get() + self.name)
        await asyncio.sleep(0)
        return await continuation(details)


@pytest.mark.parametrize("kind", ["coroutine", "coroutine without interceptors"])
def test_interceptors_and_variables(serve, connect, kind):
    log = []

    async def behavior(request, context):
        seen = variable.get()
        variable.set("of a call before")
        return seen.encode()

    more = (
        {} if kind.endswith("without interceptors") else {"interceptors": [Interceptor(n, log) for n in "12"]}
    )
    _, port = serve({"unary_unary": handler("unary_unary", behavior)}, **more)
    channel = connect(port)
    for _ in range(5):
        expected = b"none12" if more else b"none"
        assert call(channel, "unary_unary", b"", metadata=(("key", "v"),)) == [expected]
    assert not more or log == [("1", PATH + "unary_unary", "v"), ("2", PATH + "unary_unary", "v")] * 5


class Other(grpc.aio.ServerInterceptor):
    def __init__(self, then):
        self.then = then

    async def intercept_service(self, continuation, details):
        return self.then(continuation, details)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda continuation, details: handler("unary_unary", abort), (Code.ABORTED, "on purpose")),
        (lambda continuation, details: None, (Code.UNIMPLEMENTED, "Method not found!")),
        (refuse, (Code.UNKNOWN, WRONG)),
    ],
)
def test_interceptors_that_decide(serve, connect, then, expected):
    _, port = serve(ASYNC, interceptors=[Other(then)])
    error = failure(connect(port), "unary_unary", b"")
    assert (error.code(), error.details()) == expected


def test_the_maximum_of_concurrent_calls(serve, connect, loop):
    began = threading.Semaphore(0)
    gate = loop.run(_make(asyncio.Event))

    async def behavior(request, context):
        began.release()
        await gate.wait()
        return request

    _, port = serve({"unary_unary": handler("unary_unary", behavior)}, maximum_concurrent_rpcs=2)
    channel = connect(port)
    stub = channel.unary_unary(PATH + "unary_unary")
    calls = [stub.future(b"", timeout=30) for i in range(2)]
    for _ in range(2):
        assert began.acquire(timeout=30)
    error = failure(channel, "unary_unary", b"")
    assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    loop.loop.call_soon_threadsafe(gate.set)
    assert [one.result(30) for one in calls] == [b"", b""]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # a call may count until after its response has arrived
        try:
            assert call(channel, "unary_unary", b"a") == [b"a"]
            break
        except grpc.RpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED


async def _make(what):
    return what()


def test_the_end_with_calls_in_flight(serve, connect, loop):
    began = threading.Event()
    gate = loop.run(_make(asyncio.Event))

    async def behavior(request, context):
        began.set()
        await gate.wait()
        return request

    server, port = serve({"unary_unary": handler("unary_unary", behavior)})
    one = connect(port).unary_unary(PATH + "unary_unary").future(b"1", timeout=30)
    assert began.wait(30)
    stopped = asyncio.run_coroutine_threadsafe(server.stop(60), loop.loop)
    assert loop.run(server.wait_for_termination(0.05)) is True
    assert not stopped.done()
    loop.loop.call_soon_threadsafe(gate.set)
    assert one.result(30) == b"1"
    stopped.result(30)
    assert loop.run(server.wait_for_termination(30)) is False
    assert failure(connect(port), "unary_unary", b"").code() == Code.UNAVAILABLE
    loop.run(server.stop(None))


@pytest.mark.parametrize("grace", [None, 0.1])
def test_the_end_of_a_call_that_does_not_end(serve, connect, loop, grace):
    began, over = threading.Event(), futures.Future()

    async def behavior(request, context):
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            over.set_result("cancelled")
            raise

    server, port = serve({"unary_unary": handler("unary_unary", behavior)})
    one = connect(port).unary_unary(PATH + "unary_unary").future(b"", timeout=30)
    assert began.wait(30)
    loop.run(server.stop(grace))
    with pytest.raises(grpc.RpcError) as raised:
        one.result(30)
    assert raised.value.code() in (Code.UNAVAILABLE, Code.CANCELLED)
    assert over.result(30) == "cancelled"


def test_starts_and_ends_out_of_order(implementation, loop):
    async def inner():
        server = implementation.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.stop(None)
        assert await server.wait_for_termination(0.01) is True
        await server.start()
        await server.start()
        await asyncio.gather(server.stop(None), server.stop(1))
        assert await server.wait_for_termination() is False
        with pytest.raises(grpc.aio.UsageError):
            await server.start()

    loop.run(inner())


def test_a_server_that_is_dropped_stops(implementation, loop, connect):
    async def inner():
        server = implementation.aio.server()
        server.add_registered_method_handlers("test.Service", ASYNC)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return port

    port = loop.run(inner())
    gc.collect()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            call(connect(port), "unary_unary", b"a")
        except grpc.RpcError as error:
            assert error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
            return
    raise AssertionError("it still serves")


def test_wrong_arguments(implementation, loop):
    async def inner():
        for wrong in ({"maximum_concurrent_rpcs": 0}, {"interceptors": [3]}):
            with pytest.raises(ValueError):
                implementation.aio.server(**wrong)
        server = implementation.aio.server()
        assert isinstance(server, grpc.aio.Server)
        with pytest.raises(RuntimeError, match="Failed to bind to address"):
            server.add_insecure_port("nosuch.invalid:1")

    loop.run(inner())


def test_tls(implementation, loop, tls, connect):
    async def behavior(request, context):
        assert context.auth_context()["transport_security_type"] == [b"ssl"]
        return context.peer_identity_key().encode() + b" " + b" ".join(context.peer_identities())

    async def inner():
        server = implementation.aio.server()
        server.add_registered_method_handlers("test.Service", {"unary_unary": handler("unary_unary", behavior)})
        credentials = implementation.ssl_server_credentials([(tls.server_key, tls.server)], tls.ca, True)
        port = server.add_secure_port("localhost:0", credentials)
        await server.start()
        return server, port

    server, port = loop.run(inner())
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.client_key, tls.client)
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        assert call(channel, "unary_unary", b"") == [b"x509_subject_alternative_name client.example"]
    loop.run(server.stop(None))


@pytest.mark.parametrize("by", ["server", "call", "call, one message not"])
def test_compression(serve, connect, by):
    async def behavior(request, context):
        if by != "server":
            context.set_compression(grpc.Compression.Gzip)
        yield b"x" * 100_000
        if by.endswith("not"):
            context.disable_next_message_compression()
        yield b"y" * 100_000

    compression = grpc.Compression.Gzip if by == "server" else None
    _, port = serve({"unary_stream": handler("unary_stream", behavior)}, compression=compression)
    assert call(connect(port), "unary_stream", b"") == [b"x" * 100_000, b"y" * 100_000]


def test_partial_functions_are_asynchronous_too(serve, connect):
    async def behavior(more, request, context):
        return request + more

    channel = once(serve, connect, functools.partial(behavior, b"!"))
    assert call(channel, "unary_unary", b"a") == [b"a!"]


def test_many_calls_at_once(serve, connect):
    _, port = serve(ASYNC)
    channel = connect(port)

    def client(number):
        for i in range(50):
            data = b"%d-%d" % (number, i)
            assert call(channel, "unary_unary", data) == [data]
            assert call(channel, "stream_stream", data, data) == [data, data]
        return number

    with futures.ThreadPoolExecutor(8) as clients:
        assert list(clients.map(client, range(8))) == list(range(8))


def test_loops_one_after_another(implementation, connect):
    async def inner():
        server = implementation.aio.server()
        server.add_registered_method_handlers("test.Service", ASYNC)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(None, call, connect(port), "unary_unary", b"a")
        await server.stop(None)
        return answer

    for _ in range(3):
        assert asyncio.run(inner()) == [b"A"]


def test_generated_code(implementation, serve, connect, loop):
    import echo_pb2
    import echo_pb2_grpc
    import echo_service

    async def inner():
        server = implementation.aio.server()
        echo_pb2_grpc.add_EchoServicer_to_server(echo_service.AioEcho(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = loop.run(inner())
    stub = echo_pb2_grpc.EchoStub(connect(port))
    request = echo_pb2.Request(payload=b"p", replies=2)
    assert stub.Unary(request, timeout=30).payload == b"p"
    assert [reply.payload for reply in stub.ServerStream(request, timeout=30)] == [b"p", b"p"]
    assert stub.ClientStream(iter([request] * 3), timeout=30).payload == b"ppp"
    assert [reply.received for reply in stub.Bidi(iter([request] * 3), timeout=30)] == [1, 2, 3]
    loop.run(server.stop(None))


def test_a_context_ends_with_its_call(implementation, serve, connect):
    """Without the collector of cycles: a context in a cycle keeps its call's messages until that runs."""
    if implementation is grpc:
        pytest.skip("its contexts are its own")
    from tonic_rdma import _handlers

    def in_thread(request, context):
        context.add_callback(lambda: None)
        context.abort(Code.ABORTED, "on purpose") if request == b"abort" else refuse()

    async def on_loop(request, context):
        context.add_done_callback(lambda _: None)
        await context.abort(Code.ABORTED, "on purpose") if request == b"abort" else refuse()

    behaviors = {"in_thread": in_thread, "on_loop": on_loop}
    handlers = {name: handler("unary_unary", behavior) for name, behavior in behaviors.items()}
    _, port = serve(handlers | {"streams": handler("stream_stream", each), "threads": ALL["stream_stream"]})
    channel = connect(port)

    def contexts():
        return [each for each in gc.get_objects() if isinstance(each, _handlers.Peer)]

    gc.collect()
    gc.disable()
    logging.disable()  # records that pytest keeps hold exceptions, and so frames
    try:
        for method in behaviors:
            for request in (b"abort", b"raise"):
                failure(channel, "unary_unary", request, method=method)
        for method in ("streams", "threads"):
            responses = channel.stream_stream(PATH + method)(iter([b"a"] * 100), timeout=30)
            assert next(responses) == b"A"
            responses.cancel()
        deadline = time.monotonic() + 30
        while contexts() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert contexts() == []
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
