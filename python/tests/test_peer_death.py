"""A process that is killed: its peer's calls end within a second, and its peer's handlers are told.

A busy machine may need longer, so each test tries up to five times, and one try within a second is enough.
"""

import asyncio
import importlib
import subprocess
import sys
import threading
import time
from concurrent import futures

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest

KINDS = ["Unary", "ClientStream", "ServerStream", "Bidi"]
# The server's handler waits: at once, or after the first reply.
LONG = echo_pb2.Request(payload=b"x", delay=300, replies=1)


def call(stub, kind, over):
    """Makes a call that does not end by itself. `over`: an Event, set at the end of the client's stream."""

    def requests():
        yield echo_pb2.Request(payload=b"x")
        over.wait()

    match kind:
        case "Unary":
            stub.Unary(LONG)
        case "ClientStream":
            stub.ClientStream(requests())
        case "ServerStream":
            list(stub.ServerStream(LONG))
        case "Bidi":
            list(stub.Bidi(requests()))


async def call_aio(stub, kind):
    async def requests():
        yield echo_pb2.Request(payload=b"x")
        await asyncio.Event().wait()

    match kind:
        case "Unary":
            await stub.Unary(LONG)
        case "ClientStream":
            await stub.ClientStream(requests())
        case "ServerStream":
            [it async for it in stub.ServerStream(LONG)]
        case "Bidi":
            [it async for it in stub.Bidi(requests())]


def tried(attempt):
    """Calls `attempt` until it returns less than a second, at most five times."""
    seconds = []
    while not seconds or seconds[-1] >= 1:
        assert len(seconds) < 5, f"seconds of each try: {seconds}"
        seconds.append(attempt())


def lost(error):
    """Checks the error of a call whose server was killed."""
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    assert error.details()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS)
def test_server_killed(implementation, server_process, kind):
    def attempt():
        server, over = server_process(implementation.__name__), threading.Event()
        with implementation.insecure_channel(server.address) as channel, futures.ThreadPoolExecutor(1) as pool:
            stub = echo_pb2_grpc.EchoStub(channel)
            done = pool.submit(call, stub, kind, over)
            while not stub.Count(echo_pb2.Nothing()).begun:
                assert not done.done(), done.result()
                time.sleep(0.01)
            killed = time.monotonic()
            server.kill()
            error = done.exception(30)
            seconds = time.monotonic() - killed
            over.set()
            assert isinstance(error, grpc.RpcError), error
            lost(error)
        return seconds

    tried(attempt)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS)
def test_server_killed_aio(implementation, server_process, kind):
    aio = importlib.import_module(f"{implementation.__name__}.aio")

    async def attempt():
        server = server_process(implementation.__name__)
        async with aio.insecure_channel(server.address) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            task = asyncio.ensure_future(call_aio(stub, kind))
            while not (await stub.Count(echo_pb2.Nothing())).begun:
                assert not task.done(), task.result()
                await asyncio.sleep(0.01)
            killed = time.monotonic()
            server.kill()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(task, 30)
            lost(error.value)
            return time.monotonic() - killed

    tried(lambda: asyncio.run(attempt()))


def test_server_again(implementation, server_process):
    """A channel whose server was killed finds the next server at this address."""
    server = server_process(implementation.__name__)
    with implementation.insecure_channel(server.address) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        first = stub.Unary(echo_pb2.Request(payload=b"1")).server
        server.kill()
        with pytest.raises(grpc.RpcError) as error:
            stub.Unary(echo_pb2.Request())
        lost(error.value)
        server_process(implementation.__name__, server.address)
        reply = stub.Unary(echo_pb2.Request(payload=b"2"), wait_for_ready=True, timeout=30)
        assert (reply.payload, reply.server == first) == (b"2", False)


class Told(echo_pb2_grpc.EchoServicer):
    """Handlers that wait until their call is over: by a callback, or by the end of the requests."""

    def __init__(self):
        self.begun, self.told = threading.Event(), threading.Event()

    def wait(self, context):
        over = threading.Event()
        assert context.add_callback(over.set)
        self.begun.set()
        over.wait()
        assert not context.is_active()
        self.told.set()
        return echo_pb2.Reply()

    def Unary(self, request, context):
        return self.wait(context)

    def ServerStream(self, request, context):
        yield self.wait(context)

    def Bidi(self, requests, context):
        try:
            for _ in requests:
                self.begun.set()
                yield echo_pb2.Reply()
        finally:
            self.told.set()

    def ClientStream(self, requests, context):
        for _ in self.Bidi(requests, context):
            pass


class AioTold(echo_pb2_grpc.EchoServicer):
    def __init__(self):
        self.begun, self.told = threading.Event(), threading.Event()

    async def wait(self):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.told.set()
            raise

    async def Unary(self, request, context):
        await self.wait()

    async def ClientStream(self, requests, context):
        async for _ in requests:
            await self.wait()

    async def ServerStream(self, request, context):
        yield echo_pb2.Reply()
        await self.wait()

    async def Bidi(self, requests, context):
        async for _ in requests:
            yield echo_pb2.Reply()
            await self.wait()


def killed_client(implementation, port, kind, servicer):
    """Starts a client, kills it while its call waits, and returns the seconds until the handler was told."""
    client = subprocess.Popen([sys.executable, __file__, implementation.__name__, f"127.0.0.1:{port}", kind])
    try:
        assert servicer.begun.wait(30)
    finally:
        client.kill()
        killed = time.monotonic()
        client.wait()
    assert servicer.told.wait(30)
    return time.monotonic() - killed


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS)
def test_client_killed(implementation, kind):
    def attempt():
        server, servicer = implementation.server(futures.ThreadPoolExecutor(4)), Told()
        echo_pb2_grpc.add_EchoServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            return killed_client(implementation, port, kind, servicer)
        finally:
            assert server.stop(None).wait(10)

    tried(attempt)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS)
def test_client_killed_aio(implementation, kind):
    aio = importlib.import_module(f"{implementation.__name__}.aio")

    async def attempt():
        server, servicer = aio.server(), AioTold()
        echo_pb2_grpc.add_EchoServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.to_thread(killed_client, implementation, port, kind, servicer)
        finally:
            await server.stop(None)

    tried(lambda: asyncio.run(attempt()))


if __name__ == "__main__":
    module, address, kind = sys.argv[1:]
    with importlib.import_module(module).insecure_channel(address) as channel:
        call(echo_pb2_grpc.EchoStub(channel), kind, threading.Event())
