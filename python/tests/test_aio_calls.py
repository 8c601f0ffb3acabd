"""Calls of asyncio clients, of all four kinds."""

import asyncio
import contextvars
import gc
import importlib
import time
import weakref

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio

Request = echo_pb2.Request
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


@pytest.fixture
def aio(implementation):
    return importlib.import_module(implementation.__name__ + ".aio")


@pytest_asyncio.fixture
async def stub(aio, echo_address):
    async with aio.insecure_channel(echo_address) as channel:
        yield echo_pb2_grpc.EchoStub(channel)


async def until(condition):
    """Waits until `await condition()` is true; the test's limit ends it otherwise."""
    while not await condition():
        await asyncio.sleep(0.01)


def requests(*payloads):
    return [Request(payload=payload) for payload in payloads]


async def later(values):
    for value in values:
        await asyncio.sleep(0)
        yield value


class TestUnaryUnary:
    async def test_response_and_status(self, stub):
        metadata = (("initial-a", "1"), ("trailing-b-bin", b"\0\xff"))
        call = stub.Unary(Request(payload=b"x"), metadata=metadata, timeout=30)
        assert isinstance(call, grpc.aio.UnaryUnaryCall)
        assert 0 < call.time_remaining() <= 30
        reply = await call
        assert reply.payload == b"x" and 0 < reply.time_remaining < 31
        assert await call is reply  # a second time
        assert ("initial-a", "1") in tuple(await call.initial_metadata())
        assert ("trailing-b-bin", b"\0\xff") in tuple(await call.trailing_metadata())
        assert isinstance(await call.trailing_metadata(), grpc.aio.Metadata)
        assert await call.code() is grpc.StatusCode.OK
        assert await call.details() == ""
        assert await call.debug_error_string() == ""
        await call.wait_for_connection()
        assert call.done() and not call.cancelled() and not call.cancel()

    async def test_error(self, stub):
        call = stub.Unary(
            Request(code=NOT_FOUND, details="näh"), metadata=[("initial-a", "1"), ("trailing-b", "2")]
        )
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = caught.value
            assert error.code() is grpc.StatusCode.NOT_FOUND and error.details() == "näh"
            assert (
                error.initial_metadata()["initial-a"] == "1" and error.trailing_metadata()["trailing-b"] == "2"
            )
            assert "näh" in error.debug_error_string() and "näh" in str(error)
        assert await call.code() is grpc.StatusCode.NOT_FOUND and await call.details() == "näh"
        assert call.done() and not call.cancelled()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.wait_for_connection()
        assert "näh" in repr(call)

    async def test_status_without_await(self, stub):
        call = stub.Unary(Request(code=NOT_FOUND))
        assert await call.code() is grpc.StatusCode.NOT_FOUND

    async def test_deadline(self, stub):
        for timeout in [0.05, -1]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Unary(Request(delay=30), timeout=timeout)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def test_cancel(self, stub):
        call = stub.Unary(Request(delay=30))
        assert not call.done() and not call.cancelled()
        assert call.cancel()
        assert call.done() and call.cancelled() and not call.cancel()
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert await call.details() == "Locally cancelled by application!"
        assert tuple(await call.initial_metadata()) == () == tuple(await call.trailing_metadata())

    async def test_cancel_before_the_loop_sees_the_end(self, stub):
        calls = [stub.Unary(Request()), stub.ClientStream([]), stub.ServerStream(Request(replies=1))]
        time.sleep(0.2)
        for call in calls:
            assert call.cancel() and call.cancelled()
            with pytest.raises(asyncio.CancelledError):
                await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
            assert await call.code() is grpc.StatusCode.CANCELLED

    async def test_cancelled_task(self, stub):
        before = await stub.Count(echo_pb2.Nothing())
        call = stub.Unary(Request(delay=30))

        async def wait():
            await call

        task = asyncio.create_task(wait())

        async def begun():
            return (await stub.Count(echo_pb2.Nothing())).begun > before.begun

        await until(begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED

        async def cancelled():
            return (await stub.Count(echo_pb2.Nothing())).cancelled > before.cancelled

        await until(cancelled)

    async def test_wait_for(self, stub):
        call = stub.Unary(Request(delay=30))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)
        assert call.cancelled()

    async def test_a_cancelled_wait_for_the_status_lets_the_call_go_on(self, stub):
        call = stub.Unary(Request(payload=b"x", delay=0.2))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call.code(), 0.01)
        assert (await call).payload == b"x"

    async def test_many_at_once(self, stub):
        replies = await asyncio.gather(*(stub.Unary(Request(payload=b"%d" % i)) for i in range(200)))
        assert [reply.payload for reply in replies] == [b"%d" % i for i in range(200)]

    async def test_two_tasks_await_one_call(self, stub):
        call = stub.Unary(Request(payload=b"x", delay=0.05))

        async def wait():
            return await call

        assert [reply.payload for reply in await asyncio.gather(wait(), wait())] == [b"x", b"x"]

    async def test_done_callbacks(self, stub):
        variable = contextvars.ContextVar("variable", default="none")
        seen = []

        def done(call):
            seen.append((call, variable.get()))

        call = stub.Unary(Request(delay=0.05))
        variable.set("mine")
        call.add_done_callback(done)
        variable.set("later")
        await call
        # grpc.aio runs it in the context of the call's task.
        assert [one for one, _ in seen] == [call]
        call.add_done_callback(done)
        assert seen[1:] == [(call, "later")]

    async def test_done_callback_of_a_cancelled_call(self, stub):
        call = stub.Unary(Request(delay=30))
        done = asyncio.Event()
        call.add_done_callback(lambda call: done.set())
        call.cancel()
        await done.wait()

    async def test_metadata_of_all_forms(self, stub):
        for metadata in [
            (("k", "v"), ("k", "w"), ("b-bin", b"\0")),
            [("k", "v"), ("k", "w"), ("b-bin", b"\0")],
            grpc.aio.Metadata(("k", "v"), ("k", "w"), ("b-bin", b"\0")),
        ]:
            pairs = [
                (pair.key, pair.value) for pair in (await stub.Unary(Request(), metadata=metadata)).metadata
            ]
            assert [pair for pair in pairs if pair[0] in ("k", "b-bin")] == [
                ("k", b"v"),
                ("k", b"w"),
                ("b-bin", b"\0"),
            ]
        for empty in [None, (), grpc.aio.Metadata()]:
            await stub.Unary(Request(), metadata=empty)

    async def test_wrong_metadata(self, aio, stub):
        wrong = Exception if aio is grpc.aio else (TypeError, ValueError)
        for metadata in [(("K", "v"),), (("b-bin", "v"),), (("k", 1),), (("k",),), 5, (("k", "\n"),)]:
            with pytest.raises(wrong):
                await stub.Unary(Request(), metadata=metadata)
        await stub.Unary(Request())

    async def test_compression_and_wait_for_ready(self, stub):
        for compression in grpc.Compression:
            reply = await stub.Unary(Request(payload=b"x" * 5000), compression=compression, wait_for_ready=True)
            assert reply.payload == b"x" * 5000

    async def test_bytes_without_serializers(self, aio, echo_address):
        async with aio.insecure_channel(echo_address) as channel:
            unary = channel.unary_unary("/tonic_rdma.test.Echo/Unary")
            reply = await unary(Request(payload=b"x").SerializeToString())
            assert echo_pb2.Reply.FromString(reply).payload == b"x"
            for wrong in ["text", 5] if aio is grpc.aio else ["text", 5, None]:
                with pytest.raises(TypeError):
                    await unary(wrong)

    async def test_no_such_method(self, aio, echo_address):
        async with aio.insecure_channel(echo_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/no.such/Method")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_failing_serializers(self, aio, echo_address):
        if aio is grpc.aio:
            pytest.skip("it sends an empty message, and gives None, where these raise")

        def fail(value):
            raise KeyError("boom")

        async with aio.insecure_channel(echo_address) as channel:
            for arguments, what in [
                ((fail, None), "serializing request"),
                ((None, fail), "deserializing response"),
            ]:
                unary = channel.unary_unary("/tonic_rdma.test.Echo/Unary", *arguments)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await unary(b"")
                assert caught.value.code() is grpc.StatusCode.INTERNAL and what in caught.value.details()
                assert isinstance(caught.value.__cause__, KeyError)
            call = channel.unary_stream("/tonic_rdma.test.Echo/ServerStream", None, fail)(
                Request(replies=2).SerializeToString()
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert await call.code() is grpc.StatusCode.INTERNAL
            for wrong in [requests(b""), later(requests(b""))]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.stream_unary("/tonic_rdma.test.Echo/ClientStream", fail)(wrong)
                assert caught.value.code() is grpc.StatusCode.INTERNAL


class TestUnaryStream:
    async def test_iteration(self, stub):
        call = stub.ServerStream(
            Request(replies=3, payload=b"x"), metadata=[("initial-a", "1"), ("trailing-b", "2")]
        )
        assert isinstance(call, grpc.aio.UnaryStreamCall)
        await call.wait_for_connection()
        assert [reply.payload async for reply in call] == [b"x"] * 3
        assert [reply async for reply in call] == []
        assert await call.read() is grpc.aio.EOF
        assert (await call.initial_metadata())["initial-a"] == "1"
        assert (await call.trailing_metadata())["trailing-b"] == "2"
        assert await call.code() is grpc.StatusCode.OK and await call.details() == ""

    async def test_read(self, stub):
        call = stub.ServerStream(Request(replies=2, payload=b"x"))
        assert [(await call.read()).payload for _ in range(2)] == [b"x"] * 2
        for _ in range(2):
            assert await call.read() is grpc.aio.EOF
        assert call.done()

    async def test_mixed_styles(self, stub):
        call = stub.ServerStream(Request(replies=2, delay=0.05))
        await call.read()
        with pytest.raises(grpc.aio.UsageError):
            aiter(call)
        call = stub.ServerStream(Request(replies=2, delay=0.05))
        await anext(aiter(call))
        with pytest.raises(grpc.aio.UsageError):
            await call.read()

    async def test_error_after_messages(self, stub):
        call = stub.ServerStream(
            Request(replies=2, code=NOT_FOUND, details="none"), metadata=[("trailing-b", "2")]
        )
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for reply in call:
                seen.append(reply)
        assert len(seen) == 2
        assert (
            caught.value.code() is grpc.StatusCode.NOT_FOUND
            and caught.value.trailing_metadata()["trailing-b"] == "2"
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()

    async def test_cancel(self, stub):
        call = stub.ServerStream(Request(replies=1000, delay=0.05))
        await call.read()
        assert call.cancel() and not call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED

    async def test_cancelled_task(self, stub):
        call = stub.ServerStream(Request(replies=1, delay=30))

        async def wait():
            async for _ in call:
                pass

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await call.code() is grpc.StatusCode.CANCELLED

    async def test_dropped_stream_ends(self, stub, aio):
        if aio is grpc.aio:
            pytest.skip("its channel keeps the call")
        before = await stub.Count(echo_pb2.Nothing())
        call = stub.ServerStream(Request(replies=1000, delay=0.05))
        await call.read()
        gone = weakref.ref(call)
        del call
        gc.collect()
        assert gone() is None

        async def cancelled():
            return (await stub.Count(echo_pb2.Nothing())).cancelled > before.cancelled

        await until(cancelled)

    async def test_done_callback(self, stub):
        call = stub.ServerStream(Request(replies=1))
        done = []
        call.add_done_callback(done.append)
        assert len([reply async for reply in call]) == 1
        await call.code()
        assert done == [call]

    async def test_many_messages(self, stub):
        call = stub.ServerStream(Request(replies=5000, payload=b"x"))
        assert sum([len(reply.payload) async for reply in call]) == 5000


class TestStreamUnary:
    @pytest.mark.parametrize("kind", ["list", "generator", "async"])
    async def test_iterators(self, stub, kind):
        values = requests(b"a", b"b", b"c")
        iterator = {"list": values, "generator": (one for one in values), "async": later(values)}[kind]
        call = stub.ClientStream(iterator)
        assert isinstance(call, grpc.aio.StreamUnaryCall)
        reply = await call
        assert reply.payload == b"abc" and reply.received == 3
        assert await call.code() is grpc.StatusCode.OK

    async def test_empty(self, stub):
        assert (await stub.ClientStream(iter(()))).received == 0

    async def test_write(self, stub):
        call = stub.ClientStream()
        await call.wait_for_connection()
        for request in requests(b"a", b"b"):
            await call.write(request)
        for _ in range(2):
            await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(Request())
        assert (await call).payload == b"ab"
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(Request())
        await call.done_writing()

    async def test_write_beside_an_iterator(self, stub):
        call = stub.ClientStream(requests(b"a"))
        with pytest.raises(grpc.aio.UsageError):
            await call.write(Request())
        with pytest.raises(grpc.aio.UsageError):
            await call.done_writing()
        assert (await call).payload == b"a"

    async def test_error(self, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ClientStream([Request(code=NOT_FOUND, details="none")])
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND and caught.value.details() == "none"

    async def test_failing_iterators(self, stub):
        def fails():
            yield Request()
            raise KeyError("boom")

        async def fails_later():
            yield Request()
            raise KeyError("boom")

        for iterator in [fails(), fails_later(), 5]:
            call = stub.ClientStream(iterator)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await call.code() is grpc.StatusCode.CANCELLED

    async def test_cancel(self, stub):
        closed = asyncio.Event()

        async def endless():
            try:
                while True:
                    yield Request()
                    await asyncio.sleep(0.01)
            finally:
                closed.set()

        call = stub.ClientStream(endless())
        await asyncio.sleep(0.05)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await closed.wait()

    async def test_deadline(self, stub):
        call = stub.ClientStream(timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class TestStreamStream:
    async def test_iterator(self, stub):
        call = stub.Bidi(later(requests(b"a", b"b")))
        assert isinstance(call, grpc.aio.StreamStreamCall)
        assert [reply.payload async for reply in call] == [b"a", b"b"]
        assert await call.code() is grpc.StatusCode.OK

    async def test_ping_pong(self, stub):
        call = stub.Bidi()
        await call.wait_for_connection()
        for i in range(20):
            await call.write(Request(payload=b"%d" % i))
            assert (await call.read()).payload == b"%d" % i
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    async def test_one_task_writes_while_another_reads(self, stub):
        call = stub.Bidi()
        count = 2000

        async def write():
            for _ in range(count):
                await call.write(Request(payload=b"x" * 100))
            await call.done_writing()

        async def read():
            return [reply.received async for reply in call]

        _, seen = await asyncio.gather(write(), read())
        assert seen == list(range(1, count + 1))

    async def test_server_ends_first(self, stub):
        call = stub.Bidi(timeout=30)
        await call.write(Request(code=NOT_FOUND))
        await call.done_writing()
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(Request())

    async def test_writes_after_the_end_fail(self, aio, echo_address):
        async with aio.insecure_channel(echo_address) as channel:
            call = channel.stream_stream("/no.such/Method")()

            async def write_on():
                while True:
                    await call.write(b"x")

            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await write_on()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            # grpc.aio may put an error of its own in the status' place.
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED or aio is grpc.aio

    async def test_cancel_both_ways(self, stub):
        call = stub.Bidi()
        await call.write(Request())
        await call.read()
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(Request())
        await call.done_writing()


async def test_context_of_the_caller(stub):
    variable = contextvars.ContextVar("variable", default="none")
    seen = []

    async def source():
        seen.append(variable.get())
        yield Request()

    def deserialize(data):
        seen.append(variable.get())
        return data

    variable.set("mine")
    await stub.ClientStream(source())
    assert (await stub.Unary(Request())) is not None
    assert seen == ["mine"]
