"""Packages that others wrote, over tonic_rdma: health, reflection, rich status, OpenTelemetry."""

import asyncio
import contextlib
import importlib
import time
from concurrent import futures

import echo_pb2
import echo_pb2_grpc
import grpc
import pytest
from echo_service import AioEcho, Echo
from google.protobuf import any_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.instrumentation import grpc as otel
from opentelemetry.instrumentation.grpc.grpcext import intercept_channel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN_SERVICE = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ECHO = "tonic_rdma.test.Echo"


@pytest.fixture
def aio(implementation):
    return importlib.import_module(f"{implementation.__name__}.aio")


class Served:
    """A server for threads with what `add(server)` adds, and a channel to it."""

    def __init__(self, implementation, add, **options):
        self.server = implementation.server(futures.ThreadPoolExecutor(8), **options)
        add(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = implementation.insecure_channel(f"127.0.0.1:{port}")

    def __enter__(self):
        return self.channel

    def __exit__(self, *_):
        self.channel.close()
        assert self.server.stop(None).wait(10)


class AioServed:
    """The same for asyncio."""

    def __init__(self, aio, add, channel_options=None, **options):
        self.aio, self.add, self.channel_options, self.options = aio, add, channel_options or {}, options

    async def __aenter__(self):
        self.server = self.aio.server(**self.options)
        self.add(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = self.aio.insecure_channel(f"127.0.0.1:{port}", **self.channel_options)
        return self.channel

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(None)


def asked(service=""):
    return health_pb2.HealthCheckRequest(service=service)


# Health


@pytest.mark.parametrize("non_blocking", [True, False])
def test_health(implementation, non_blocking):
    servicer = health.HealthServicer(non_blocking, futures.ThreadPoolExecutor(2) if non_blocking else None)
    with Served(
        implementation, lambda it: health_pb2_grpc.add_HealthServicer_to_server(servicer, it)
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(asked()).status == SERVING
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(asked("unheard"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(asked("late"))
        assert next(watch).status == UNKNOWN_SERVICE
        servicer.set("late", SERVING)
        assert next(watch).status == SERVING
        servicer.enter_graceful_shutdown()
        assert next(watch).status == NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.RpcError) as error:
            next(watch)
        assert error.value.code() is grpc.StatusCode.CANCELLED


def test_health_aio(aio):
    async def run():
        servicer = health.aio.HealthServicer()
        async with AioServed(
            aio, lambda it: health_pb2_grpc.add_HealthServicer_to_server(servicer, it)
        ) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(asked())).status == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Check(asked("unheard"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(asked("late"))
            assert (await watch.read()).status == UNKNOWN_SERVICE
            await servicer.set("late", SERVING)
            assert (await watch.read()).status == SERVING
            await servicer.enter_graceful_shutdown()
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watch.read()

    asyncio.run(run())


# Reflection


def check_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert sorted(database.get_services()) == sorted([ECHO, reflection.SERVICE_NAME])
    method = DescriptorPool(database).FindServiceByName(ECHO).FindMethodByName("Bidi")
    assert (method.client_streaming, method.input_type.full_name) == (True, "tonic_rdma.test.Request")
    with pytest.raises(KeyError):
        DescriptorPool(database).FindServiceByName("tonic_rdma.test.Unheard")


def test_reflection(implementation):
    names = (ECHO, reflection.SERVICE_NAME)
    with Served(implementation, lambda it: reflection.enable_server_reflection(names, it)) as channel:
        check_reflection(channel)


def test_reflection_aio(implementation, aio):
    async def run():
        server = aio.server()
        reflection.enable_server_reflection((ECHO, reflection.SERVICE_NAME), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        # The package's client is for threads.
        with implementation.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.to_thread(check_reflection, channel)
        await server.stop(None)

    asyncio.run(run())


# Rich status


def rich():
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.DebugInfo(stack_entries=["one", "two"], detail="näher"))
    return status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="gibt es schon: ☺", details=[detail])


class Rich(echo_pb2_grpc.EchoServicer):
    def Unary(self, request, context):
        context.abort_with_status(rpc_status.to_status(rich()))

    def ServerStream(self, request, context):
        yield echo_pb2.Reply()
        context.abort_with_status(rpc_status.to_status(rich()))


class AioRich(echo_pb2_grpc.EchoServicer):
    async def Unary(self, request, context):
        # An aio context has no abort_with_status.
        status = rpc_status.to_status(rich())
        await context.abort(status.code, status.details, status.trailing_metadata)


def test_status(implementation):
    with Served(implementation, lambda it: echo_pb2_grpc.add_EchoServicer_to_server(Rich(), it)) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.Unary(echo_pb2.Request())
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert rpc_status.from_call(error.value) == rich()
        with pytest.raises(grpc.RpcError) as error:
            stub.Unary.with_call(echo_pb2.Request())
        assert rpc_status.from_call(error.value) == rich()
        stream = stub.ServerStream(echo_pb2.Request())
        next(stream)
        with pytest.raises(grpc.RpcError):
            next(stream)
        assert rpc_status.from_call(stream) == rich()


def test_status_aio(aio):
    async def run():
        async with AioServed(
            aio, lambda it: echo_pb2_grpc.add_EchoServicer_to_server(AioRich(), it)
        ) as channel:
            call = echo_pb2_grpc.EchoStub(channel).Unary(echo_pb2.Request())
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert rpc_status.from_call(error.value) == rich()
            assert await rpc_status.aio.from_call(call) == rich()

    asyncio.run(run())


# OpenTelemetry

SPANS = InMemorySpanExporter()
KINDS = ["Unary", "ClientStream", "ServerStream", "Bidi"]
WANTED = [(side, kind, 0) for side in ("CLIENT", "SERVER") for kind in KINDS]
WANTED_OF_FAILURE = [("CLIENT", "Unary", 9), ("SERVER", "Unary", 9)]
REQUEST, WRONG = echo_pb2.Request(payload=b"x", replies=2), echo_pb2.Request(code=9, details="no")


@pytest.fixture(scope="module")
def provider():
    """The process's one provider: an instrumentor of channels takes no other."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)


@pytest.fixture
def telemetry(provider, implementation, aio, monkeypatch):
    """Lets grpc's functions, which instrumentors wrap, be those of `implementation`."""
    for to, module in ((grpc, implementation), (grpc.aio, aio)):
        for name in ("insecure_channel", "secure_channel", "server"):
            monkeypatch.setattr(to, name, getattr(module, name))
    SPANS.clear()


def expect_spans(wanted):
    """Waits for the spans (side, method, code), because a server's may end after the client has its answer."""
    until = time.monotonic() + 30
    while len(spans := SPANS.get_finished_spans()) < len(wanted) and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(
        (it.kind.name, it.attributes["rpc.method"], it.attributes["rpc.grpc.status_code"]) for it in spans
    ) == sorted(wanted)
    clients = {it.context.span_id: it for it in spans if it.kind is trace.SpanKind.CLIENT}
    for span in spans:
        if span.kind is trace.SpanKind.SERVER:
            client = clients[span.parent.span_id]
            assert (client.name, client.context.trace_id) == (span.name, span.context.trace_id)
            assert span.attributes["net.peer.ip"] == "127.0.0.1" and span.attributes["rpc.user_agent"]
    SPANS.clear()


@pytest.mark.parametrize("instrumentors", [False, True])
def test_telemetry(implementation, telemetry, instrumentors):
    def add(server):
        echo_pb2_grpc.add_EchoServicer_to_server(Echo(), server)

    def call(channel):
        stub = echo_pb2_grpc.EchoStub(channel)
        assert stub.Unary(REQUEST).payload == b"x"
        assert stub.ClientStream(iter([REQUEST, REQUEST])).payload == b"xx"
        assert [it.payload for it in stub.ServerStream(REQUEST)] == [b"x", b"x"]
        assert [it.payload for it in stub.Bidi(iter([REQUEST]))] == [b"x"]
        expect_spans(WANTED)
        with pytest.raises(grpc.RpcError):
            stub.Unary(WRONG)
        expect_spans(WANTED_OF_FAILURE)
        assert stub.Unary.future(REQUEST).result().payload == b"x"
        assert stub.Unary.with_call(REQUEST)[0].payload == b"x"
        expect_spans([("CLIENT", "Unary", 0), ("SERVER", "Unary", 0)] * 2)

    if instrumentors:
        with (
            instrumented(otel.GrpcInstrumentorClient(), otel.GrpcInstrumentorServer()),
            Served(grpc, add) as channel,
        ):
            call(channel)
    else:
        with Served(implementation, add, interceptors=[otel.server_interceptor()]) as channel:
            call(intercept_channel(channel, otel.client_interceptor()))


@pytest.mark.parametrize("instrumentors", [False, True])
def test_telemetry_aio(telemetry, aio, instrumentors):
    def add(server):
        echo_pb2_grpc.add_EchoServicer_to_server(AioEcho(), server)

    async def requests(count):
        for _ in range(count):
            yield REQUEST

    async def call(served):
        async with served as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            assert (await stub.Unary(REQUEST)).payload == b"x"
            assert (await stub.ClientStream(requests(2))).payload == b"xx"
            assert [it.payload async for it in stub.ServerStream(REQUEST)] == [b"x", b"x"]
            assert [it.payload async for it in stub.Bidi(requests(1))] == [b"x"]
            await asyncio.to_thread(expect_spans, WANTED)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Unary(WRONG)
            await asyncio.to_thread(expect_spans, WANTED_OF_FAILURE)

    if instrumentors:
        with instrumented(otel.GrpcAioInstrumentorClient(), otel.GrpcAioInstrumentorServer()):
            asyncio.run(call(AioServed(grpc.aio, add)))
    else:
        clients, servers = otel.aio_client_interceptors(), [otel.aio_server_interceptor()]
        asyncio.run(call(AioServed(aio, add, {"interceptors": clients}, interceptors=servers)))


@contextlib.contextmanager
def instrumented(*instrumentors):
    for it in instrumentors:
        it.instrument()
    try:
        yield
    finally:
        for it in instrumentors:
            it.uninstrument()
