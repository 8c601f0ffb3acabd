"""The processes of `_compare`: servers, clients, and the floors, which no call can be faster than.

A process prints one JSON line for each line of its standard input, and ends with it. A client compares what comes
back with what it sent, and the server does if nothing comes back: every byte up to 64 KiB, above that the length and
words at 65 places of each message, and every byte of a cell's first message.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

SMALL = 64 << 10  # bytes; longer messages are checked at some places
PLACES = 64
VARIANTS = 4  # successive messages differ, so that an old buffer is no right answer
CALL_LIMIT = 60.0  # seconds
METHOD = "/tonic_rdma.compare.Compare/Echo"
HEALTH = "/grpc.health.v1.Health/Check"
NO_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Cell(NamedTuple):
    size: int  # bytes
    in_flight: int


class Failure(Exception):
    """What the user is told; the command ends with status 1."""


def serve(kind: str, what: str) -> None:
    message = message_class()
    if kind.endswith("-aio"):
        asyncio.run(serve_aio(kind, message))
        return
    receiver = Receiver(message, what)
    import grpc

    import tonic_rdma

    workers = ThreadPoolExecutor(max_workers=32)
    options = [*NO_LIMITS, ("grpc.so_reuseport", 0)]
    server = (
        tonic_rdma.server(workers, options=options)
        if kind == "tonic-rdma"
        else grpc.server(workers, options=options)
    )
    handle = grpc.unary_unary_rpc_method_handler(
        lambda request, context: receiver.reply(request),
        request_deserializer=message.FromString,
        response_serializer=message.SerializeToString,
    )
    add_handler(server, handle)
    say(port=server.add_insecure_port("127.0.0.1:0"))
    server.start()
    sys.stdin.read()
    server.stop(0).wait()


async def serve_aio(kind: str, message: Any) -> None:
    import grpc.aio

    import tonic_rdma.aio

    options = [*NO_LIMITS, ("grpc.so_reuseport", 0)]
    server: Any = (
        tonic_rdma.aio.server(options=options) if kind == "tonic-rdma-aio" else grpc.aio.server(options=options)
    )

    async def echo(request: Any, context: Any) -> Any:
        return message(seed=request.seed, payload=request.payload)

    handle = grpc.unary_unary_rpc_method_handler(
        echo, request_deserializer=message.FromString, response_serializer=message.SerializeToString
    )
    add_handler(server, handle)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(port=port)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def add_handler(server: Any, handler: Any) -> None:
    """Does what the generated `add_CompareServicer_to_server` does."""
    import grpc

    _, service, name = METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    server.add_registered_method_handlers(service, {name: handler})


def call(kind: str, address: str, server: str, what: str = "echo") -> None:
    """Measures the cells that are asked for, as a client of this kind. `server` is the server's process."""
    kinds = CALLS[what]()
    if kind.endswith("-aio"):
        asyncio.run(call_aio(kind, address, int(server), kinds))
        return
    import grpc

    import tonic_rdma

    connect: Any = tonic_rdma.insecure_channel if kind == "tonic-rdma" else grpc.insecure_channel
    with connect(address, options=NO_LIMITS) as channel:
        method = channel.unary_unary(
            kinds.path,
            request_serializer=kinds.serialize,
            response_deserializer=kinds.parse,
            _registered_method=True,
        )
        kinds.prepare(64)
        kinds.first(method(kinds.request(0, True), timeout=CALL_LIMIT))
        say(carried=carried(channel))
        for cell, duration in asked():
            kinds.prepare(cell.size)
            kinds.first(method(kinds.request(0, True), timeout=CALL_LIMIT))
            with ThreadPoolExecutor(cell.in_flight) as threads:
                run_threads(threads, method, kinds, cell, duration / 5)
                began, before = time.perf_counter_ns(), cpu_of(int(server))
                latencies = run_threads(threads, method, kinds, cell, duration)
                say(**figures(latencies, time.perf_counter_ns() - began, cpu_of(int(server)) - before))


def run_threads(
    threads: ThreadPoolExecutor, method: Any, kinds: Echo, cell: Cell, duration: float
) -> list[int]:
    end = time.perf_counter_ns() + int(duration * 1e9)

    def one(first: int) -> list[int]:
        clock, request, read, check = time.perf_counter_ns, kinds.request, kinds.read, kinds.check
        latencies: list[int] = []
        index, now = first, 0
        while now < end:
            began = clock()
            reply = method(request(index), timeout=CALL_LIMIT)
            payload = read(reply)
            now = clock()
            latencies.append(now - began)
            check(index, reply, payload)
            index += 1
        return latencies

    return [latency for each in threads.map(one, range(cell.in_flight)) for latency in each]


async def call_aio(kind: str, address: str, server: int, kinds: Echo) -> None:
    import grpc.aio

    import tonic_rdma.aio

    connect: Any = tonic_rdma.aio.insecure_channel if kind == "tonic-rdma-aio" else grpc.aio.insecure_channel
    async with connect(address, options=NO_LIMITS) as channel:
        method = channel.unary_unary(
            kinds.path,
            request_serializer=kinds.serialize,
            response_deserializer=kinds.parse,
            _registered_method=True,
        )

        async def one(first: int, end: int) -> list[int]:
            clock, request, read, check = time.perf_counter_ns, kinds.request, kinds.read, kinds.check
            latencies: list[int] = []
            index, now = first, 0
            while now < end:
                began = clock()
                reply = await method(request(index), timeout=CALL_LIMIT)
                payload = read(reply)
                now = clock()
                latencies.append(now - began)
                check(index, reply, payload)
                index += 1
            return latencies

        async def run_tasks(cell: Cell, duration: float) -> list[int]:
            end = time.perf_counter_ns() + int(duration * 1e9)
            each = await asyncio.gather(*(one(first, end) for first in range(cell.in_flight)))
            return [latency for latencies in each for latency in latencies]

        kinds.prepare(64)
        kinds.first(await method(kinds.request(0, True), timeout=CALL_LIMIT))
        say(carried=carried(channel))
        for cell, duration in asked():  # nothing else runs while it waits
            kinds.prepare(cell.size)
            kinds.first(await method(kinds.request(0, True), timeout=CALL_LIMIT))
            await run_tasks(cell, duration / 5)
            began, before = time.perf_counter_ns(), cpu_of(server)
            latencies = await run_tasks(cell, duration)
            say(**figures(latencies, time.perf_counter_ns() - began, cpu_of(server) - before))


def figures(latencies: list[int], took: int, cpu: int) -> dict[str, float]:
    return {
        "calls": len(latencies),
        "p50_us": statistics.median(latencies) / 1e3,
        "mean_us": statistics.fmean(latencies) / 1e3,
        "per_second": len(latencies) * 1e9 / took,
        "cpu_us": cpu / len(latencies) / 1e3,
    }


def cpu_of(server: int) -> int:
    """Returns the nanoseconds of processor time of this process and of the process `server`, up to now."""
    clock_of_server = ~server << 3 | 2  # as clock_getcpuclockid(3) makes it
    return time.process_time_ns() + time.clock_gettime_ns(clock_of_server)


def carried(channel: Any) -> str:
    verdict = getattr(channel, "verdict", None)
    if verdict is None:
        return ""
    native = ", native calls" if getattr(channel.connection, "native", False) else ""
    return f"over {verdict}{native}, because {channel.reason}"


class Echo:
    """Requests of one size, and the check of replies."""

    path = METHOD

    def __init__(self) -> None:
        self.message = message_class()
        self.serialize, self.parse = self.message.SerializeToString, self.message.FromString
        self.contents: list[bytes] = []
        self.places: list[int] = []

    def prepare(self, size: int) -> None:
        self.contents, self.places = contents_of(size), places_of(size)

    def request(self, index: int, every_byte: bool = False) -> Any:
        return self.message(seed=index, payload=self.contents[index % VARIANTS])

    def read(self, reply: Any) -> bytes:
        payload: bytes = reply.payload
        return payload

    def first(self, reply: Any) -> None:
        """Checks every byte of the reply to request 0."""
        self.check(0, reply, self.read(reply), True)

    def check(self, index: int, reply: Any, payload: bytes, every_byte: bool = False) -> None:
        sent = self.contents[index % VARIANTS]
        if reply.seed != index or not is_same(payload, sent, self.places, every_byte):
            raise Failure(f"message {index} of {len(sent)} bytes came back changed")


class OneWay(Echo):
    """The server has the contents too, and checks what arrives."""

    def request(self, index: int, every_byte: bool = False) -> Any:
        return self.message(seed=index, payload=self.contents[index % VARIANTS], every_byte=every_byte)

    def check(self, index: int, reply: Any, payload: bytes, every_byte: bool = False) -> None:
        if reply.seed != index:
            raise Failure(f"message {index} was answered by message {reply.seed}")


class Reference(OneWay):
    """The field has a handle. The payload lies in an array, which is shared anew for each call."""

    def __init__(self) -> None:
        import tonic_rdma

        super().__init__()
        self.pool = tonic_rdma.BufferPool()
        self.arrays: list[Any] = []
        self.shared = threading.local()  # each thread has one call at a time

    def prepare(self, size: int) -> None:
        import tonic_rdma

        super().prepare(size)
        self.arrays = [tonic_rdma.empty(size, "uint8") for _ in self.contents]
        for array, content in zip(self.arrays, self.contents):
            memoryview(array)[:] = content

    def request(self, index: int, every_byte: bool = False) -> Any:
        import tonic_rdma

        self.shared.buffer = tonic_rdma.share(self.arrays[index % VARIANTS], pool=self.pool)
        return self.message(seed=index, payload=bytes(self.shared.buffer), every_byte=every_byte)

    def read(self, reply: Any) -> bytes:
        self.shared.buffer.close()
        return super().read(reply)

    def first(self, reply: Any) -> None:
        super().first(reply)
        copied = self.pool.statistics().copied_bytes, int.from_bytes(reply.payload, "little")
        if any(copied):
            raise Failure(
                f"the owner has copied {copied[0]} bytes, and the reader {copied[1]} besides its fetches"
            )


class Health(Echo):
    """Health checks, without protobuf: the request has no fields, and the reply is {status: SERVING}."""

    path = HEALTH

    def __init__(self) -> None:
        self.serialize = self.parse = bytes

    def prepare(self, size: int) -> None:
        pass

    def request(self, index: int, every_byte: bool = False) -> Any:
        return b""

    def read(self, reply: Any) -> bytes:
        return b""

    def check(self, index: int, reply: Any, payload: bytes, every_byte: bool = False) -> None:
        if reply != b"\x08\x01":
            raise Failure(f"the health check was answered by {reply!r}")


CALLS: dict[str, type[Echo]] = {"echo": Echo, "one-way": OneWay, "reference": Reference, "health": Health}


class Receiver:
    """The server's side of these calls."""

    def __init__(self, message: Any, what: str) -> None:
        self.message, self.what = message, what
        self.expected: dict[int, tuple[list[bytes], list[int]]] = {}  # contents and places, by size

    def reply(self, request: Any) -> Any:
        if self.what == "echo":
            return self.message(seed=request.seed, payload=request.payload)
        payload, copied = request.payload, b""
        if self.what == "reference":
            import tonic_rdma

            payload = memoryview(tonic_rdma.RemoteBuffer(payload).fetch())
        if len(payload) not in self.expected:
            self.expected = {len(payload): (contents_of(len(payload)), places_of(len(payload)))}
        contents, places = self.expected[len(payload)]
        if not is_same(payload, contents[request.seed % VARIANTS], places, request.every_byte):
            raise Failure(f"message {request.seed} of {len(payload)} bytes arrived changed")
        if self.what == "reference" and request.every_byte:
            copied = copied_of_fetches().to_bytes(8, "little")
        return self.message(seed=request.seed, payload=copied)


def copied_of_fetches() -> int:
    """Returns the bytes that this process has copied besides its fetches."""
    import tonic_rdma
    from tonic_rdma._buffers import _client

    of_owners = sum(owner.copied_bytes for owner in _client().owners())
    return of_owners + tonic_rdma.memory_statistics().copied_bytes


def contents_of(size: int) -> list[bytes]:
    # Random bytes: no word stands at two places, so a shifted or torn message differs.
    return [random.Random(variant).randbytes(size) for variant in range(VARIANTS)]


def places_of(size: int) -> list[int]:
    return [place * (size - 8) // PLACES for place in range(PLACES)] + [size - 8]


def is_same(payload: Any, sent: bytes, places: list[int], every_byte: bool) -> bool:
    if len(payload) != len(sent) or every_byte or len(sent) <= SMALL:
        return bool(payload == sent)
    return all(payload[at : at + 8] == sent[at : at + 8] for at in places)


def floor() -> None:
    kinds = Echo()
    for cell, duration in asked():
        kinds.prepare(cell.size)
        say(protobuf_us=protobuf_alone(kinds, duration) / 1e3, wake_us=asyncio.run(wake_ups(duration)) / 1e3)


def protobuf_alone(kinds: Echo, duration: float) -> float:
    """Returns the nanoseconds that the messages of an echo take, at both ends, without a call."""
    clock, message = time.perf_counter_ns, kinds.message
    end, index = clock() + int(duration * 1e9), 0
    latencies: list[int] = []
    while not latencies or clock() < end:
        began = clock()
        at_server = message.FromString(kinds.request(index).SerializeToString())
        reply = message(seed=at_server.seed, payload=at_server.payload)
        at_client = message.FromString(reply.SerializeToString())
        payload = kinds.read(at_client)
        latencies.append(clock() - began)
        kinds.check(index, at_client, payload)
        index += 1
    return statistics.median(latencies)


async def wake_ups(duration: float) -> float:
    """Returns the nanoseconds from a thread's write to an eventfd to the loop's callback, and back."""
    to_loop, to_thread = os.eventfd(0), os.eventfd(0)
    loop = asyncio.get_running_loop()

    def wake() -> None:
        os.eventfd_read(to_loop)
        os.eventfd_write(to_thread, 1)

    def measured() -> list[int]:
        clock = time.perf_counter_ns
        end = clock() + int(duration * 1e9)
        latencies: list[int] = []
        while not latencies or clock() < end:
            began = clock()
            os.eventfd_write(to_loop, 1)
            os.eventfd_read(to_thread)
            latencies.append(clock() - began)
        return latencies

    loop.add_reader(to_loop, wake)
    try:
        return statistics.median(await loop.run_in_executor(None, measured))
    finally:
        loop.remove_reader(to_loop)
        os.close(to_loop)
        os.close(to_thread)


def message_class() -> Any:
    """Returns the class that protoc would generate for {uint64 seed = 1; bytes payload = 2; bool every_byte = 3}."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise Failure("protobuf is missing: pip install protobuf") from None
    file = descriptor_pb2.FileDescriptorProto(
        name="tonic_rdma/compare.proto", package="tonic_rdma.compare", syntax="proto3"
    )
    message = file.message_type.add(name="Echoed")
    kinds = descriptor_pb2.FieldDescriptorProto
    fields = [("seed", kinds.TYPE_UINT64), ("payload", kinds.TYPE_BYTES), ("every_byte", kinds.TYPE_BOOL)]
    for number, (name, kind) in enumerate(fields, 1):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tonic_rdma.compare.Echoed"))


def asked() -> Iterator[tuple[Cell, float]]:
    for line in sys.stdin:
        size, in_flight, duration = json.loads(line)
        yield Cell(size, in_flight), duration


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def child(arguments: list[str]) -> None:
    programs: dict[str, Callable[..., None]] = {"serve": serve, "call": call, "floor": floor}
    try:
        programs[arguments[0]](*arguments[1:])
    except KeyboardInterrupt:
        pass  # the parent says so
    except Exception as error:  # noqa: BLE001, the parent shows it
        say(error=f"{type(error).__name__}: {error}" if not isinstance(error, Failure) else str(error))
        sys.exit(1)


if __name__ == "__main__":
    child(sys.argv[1:])
