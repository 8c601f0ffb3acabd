"""Calls of threads, of all four kinds, to servers by grpcio and by this package."""

import functools
import threading
import time

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest

Request = echo_pb2.Request
UNARY = "/tonic_rdma.test.Echo/Unary"
CLIENT_STREAM = "/tonic_rdma.test.Echo/ClientStream"
SERVER_STREAM = "/tonic_rdma.test.Echo/ServerStream"
BIDI = "/tonic_rdma.test.Echo/Bidi"


@pytest.fixture
def channel(implementation, echo_address):
    with implementation.insecure_channel(echo_address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return echo_pb2_grpc.EchoStub(channel)


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def requests(n):
    return [Request(payload=bytes([i])) for i in range(n)]


def sent(pairs, prefix):
    return [(key, value) for key, value in pairs if key.startswith(prefix)]


# What the methods return


def test_unary(stub):
    assert stub.Unary(Request(payload=b"hello")).payload == b"hello"
    assert stub.Unary(Request()).payload == b""


def test_unary_with_call(stub):
    reply, call = stub.Unary.with_call(Request(payload=b"hello"), metadata=(("trailing-a", "b"),))
    assert reply.payload == b"hello"
    assert isinstance(call, grpc.Call)
    assert call.code() is grpc.StatusCode.OK
    assert call.details() == ""
    assert sent(call.trailing_metadata(), "trailing-") == [("trailing-a", "b")]
    assert not call.is_active() and not call.cancel() and not call.add_callback(lambda: None)


def test_unary_future(stub):
    future = stub.Unary.future(Request(payload=b"hello"))
    assert isinstance(future, grpc.Future) and isinstance(future, grpc.Call)
    reply = future.result(timeout=30)
    assert reply.payload == b"hello"
    assert future.result() is reply
    assert future.done() and not future.running() and not future.cancelled() and not future.cancel()
    assert future.exception() is None and future.traceback() is None
    assert future.code() is grpc.StatusCode.OK


def test_client_stream(stub):
    reply = stub.ClientStream(iter(requests(5)))
    assert (reply.payload, reply.received) == (b"\0\1\2\3\4", 5)
    assert stub.ClientStream(iter([])).received == 0


def test_client_stream_with_call(stub):
    reply, call = stub.ClientStream.with_call(iter(requests(2)), metadata=(("initial-a", "b"),))
    assert reply.received == 2
    assert call.code() is grpc.StatusCode.OK
    assert sent(call.initial_metadata(), "initial-") == [("initial-a", "b")]


def test_client_stream_future(stub):
    future = stub.ClientStream.future(iter(requests(3)))
    assert future.result(timeout=30).received == 3


def test_server_stream(stub):
    call = stub.ServerStream(Request(payload=b"x", replies=100))
    assert isinstance(call, grpc.Call) and isinstance(call, grpc.Future) and iter(call) is call
    assert [reply.payload for reply in call] == [b"x"] * 100
    assert call.code() is grpc.StatusCode.OK and call.result() is None and call.done()
    with pytest.raises(StopIteration):
        next(call)
    assert list(stub.ServerStream(Request())) == []


def test_bidi(stub):
    replies = list(stub.Bidi(iter(requests(100))))
    assert [(reply.payload, reply.received) for reply in replies] == [(bytes([i]), i + 1) for i in range(100)]


def test_bidi_where_each_request_needs_the_last_reply(stub):
    got = threading.Semaphore(0)

    def ask():
        for request in requests(20):
            yield request
            got.acquire()

    received = []
    for reply in stub.Bidi(ask()):
        received.append(reply.received)
        got.release()
    assert received == list(range(1, 21))


def test_large_messages(implementation, echo_address):
    options = [("grpc.max_receive_message_length", -1)]
    with implementation.insecure_channel(echo_address, options=options) as channel:
        payload = bytes(range(256)) * (3 << 12)  # 3 MiB: servers here take up to 4
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(Request(payload=payload)).payload == payload
        assert [reply.payload for reply in stub.Bidi(iter([Request(payload=payload)] * 3))] == [payload] * 3
        assert len(stub.ClientStream(iter([Request(payload=payload)] * 3)).payload) == 3 * len(payload)


def test_without_serializers_messages_are_bytes(channel):
    message = Request(payload=b"raw").SerializeToString()
    reply = channel.unary_unary(UNARY)(message)
    assert echo_pb2.Reply.FromString(reply).payload == b"raw"
    replies = channel.stream_stream(BIDI)(iter([message, message]))
    assert [echo_pb2.Reply.FromString(reply).payload for reply in replies] == [b"raw", b"raw"]
    with pytest.raises(TypeError):
        channel.unary_unary(UNARY)("text")


def test_registered_methods(channel):
    arguments = (Request.SerializeToString, echo_pb2.Reply.FromString)
    for known in (True, False):
        assert channel.unary_unary(UNARY, *arguments, _registered_method=known)(Request()).received == 1
        call = channel.stream_stream(BIDI, *arguments, _registered_method=known)(iter(requests(2)))
        assert len(list(call)) == 2


# Metadata


PAIRS = (("initial-a", "1"), ("initial-a", "2"), ("initial-e", ""), ("trailing-x-bin", b"\0\xff"), ("own", "t"))


@pytest.mark.parametrize("kind", [tuple, list, lambda pairs: grpc.aio.Metadata(*pairs)])
def test_metadata(stub, kind):
    reply, call = stub.Unary.with_call(Request(), metadata=kind(PAIRS))
    there = [(pair.key, pair.value) for pair in reply.metadata]
    for key, value in PAIRS:
        assert (key, value if isinstance(value, bytes) else value.encode()) in there
    initial = sent(call.initial_metadata(), "initial-")
    assert initial == [("initial-a", "1"), ("initial-a", "2"), ("initial-e", "")]
    trailing = [pair for pair in call.trailing_metadata() if pair.key == "trailing-x-bin"]
    assert [pair.value for pair in trailing] == [b"\0\xff"]


def test_initial_metadata_comes_before_the_response(stub):
    stream = stub.ServerStream(Request(delay=60, replies=1), metadata=(("initial-a", "b"),))
    assert sent(stream.initial_metadata(), "initial-") == [("initial-a", "b")]
    stream.cancel()


def test_metadata_of_streams(stub):
    call = stub.Bidi(iter(requests(3)), metadata=(("initial-a", "b"), ("trailing-c", "d")))
    assert len(list(call)) == 3
    assert sent(call.initial_metadata(), "initial-") == [("initial-a", "b")]
    assert sent(call.trailing_metadata(), "trailing-") == [("trailing-c", "d")]


# Errors


def fails(code, call, details=None):
    with pytest.raises(grpc.RpcError) as info:
        call()
    assert info.value.code() is code, info.value
    if details is not None:
        assert info.value.details() == details
    return info.value


NOT_FOUND = dict(code=grpc.StatusCode.NOT_FOUND.value[0], details="nothing here: \u00fc\u4e16")


def test_error_of_unary(stub):
    metadata = (("trailing-why", "because"),)
    for invoke in (stub.Unary, stub.Unary.with_call, lambda *a, **k: stub.Unary.future(*a, **k).result()):
        call = functools.partial(invoke, Request(**NOT_FOUND), metadata=metadata)
        error = fails(grpc.StatusCode.NOT_FOUND, call, NOT_FOUND["details"])
        assert isinstance(error, grpc.Call) and isinstance(error, grpc.Future)
        assert sent(error.trailing_metadata(), "trailing-") == [("trailing-why", "because")]
        assert error.exception() is error and error.done() and not error.cancelled() and not error.running()
        assert "StatusCode.NOT_FOUND" in str(error) and "nothing here" in repr(error)
        assert "nothing here" in error.debug_error_string()
        with pytest.raises(grpc.RpcError):
            error.result()


def test_error_of_streams(stub):
    call = stub.ServerStream(Request(replies=2, **NOT_FOUND))
    assert next(call).received == 1 and next(call).received == 1
    for _ in range(2):  # it stays so
        error = fails(grpc.StatusCode.NOT_FOUND, lambda: next(call), NOT_FOUND["details"])
        assert error.code() is call.code()
    assert call.exception() is not None and call.traceback() is not None
    with pytest.raises(grpc.RpcError):
        call.result()
    fails(grpc.StatusCode.NOT_FOUND, lambda: stub.ClientStream(iter([Request(**NOT_FOUND)])))
    fails(grpc.StatusCode.NOT_FOUND, lambda: list(stub.Bidi(iter([Request(**NOT_FOUND)]))))


def test_each_code_comes_through(stub):
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            fails(code, lambda: stub.Unary(Request(code=code.value[0], details="d")), "d")


def test_exception_in_a_handler(stub):
    error = fails(grpc.StatusCode.UNKNOWN, lambda: stub.Unary(Request(details="boo", **{"raise": True})))
    assert "boo" in error.details()


def test_unknown_method(channel):
    fails(grpc.StatusCode.UNIMPLEMENTED, lambda: channel.unary_unary("/no.Service/Method")(b""))
    fails(grpc.StatusCode.UNIMPLEMENTED, lambda: next(channel.unary_stream("/no.Service/Method")(b"")))


def test_nobody_listens(implementation):
    with implementation.insecure_channel("127.0.0.1:1") as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        fails(grpc.StatusCode.UNAVAILABLE, lambda: stub.Unary(Request()))
        fails(grpc.StatusCode.UNAVAILABLE, lambda: next(stub.ServerStream(Request())))
        fails(grpc.StatusCode.UNAVAILABLE, lambda: stub.ClientStream(iter(requests(2))))


def bad(_):
    raise ValueError("bad")


def nothing(_):
    return None


@pytest.mark.parametrize("serializer", [bad, nothing])
def test_requests_that_do_not_serialize(channel, serializer):
    internal, details = grpc.StatusCode.INTERNAL, "Exception serializing request!"
    fails(internal, lambda: channel.unary_unary(UNARY, serializer)(1), details)
    fails(internal, lambda: channel.unary_unary(UNARY, serializer).with_call(1), details)
    fails(internal, lambda: channel.unary_unary(UNARY, serializer).future(1).result(), details)
    fails(internal, lambda: channel.stream_unary(CLIENT_STREAM, serializer)(iter([1])), details)
    fails(internal, lambda: list(channel.unary_stream(SERVER_STREAM, serializer)(1)), details)
    fails(internal, lambda: list(channel.stream_stream(BIDI, serializer)(iter([1]))), details)


@pytest.mark.parametrize("deserializer", [bad, nothing])
def test_responses_that_do_not_deserialize(channel, deserializer):
    internal, details = grpc.StatusCode.INTERNAL, "Exception deserializing response!"
    message = Request(replies=3).SerializeToString()
    unary = channel.unary_unary(UNARY, None, deserializer)
    fails(internal, lambda: unary(message), details)
    fails(internal, lambda: unary.with_call(message), details)
    future = unary.future(message)
    fails(internal, future.result, details)
    assert future.code() is internal and future.exception() is not None
    stream = channel.unary_stream(SERVER_STREAM, None, deserializer)(message)
    fails(internal, lambda: next(stream), details)
    assert stream.code() is internal
    fails(internal, lambda: list(channel.stream_stream(BIDI, None, deserializer)(iter([message]))), details)


@pytest.mark.parametrize("many", [True, False])
def test_request_iterators_that_raise(stub, many):
    def broken():
        if many:
            yield Request()
        raise ValueError("broken")

    unknown, details = grpc.StatusCode.UNKNOWN, "Exception iterating requests!"
    fails(unknown, lambda: stub.ClientStream(broken()), details)
    fails(unknown, lambda: stub.ClientStream.future(broken()).result(), details)
    fails(unknown, lambda: list(stub.Bidi(broken())), details)


def test_message_limits(implementation, echo_address):
    options = (("grpc.max_send_message_length", 100), ("grpc.max_receive_message_length", 1000))
    with implementation.insecure_channel(echo_address, options=options) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(Request(payload=bytes(50))).received == 1
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        fails(exhausted, lambda: stub.Unary(Request(payload=bytes(101))))
        fails(exhausted, lambda: stub.ClientStream(iter([Request(payload=bytes(101))])))
        fails(exhausted, lambda: stub.Unary(Request(), metadata=(("own", "x" * 1001),)))
        fails(exhausted, lambda: list(stub.ServerStream(Request(replies=1), metadata=(("own", "x" * 1001),))))


# Deadlines and cancellation


def test_deadlines(stub):
    late = grpc.StatusCode.DEADLINE_EXCEEDED  # the details are of the end that was first to notice
    slow = Request(delay=60, replies=1)
    fails(late, lambda: stub.Unary(slow, timeout=0.2))
    fails(late, lambda: stub.Unary.with_call(slow, timeout=0.2))
    fails(late, lambda: stub.Unary.future(slow, timeout=0.2).result())
    fails(late, lambda: stub.ClientStream(iter([slow]), timeout=0.2))
    fails(late, lambda: list(stub.ServerStream(slow, timeout=0.2)))
    fails(late, lambda: list(stub.Bidi(iter([slow]), timeout=0.2)))
    fails(late, lambda: stub.Unary(slow, timeout=-1))


def test_a_request_iterator_that_waits_does_not_hold_up_the_deadline(stub):
    go_on = threading.Event()

    def waits():
        yield Request()
        go_on.wait()

    fails(grpc.StatusCode.DEADLINE_EXCEEDED, lambda: stub.ClientStream(waits(), timeout=0.2))
    fails(grpc.StatusCode.DEADLINE_EXCEEDED, lambda: list(stub.Bidi(waits(), timeout=0.2)))
    go_on.set()


def test_the_server_knows_the_deadline(stub):
    reply = stub.Unary(Request(), timeout=100)
    assert 50 < reply.time_remaining < 102  # implementations round it up
    assert not stub.Unary(Request()).HasField("time_remaining")
    future = stub.Unary.future(Request(), timeout=100)
    assert 50 < future.time_remaining() <= 100
    assert stub.Unary.future(Request()).time_remaining() is None


def test_result_with_a_time_out_of_its_own(stub):
    future = stub.Unary.future(Request(delay=60))
    with pytest.raises(grpc.FutureTimeoutError):
        future.result(timeout=0.05)
    with pytest.raises(grpc.FutureTimeoutError):
        future.exception(timeout=0.05)
    assert future.running() and future.is_active()
    assert future.cancel()


def test_cancel_of_futures(stub):
    before = stub.Count(echo_pb2.Nothing())
    future = stub.Unary.future(Request(delay=60))
    wait_until(lambda: stub.Count(echo_pb2.Nothing()).begun > before.begun)
    assert future.cancel() and not future.cancel()
    assert future.cancelled() and future.done()
    with pytest.raises(grpc.FutureCancelledError):
        future.result()
    with pytest.raises(grpc.FutureCancelledError):
        future.exception()
    assert future.code() is grpc.StatusCode.CANCELLED
    assert future.details() == "Locally cancelled by application!"
    wait_until(lambda: stub.Count(echo_pb2.Nothing()).cancelled > before.cancelled)


def test_cancel_of_iterators(stub):
    before = stub.Count(echo_pb2.Nothing()).cancelled
    call = stub.ServerStream(Request(replies=10**6))
    next(call)
    assert call.cancel()
    error = fails(grpc.StatusCode.CANCELLED, lambda: next(call), "Locally cancelled by application!")
    assert error.code() is call.code() and call.cancelled()
    wait_until(lambda: stub.Count(echo_pb2.Nothing()).cancelled > before)


def test_cancel_from_another_thread(stub):
    call = stub.ServerStream(Request(replies=1, delay=60))
    threading.Timer(0.1, call.cancel).start()
    fails(grpc.StatusCode.CANCELLED, lambda: next(call))


def test_a_dropped_call_is_cancelled(stub):
    go_on = threading.Event()

    def waits():
        yield Request()
        go_on.wait()

    for begin in (lambda: stub.ServerStream(Request(replies=10**6)), lambda: stub.Bidi(waits())):
        before = stub.Count(echo_pb2.Nothing()).ended
        call = begin()
        next(call)
        del call
        wait_until(lambda: stub.Count(echo_pb2.Nothing()).ended > before)
    go_on.set()


# Callbacks


def test_done_callbacks(stub):
    future = stub.Unary.future(Request(delay=0.1))
    order, done = [], threading.Event()
    future.add_done_callback(lambda f: order.append((1, f, f.result().received)))
    assert future.add_callback(lambda: order.append((2, future, future.code())))
    future.add_done_callback(lambda f: done.set())
    assert done.wait(30)
    assert order == [(1, future, 1), (2, future, grpc.StatusCode.OK)]
    future.add_done_callback(lambda f: order.append(threading.current_thread()))
    assert order[-1] is threading.current_thread()  # at once
    assert not future.add_callback(lambda: None)


def test_exceptions_in_callbacks_are_logged(stub, caplog):
    future, done = stub.Unary.future(Request(delay=0.1)), threading.Event()
    future.add_done_callback(bad)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(30)
    assert "ValueError" in caplog.text


def test_callbacks_of_streams(stub):
    done = threading.Event()
    call = stub.ServerStream(Request(replies=3, delay=0.05))
    assert call.add_callback(done.set)
    assert len(list(call)) == 3
    assert done.wait(30)


def test_callbacks_run_when_a_call_is_cancelled(stub):
    done = threading.Event()
    future = stub.Unary.future(Request(delay=60))
    future.add_done_callback(lambda f: done.set() if f.cancelled() else None)
    future.cancel()
    assert done.wait(30)


def test_calls_within_callbacks(stub):
    got = []
    done = threading.Event()

    def again(future):
        got.append(stub.Unary(Request(payload=b"within")).payload)
        done.set()

    stub.Unary.future(Request(delay=0.05)).add_done_callback(again)
    assert done.wait(30) and got == [b"within"]


# Compression


@pytest.mark.parametrize("compression", list(grpc.Compression))
def test_compression(implementation, echo_address, compression):
    payload = b"a" * 100_000
    with implementation.insecure_channel(echo_address, compression=compression) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(Request(payload=payload)).payload == payload
        assert [reply.payload for reply in stub.Bidi(iter([Request(payload=payload)] * 2))] == [payload] * 2
    with implementation.insecure_channel(echo_address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(Request(payload=payload), compression=compression).payload == payload
        assert stub.Unary.future(Request(payload=payload), compression=compression).result().payload == payload


# Many at once


def test_many_threads_and_futures(stub):
    failures = []

    def work(seed):
        try:
            for n in range(50):
                payload = bytes([seed]) * n
                assert stub.Unary(Request(payload=payload)).payload == payload
            futures = [stub.Unary.future(Request(payload=bytes([seed]) * n)) for n in range(20)]
            assert [len(future.result().payload) for future in futures] == list(range(20))
            assert len(list(stub.Bidi(iter(requests(20))))) == 20
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
