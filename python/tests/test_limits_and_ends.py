"""Limits that are none or are reached, and ends that come early: of writes, of calls, of channels, of servers.

No test depends on the machine's speed: what has to happen is waited for, for up to LIMIT seconds.
"""

import asyncio
import gc
import os
import queue
import socket
import struct
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
from test_process import run

import tonic_rdma

pytestmark = pytest.mark.timeout(60)
LIMIT = 40  # seconds
PATH = "/s/m"
Code = grpc.StatusCode
Gzip = grpc.Compression.Gzip
NO_LIMIT = [("grpc.max_receive_message_length", -1)]
TOO_MUCH_METADATA = [(f"k{i}", "v") for i in range(33000)]


def handlers(kind, behavior):
    made = getattr(grpc, f"{kind}_rpc_method_handler")(behavior)
    return (grpc.method_handlers_generic_handler("s", {"m": made}),)


def until(condition):
    """Waits until `condition()`. Returns whether that came."""
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def serve():
    """A function that starts a server with one method, and returns its address."""
    made = []

    def start(kind, behavior, module=tonic_rdma, threads=8, **more):
        pool = futures.ThreadPoolExecutor(threads)
        server = module.server(pool, handlers=handlers(kind, behavior), **more)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        made.append((server, pool))
        return address

    yield start
    for server, pool in made:
        server.stop(0)
        pool.shutdown(wait=False)


@pytest.fixture
def connect():
    """A function that makes a channel."""
    made = []

    def make(address, module=tonic_rdma, **more):
        made.append(module.insecure_channel(address, **more))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


@pytest.fixture
def gate():
    """An event that is set at the end of the test, so that no handler waits longer."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("compression", [Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("client, server", [(tonic_rdma, tonic_rdma), (grpc, tonic_rdma), (tonic_rdma, grpc)])
def test_compressed_messages_are_whole_without_a_limit(serve, connect, client, server, compression):
    def repeated(request, context):
        context.set_compression(compression)
        return request * 5

    address = serve("unary_unary", repeated, server, options=NO_LIMIT)
    request = os.urandom(500) + bytes(500)
    call = connect(address, client, options=NO_LIMIT).unary_unary(PATH)
    assert call(request, compression=compression, timeout=LIMIT) == request * 5


@pytest.mark.asyncio
async def test_a_write_that_waits_is_sent_before_the_end_of_the_requests(serve, gate):
    def total(requests, context):
        gate.wait(LIMIT)
        return b"%d" % sum(len(request) for request in requests)

    address = serve("stream_unary", total)
    async with tonic_rdma.aio.insecure_channel(address) as channel:
        call = channel.stream_unary(PATH)(timeout=LIMIT)
        # The handler takes nothing, so there is no room after some writes.
        for count in range(1, 3000):
            write = asyncio.create_task(call.write(bytes(100_000)))
            done, _ = await asyncio.wait({write}, timeout=0.2)
            if not done:
                break
        assert not write.done()
        end = asyncio.create_task(call.done_writing())
        await asyncio.sleep(0)
        gate.set()
        await write
        await end
        assert await call == b"%d" % (count * 100_000)
        assert await call.code() == Code.OK


def frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header that HPACK keeps in no table."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


HEADERS = b"\x83\x86" + b"".join(  # POST, http
    literal(name, value)
    for name, value in [
        (b":path", PATH.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
)
DATA, HEAD, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
NO_ERROR, CANCEL = 0, 8


@pytest.mark.parametrize("reason", [NO_ERROR, CANCEL, None], ids=["NO_ERROR", "CANCEL", "no reset"])
def test_requests_that_a_reset_cuts_are_not_complete(serve, reason):
    arrived, ends = queue.Queue(), queue.Queue()

    def count(requests, context):
        try:
            arrived.put(next(requests))
            ends.put(f"complete, {len(list(requests))} more")
        except BaseException:
            ends.put("cut")
            raise
        return b""

    host, port = serve("stream_unary", count).split(":")
    calls = 100
    with socket.create_connection((host, int(port)), LIMIT) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        for stream in range(1, 2 * calls, 2):
            client.sendall(frame(HEAD, END_HEADERS, stream, HEADERS) + frame(DATA, 0, stream, b"\0\0\0\0\1a"))
            assert arrived.get(timeout=LIMIT) == b"a"
            if reason is None:
                client.sendall(frame(DATA, END_STREAM, stream))
            else:
                client.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", reason)))
        seen = {ends.get(timeout=LIMIT) for _ in range(calls)}
    assert seen == {"complete, 0 more" if reason is None else "cut"}


def sockets():
    """How many sockets this process has."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:  # the one that listed the folder
            pass
    return count


def test_close_closes_the_connections(server_process):
    address = server_process("tonic_rdma").address

    def use(count):
        channels = [tonic_rdma.insecure_channel(address) for _ in range(count)]
        for channel in channels:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(PATH)(b"", timeout=LIMIT)
            assert raised.value.code() == Code.UNIMPLEMENTED
        return channels

    # What the first connection makes for the process may stay.
    for channel in use(1):
        channel.close()
    gc.collect()
    before = sockets()
    channels = use(5)
    assert sockets() >= before + 4  # that of the first channel may still have been counted
    for channel in channels:
        channel.close()
    assert until(lambda: sockets() <= before), (sockets(), before)


@pytest.mark.parametrize("client", [tonic_rdma, grpc])
def test_the_bound_for_calls_counts_those_whose_client_gave_up(serve, connect, gate, client):
    started, gone = threading.Semaphore(0), threading.Semaphore(0)

    def hold(request, context):
        context.add_callback(gone.release)
        started.release()
        gate.wait(LIMIT)
        return b""

    # Two of the calls run, two wait for a thread.
    call = connect(serve("unary_unary", hold, threads=2, maximum_concurrent_rpcs=4), client).unary_unary(PATH)
    ended = queue.Queue()
    calls = [call.future(b"", timeout=LIMIT) for _ in range(5)]
    for one in calls:
        one.add_done_callback(ended.put)
    assert ended.get(timeout=LIMIT).code() == Code.RESOURCE_EXHAUSTED
    for _ in range(2):
        assert started.acquire(timeout=LIMIT)
    for one in calls:
        one.cancel()
    for _ in range(2):
        assert gone.acquire(timeout=LIMIT)
    for _ in range(10):
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=20)
        assert raised.value.code() == Code.RESOURCE_EXHAUSTED
    gate.set()

    def is_served():
        try:
            return call(b"", timeout=20) == b""
        except grpc.RpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED
            return False

    assert until(is_served)


def greet(requests, context):
    """A handler that sends initial metadata before it takes requests."""
    context.send_initial_metadata((("greeting", "hello"),))
    return b"%d" % len(list(requests))


def test_initial_metadata_arrives_before_the_requests_end(serve, connect):
    greeted = threading.Event()

    def requests():
        greeted.wait(LIMIT)
        yield b""

    future = connect(serve("stream_unary", greet)).stream_unary(PATH).future(requests(), timeout=20)
    try:
        assert ("greeting", "hello") in [tuple(pair) for pair in future.initial_metadata()]
    finally:
        greeted.set()
    assert future.result() == b"1"


@pytest.mark.asyncio
async def test_initial_metadata_arrives_before_the_requests_end_aio(serve):
    async with tonic_rdma.aio.insecure_channel(serve("stream_unary", greet)) as channel:
        call = channel.stream_unary(PATH)(timeout=20)
        assert ("greeting", "hello") in [tuple(pair) for pair in await call.initial_metadata()]
        await call.write(b"")
        await call.done_writing()
        assert await call == b"1"


@pytest.mark.parametrize("client", [tonic_rdma, grpc])
@pytest.mark.parametrize("first", ["message", "initial metadata"])
def test_set_compression_has_no_effect_once_the_response_has_begun(serve, connect, client, first):
    def respond(request, context):
        if first == "message":
            yield b"a" * 100
        else:
            context.send_initial_metadata(())
        context.set_compression(Gzip)
        yield b"b" * 100
        yield b"c" * 100

    responses = connect(serve("unary_stream", respond), client).unary_stream(PATH)(b"", timeout=LIMIT)
    received = list(responses)
    assert received == [letter * 100 for letter in (b"a", b"b", b"c")][first != "message" :]
    assert "grpc-encoding" not in dict(responses.initial_metadata())


def test_a_callback_that_exits_stops_no_later_callback(serve, connect, gate, monkeypatch):
    def hold(request, context):
        gate.wait(LIMIT)
        return request

    # Callbacks of calls under way run in the thread of all callbacks.
    address = serve("unary_unary", hold)
    raised, ran = queue.Queue(), threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.put(unraisable.exc_type))
    connect(address).unary_unary(PATH).future(b"", timeout=LIMIT).add_done_callback(lambda _: sys.exit(1))
    gate.set()
    assert raised.get(timeout=LIMIT) is SystemExit
    gate.clear()
    connect(address).unary_unary(PATH).future(b"", timeout=LIMIT).add_done_callback(lambda _: ran.set())
    gate.set()
    assert ran.wait(LIMIT)


@pytest.mark.parametrize("end", ["del server; gc.collect(); os._exit(0)", "sys.exit(0)"])
def test_a_fork_that_drops_a_bound_server_leaves_the_parents_alone(end):
    setup = "import gc, os, sys, grpc, tonic_rdma"
    output = run(f"""
        echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
        server = tonic_rdma.server(handlers=[grpc.method_handlers_generic_handler("s", {{"m": echo}})])
        port = server.add_insecure_port("127.0.0.1:0")
        child = os.fork()
        if child == 0:
            {end}
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        server.start()
        channel = tonic_rdma.insecure_channel(f"127.0.0.1:{{port}}")
        print(status, channel.unary_unary("/s/m")(b"x", timeout={LIMIT}))
        channel.close()
        server.stop(None)
    """, setup)
    assert output == "0 b'x'\n"


@pytest.mark.asyncio
async def test_waits_for_termination_that_time_out_leave_nothing_behind():
    server = tonic_rdma.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await server.wait_for_termination(1e-5)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(2000):
            assert await server.wait_for_termination(1e-5)
        # Without the end of each wait there would be three objects of each.
        end = time.monotonic() + LIMIT
        while len(gc.get_objects()) > before + 1000 and time.monotonic() < end:
            await asyncio.sleep(0.01)
            gc.collect()
        assert len(gc.get_objects()) <= before + 1000
    finally:
        await server.stop(None)
    assert not await server.wait_for_termination(LIMIT)


def test_other_threads_run_during_a_compression():
    # Bound and not started: a call to it waits for the connection, and its requests are queued.
    server = tonic_rdma.server()
    port = server.add_insecure_port("127.0.0.1:0")
    channel = tonic_rdma._native.Channel([f"127.0.0.1:{port}"])
    method = channel.method(PATH)
    steps, stop = 0, False

    def step():
        nonlocal steps
        while not stop:
            steps += 1
            time.sleep(0)  # gives the interpreter's lock away

    def steps_during(message, compression):
        call = method.start(None, True, None, None, True, compression)
        before = steps
        assert call.send_now(message)
        during = steps - before
        call.cancel()
        return during

    thread = threading.Thread(target=step)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        # Now a thread gives the lock away only where it waits, or where native code releases it.
        sys.setswitchinterval(1000)
        time.sleep(0.05)
        message = os.urandom(1 << 20)
        assert min(steps_during(message, 0) for _ in range(5)) == 0
        # One compression may be over before the kernel runs the other thread.
        assert any(steps_during(message, int(Gzip)) > 0 for _ in range(100))
    finally:
        sys.setswitchinterval(interval)
        stop = True
        thread.join()
        channel.close()
        server.stop(None)


def test_too_much_metadata_is_a_value_error(serve, connect):
    def answer(request, context):
        if request == b"initial":
            try:
                context.send_initial_metadata(TOO_MUCH_METADATA)
            except ValueError:
                return b"ValueError"
        return request

    channel = connect(serve("unary_unary", answer))
    call = channel.unary_unary(PATH)
    for make in (call, call.with_call, call.future, channel.unary_stream(PATH)):
        with pytest.raises(ValueError):
            make(b"", metadata=TOO_MUCH_METADATA, timeout=LIMIT)
    assert call(b"x", timeout=LIMIT) == b"x"
    assert call(b"initial", timeout=LIMIT) == b"ValueError"


@pytest.mark.asyncio
async def test_too_much_metadata_is_a_value_error_aio(serve):
    address = serve("unary_unary", lambda request, context: request)
    async with tonic_rdma.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(PATH)
        with pytest.raises(ValueError):
            await call(b"", metadata=TOO_MUCH_METADATA, timeout=LIMIT)
        assert await call(b"x", timeout=LIMIT) == b"x"


def test_a_server_that_has_started_takes_no_port(serve, connect):
    server = tonic_rdma.server(handlers=handlers("unary_unary", lambda request, context: request))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(RuntimeError):
        server.add_insecure_port("127.0.0.1:0")
    assert connect(f"127.0.0.1:{port}").unary_unary(PATH)(b"x", timeout=LIMIT) == b"x"
    server.stop(None)
    with pytest.raises(RuntimeError):
        server.add_insecure_port("127.0.0.1:0")


@pytest.mark.asyncio
async def test_a_server_that_has_started_takes_no_port_aio():
    server = tonic_rdma.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(RuntimeError):
        server.add_insecure_port("127.0.0.1:0")
    await server.stop(None)


def test_stop_frees_the_port_of_a_server_that_never_started():
    server, other = tonic_rdma.server(), tonic_rdma.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    with pytest.raises(RuntimeError):
        other.add_insecure_port(address)
    server.stop(None)
    assert address.endswith(f":{other.add_insecure_port(address)}")
    other.stop(None)


def test_a_certificate_that_is_none_is_a_value_error():
    server = tonic_rdma.server()
    with pytest.raises(ValueError):
        server.add_secure_port("127.0.0.1:0", tonic_rdma.ssl_server_credentials([(b"bad", b"bad")]))
    server.stop(None)
