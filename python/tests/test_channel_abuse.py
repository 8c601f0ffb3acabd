"""What must not hang, leak or crash: signals, forks, exits, iterators that misbehave, many dropped calls."""

import contextvars
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest

Request = echo_pb2.Request


@pytest.fixture
def stub(implementation, echo_address):
    with implementation.insecure_channel(echo_address) as channel:
        yield echo_pb2_grpc.EchoStub(channel)


def program(implementation, address, body):
    """Runs `body` in a process of its own, with a channel and a stub of Echo."""
    start = f"""
        import os, signal, sys, threading, time
        import echo_pb2, echo_pb2_grpc, grpc
        import {implementation.__name__} as implementation
        Request = echo_pb2.Request
        channel = implementation.insecure_channel({address!r})
        stub = echo_pb2_grpc.EchoStub(channel)
        stub.Unary(Request())
    """
    source = textwrap.dedent(start) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source],
        capture_output=True,
        text=True,
        timeout=50,
    )


CTRL_C = """
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        {wait}
    except KeyboardInterrupt:
        print("interrupted")
    print(stub.Unary(Request(payload=b"on")).payload)
"""


@pytest.mark.parametrize(
    "wait",
    [
        "stub.Unary(Request(delay=60))",
        "stub.Unary.with_call(Request(delay=60))",
        "stub.Unary.future(Request(delay=60)).result()",
        "stub.ClientStream(iter([Request(delay=60)]))",
        "next(stub.ServerStream(Request(delay=60, replies=1)))",
        "stub.ServerStream(Request(delay=60, replies=1)).code()",
        "stub.ServerStream(Request(delay=60, replies=1)).initial_metadata(); time.sleep(60)",
    ],
)
def test_ctrl_c(implementation, server_process, wait):
    server = server_process("grpcio")
    ended = program(implementation, server.address, CTRL_C.format(wait=wait))
    assert (ended.returncode, ended.stdout) == (0, "interrupted\nb'on'\n"), ended.stderr


def test_a_child_of_fork_gets_a_clear_error(server_process):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    body = """
        future = stub.Unary.future(Request(delay=60))
        child = os.fork()
        if child == 0:
            other = echo_pb2_grpc.EchoStub(implementation.insecure_channel("localhost:1"))
            for use in (lambda: stub.Unary(Request()), lambda: other.Unary(Request())):
                try:
                    use()
                except RuntimeError as error:
                    print("child:", "fork" in str(error))
            del future
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        future.cancel()
        print("parent:", stub.Unary(Request()).received)
    """
    for kind in ("grpcio", "tonic_rdma"):
        ended = program(tonic_rdma, server_process(kind).address, body)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "child: True\nchild: True\nparent: 1\n"
        assert ended.stderr == ""


@pytest.mark.parametrize(
    "body",
    [
        "call = stub.Unary.future(Request(delay=60))",
        "call = stub.Unary.future(Request(delay=60)); call.add_done_callback(print)",
        "threading.Thread(target=stub.Unary, args=(Request(delay=60),), daemon=True).start(); time.sleep(0.2)",
        "call = stub.ServerStream(Request(replies=10**6)); next(call)",
        "call = stub.Bidi(Request(payload=bytes(10**6)) for _ in range(10**6)); time.sleep(0.3)",
        "call = stub.Bidi(iter(threading.Event().wait, None)); time.sleep(0.1)",
        "channel.subscribe(lambda state: None, True)",
        "channel.subscribe(lambda state: time.sleep(60), True); time.sleep(0.1)",
        "call = stub.ServerStream(Request(delay=60, replies=1))\n"
        "threading.Thread(target=lambda: list(call), daemon=True).start(); time.sleep(0.2)",
    ],
)
@pytest.mark.parametrize("kind", ["grpcio", "tonic_rdma"])
def test_a_program_ends_with_calls_in_flight(server_process, body, kind):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    ended = program(tonic_rdma, server_process(kind).address, body + "\nprint('end')\n")
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
    assert ended.stderr == ""


def test_context_variables_reach_the_request_iterator(stub):
    variable = contextvars.ContextVar("variable", default="none")
    seen = []

    def requests():
        seen.append((variable.get(), threading.current_thread() is threading.main_thread()))
        variable.set("changed")
        yield Request()

    variable.set("mine")
    assert stub.ClientStream(requests()).received == 1
    assert len(list(stub.Bidi(requests()))) == 1
    assert seen == [("mine", False)] * 2
    assert variable.get() == "mine"


def test_request_iterators_of_odd_kinds(stub):
    class Odd:
        """No `__iter__`."""

        left = 3

        def __next__(self):
            if not self.left:
                raise StopIteration
            self.left -= 1
            return Request()

    assert stub.ClientStream(Odd()).received == 3
    with pytest.raises(grpc.RpcError) as info:
        stub.ClientStream([Request()])  # a list is no iterator
    assert info.value.code() is grpc.StatusCode.UNKNOWN
    with pytest.raises(grpc.RpcError) as info:
        stub.ClientStream(None)
    assert info.value.code() is grpc.StatusCode.UNKNOWN


def test_requests_that_are_not_bytes(echo_address):
    tonic_rdma = pytest.importorskip("tonic_rdma")  # grpcio's call hangs
    with tonic_rdma.insecure_channel(echo_address) as channel:
        for serializer in (None, lambda request: "text"):
            call = channel.stream_stream("/tonic_rdma.test.Echo/Bidi", serializer)(iter(["text"]))
            with pytest.raises(grpc.RpcError) as info:
                next(call)
            assert info.value.code() is grpc.StatusCode.INTERNAL
            assert info.value.details() == "Exception serializing request!"


def test_a_cancelled_upload_is_not_taken_for_a_whole_one(implementation, server_process):
    # Servers by grpcio take some for whole, from its own clients, too.
    pytest.importorskip("tonic_rdma")
    stub = echo_pb2_grpc.EchoStub(implementation.insecure_channel(server_process("tonic_rdma").address))
    for _ in range(20):
        before = stub.Count(echo_pb2.Nothing())
        go_on = threading.Event()

        def requests():
            yield Request(payload=b"the first half")
            go_on.wait()

        call = stub.ClientStream.future(requests())
        while stub.Count(echo_pb2.Nothing()).begun == before.begun:
            time.sleep(0.002)
        call.cancel()
        while (after := stub.Count(echo_pb2.Nothing())).ended == before.ended:
            time.sleep(0.002)
        assert after.cancelled == before.cancelled + 1
        go_on.set()


@pytest.mark.parametrize(
    "metadata, error",
    [
        ((("UPPER", "v"),), ValueError),
        ((("key", "new\nline"),), ValueError),
        ((("key", 5),), (ValueError, TypeError)),
        ((("a", "b", "c"),), (ValueError, TypeError)),
        (5, TypeError),
    ],
)
def test_wrong_metadata(echo_address, metadata, error):
    tonic_rdma = pytest.importorskip("tonic_rdma")  # grpcio's own answers changed from version to version
    with tonic_rdma.insecure_channel(echo_address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        for invoke in (stub.Unary, stub.Unary.with_call, stub.Unary.future, stub.ServerStream):
            with pytest.raises(error):
                invoke(Request(), metadata=metadata)
        for invoke in (stub.ClientStream, stub.Bidi):
            with pytest.raises(error):
                invoke(iter([Request()]), metadata=metadata)
        assert stub.Unary(Request()).received == 1


def test_wrong_timeouts(stub):
    for invoke in (stub.Unary, stub.Unary.future, stub.ServerStream):
        with pytest.raises(TypeError):
            invoke(Request(), timeout="soon")


def test_a_blocked_callback_holds_up_no_call(stub):
    go_on, blocked = threading.Event(), threading.Event()

    def blocks(_):
        blocked.set()
        go_on.wait()

    stub.Unary.future(Request(delay=0.05)).add_done_callback(blocks)
    assert blocked.wait(30)
    assert stub.Unary.future(Request(payload=b"x")).result(timeout=30).payload == b"x"
    assert len(list(stub.Bidi(iter([Request()] * 5)))) == 5
    go_on.set()


def test_ended_calls_keep_nothing(stub):
    class Marker(bytes):
        pass

    calls = [stub.Unary.future(Request()), stub.ServerStream(Request(replies=1)), stub.Bidi(iter([Request()]))]
    calls[0].result()
    list(calls[1]), list(calls[2])
    references = [weakref.ref(call) for call in calls]
    del calls
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_dropped_calls_leave_no_threads_and_no_descriptors(implementation, stub):
    def some():
        futures = [stub.Unary.future(Request()) for _ in range(20)]
        streams = [stub.ServerStream(Request(replies=10)) for _ in range(20)]
        streams += [stub.Bidi(iter([Request()] * 5)) for _ in range(5)]
        for stream in streams[::2]:
            next(stream)
        for future in futures[::2]:
            future.result()

    def counts():
        own = [thread for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")]
        return len(own), len(os.listdir("/proc/self/fd"))

    some()
    before = counts()
    for _ in range(10):
        some()
    gc.collect()
    end = time.monotonic() + 20
    while any(now > then + 2 for now, then in zip(counts(), before)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(now <= then + 2 for now, then in zip(counts(), before)), (before, counts())


def test_many_channels(implementation, echo_address):
    for _ in range(30):
        with implementation.insecure_channel(echo_address) as channel:
            assert echo_pb2_grpc.EchoStub(channel).Unary(Request()).received == 1


def test_channels_closed_while_threads_call(implementation, echo_address):
    for _ in range(5):
        channel = implementation.insecure_channel(echo_address)
        stub = echo_pb2_grpc.EchoStub(channel)
        unexpected = []

        def work():
            try:
                while True:
                    stub.Unary(Request())
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:
                    unexpected.append(error)
            except ValueError:
                pass  # after close()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        channel.close()
        for thread in threads:
            thread.join()
        assert not unexpected


def test_cancel_and_end_at_the_same_time(stub):
    for _ in range(100):
        future = stub.Unary.future(Request(payload=b"x"))
        thread = threading.Thread(target=future.cancel)
        thread.start()
        try:
            assert future.result(timeout=30).payload == b"x"
            assert not future.cancelled()
        except grpc.FutureCancelledError:
            assert future.cancelled() and future.code() is grpc.StatusCode.CANCELLED
        thread.join()
