"""The service of echo.proto: for threads, for asyncio, and as a process of its own.

Request metadata `initial-*` comes back as initial metadata, and `trailing-*` as trailing metadata.
"""

import asyncio
import os
import sys
import threading
from concurrent import futures

# conftest.py generates these and puts their folder on sys.path, and on PYTHONPATH for other processes.
import echo_pb2
import echo_pb2_grpc
import grpc

CODES = {code.value[0]: code for code in grpc.StatusCode}


def _chosen(metadata, prefix):
    return tuple((key, value) for key, value in metadata if key.startswith(prefix))


def _reply(request, received, context):
    # grpcio says 2**63 nanoseconds or so where there is no deadline.
    remaining = context.time_remaining()
    return echo_pb2.Reply(
        payload=request.payload,
        received=received,
        metadata=[
            echo_pb2.Pair(key=key, value=value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata()
        ],
        time_remaining=None if remaining is None or remaining > 1e9 else remaining,
        peer=context.peer(),
        server=os.getpid(),
    )


def _finish(state, request, context):
    state["returned"] = context.is_active()
    if getattr(request, "raise"):
        raise ValueError(request.details)
    if request.code:
        context.abort(CODES[request.code], request.details)


class Tally:
    """Counts calls. A call that ends before its handler returns counts as cancelled."""

    def __init__(self):
        self.lock = threading.Lock()
        self.begun = self.ended = self.cancelled = 0

    def begin(self):
        with self.lock:
            self.begun += 1

    def end(self, cancelled):
        with self.lock:
            self.ended += 1
            self.cancelled += cancelled

    def message(self):
        with self.lock:
            return echo_pb2.Counts(begun=self.begun, ended=self.ended, cancelled=self.cancelled)


class Echo(echo_pb2_grpc.EchoServicer):
    """For threads."""

    def __init__(self):
        self.tally = Tally()

    def _begin(self, context):
        self.tally.begin()
        over = threading.Event()
        state = {"returned": False}

        def ended():
            self.tally.end(not state["returned"])
            over.set()

        if not context.add_callback(ended):
            ended()
        metadata = context.invocation_metadata()
        initial = _chosen(metadata, "initial-")
        if initial:
            context.send_initial_metadata(initial)
        trailing = _chosen(metadata, "trailing-")
        if trailing:
            context.set_trailing_metadata(trailing)
        return over, state

    def Unary(self, request, context):
        over, state = self._begin(context)
        if request.delay:
            over.wait(request.delay)
        _finish(state, request, context)
        return _reply(request, 1, context)

    def ClientStream(self, requests, context):
        over, state = self._begin(context)
        payloads, last = [], echo_pb2.Request()
        for last in requests:
            payloads.append(last.payload)
            if last.delay:
                over.wait(last.delay)
        _finish(state, last, context)
        return _reply(echo_pb2.Request(payload=b"".join(payloads)), len(payloads), context)

    def ServerStream(self, request, context):
        over, state = self._begin(context)
        for _ in range(request.replies):
            if request.delay:
                over.wait(request.delay)
            yield _reply(request, 1, context)
        _finish(state, request, context)

    def Bidi(self, requests, context):
        over, state = self._begin(context)
        last = echo_pb2.Request()
        for received, last in enumerate(requests, 1):
            if last.delay:
                over.wait(last.delay)
            yield _reply(last, received, context)
        _finish(state, last, context)

    def Count(self, request, context):
        return self.tally.message()


class AioEcho(echo_pb2_grpc.EchoServicer):
    """For asyncio."""

    def __init__(self):
        self.tally = Tally()

    async def _begin(self, context):
        self.tally.begin()
        context.add_done_callback(lambda context: self.tally.end(context.cancelled()))
        metadata = context.invocation_metadata()
        initial = _chosen(metadata, "initial-")
        if initial:
            await context.send_initial_metadata(initial)
        trailing = _chosen(metadata, "trailing-")
        if trailing:
            context.set_trailing_metadata(trailing)

    async def _finish(self, request, context):
        if getattr(request, "raise"):
            raise ValueError(request.details)
        if request.code:
            await context.abort(CODES[request.code], request.details)

    async def Unary(self, request, context):
        await self._begin(context)
        if request.delay:
            await asyncio.sleep(request.delay)
        await self._finish(request, context)
        return _reply(request, 1, context)

    async def ClientStream(self, requests, context):
        await self._begin(context)
        payloads, last = [], echo_pb2.Request()
        async for last in requests:
            payloads.append(last.payload)
            if last.delay:
                await asyncio.sleep(last.delay)
        await self._finish(last, context)
        return _reply(echo_pb2.Request(payload=b"".join(payloads)), len(payloads), context)

    async def ServerStream(self, request, context):
        await self._begin(context)
        for _ in range(request.replies):
            if request.delay:
                await asyncio.sleep(request.delay)
            yield _reply(request, 1, context)
        await self._finish(request, context)

    async def Bidi(self, requests, context):
        await self._begin(context)
        received, last = 0, echo_pb2.Request()
        async for last in requests:
            received += 1
            if last.delay:
                await asyncio.sleep(last.delay)
            yield _reply(last, received, context)
        await self._finish(last, context)

    async def Count(self, request, context):
        return self.tally.message()


def serve(module, address="127.0.0.1:0", credentials=None, options=None, threads=16, **more):
    """Starts a server of `Echo`: `module` is `grpc` or `tonic_rdma`. Returns (server, port)."""
    server = module.server(futures.ThreadPoolExecutor(threads), options=options, **more)
    echo_pb2_grpc.add_EchoServicer_to_server(Echo(), server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    return server, port


if __name__ == "__main__":
    # `echo_service.py MODULE ADDRESS`: prints the port, and ends when its standard input does.
    server, port = serve(__import__(sys.argv[1]), sys.argv[2])
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)
