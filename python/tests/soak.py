"""Many calls of all kinds, with cancellations and deadlines, while threads come and go and the garbage collector runs
at random moments. Prints how much memory and how many descriptors each process has, and whether these stay flat.

    python tests/soak.py [--calls 1000000] [--seed N] [--in-process] [--implementation tonic_rdma|grpc]

Ends with status 0 if all calls ended as they must and nothing grew.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import faulthandler
import gc
import importlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

PHASES = 20
PHASE_LIMIT = 1800  # seconds; then all stacks are printed, and the process ends
CALL_LIMIT = 120.0
WARM = PHASES // 4  # phases after which nothing may grow
GROWTH = 16 << 20  # bytes; a leak of 20 bytes a call shows in a million calls
SETTLES = 10  # seconds; devices free what was idle for 8
# The C library gives freed memory back at once, and has few arenas, so that resident memory says what is in use.
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
OK, CANCELLED, DEADLINE = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED
NO_LIMIT = [("grpc.max_receive_message_length", -1)]
SERVICE = "tonic_rdma.soak.Soak"
KINDS = {"Echo": "uu", "Slow": "uu", "Fail": "uu", "Raise": "uu", "Count": "us", "Join": "su", "Chat": "ss"}
COUNTING = threading.Lock()
CONTENT = random.Random(0).randbytes(2 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--in-process", action="store_true", help="servers in this process")
    parser.add_argument("--implementation", choices=("tonic_rdma", "grpc"), default="tonic_rdma")
    parser.add_argument("--serve", choices=("sync", "aio"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    module = importlib.import_module(options.implementation)
    importlib.import_module(options.implementation + ".aio")
    logging.disable()  # of the handlers that raise
    if options.serve:
        serve(module, options.serve, lambda port: print(port, flush=True), sys.stdin.read)
        return 0
    faulthandler.enable()
    print(f"{options.calls} calls, seed {options.seed}", flush=True)
    return soak(module, options)


def soak(module: Any, options: argparse.Namespace) -> int:
    servers = [start_server(module, kind, options) for kind in ("sync", "aio")]
    watched = {"client": os.getpid()} | {f"{kind} server": pid for kind, _, pid, _ in servers if pid}
    codes: collections.Counter[str] = collections.Counter()
    try:
        faults = phases(module, options, [address for _, address, _, _ in servers], watched, codes)
    finally:
        for *_, stop in servers:
            stop()
    print(", ".join(f"{code} {n}" for code, n in sorted(codes.items())))
    print(f"not flat: {', '.join(faults)} grew" if faults else "flat: nothing grew after the first quarter")
    return 1 if faults else 0


def phases(module: Any, options: Any, addresses: list[str], watched: dict[str, int], codes: Any) -> list[str]:
    """Makes all calls, and returns the processes that grew."""
    rng = random.Random(options.seed)
    for phase in range(PHASES):
        faulthandler.dump_traceback_later(PHASE_LIMIT, exit=True)
        calls = options.calls * (phase + 1) // PHASES - options.calls * phase // PHASES
        run_phase(module, rng, addresses, calls, codes)
        print(f"after {sum(codes.values())} calls: {text_of(used_by(watched))}", flush=True)
        if phase + 1 == WARM:
            time.sleep(SETTLES)
            early = used_by(watched)
            print(f"{SETTLES} s later: {text_of(early)}", flush=True)
    end = time.monotonic() + 3 * SETTLES
    while (faults := grown(early, late := used_by(watched))) and time.monotonic() < end:
        time.sleep(1)
    print(f"in the end: {text_of(late)}")
    faulthandler.cancel_dump_traceback_later()
    return faults


Used = dict[str, tuple[int, int]]


def grown(early: Used, late: Used) -> list[str]:
    return [name for name in early if late[name][0] > early[name][0] + GROWTH or late[name][1] > early[name][1]]


def text_of(used: Used) -> str:
    return ", ".join(f"{name} {rss / 1048576:.1f} MiB, {fds} descriptors" for name, (rss, fds) in used.items())


def used_by(watched: dict[str, int]) -> Used:
    gc.collect()
    return {name: usage(pid) for name, pid in watched.items()}


def usage(pid: int) -> tuple[int, int]:
    """Returns the bytes of resident memory and the number of open files of a process."""
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


# The servers.


def start_server(module: Any, kind: str, options: argparse.Namespace) -> tuple[str, str, int | None, Any]:
    """Returns the kind, the address, the process if it is another one, and a function that stops the server."""
    if options.in_process:
        ports: list[int] = []
        ready, end = threading.Event(), threading.Event()

        def announce(port: int) -> None:
            ports.append(port)
            ready.set()

        thread = threading.Thread(target=serve, args=(module, kind, announce, end.wait))
        thread.start()
        ready.wait()
        return kind, f"127.0.0.1:{ports[0]}", None, lambda: (end.set(), thread.join())
    command = [sys.executable, __file__, "--serve", kind, "--implementation", module.__name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    port = int(process.stdout.readline())

    def stop() -> None:
        process.communicate(timeout=60)
        assert process.returncode == 0, f"the {kind} server ended with {process.returncode}"

    return kind, f"127.0.0.1:{port}", process.pid, stop


def serve(module: Any, kind: str, announce: Any, wait: Any) -> None:
    options = [("grpc.so_reuseport", 0), *NO_LIMIT]
    if kind == "aio":
        asyncio.run(serve_aio(module, options, announce, wait))
        return
    server = module.server(ThreadPoolExecutor(16), options=options)
    add(server, SyncService())
    announce(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    wait()
    server.stop(1).wait()


async def serve_aio(module: Any, options: Any, announce: Any, wait: Any) -> None:
    server = module.aio.server(options=options)
    add(server, AioService())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce(port)
    await asyncio.get_running_loop().run_in_executor(None, wait)
    await server.stop(1)


def add(server: Any, service: Any) -> None:
    make = {
        "uu": grpc.unary_unary_rpc_method_handler,
        "us": grpc.unary_stream_rpc_method_handler,
        "su": grpc.stream_unary_rpc_method_handler,
        "ss": grpc.stream_stream_rpc_method_handler,
    }
    handlers = {name: make[kind](getattr(service, name)) for name, kind in KINDS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


def counted(request: bytes) -> tuple[int, int]:
    messages, size = request.split()
    return int(messages), int(size)


def digest(total: int, crc: int) -> bytes:
    return b"%d %d" % (total, crc)


class SyncService:
    def Echo(self, request: bytes, context: Any) -> bytes:
        return request

    def Slow(self, request: bytes, context: Any) -> bytes:
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(5)
        return b""

    def Fail(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("why", "asked"), ("why-bin", request)))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as asked")
        return b""

    def Raise(self, request: bytes, context: Any) -> bytes:
        raise ValueError("a fault of the handler")

    def Count(self, request: bytes, context: Any) -> Any:
        messages, size = counted(request)
        for index in range(messages):
            yield CONTENT[index : index + size]

    def Join(self, requests: Any, context: Any) -> bytes:
        total = crc = 0
        for request in requests:
            total, crc = total + len(request), zlib.crc32(request, crc)
        return digest(total, crc)

    def Chat(self, requests: Any, context: Any) -> Any:
        yield from requests


class AioService:
    async def Echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def Slow(self, request: bytes, context: Any) -> bytes:
        await asyncio.sleep(5)
        return b""

    async def Fail(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("why", "asked"), ("why-bin", request)))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as asked")
        return b""

    async def Raise(self, request: bytes, context: Any) -> bytes:
        raise ValueError("a fault of the handler")

    async def Count(self, request: bytes, context: Any) -> Any:
        messages, size = counted(request)
        for index in range(messages):
            yield CONTENT[index : index + size]

    async def Join(self, requests: Any, context: Any) -> bytes:
        total = crc = 0
        async for request in requests:
            total, crc = total + len(request), zlib.crc32(request, crc)
        return digest(total, crc)

    async def Chat(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request


# The clients.


def run_phase(module: Any, rng: random.Random, addresses: list[str], calls: int, codes: Any) -> None:
    """Makes calls from some threads and from some tasks of a loop, over channels of this phase."""
    over, faults = threading.Event(), []
    shares = [calls // 2 // (n := rng.randint(1, 6))] * n
    tasks = rng.randint(1, 16)

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as fault:  # noqa: BLE001, raised again below
            faults.append(fault)

    def in_threads() -> None:
        channels = [module.insecure_channel(address, options=NO_LIMIT) for address in addresses]
        threads = [
            threading.Thread(target=guarded, args=(sync_calls, Stub(rng_.choice(channels)), rng_, share, codes))
            for share in shares
            for rng_ in [random.Random(rng.random())]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for channel in channels:
            channel.close()

    def in_loop() -> None:
        asyncio.run(
            aio_calls(module, random.Random(rng.random()), addresses, calls - sum(shares), tasks, codes)
        )

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (in_threads, in_loop)]
    disturber = threading.Thread(target=disturb, args=(random.Random(rng.random()), over))
    for thread in (*threads, disturber):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    disturber.join()
    if faults:
        raise faults[0]


def disturb(rng: random.Random, over: threading.Event) -> None:
    while not over.wait(rng.uniform(0, 0.05)):
        sys.setswitchinterval(rng.choice([1e-6, 1e-4, 5e-3]))
        gc.set_threshold(rng.choice([1, 50, 700]), 10, 10)
        if rng.random() < 0.3:
            gc.collect(rng.choice([0, 1, 2]))
        threading.Thread(target=lambda: [[] for _ in range(100)]).start()
    sys.setswitchinterval(5e-3)
    gc.set_threshold(700, 10, 10)


class Stub:
    def __init__(self, channel: Any) -> None:
        make = {"uu": "unary_unary", "us": "unary_stream", "su": "stream_unary", "ss": "stream_stream"}
        for name, kind in KINDS.items():
            method = getattr(channel, make[kind])
            setattr(self, name, method(f"/{SERVICE}/{name}", _registered_method=True))
        self.Missing = channel.unary_unary(f"/{SERVICE}/Missing", _registered_method=True)

    def __getattr__(self, name: str) -> Any:  # for type checkers
        raise AttributeError(name)


def some_bytes(rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 64, 64, 64, 4096, 65536, 1 << 20]) if rng.random() < 0.1 else 64
    start = rng.randrange(1 << 20)
    return CONTENT[start : start + size]


def some_messages(rng: random.Random) -> list[bytes]:
    return [some_bytes(rng) for _ in range(rng.choice([0, 1, 2, 5, 20]))]


def expect(code: grpc.StatusCode, *expected: grpc.StatusCode) -> str:
    assert code in expected, f"the call ended with {code}, not with {' or '.join(map(str, expected))}"
    return code.name


# How a call goes on: most end in order; the rest are cancelled, dropped, too late, or fail.
WAYS = ["echo"] * 60 + ["with_call", "future", "count", "join", "chat"] * 6 + [
    "cancelled", "half read", "dropped", "abandoned chat", "late", "fails", "raises", "missing",
]  # fmt: skip


def sync_calls(stub: Stub, rng: random.Random, calls: int, codes: Any) -> None:
    ended = collections.Counter(sync_call(stub, rng, rng.choice(WAYS)) for _ in range(calls))
    with COUNTING:
        codes.update(ended)


def code_of(work: Any) -> grpc.StatusCode:
    try:
        work()
    except grpc.FutureCancelledError:
        return CANCELLED
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return OK


def sync_call(stub: Stub, rng: random.Random, way: str) -> str:
    sent, limit = some_bytes(rng), CALL_LIMIT
    if way == "echo":
        assert stub.Echo(sent, timeout=limit) == sent
    elif way == "with_call":
        reply, call = stub.Echo.with_call(sent, timeout=limit, metadata=(("k", "v"), ("k-bin", b"\0")))
        assert reply == sent and call.code() is OK and call.trailing_metadata() is not None
    elif way == "future":
        assert stub.Echo.future(sent, timeout=limit).result() == sent
    elif way in ("count", "half read", "dropped"):
        call = stub.Count(
            b"%d %d" % (n := rng.randint(0, 20), size := rng.choice([0, 64, 65536])), timeout=limit
        )
        if way == "count":
            assert list(call) == [CONTENT[index : index + size] for index in range(n)]
        elif way == "half read":
            if n:
                assert next(call) == CONTENT[:size]
            call.cancel()
            return expect(code_of(lambda: list(call)), OK, CANCELLED)
    elif way == "join":
        messages = some_messages(rng)
        joined = b"".join(messages)
        assert stub.Join(iter(messages), timeout=limit) == digest(len(joined), zlib.crc32(joined))
    elif way == "chat":
        messages = some_messages(rng)
        assert list(stub.Chat(iter(messages), timeout=limit)) == messages
    elif way == "abandoned chat":
        call = stub.Chat(iter([sent] * 5), timeout=limit)
        assert next(call) == sent
        call.cancel()
        return expect(code_of(lambda: list(call)), OK, CANCELLED)
    elif way == "cancelled":
        call = stub.Slow.future(sent, timeout=limit)
        call.cancel()
        return expect(code_of(call.result), CANCELLED)
    elif way == "late":
        return expect(code_of(lambda: stub.Slow(sent, timeout=rng.uniform(0, 0.005))), DEADLINE)
    elif way == "fails":
        return expect(
            code_of(lambda: stub.Fail(sent[:100], timeout=limit)), grpc.StatusCode.FAILED_PRECONDITION
        )
    elif way == "raises":
        return expect(code_of(lambda: stub.Raise(sent, timeout=limit)), grpc.StatusCode.UNKNOWN)
    elif way == "missing":
        return expect(code_of(lambda: stub.Missing(sent, timeout=limit)), grpc.StatusCode.UNIMPLEMENTED)
    return OK.name


async def aio_calls(
    module: Any, rng: random.Random, addresses: list[str], calls: int, tasks: int, codes: Any
) -> None:
    channels = [module.aio.insecure_channel(address, options=NO_LIMIT) for address in addresses]
    stubs = [Stub(channel) for channel in channels]

    async def some(rng: random.Random, calls: int) -> None:
        ended = collections.Counter(
            [await aio_call(rng.choice(stubs), rng, rng.choice(WAYS)) for _ in range(calls)]
        )
        with COUNTING:
            codes.update(ended)

    shares = [calls // tasks] * (tasks - 1) + [calls - calls // tasks * (tasks - 1)]
    await asyncio.gather(*(some(random.Random(rng.random()), share) for share in shares))
    for channel in channels:
        await channel.close()


async def aio_code_of(awaitable: Any) -> grpc.StatusCode:
    try:
        await awaitable
    except asyncio.CancelledError:
        return CANCELLED
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return OK


async def aio_call(stub: Stub, rng: random.Random, way: str) -> str:
    sent, limit = some_bytes(rng), CALL_LIMIT
    if way in ("echo", "future"):
        assert await stub.Echo(sent, timeout=limit) == sent
    elif way == "with_call":
        call = stub.Echo(sent, timeout=limit, metadata=(("k", "v"), ("k-bin", b"\0")))
        assert await call == sent and await call.code() is OK and await call.trailing_metadata() is not None
    elif way in ("count", "half read", "dropped"):
        call = stub.Count(
            b"%d %d" % (n := rng.randint(0, 20), size := rng.choice([0, 64, 65536])), timeout=limit
        )
        if way == "count":
            assert [message async for message in call] == [CONTENT[index : index + size] for index in range(n)]
        elif way == "half read":
            if n:
                assert await call.read() == CONTENT[:size]
            call.cancel()
            return expect(await call.code(), OK, CANCELLED)
    elif way == "join":
        messages = some_messages(rng)
        joined = b"".join(messages)
        assert await stub.Join(iter(messages), timeout=limit) == digest(len(joined), zlib.crc32(joined))
    elif way == "chat":
        messages = some_messages(rng)
        assert [message async for message in stub.Chat(iter(messages), timeout=limit)] == messages
    elif way == "abandoned chat":
        call = stub.Chat(timeout=limit)
        await call.write(sent)
        assert await call.read() == sent
        call.cancel()
        return expect(await call.code(), CANCELLED)
    elif way == "cancelled":
        task = asyncio.ensure_future(aio_code_of(stub.Slow(sent, timeout=limit)))
        await asyncio.sleep(rng.uniform(0, 0.002))
        task.cancel()
        try:
            return expect(await task, CANCELLED)
        except asyncio.CancelledError:
            return CANCELLED.name
    elif way == "late":
        return expect(await aio_code_of(stub.Slow(sent, timeout=rng.uniform(0, 0.005))), DEADLINE)
    elif way == "fails":
        return expect(
            await aio_code_of(stub.Fail(sent[:100], timeout=limit)), grpc.StatusCode.FAILED_PRECONDITION
        )
    elif way == "raises":
        return expect(await aio_code_of(stub.Raise(sent, timeout=limit)), grpc.StatusCode.UNKNOWN)
    elif way == "missing":
        return expect(await aio_code_of(stub.Missing(sent, timeout=limit)), grpc.StatusCode.UNIMPLEMENTED)
    return OK.name


if __name__ == "__main__":
    sys.exit(main())
