"""Channels of asyncio: connecting, closing, credentials, event loops."""

import asyncio
import gc
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref

import echo_pb2
import echo_pb2_grpc
import echo_service
import grpc
import pytest

Request = echo_pb2.Request
IDLE, READY, SHUTDOWN = (getattr(grpc.ChannelConnectivity, name) for name in ("IDLE", "READY", "SHUTDOWN"))


@pytest.fixture
def aio(implementation):
    return importlib.import_module(implementation.__name__ + ".aio")


@pytest.fixture
def nowhere():
    """An address that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


class TestState:
    pytestmark = pytest.mark.asyncio

    async def test_ready(self, aio, echo_address):
        async with aio.insecure_channel(echo_address) as channel:
            assert isinstance(channel, grpc.aio.Channel)
            assert channel.get_state() is IDLE
            await channel.channel_ready()
            assert channel.get_state() is READY
            await channel.wait_for_state_change(IDLE)
            await echo_pb2_grpc.EchoStub(channel).Unary(Request())

    async def test_waits_end_when_the_channel_is_closed(self, aio, echo_address, nowhere):
        channel = aio.insecure_channel(echo_address)
        await channel.channel_ready()
        waiting = asyncio.create_task(channel.wait_for_state_change(READY))
        unready = aio.insecure_channel(nowhere)
        unready_waiting = asyncio.create_task(unready.channel_ready())
        await asyncio.sleep(0.05)
        await channel.close()
        await unready.close()
        await waiting
        with pytest.raises(grpc.aio.UsageError):
            await unready_waiting
        assert channel.get_state() is SHUTDOWN
        with pytest.raises(grpc.aio.UsageError):
            await channel.wait_for_state_change(READY)

    async def test_nobody_listens(self, aio, nowhere):
        async with aio.insecure_channel(nowhere) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Unary(Request())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and caught.value.details()
            for call in [stub.ServerStream(Request()), stub.ClientStream(), stub.Bidi()]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.wait_for_connection()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Bidi().write(Request())
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Unary(Request(), wait_for_ready=True, timeout=0.2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def test_wait_for_ready(self, aio, server_process):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            call = stub.Unary(Request(payload=b"x"), wait_for_ready=True, timeout=50)
            await asyncio.sleep(0.05)
            assert not call.done()
            await asyncio.to_thread(server_process, "grpcio", f"127.0.0.1:{port}")
            assert (await call).payload == b"x"

    async def test_connection(self, aio, echo_address):
        if aio is grpc.aio:
            pytest.skip("it has none")
        async with aio.insecure_channel(echo_address) as channel:
            assert channel.connection is None and channel.verdict is None and channel.reason is None
            await channel.channel_ready()
            await echo_pb2_grpc.EchoStub(channel).Unary(Request())
            assert channel.verdict in ("rdma", "tcp") and channel.reason
            assert channel.verdict == channel.connection.verdict


class TestClose:
    pytestmark = pytest.mark.asyncio

    async def test_calls_in_flight_are_cancelled(self, aio, echo_address):
        channel = aio.insecure_channel(echo_address)
        stub = echo_pb2_grpc.EchoStub(channel)
        unary, stream = stub.Unary(Request(delay=30)), stub.ServerStream(Request(replies=100, delay=0.05))
        await stream.read()
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await unary
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        for call in [unary, stream]:
            assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.aio.UsageError):
            await stub.Unary(Request())
        await channel.close()

    async def test_grace(self, aio, echo_address):
        channel = aio.insecure_channel(echo_address)
        stub = echo_pb2_grpc.EchoStub(channel)
        short, long = stub.Unary(Request(delay=0.3, payload=b"x")), stub.Unary(Request(delay=30))
        stream = stub.ServerStream(Request(replies=2, delay=0.05))
        await stream.read()
        closing = asyncio.create_task(channel.close(2))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.UsageError):
            await stub.Unary(Request())
        assert (await short).payload == b"x"
        await stream.read()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await long

    async def test_grace_without_calls(self, aio, echo_address):
        channel = aio.insecure_channel(echo_address)
        await echo_pb2_grpc.EchoStub(channel).Unary(Request())
        await channel.close(3000)
        for wrong in [-1, -0.5]:
            with pytest.raises(ValueError):
                await aio.insecure_channel(echo_address).close(wrong)

    async def test_intercepted_call(self, aio, echo_address):
        class Waits(grpc.aio.UnaryUnaryClientInterceptor):
            async def intercept_unary_unary(self, continuation, details, request):
                await asyncio.sleep(30)

        channel = aio.insecure_channel(echo_address, interceptors=[Waits()])
        call = echo_pb2_grpc.EchoStub(channel).Unary(Request())
        await asyncio.sleep(0.01)
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_a_call_outlives_its_channel_object(self, aio, echo_address):
        call = echo_pb2_grpc.EchoStub(aio.insecure_channel(echo_address)).Unary(
            Request(payload=b"x", delay=0.1)
        )
        gc.collect()
        assert (await call).payload == b"x"


class Token(grpc.AuthMetadataPlugin):
    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def __call__(self, context, callback):
        self.asked.append((context.service_url, context.method_name))
        self.answer(callback)


def plugin(answer):
    token = Token(answer)
    return token, grpc.metadata_call_credentials(token)


@pytest.fixture
def secure(tls):
    """A server with TLS: its port."""
    credentials = grpc.ssl_server_credentials([(tls.server_key, tls.server)])
    server, port = echo_service.serve(grpc, "127.0.0.1:0", credentials)
    yield port
    server.stop(None).wait(10)


class TestCredentials:
    pytestmark = pytest.mark.asyncio

    async def test_tls(self, aio, secure, tls):
        credentials = grpc.ssl_channel_credentials(tls.ca)
        async with aio.secure_channel(f"localhost:{secure}", credentials) as channel:
            assert (await echo_pb2_grpc.EchoStub(channel).Unary(Request(payload=b"x"))).payload == b"x"
        options = [("grpc.ssl_target_name_override", "named.example")]
        async with aio.secure_channel(f"127.0.0.1:{secure}", credentials, options) as channel:
            assert (await echo_pb2_grpc.EchoStub(channel).Unary(Request(payload=b"x"))).payload == b"x"
        async with aio.secure_channel(
            f"localhost:{secure}", grpc.ssl_channel_credentials(tls.client)
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo_pb2_grpc.EchoStub(channel).Unary(Request())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_call_credentials_of_all_kinds(self, aio, secure, tls):
        async def requests():
            yield Request()

        def sent(reply):
            keys = ("one", "two", "authorization", "k")
            return [(pair.key, pair.value) for pair in reply.metadata if pair.key in keys]

        one, of_one = plugin(lambda callback: callback((("one", "1"),), None))
        # A plugin may answer later, from another thread.
        two, of_two = plugin(lambda callback: threading.Timer(0.02, callback, ((("two", "2"),), None)).start())
        of_channel = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(tls.ca), grpc.access_token_call_credentials("token"), of_one
        )
        async with aio.secure_channel(f"localhost:{secure}", of_channel) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            options = {"credentials": of_two, "metadata": [("k", "v")]}
            expected = {("k", b"v"), ("authorization", b"Bearer token"), ("one", b"1"), ("two", b"2")}
            assert set(sent(await stub.Unary(Request(), **options))) == expected
            assert set(sent(await stub.ClientStream(requests(), **options))) == expected
            assert set(sent(await stub.ServerStream(Request(replies=1), **options).read())) == expected
            call = stub.Bidi(**options)
            await call.write(Request())
            assert set(sent(await call.read())) == expected
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            expected.remove(("two", b"2"))
            assert set(sent(await stub.Unary(Request(), metadata=[("k", "v")]))) == expected
        assert one.asked[0] == (f"https://localhost:{secure}/tonic_rdma.test.Echo", "Unary")
        assert two.asked[-1][1] == "Bidi"

    async def test_failing_plugins(self, aio, secure, tls):
        def fail(callback):
            raise KeyError("boom")

        credentials = grpc.ssl_channel_credentials(tls.ca)
        async with aio.secure_channel(f"localhost:{secure}", credentials) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            for answer in [fail, lambda callback: callback(None, KeyError("boom"))]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Unary(Request(), credentials=plugin(answer)[1])
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "boom" in caught.value.details()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Unary(Request(), credentials=plugin(lambda callback: None)[1], timeout=0.1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            call = stub.Unary(Request(), credentials=plugin(lambda callback: None)[1])
            await asyncio.sleep(0.05)
            assert call.cancel() and await call.code() is grpc.StatusCode.CANCELLED

    async def test_no_credentials(self, aio, echo_address):
        with pytest.raises((TypeError, AttributeError)):
            aio.secure_channel(echo_address, None)

    async def test_call_credentials_need_tls(self, aio, echo_address):
        async with aio.insecure_channel(echo_address) as channel:
            with pytest.raises(grpc.aio.UsageError):
                await echo_pb2_grpc.EchoStub(channel).Unary(
                    Request(), credentials=grpc.access_token_call_credentials("token")
                )


class TestLoops:
    def test_many_loops_leave_nothing_behind(self, aio, echo_address):
        def files():
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        loops = []

        async def main():
            loops.append(weakref.ref(asyncio.get_running_loop()))
            async with aio.insecure_channel(echo_address) as channel:
                stub = echo_pb2_grpc.EchoStub(channel)
                assert (await stub.Unary(Request(payload=b"x"))).payload == b"x"
                stub.Unary(Request(delay=0.01))  # which ends after the loop

        if aio is grpc.aio:
            pytest.skip("its loops stay")
        asyncio.run(main())
        before = files()
        for _ in range(30):
            asyncio.run(main())
        # Connections close in the background.
        while files() > before + 4:
            time.sleep(0.05)
        gc.collect()
        assert sum(loop() is not None for loop in loops) <= 2

    def test_one_channel_in_several_loops(self, aio, echo_address):
        if aio is grpc.aio:
            pytest.skip("it belongs to one loop")
        channel = aio.insecure_channel(echo_address)
        stub = echo_pb2_grpc.EchoStub(channel)

        async def main():
            return (await stub.Unary(Request(payload=b"x"))).payload

        assert [asyncio.run(main()) for _ in range(3)] == [b"x"] * 3
        results = []
        threads = [threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [b"x"] * 4
        asyncio.run(channel.close())

    def test_a_loop_that_is_not_running_yet(self, aio, echo_address):
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            channel = aio.insecure_channel(echo_address)
            call = echo_pb2_grpc.EchoStub(channel).Unary(Request(payload=b"x"))

            async def wait():
                return await call

            assert loop.run_until_complete(wait()).payload == b"x"
            loop.run_until_complete(channel.close())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def test_the_interpreter_ends_with_calls_in_flight(self, aio, echo_address):
        script = f"""
import asyncio, importlib, echo_pb2_grpc
from echo_pb2 import Request
aio = importlib.import_module({aio.__name__!r})
async def main():
    channel = aio.insecure_channel({echo_address!r})
    stub = echo_pb2_grpc.EchoStub(channel)
    await stub.Unary(Request())
    calls = stub.Unary(Request(delay=30)), stub.Bidi(), stub.ServerStream(Request(replies=9, delay=9))
    await asyncio.sleep(0.05)
    print("end")
    return channel, calls
kept = asyncio.run(main())
"""
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
        assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
