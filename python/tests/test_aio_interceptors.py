"""Client interceptors of asyncio, of all four kinds."""

import asyncio
import contextvars
import importlib

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest

pytestmark = pytest.mark.asyncio

Request, Reply = echo_pb2.Request, echo_pb2.Reply
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


@pytest.fixture
def open_channel(implementation, echo_address):
    aio = importlib.import_module(implementation.__name__ + ".aio")
    return lambda *interceptors: aio.insecure_channel(echo_address, interceptors=interceptors)


@pytest.fixture
def ours(implementation):
    return implementation is not grpc


class UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, act):
        self.act = act

    async def intercept_unary_unary(self, continuation, details, request):
        return await self.act(continuation, details, request)


class UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, act):
        self.act = act

    async def intercept_unary_stream(self, continuation, details, request):
        return await self.act(continuation, details, request)


class StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, act):
        self.act = act

    async def intercept_stream_unary(self, continuation, details, requests):
        return await self.act(continuation, details, requests)


class StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, act):
        self.act = act

    async def intercept_stream_stream(self, continuation, details, requests):
        return await self.act(continuation, details, requests)


async def go_on(continuation, details, request):
    return await continuation(details, request)


def added(key):
    """An interceptor's work: one more pair of metadata."""

    async def act(continuation, details, request):
        metadata = details.metadata + grpc.aio.Metadata((key, "1"))
        return await continuation(details._replace(metadata=metadata), request)

    return act


def keys(reply):
    return [pair.key for pair in reply.metadata]


async def requests(*payloads):
    for payload in payloads:
        yield Request(payload=payload)


class TestUnaryUnary:
    async def test_details(self, open_channel):
        seen = []

        async def act(continuation, details, request):
            seen.append((details, request))
            call = await continuation(details, request)
            assert isinstance(call, grpc.aio.UnaryUnaryCall)
            return call

        async with open_channel(UnaryUnary(act)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            request = Request(payload=b"x")
            call = stub.Unary(request, timeout=30, metadata=[("k", "v")], wait_for_ready=True)
            assert isinstance(call, grpc.aio.UnaryUnaryCall)
            assert not call.done() and not call.cancelled()
            assert (await call).payload == b"x"
        [(details, given)] = seen
        assert given is request and isinstance(details, grpc.ClientCallDetails)
        assert details.method == b"/tonic_rdma.test.Echo/Unary"
        assert details.timeout == 30 and details.wait_for_ready and details.credentials is None
        assert isinstance(details.metadata, grpc.aio.Metadata) and tuple(details.metadata) == (("k", "v"),)

    async def test_order_metadata_and_status(self, open_channel):
        async with open_channel(UnaryUnary(added("one")), UnaryUnary(added("two"))) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.Unary(Request(), metadata=[("zero", "0"), ("initial-a", "1"), ("trailing-b", "2")])
            reply = await call
            assert [key for key in keys(reply) if key in ("zero", "one", "two")] == ["zero", "one", "two"]
            assert (await call.initial_metadata())["initial-a"] == "1"
            assert (await call.trailing_metadata())["trailing-b"] == "2"
            assert await call.code() is grpc.StatusCode.OK and await call.details() == ""
            await call.wait_for_connection()
            assert await call is not None and call.done() and not call.cancel()

    async def test_another_method(self, open_channel):
        async def act(continuation, details, request):
            return await continuation(details._replace(method=b"/tonic_rdma.test.Echo/Unary"), request)

        async with open_channel(UnaryUnary(act)) as channel:
            unary = channel.unary_unary("/no.such/Method", Request.SerializeToString, Reply.FromString)
            assert (await unary(Request(payload=b"x"))).payload == b"x"

    async def test_response_instead_of_a_call(self, open_channel):
        async def answer(continuation, details, request):
            return Reply(payload=b"mine")

        async def after(continuation, details, request):
            call = await continuation(details, request)
            assert isinstance(call, grpc.aio.UnaryUnaryCall)
            assert await call.code() is grpc.StatusCode.OK
            return Reply(payload=(await call).payload + b"!")

        async with open_channel(UnaryUnary(after), UnaryUnary(answer)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request())
            assert (await call).payload == b"mine!"
            assert await call.code() is grpc.StatusCode.OK and call.done() and not call.cancelled()
            assert await call.trailing_metadata() is None

    async def test_retry(self, open_channel):
        tries = []

        async def act(continuation, details, request):
            while True:
                call = await continuation(details, request)
                tries.append(await call.code())
                if len(tries) == 3:
                    return call

        async with open_channel(UnaryUnary(act)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo_pb2_grpc.EchoStub(channel).Unary(Request(code=NOT_FOUND))
            assert tries == [grpc.StatusCode.NOT_FOUND] * 3
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_interceptor_raises(self, open_channel):
        async def act(continuation, details, request):
            raise KeyError("boom")

        async def awaits(continuation, details, request):
            return await (await continuation(details, request))

        async with open_channel(UnaryUnary(act)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request())
            done = []
            call.add_done_callback(done.append)
            with pytest.raises(KeyError):
                await call
            assert call.done() and not call.cancelled() and done == [call]
        async with open_channel(UnaryUnary(awaits)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(
                Request(code=NOT_FOUND, details="none"), metadata=[("trailing-b", "2")]
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            assert await call.code() is grpc.StatusCode.NOT_FOUND and await call.details() == "none"
            assert (await call.trailing_metadata())["trailing-b"] == "2"

    async def test_cancel_while_the_interceptor_waits(self, open_channel):
        begun = asyncio.Event()

        async def act(continuation, details, request):
            begun.set()
            await asyncio.sleep(30)

        async with open_channel(UnaryUnary(act)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request())
            await begun.wait()
            assert call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert call.cancelled() and call.done() and not call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED
            assert await call.details() == "Locally cancelled by application!"

    async def test_cancel_after_the_interceptor(self, open_channel):
        async with open_channel(UnaryUnary(go_on)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request(delay=30))
            await asyncio.sleep(0.05)
            assert call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED

    async def test_cancelled_task(self, open_channel):
        async with open_channel(UnaryUnary(go_on)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request(delay=30))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.1)
            assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED

    async def test_done_callbacks(self, open_channel):
        async with open_channel(UnaryUnary(go_on)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request())
            done = []
            call.add_done_callback(done.append)
            await call
            call.add_done_callback(done.append)
            assert done == [call, call]

    async def test_context_of_the_caller(self, open_channel):
        variable = contextvars.ContextVar("variable")
        seen = []

        async def act(continuation, details, request):
            seen.append(variable.get())
            return await continuation(details, request)

        async with open_channel(UnaryUnary(act)) as channel:
            variable.set("mine")
            await echo_pb2_grpc.EchoStub(channel).Unary(Request())
        assert seen == ["mine"]

    async def test_other_kinds_are_left_alone(self, open_channel):
        async def never(continuation, details, request):
            raise AssertionError

        async with open_channel(UnaryStream(never), StreamUnary(never), StreamStream(never)) as channel:
            await echo_pb2_grpc.EchoStub(channel).Unary(Request())

    async def test_what_is_no_interceptor(self, open_channel):
        with pytest.raises(ValueError):
            open_channel(object())


class TestUnaryStream:
    async def test_call(self, open_channel):
        async with open_channel(UnaryStream(added("one")), UnaryStream(go_on)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.ServerStream(Request(replies=3), metadata=[("trailing-b", "2")])
            assert isinstance(call, grpc.aio.UnaryStreamCall)
            assert ["one" in keys(reply) async for reply in call] == [True] * 3
            assert await call.code() is grpc.StatusCode.OK
            assert (await call.trailing_metadata())["trailing-b"] == "2"
            call = stub.ServerStream(Request(replies=2))
            await call.wait_for_connection()
            assert "one" in keys(await call.read()) and "one" in keys(await call.read())
            assert await call.read() is grpc.aio.EOF

    async def test_other_responses(self, open_channel):
        async def act(continuation, details, request):
            call = await continuation(details, request)

            async def doubled():
                async for reply in call:
                    yield Reply(payload=reply.payload * 2)

            return doubled()

        async with open_channel(UnaryStream(act), UnaryStream(act)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.ServerStream(Request(replies=2, payload=b"x"), metadata=[("trailing-b", "2")])
            assert [reply.payload async for reply in call] == [b"xxxx"] * 2
            assert await call.code() is grpc.StatusCode.OK and call.done() and not call.cancelled()
            assert (await call.trailing_metadata())["trailing-b"] == "2"

    async def test_responses_without_a_call(self, open_channel, ours):
        if not ours:
            pytest.skip("its call needs one below it")

        async def act(continuation, details, request):
            async def own():
                yield Reply(payload=b"mine")

            return own()

        async with open_channel(UnaryStream(act)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).ServerStream(Request())
            assert [reply.payload async for reply in call] == [b"mine"]
            assert await call.code() is grpc.StatusCode.OK and call.done() and not call.cancel()

    async def test_error_and_cancel(self, open_channel):
        async with open_channel(UnaryStream(go_on)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.ServerStream(Request(replies=1, code=NOT_FOUND)):
                    pass
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            call = stub.ServerStream(Request(replies=100, delay=0.05))
            await call.read()
            assert call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
            assert await call.code() is grpc.StatusCode.CANCELLED


class TestStreamUnary:
    async def test_iterator_and_writes(self, open_channel):
        async with open_channel(StreamUnary(added("one")), StreamUnary(go_on)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.ClientStream(requests(b"a", b"b"))
            assert isinstance(call, grpc.aio.StreamUnaryCall)
            reply = await call
            assert reply.payload == b"ab" and "one" in keys(reply)
            with pytest.raises(grpc.aio.UsageError):
                await call.write(Request())
            with pytest.raises(grpc.aio.UsageError):
                await call.done_writing()
            call = stub.ClientStream()
            for payload in [b"a", b"b", b"c"]:
                await call.write(Request(payload=payload))
            await call.done_writing()
            assert (await call).payload == b"abc"
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(Request())

    async def test_other_requests(self, open_channel, ours):
        async def act(continuation, details, given):
            async def doubled():
                async for request in given:
                    yield Request(payload=request.payload * 2)

            return await continuation(details, doubled())

        async with open_channel(StreamUnary(act)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            assert (await stub.ClientStream(requests(b"a", b"b"))).payload == b"aabb"
            call = stub.ClientStream()
            await call.write(Request(payload=b"a"))
            await call.done_writing()
            if ours:  # grpc.aio learns that later
                with pytest.raises(asyncio.InvalidStateError):
                    await call.write(Request())
            assert (await call).payload == b"aa"

    async def test_error(self, open_channel):
        async with open_channel(StreamUnary(go_on)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo_pb2_grpc.EchoStub(channel).ClientStream([Request(code=NOT_FOUND)])
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_interceptor_raises_before_writes(self, open_channel):
        async def act(continuation, details, given):
            raise KeyError("boom")

        async with open_channel(StreamUnary(act)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).ClientStream()
            with pytest.raises(KeyError):
                while True:
                    await call.write(Request())
            with pytest.raises(KeyError):
                await call


class TestStreamStream:
    async def test_iterator_and_writes(self, open_channel):
        async with open_channel(StreamStream(added("one")), StreamStream(go_on)) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.Bidi(requests(b"a", b"b"))
            assert isinstance(call, grpc.aio.StreamStreamCall)
            assert [reply.payload async for reply in call] == [b"a", b"b"]
            call = stub.Bidi()
            for payload in [b"a", b"b"]:
                await call.write(Request(payload=payload))
                reply = await call.read()
                assert reply.payload == payload and "one" in keys(reply)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    async def test_other_responses(self, open_channel):
        async def act(continuation, details, given):
            call = await continuation(details, given)

            async def doubled():
                async for reply in call:
                    yield Reply(payload=reply.payload * 2)

            return doubled()

        async with open_channel(StreamStream(act), StreamStream(act)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Bidi(requests(b"a", b"b"))
            assert [reply.payload async for reply in call] == [b"aaaa", b"bbbb"]
            assert await call.code() is grpc.StatusCode.OK

    async def test_writes_to_a_call_that_ended(self, open_channel):
        async with open_channel(StreamStream(go_on)) as channel:
            call = channel.stream_stream("/no.such/Method")()

            async def write_on():
                while True:
                    await call.write(b"x")

            with pytest.raises(asyncio.InvalidStateError):
                await asyncio.wait_for(write_on(), 30)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()

    async def test_cancel(self, open_channel):
        async with open_channel(StreamStream(go_on)) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Bidi()
            await call.write(Request())
            await call.read()
            assert call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(Request())
