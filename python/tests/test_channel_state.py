"""Channels: their state, waiting for servers, closing, what carries them, interceptors."""

import contextlib
import gc
import os
import threading
import time
import weakref

import echo_pb2
import echo_pb2_grpc
import echo_service
import grpc
import pytest

Request = echo_pb2.Request
State = grpc.ChannelConnectivity


def free_address():
    """An address where nobody listens, and where a server can listen later."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return "127.0.0.1:%d" % listener.getsockname()[1]


class States:
    """Collects the states that a subscriber is told."""

    def __init__(self):
        self.told = []
        self.news = threading.Condition()

    def __call__(self, state):
        with self.news:
            self.told.append(state)
            self.news.notify_all()

    def wait_for(self, state, seconds=30):
        with self.news:
            assert self.news.wait_for(lambda: state in self.told, seconds), self.told


def test_subscribe(implementation, echo_address):
    states = States()
    with implementation.insecure_channel(echo_address) as channel:
        channel.subscribe(states)
        states.wait_for(State.IDLE)
        echo_pb2_grpc.EchoStub(channel).Unary(Request())
        states.wait_for(State.READY)
        late = States()
        channel.subscribe(late)
        late.wait_for(State.READY)
        for one in (states, late):
            assert all(first is not second for first, second in zip(one.told, one.told[1:]))


def test_subscribe_connects(implementation, echo_address):
    states = States()
    with implementation.insecure_channel(echo_address) as channel:
        channel.subscribe(states, try_to_connect=True)
        states.wait_for(State.READY)


def test_a_server_that_is_away(implementation):
    states = States()
    with implementation.insecure_channel(free_address()) as channel:
        channel.subscribe(states, try_to_connect=True)
        states.wait_for(State.TRANSIENT_FAILURE)


def test_unsubscribe(implementation, echo_address):
    first, second = States(), States()
    with implementation.insecure_channel(echo_address) as channel:
        channel.subscribe(first)
        first.wait_for(State.IDLE)
        channel.unsubscribe(first)
        channel.unsubscribe(first)  # does nothing
        channel.subscribe(second, try_to_connect=True)
        second.wait_for(State.READY)
        assert first.told == [State.IDLE]


def test_a_subscriber_that_raises(implementation, echo_address, caplog):
    def raises(state):
        raise ValueError("from a subscriber")

    states = States()
    with implementation.insecure_channel(echo_address) as channel:
        channel.subscribe(raises)
        channel.subscribe(states, try_to_connect=True)
        states.wait_for(State.READY)
    assert "from a subscriber" in caplog.text


def test_channel_ready_future(implementation, echo_address):
    with implementation.insecure_channel(echo_address) as channel:
        future = grpc.channel_ready_future(channel)
        assert future.result(timeout=30) is None
        assert future.done() and not future.cancelled()


def test_channel_ready_future_of_a_server_that_is_away(implementation):
    with implementation.insecure_channel(free_address()) as channel:
        future = grpc.channel_ready_future(channel)
        with pytest.raises(grpc.FutureTimeoutError):
            future.result(timeout=0.2)
        assert future.cancel() and future.cancelled()


def test_wait_for_ready(implementation):
    address = free_address()
    with implementation.insecure_channel(address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        with pytest.raises(grpc.RpcError) as info:
            stub.Unary(Request(), timeout=0.5, wait_for_ready=True)
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        calls = [
            stub.Unary.future(Request(), wait_for_ready=True),
            stub.ClientStream.future(iter([Request()]), wait_for_ready=True),
        ]
        streams = [
            stub.ServerStream(Request(replies=1), wait_for_ready=True),
            stub.Bidi(iter([Request()]), wait_for_ready=True),
        ]
        server, _ = echo_service.serve(grpc, address)
        try:
            assert [call.result(timeout=40).received for call in calls] == [1, 1]
            assert [next(stream).received for stream in streams] == [1, 1]
        finally:
            server.stop(None)


def test_a_channel_finds_its_server_again(implementation, server_process):
    server = server_process("grpcio")
    with implementation.insecure_channel(server.address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(Request()).received == 1
        server.kill()
        with pytest.raises(grpc.RpcError) as info:
            stub.Unary(Request())
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
        server_process("grpcio", server.address)
        assert stub.Unary(Request(), wait_for_ready=True, timeout=40).received == 1


def test_calls_in_flight_when_the_server_is_killed(implementation, server_process):
    server = server_process("grpcio")
    with implementation.insecure_channel(server.address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        stream = stub.ServerStream(Request(replies=2), metadata=(("initial-a", "b"),))
        next(stream)
        calls = [stub.Unary.future(Request(delay=60)), stub.ServerStream(Request(delay=60, replies=1))]
        stub.Unary(Request())
        server.kill()
        for call in calls:
            assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_close(implementation, echo_address):
    channel = implementation.insecure_channel(echo_address)
    stub = echo_pb2_grpc.EchoStub(channel)
    future = stub.Unary.future(Request(delay=60))
    stream = stub.ServerStream(Request(delay=60, replies=1))
    channel.close()
    for call in (future, stream):
        assert call.code() is grpc.StatusCode.CANCELLED
        assert call.details() == "Channel closed!"
        assert not call.cancelled()  # nobody cancelled it
        with pytest.raises(grpc.RpcError):
            call.result()
    for invoke in (
        lambda: stub.Unary(Request()),
        lambda: stub.Unary.with_call(Request()),
        lambda: stub.Unary.future(Request()),
        lambda: stub.ServerStream(Request()),
        lambda: stub.ClientStream(iter([])),
        lambda: stub.Bidi(iter([])),
    ):
        with pytest.raises(ValueError, match="Channel closed|closed channel"):
            invoke()
    channel.close()


def test_context_manager(implementation, echo_address):
    with pytest.raises(KeyError):
        with implementation.insecure_channel(echo_address) as channel:
            future = echo_pb2_grpc.EchoStub(channel).Unary.future(Request(delay=60))
            raise KeyError
    assert future.code() is grpc.StatusCode.CANCELLED


def test_a_stub_outlives_its_channel_object(implementation, echo_address):
    channel = implementation.insecure_channel(echo_address)
    stub = echo_pb2_grpc.EchoStub(channel)
    dropped = weakref.ref(channel)
    del channel
    gc.collect()
    assert dropped() is None
    assert stub.Unary(Request()).received == 1


def test_a_subscribed_channel_can_be_dropped(implementation, echo_address):
    channel = implementation.insecure_channel(echo_address)
    states = States()
    channel.subscribe(states, try_to_connect=True)
    states.wait_for(State.READY)
    dropped = weakref.ref(channel)
    del channel
    gc.collect()
    assert dropped() is None


def test_is_a_channel_of_grpcio(implementation, echo_address):
    with implementation.insecure_channel(echo_address) as channel:
        assert isinstance(channel, grpc.Channel)
        assert isinstance(channel.unary_unary("/a/b"), grpc.UnaryUnaryMultiCallable)
        assert isinstance(channel.unary_stream("/a/b"), grpc.UnaryStreamMultiCallable)
        assert isinstance(channel.stream_unary("/a/b"), grpc.StreamUnaryMultiCallable)
        assert isinstance(channel.stream_stream("/a/b"), grpc.StreamStreamMultiCallable)


@pytest.mark.parametrize("target", ["", "foo/bar", "http://127.0.0.1:1"])
def test_targets_that_name_no_address(implementation, target):
    with implementation.insecure_channel(target) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        for invoke in (stub.Unary, lambda request: next(stub.ServerStream(request))):
            with pytest.raises(grpc.RpcError):
                invoke(Request())


def test_several_addresses(implementation):
    servers = [echo_service.serve(grpc) for _ in range(2)]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for _, port in servers)
    with implementation.insecure_channel(target) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        assert all(stub.Unary(Request()).received == 1 for _ in range(10))
        servers[0][0].stop(None).wait(10)
        with contextlib.suppress(grpc.RpcError):
            stub.Unary(Request())  # whose connection may end under it
        for _ in range(10):
            assert stub.Unary(Request(), wait_for_ready=True, timeout=30).received == 1
    servers[1][0].stop(None)


# Interceptors


class AddsMetadata(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, *pair):
        self.pair = pair
        self.done = []

    def add(self, continuation, details, request):
        class Details(grpc.ClientCallDetails):
            method, timeout, credentials = details.method, details.timeout, details.credentials
            wait_for_ready, compression = details.wait_for_ready, details.compression
            metadata = [*(details.metadata or ()), self.pair]

        call = continuation(Details(), request)
        call.add_done_callback(lambda call: self.done.append(call.code()))
        return call

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = add


def test_interceptors(implementation, echo_address):
    adds = AddsMetadata("added", "by an interceptor")
    with implementation.insecure_channel(echo_address) as channel:
        stub = echo_pb2_grpc.EchoStub(grpc.intercept_channel(channel, adds, AddsMetadata("second", "x")))
        reply, call = stub.Unary.with_call(Request())
        replies = [stub.Unary(Request()), reply, stub.Unary.future(Request()).result(timeout=30)]
        replies.append(stub.ClientStream(iter([Request()])))
        replies += list(stub.ServerStream(Request(replies=1))) + list(stub.Bidi(iter([Request()])))
        assert len(replies) == 6
        for reply in replies:
            pairs = {pair.key: pair.value for pair in reply.metadata}
            assert (pairs["added"], pairs["second"]) == (b"by an interceptor", b"x")
        end = time.monotonic() + 30
        while len(adds.done) < 6 and time.monotonic() < end:
            time.sleep(0.005)
        assert adds.done == [grpc.StatusCode.OK] * 6
        with pytest.raises(grpc.RpcError) as info:
            stub.Unary(Request(code=5, details="d"))
        assert info.value.code() is grpc.StatusCode.NOT_FOUND


# What carries the calls. grpcio has nothing like it.


def test_verdict_and_reason(echo_address):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    with tonic_rdma.insecure_channel(echo_address) as channel:
        assert channel.verdict is None and channel.reason is None and channel.connection is None
        reply = echo_pb2_grpc.EchoStub(channel).Unary(Request())
        assert channel.verdict in ("rdma", "tcp")
        assert channel.reason
        connection = channel.connection
        assert (connection.verdict, connection.reason) == (channel.verdict, channel.reason)
        assert not connection.tls
        assert reply.received == 1


@pytest.mark.skipif("RDMA_POLICY" in os.environ, reason="RDMA_POLICY decides")
def test_native_calls_between_processes(server_process):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    server = server_process("tonic_rdma")
    with tonic_rdma.insecure_channel(server.address) as channel:
        echo_pb2_grpc.EchoStub(channel).Unary(Request())
        assert (channel.verdict, channel.connection.native) == ("rdma", True), channel.reason
