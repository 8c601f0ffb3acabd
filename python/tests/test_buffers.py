"""Arrays by reference: pools, leases, handles and fetches, in one process and between two, over RDMA and TCP."""

import array
import asyncio
import contextlib
import gc
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures

import grpc
import pytest

import tonic_rdma
import tonic_rdma.aio
from tonic_rdma import BufferClient, BufferPool, RemoteBuffer, share

np = pytest.importorskip("numpy", reason="numpy is not installed")

PROGRAM = """
import gc, os, pickle, sys, threading, time
import numpy as np
import tonic_rdma
from tonic_rdma import BufferClient, BufferPool, RemoteBuffer, share

def filled(*shape, seed=0):
    array = tonic_rdma.empty(shape, "int64")
    array.numpy()[...] = np.random.default_rng(seed).integers(-(1 << 60), 1 << 60, shape)
    return array

while True:
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    if not size:
        break
    code, known = pickle.loads(sys.stdin.buffer.read(size))
    globals().update(known)
    try:
        try:
            result = eval(compile(code, "peer", "eval"))
        except SyntaxError:
            result = exec(compile(code, "peer", "exec"), globals())
    except Exception as error:
        result = error
    data = pickle.dumps(result)
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()
"""


def filled(*shape, seed=0):
    made = tonic_rdma.empty(shape, "int64")
    made.numpy()[...] = content(*shape, seed=seed)
    return made


def content(*shape, seed=0):
    return np.random.default_rng(seed).integers(-(1 << 60), 1 << 60, shape)


class Peer:
    """Another process, which runs what it is told: `peer("share(x)", x=...)` returns or raises what it gave."""

    def __init__(self):
        command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def __call__(self, code, **known):
        self.start(code, **known)
        return self.result()

    def start(self, code, **known):
        data = pickle.dumps((code, known))
        self.process.stdin.write(len(data).to_bytes(4, "big") + data)
        self.process.stdin.flush()

    def result(self):
        size = int.from_bytes(self.process.stdout.read(4), "big")
        assert size, f"the peer ended with {self.process.wait(5)}"
        result = pickle.loads(self.process.stdout.read(size))
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stand_still(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        threads = pathlib.Path(f"/proc/{self.process.pid}/task")
        while any(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()
        ):
            time.sleep(0.001)

    def end(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


@pytest.fixture(params=["rdma", "tcp"])
def path(request, monkeypatch):
    """What carries fetches between processes that are started, and of clients that are made, in the test."""
    if request.param == "tcp":
        monkeypatch.setenv("RDMA_POLICY", "tcp-only")
    return request.param


@pytest.fixture
def peers():
    started = []

    def start():
        started.append(Peer())
        return started[-1]

    yield start
    for peer in started:
        peer.end()


@pytest.fixture
def peer(path, peers):
    return peers()


def refused(kind, call, *arguments, **known):
    with pytest.raises(tonic_rdma.TensorError) as raised:
        call(*arguments, **known)
    assert raised.value.kind == kind, raised.value
    return raised.value


# Content.


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "float16", "float32", "float64", "complex128"]
)
def test_an_array_comes_as_it_was_shared(peer, path, dtype):
    client = BufferClient()
    for shape in [(), (0,), (1,), (3, 0, 2), (3, 5), (7, 11, 13), (1 << 18,)]:
        sent = (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)
        buffer = peer("kept = share(sent); kept", sent=sent) or peer("kept")
        assert (buffer.shape, buffer.dtype, buffer.nbytes) == (shape, dtype, sent.nbytes)
        got = client.fetch(buffer)
        assert (got.shape, got.dtype, got.nbytes, got.readonly) == (shape, dtype, sent.nbytes, True)
        assert got.numpy().dtype == dtype and np.array_equal(got.numpy(), sent)
        with pytest.raises(ValueError, match="read-only"):
            got.numpy()[...] = 0
    [owner] = client.owners()
    assert (owner.owner, owner.connection.verdict) == (buffer.owner, path) and owner.copied_bytes == 0


def test_arrays_in_registered_memory_and_their_views_are_not_copied(peer, path):
    peer("pool = BufferPool(); made = filled(512, 1024); view = made.numpy()")
    peer("shared = [share(it, pool=pool) for it in (made, view, view[3:9], view[:, :], memoryview(made))]")
    before = tonic_rdma.memory_statistics().copied_bytes
    client = BufferClient()
    for buffer, expected in zip(peer("shared"), ["view", "view", "view[3:9]", "view", "view"], strict=True):
        assert np.array_equal(client.fetch(buffer).numpy(), peer(expected))
    assert peer("pool.statistics()")[2] == peer("tonic_rdma.memory_statistics().copied_bytes") == 0
    if path == "rdma":  # over TCP, elements out of a message are copied if they are not aligned
        assert tonic_rdma.memory_statistics().copied_bytes == before
    [owner] = client.owners()
    assert owner.copied_bytes == 0 and (owner.landed_bytes > 4 * peer("view.nbytes")) == (path == "rdma")

    # Others are, once.
    buffer = peer("columns = share(view[:, ::2], pool=pool)") or peer("columns")
    assert np.array_equal(client.fetch(buffer).numpy(), peer("view[:, ::2]"))
    buffer = peer("others = share(np.arange(1000.0), pool=pool)") or peer("others")
    assert np.array_equal(buffer.numpy(), np.arange(1000.0))
    assert peer("pool.statistics()")[2] == peer("view.nbytes // 2") + 8000


def test_objects_of_each_kind_are_shared():
    for given, expected in [
        (b"abc", [97, 98, 99]),
        (bytearray(3), [0, 0, 0]),
        (memoryview(b"xyz")[::-1], [122, 121, 120]),
        (array.array("d", [1.5, 2.5]), [1.5, 2.5]),
        (np.float32(3.5), 3.5),
        (tonic_rdma.zeros(2), [0, 0]),
    ]:
        assert share(given).numpy().tolist() == expected
    for wrong in (None, 3, "text", [1.0, 2.0], object()):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            share(wrong)
    with pytest.raises((TypeError, BufferError), match="object"):
        share(np.array([object()]))


def test_bytes_that_are_no_array_come_as_bytes():
    kept = share(b"abcd")
    message = kept.message
    message.ClearField("dtype")
    message.ClearField("shape")
    buffer = RemoteBuffer(message)
    assert (buffer.dtype, buffer.shape, buffer.fetch().tobytes()) == ("uint8", (4,), b"abcd")
    message.dtype = "float32"
    message.shape.append(3)
    with pytest.raises(ValueError, match="4 bytes for float32"):
        RemoteBuffer(message)


def test_a_checksum_is_compared(peer):
    peer("kept = share(np.arange(5000), checksum=True)")
    message = peer("kept").message
    assert message.HasField("xxh3") and RemoteBuffer(message).numpy()[4999] == 4999
    message.xxh3 += 1
    assert "checksum" in str(refused("protocol", RemoteBuffer(message).fetch))
    into = np.empty(5000, "int64")
    refused("protocol", RemoteBuffer(message).fetch_into, into)


def test_it_is_fetched_into_memory_of_the_reader(peer, path):
    client = BufferClient()
    peer("made = filled(1000, 100); kept = share(made)")
    buffer, expected = peer("kept"), peer("made.numpy()")
    flat = expected.reshape(-1).view("uint8")
    for into in (
        np.empty((1000, 100), "int64"),
        np.empty(100_000, "int64"),
        tonic_rdma.empty((100_000,), "int64"),
    ):
        client.fetch_into(buffer, into)
        assert np.array_equal(np.asarray(into).reshape(1000, 100), expected)
    for into in (
        bytearray(4096),
        array.array("B", bytes(4096)),
        np.empty(4096, "uint8"),
        memoryview(bytearray(4096)),
    ):
        for offset in (0, 1, 4095, 800_000 - 4096):
            client.fetch_into(buffer, into, offset)
            assert bytes(into) == flat[offset : offset + 4096].tobytes()
    rows = np.zeros((4, 100), "int64")
    buffer.fetch_into(rows[1:3], offset=800)
    assert np.array_equal(rows[1:3], expected[1:3]) and not rows[0].any() and not rows[3].any()
    client.fetch_into(buffer, bytearray(), 800_000)
    # The memory is released: a bytearray with views can't be resized.
    into = bytearray(10)
    client.fetch_into(buffer, into)
    into.append(1)


def test_it_goes_to_other_libraries_by_dlpack(peer, path):
    peer("made = filled(100, 7); kept = share(made)")
    buffer, expected = peer("kept"), peer("made.numpy()")
    assert buffer.__dlpack_device__() == (1, 0)
    got = np.from_dlpack(buffer)
    assert np.array_equal(got, expected) and not got.flags.writeable
    # Who knows no read-only arrays gets one that it may write, also in the owner's process.
    for mine in (buffer, share(filled(100, 7))):
        copy = tonic_rdma.asarray(mine.__dlpack__()).numpy()
        assert np.array_equal(copy, expected) and copy.flags.writeable
        copy[...] = 0
        assert np.array_equal(mine.numpy(), expected)


def test_memory_that_can_not_be_fetched_into_is_refused(peer):
    buffer = peer("kept = share(np.arange(10.0))") or peer("kept")
    for into, offset, error, text in [
        (b"12345678", 0, ValueError, "read-only"),
        (buffer.fetch(), 0, ValueError, "read-only"),
        (np.empty(20)[::2], 0, ValueError, "contiguous"),
        (np.empty(11), 0, ValueError, "88 bytes at offset 0 of a buffer of 80"),
        (np.empty(1), 73, ValueError, "8 bytes at offset 73"),
        (np.empty(1), 1 << 62, ValueError, "offset"),
        (np.empty(1), -1, ValueError, "offset: expected a number from 0 on, not -1"),
        (np.empty(1), "1", TypeError, "offset"),
        (np.empty(10, "float32"), 0, ValueError, "elements of float32, and the buffer of float64"),
        ("text", 0, TypeError, "str"),
    ]:
        with pytest.raises(error, match=text):
            buffer.fetch_into(into, offset)


def test_blocks_come_by_one_call(peer, path):
    client = BufferClient()
    peer("made = filled(50_000); kept = share(made)")
    buffer, flat = peer("kept"), peer("made.tobytes()")
    ranges = [
        (start, min(start + length, 400_000))
        for start, length in ((i * 397 % 399_000, i % 999) for i in range(500))
    ]
    for (start, stop), block in zip(ranges, client.fetch_blocks(buffer, iter(ranges)), strict=True):
        assert (block.dtype, block.shape) == ("uint8", (stop - start,)) and block.tobytes() == flat[start:stop]
    assert buffer.fetch_blocks([]) == []
    for ranges in ([(0, 400_001)], [(-1, 2)], [(3, 2)], [(0, 1)] * 65_537):
        with pytest.raises(ValueError, match="range"):
            buffer.fetch_blocks(ranges)
    for ranges in ([3], [(1, 2, 3)], [("a", "b")], None):
        with pytest.raises((TypeError, ValueError)):
            buffer.fetch_blocks(ranges)


def test_writes_are_seen_by_later_fetches(peer, path):
    client = BufferClient()
    peer("made = filled(100, 100); kept = share(made, writable=True, checksum=True)")
    buffer, expected = peer("kept"), peer("made.numpy().copy()")
    before = client.fetch(buffer)
    for row, written in [(3, np.arange(100)), (5, np.arange(200)[::2]), (99, tonic_rdma.zeros(100, "int64"))]:
        client.write_back(buffer, row * 800, written)
        expected[row] = np.asarray(written)
    client.write_back(buffer, 7, b"\xff" * 9)
    expected.reshape(-1).view("uint8")[7:16] = 255
    client.write_back(buffer, 80_000, b"")
    assert np.array_equal(client.fetch(buffer).numpy(), expected)
    assert np.array_equal(peer("kept.numpy()"), expected), "and by the owner's"
    assert np.array_equal(before.numpy(), peer("made.numpy()")), (
        "neither the array nor what was fetched has changed"
    )
    assert peer("kept.writes()") == 5
    for offset, object, error, text in [
        (79_999, b"12", ValueError, "80001"),
        (0, np.arange(3.0), ValueError, "elements of float64"),
        (-1, b"1", ValueError, "offset"),
        (0, None, TypeError, "NoneType"),
    ]:
        with pytest.raises(error, match=text):
            client.write_back(buffer, offset, object)
    peer("fixed = share(made)")
    refused("not_permitted", client.write_back, peer("fixed"), 0, b"1")
    peer.start("kept.wait_written(5, 30)")
    client.write_back(buffer, 0, np.arange(9))
    assert peer.result() == 6
    with pytest.raises(tonic_rdma.TensorTimeout, match="a write did not happen within"):
        peer("kept.wait_written(6, 0.01)")


def test_many_buffers_of_several_owners_have_a_result_each(path, peers):
    client = BufferClient()
    owners = [peers() for _ in range(2)]
    buffers = []
    for seed, owner in enumerate(owners):
        owner("made = [filled(1000 * (i + 1), seed=seed + i) for i in range(5)]", seed=seed * 5)
        buffers += owner("kept = [share(it) for it in made]") or owner("kept")
    for seed, fetched in enumerate(client.fetch_all(buffers)):
        assert np.array_equal(fetched.numpy(), content(1000 * (seed % 5 + 1), seed=seed))
    owners[0]("kept[1].close(); kept[3].revoke()")
    owners[1].kill()
    results = client.fetch_all(iter(buffers), return_exceptions=True)
    expected = [None, tonic_rdma.Gone, None, tonic_rdma.Revoked, None] + [tonic_rdma.PeerLost] * 5
    for result, kind in zip(results, expected, strict=True):
        assert isinstance(result, kind or tonic_rdma.Array), result
    with pytest.raises(tonic_rdma.Gone):
        client.fetch_all(buffers)
    assert tonic_rdma.fetch_all([]) == []
    assert len(asyncio.run(tonic_rdma.fetch_all_async(buffers[:1]))) == 1
    with pytest.raises(TypeError, match="RemoteBuffer, not bytes"):
        client.fetch_all([bytes(buffers[0])])


# Ends of leases.


def test_a_lease_ends_by_its_owner_its_readers_or_its_time(peer, path):
    client = BufferClient()
    peer("made = filled(1000)")

    def shared(**options):
        return peer("kept = share(made, **options)", options=options) or peer("kept")

    buffer = shared()
    client.fetch(buffer)
    [(name, address, running, complete, sent)] = peer("kept.readers()")
    assert (name, running, complete, sent) == (None, 0, 1, 8000) and address.startswith("ipv4:127.0.0.1:")
    peer("kept.close(); kept.close(); kept.revoke()")
    with pytest.raises(tonic_rdma.Gone, match="dropped the lease"):
        client.fetch(buffer)
    peer("kept.wait_ended(5)")

    buffer = shared()
    peer("kept.revoke(); kept.close()")
    with pytest.raises(tonic_rdma.Revoked):
        client.fetch(buffer)

    buffer = shared()
    peer("del kept; gc.collect()")
    with pytest.raises(tonic_rdma.Gone):
        client.fetch(buffer)

    buffer = shared(readers=2)
    peer("del kept; gc.collect()")
    client.fetch(buffer)
    client.fetch_blocks(buffer, [(0, 8), (9, 10)])
    with pytest.raises(tonic_rdma.Gone, match="readers"):
        client.fetch(buffer)

    buffer = shared(time_limit=0.05)
    peer.start("kept.wait_ended(30)")
    peer.result()
    with pytest.raises(tonic_rdma.Gone, match="time limit"):
        client.fetch(buffer)
    buffer = shared(time_limit=1000)
    peer("del kept; gc.collect()")
    client.fetch(buffer)

    buffer = peer("with share(made) as kept: inside = RemoteBuffer(bytes(kept)).fetch()") or peer("kept")
    with pytest.raises(tonic_rdma.Gone):
        client.fetch(buffer)
    buffer = shared()
    with pytest.raises(tonic_rdma.TensorTimeout):
        peer("kept.wait_ended(0.01)")
    for call in (buffer.revoke, buffer.readers, buffer.writes, buffer.wait_ended):
        with pytest.raises(ValueError, match="no lease"):
            call()
    buffer.close()  # a handle holds nothing
    assert client.fetch(buffer).shape == (1000,)


def test_wrong_arguments_are_named():
    for arguments, error, text in [
        ({"readers": 0}, ValueError, "readers: expected a number from 1 on"),
        ({"readers": 1.5}, TypeError, "readers"),
        ({"time_limit": -1}, ValueError, "time_limit"),
        ({"time_limit": float("nan")}, ValueError, "time_limit"),
        ({"only_for": "name"}, TypeError, "only_for"),
        ({"only_for": [3]}, TypeError, "only_for|str"),
    ]:
        with pytest.raises(error, match=text):
            share(b"x", **arguments)
    for address in ("0.0.0.0:0", "nowhere", "no.such.host.invalid:0", "127.0.0.1:x", ""):
        with pytest.raises((ValueError, OSError)):
            BufferPool(address)
    for server in (3, grpc.server(None)):
        with pytest.raises(TypeError, match="server"):
            BufferPool(server=server)
    for arguments in ({"limit": -1}, {"limit": "1"}):
        with pytest.raises((ValueError, TypeError), match="limit"):
            BufferPool(**arguments)
    for arguments in (
        {"timeout": 0},
        {"max_fetch_bytes": -1},
        {"landing_budget": 3},
        {"secrets": [("a", "b", b"c")]},
    ):
        with pytest.raises(ValueError, match="timeout|max_fetch_bytes|landing_budget|secret"):
            BufferClient(**arguments)
    for handle in (None, 3, "text", object(), [1]):
        with pytest.raises(TypeError, match="handle: expected"):
            RemoteBuffer(handle)
    for data in (b"", b"\xff", b"nonsense", bytes(share(b"abc"))[:-3]):
        with pytest.raises(ValueError):
            RemoteBuffer(data)


def test_the_limit_of_a_pool_bounds_copies():
    pool = BufferPool(limit=1 << 20)
    kept = share(bytes(1000), pool=pool)
    with pytest.raises(MemoryError):
        share(bytes(2 << 20), pool=pool)
    assert pool.statistics() == (1, 1000, 1000)
    large = tonic_rdma.zeros(4 << 20, "uint8")
    assert share(large, pool=pool).nbytes == 4 << 20, "what is not copied takes none of it"
    del kept


def test_a_handle_is_a_value():
    buffer = share(np.arange(3))
    again = pickle.loads(pickle.dumps(buffer))
    assert again == buffer and hash(again) == hash(buffer) and again != share(b"x") and buffer != bytes(buffer)
    assert (
        RemoteBuffer(buffer.message)
        == RemoteBuffer(bytes(buffer))
        == RemoteBuffer(bytearray(bytes(buffer)))
        == buffer
    )
    token = buffer.message.token
    assert len(token) == 16 and repr(token)[2:-1] not in repr(buffer) and token.hex() not in repr(buffer)
    assert repr(buffer).startswith("<tonic_rdma.RemoteBuffer int64 [3] at http://127.0.0.1:")
    with pytest.raises(TypeError, match="FetchRequest"):
        from tonic_rdma import buffer_pb2

        RemoteBuffer(buffer_pb2.FetchRequest())
    with pytest.raises(ValueError, match="names no owner"):
        RemoteBuffer(buffer_pb2.RemoteBuffer())
    del buffer
    gc.collect()
    with pytest.raises(tonic_rdma.Gone):
        again.fetch()


def test_in_the_owners_process_it_is_the_shared_memory():
    made = filled(1000)
    with share(made) as buffer:
        assert np.shares_memory(buffer.numpy(), made.numpy()) and buffer.fetch().readonly
        assert buffer.readers() == [(None, None, 0, 1, 8000)] or buffer.readers()[0][1] is None
        got = RemoteBuffer(bytes(buffer)).fetch()
    del made
    gc.collect()
    others = [tonic_rdma.zeros(1000, "int64") for _ in range(50)]
    assert np.array_equal(got.numpy(), content(1000)) and len(others) == 50


def test_what_was_fetched_outlives_object_pool_and_process_of_the_owner(peer, path):
    client = BufferClient()
    peer("pool = BufferPool(); made = filled(300_000); kept = share(made, pool=pool)")
    buffer = peer("kept")
    got, part = client.fetch(buffer), client.fetch_blocks(buffer, [(8, 80)])[0]
    view = got.numpy()[100:200]
    peer("kept.close(); del made, kept; pool.close(); gc.collect()")
    peer("new = [tonic_rdma.zeros(300_000, 'int64') for _ in range(4)]")
    assert np.array_equal(got.numpy(), content(300_000))
    peer.kill()
    del got, client
    gc.collect()
    assert (
        np.array_equal(view, content(300_000)[100:200]) and part.tobytes() == content(300_000)[1:10].tobytes()
    )


def test_what_was_shared_stays_while_a_fetch_may_read_it(peer, path):
    """The owner drops the array, and its process uses as much memory again, while readers fetch."""
    client = BufferClient()
    expected = [content(1 << 18, seed=seed) for seed in range(3)]
    fetched = gone = 0
    for turn in range(30):
        seed = turn % 3
        peer("kept = share(filled(1 << 18, seed=seed))", seed=seed)
        buffer = peer("kept")
        delay = random.random() * 0.002
        peer.start("time.sleep(delay); kept.close(); more = tonic_rdma.zeros(1 << 18, 'int64')", delay=delay)
        try:
            while True:
                assert np.array_equal(client.fetch(buffer).numpy(), expected[seed])
                fetched += 1
        except tonic_rdma.Gone:
            gone += 1
        peer.result()
    assert gone == 30, fetched


def test_a_revoke_during_fetches_gives_all_bytes_or_none(peer, path):
    client = BufferClient()
    expected = content(1 << 20)
    into = np.empty(1 << 20, "int64")
    for _turn in range(20):
        peer("kept = share(filled(1 << 20))")
        buffer = peer("kept")
        peer.start("time.sleep(delay); kept.revoke()", delay=random.random() * 0.01)
        with pytest.raises(tonic_rdma.Revoked):
            while True:
                client.fetch_into(buffer, into)
                assert np.array_equal(into, expected)
        peer.result()
        with pytest.raises(tonic_rdma.Revoked):
            client.fetch(buffer)


# Owners that are gone.


def test_the_owner_is_killed(peer, path):
    client = BufferClient()
    peer("made = filled(8 << 20 >> 3); kept = share(made)")
    buffer = peer("kept")
    client.fetch(buffer)
    threading.Timer(0.05, peer.process.kill).start()
    with pytest.raises(tonic_rdma.PeerLost):
        while True:
            client.fetch(buffer)
    began = time.monotonic()
    with pytest.raises(tonic_rdma.PeerLost):
        client.fetch(buffer)
    with pytest.raises(tonic_rdma.PeerLost):
        buffer.fetch()
    assert time.monotonic() - began < 10, "the client's own timeout"


def test_another_process_is_at_the_address(path, peers):
    client = BufferClient()
    first = peers()
    buffer = first("pool = BufferPool(); kept = share(b'first', pool=pool)") or first("kept")
    assert client.fetch(buffer).tobytes() == b"first"
    address = buffer.owner.removeprefix("http://")
    first.kill()
    second = peers()
    again = second("pool = BufferPool(address); kept = share(b'second', pool=pool)", address=address) or second(
        "kept"
    )
    with pytest.raises(tonic_rdma.Restarted):
        try:
            client.fetch(buffer)
        except tonic_rdma.PeerLost:
            # For 200 ms after the first process ended, its connection waits for messages on their way.
            client.fetch(buffer)
    assert client.fetch(again).tobytes() == b"second"
    second.kill()
    # A server without a pool.
    server = tonic_rdma.server()
    server.add_insecure_port(address)
    server.start()
    with pytest.raises(tonic_rdma.Restarted):
        BufferClient().fetch(buffer)
    server.stop(None)


def test_an_owner_that_stands_still(peer, path):
    client = BufferClient(timeout=0.5)
    peer("made = filled(1000); kept = share(made)")
    buffer = peer("kept")
    client.fetch(buffer)
    peer.stand_still()
    try:
        with pytest.raises(tonic_rdma.TensorTimeout):
            client.fetch(buffer)
        with pytest.raises(TimeoutError, match="the fetch did not happen within"):
            BufferClient().fetch(buffer, timeout=0.2)
        with pytest.raises(tonic_rdma.TensorTimeout):
            asyncio.run(BufferClient().fetch_async(buffer, timeout=0.2))
        with pytest.raises(tonic_rdma.TensorTimeout):
            client.fetch_into(buffer, into := bytearray(10), timeout=0.2)
        into.append(1)  # released
        with pytest.raises(ValueError, match="timeout: expected seconds"):
            client.fetch(buffer, timeout=float("nan"))
    finally:
        os.kill(peer.process.pid, signal.SIGCONT)
    assert client.fetch(buffer).nbytes == 8000


def test_a_closed_pool(path, peers):
    peer = peers()
    client = BufferClient()
    buffer = peer("pool = BufferPool(); made = filled(1000); kept = share(made, pool=pool)") or peer("kept")
    client.fetch(buffer)
    address = buffer.owner.removeprefix("http://")
    peer("pool.close(); pool.close()")
    with pytest.raises(tonic_rdma.PeerLost):
        client.fetch(buffer)
    assert refused("closed", peer, "share(made, pool=pool)")
    with pytest.raises(tonic_rdma.TensorError):
        peer("kept.fetch()")
    peer("again = BufferPool(address); other = share(made, pool=again)", address=address)
    with pytest.raises(OSError, match="listen"):
        BufferPool(address)
    with pytest.raises(tonic_rdma.Restarted):
        client.fetch(buffer)
    # A buffer keeps its pool, and without buffers it ends.
    peer("del again; gc.collect()")
    assert client.fetch(peer("other")).nbytes == 8000
    peer("del other; gc.collect()")
    deadline = time.monotonic() + 20
    while True:
        try:
            BufferPool(address).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# Who may read.


def test_a_wrong_token_gives_nothing(peer, path):
    client = BufferClient()
    buffer = peer("kept = share(b'secret', writable=True)") or peer("kept")
    message = buffer.message
    for position in range(16):
        wrong = type(message)()
        wrong.CopyFrom(message)
        wrong.token = bytes(
            byte ^ (1 << position % 8 if at == position else 0) for at, byte in enumerate(message.token)
        )
        assert "secret" not in str(refused("not_permitted", client.fetch, RemoteBuffer(wrong)))
    refused("not_permitted", client.write_back, RemoteBuffer(wrong), 0, b"x")
    wrong.token = b"short"
    with pytest.raises(ValueError, match="token of 5 bytes"):
        client.fetch(RemoteBuffer(wrong))
    wrong.CopyFrom(message)
    wrong.id += 1
    with pytest.raises(tonic_rdma.Gone):
        client.fetch(RemoteBuffer(wrong))
    wrong.CopyFrom(message)
    wrong.generation += 1
    with pytest.raises(tonic_rdma.Restarted):
        client.fetch(RemoteBuffer(wrong))
    # A longer range than the buffer has.
    wrong.CopyFrom(message)
    wrong.length = 1 << 20
    wrong.shape[:] = [1 << 20]
    with pytest.raises(ValueError, match="bytes 0 to 1048576 of 6"):
        client.fetch(RemoteBuffer(wrong))
    assert client.fetch(buffer).tobytes() == b"secret"


def test_handles_of_strangers_are_refused_or_fetched():
    """Bytes at random, and lengths and shapes that no array has."""
    kept = share(tonic_rdma.zeros((3, 4)))
    chance, data = random.Random(5), bytes(kept)
    handles = []
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(changed))
            changed[at : at + chance.randrange(2)] = chance.randbytes(chance.randrange(2))
        if b"127.0.0.1" in changed:
            handles.append(bytes(changed))
    for dtype in ("string", "float32", "uint8", "bfloat16", "object", ""):
        for shape in ([], [0], [1 << 63], [(1 << 64) - 1], [1 << 32] * 2, [0, (1 << 64) - 1], [12] * 20, [48]):
            for length in (0, 48, 1 << 63, (1 << 64) - 1):
                message = kept.message
                message.dtype, message.length, message.shape[:] = dtype, length, shape
                handles.append(message.SerializeToString())
    fetched = 0
    for handle in handles:
        with contextlib.suppress(ValueError, tonic_rdma.TensorError):
            fetched += RemoteBuffer(handle).numpy(timeout=5).nbytes > 0
    assert 0 < fetched < len(handles)


def test_named_readers_prove_their_names(peer, path):
    peer("pool = BufferPool(); kept = share(b'for alice', pool=pool, only_for=['alice'])")
    buffer = peer("kept")
    alice, bob = peer("pool.admit('alice')"), peer("pool.admit('bob')")
    assert alice.secret.hex() not in repr(alice) and repr(alice.secret) not in repr(alice)
    client = BufferClient(secrets=[alice])
    assert client.fetch(buffer).tobytes() == b"for alice"
    assert peer("kept.readers()")[0][0] == "alice"
    forged = alice._replace(secret=bytes(16))
    for secrets in ([], [bob], [forged]):
        refused("not_permitted", BufferClient(secrets=secrets).fetch, buffer)
    peer("pool.dismiss('alice')")
    refused("not_permitted", client.fetch, buffer)
    with pytest.raises(ValueError, match="name"):
        peer("pool.admit('')")


def test_a_reader_decides_where_it_connects_to_and_how_much_it_takes(peer):
    buffer = peer("kept = share(bytes(1000))") or peer("kept")
    seen = []
    client = BufferClient(owners=lambda owner: seen.append(owner) or ":1" not in owner)
    stranger = buffer.message
    stranger.owner = "http://127.0.0.1:1"
    assert "`owners`" in str(refused("not_permitted", client.fetch, RemoteBuffer(stranger)))
    refused("not_permitted", client.fetch_all, [buffer, RemoteBuffer(stranger)])
    assert client.owners() == [] and seen[0] == "http://127.0.0.1:1"
    with pytest.raises(ValueError, match="max_fetch_bytes"):
        BufferClient(max_fetch_bytes=999).fetch(buffer)
    assert BufferClient(max_fetch_bytes=1000).fetch(buffer).nbytes == 1000
    stranger.owner = "no uri"
    with pytest.raises(ValueError, match="no uri"):
        BufferClient().fetch(RemoteBuffer(stranger))
    with pytest.raises(TypeError, match="credentials|Credentials"):
        BufferClient(credentials=3)


# Pools of servers.


def echo_handlers():
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    return [grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler})]


def fetched_by_grpcio(channel, buffer):
    """Makes the calls of a fetch as any program can that has the proto."""
    from tonic_rdma import buffer_pb2

    message = buffer.message
    key = buffer_pb2.BufferKey(generation=message.generation, id=message.id, token=message.token)
    half = message.length // 2
    ranges = buffer_pb2.BufferRanges(key=key, offsets=[0, half], lengths=[half, message.length - half])
    fetch = channel.unary_stream(
        "/tonic_rdma.buffer.v1.Buffers/Fetch",
        request_serializer=buffer_pb2.FetchRequest.SerializeToString,
        response_deserializer=buffer_pb2.FetchReply.FromString,
    )
    replies = list(fetch(buffer_pb2.FetchRequest(buffers=[ranges]), timeout=20))
    assert not any(reply.HasField("fault") for reply in replies), replies
    return b"".join(content for reply in replies for content in reply.contents)


def check_pool_of_server(address, buffer, expected, path):
    client = BufferClient(calls_itself=True)
    assert np.array_equal(client.fetch(buffer).numpy(), expected)
    connection = client.owners()[0].connection
    assert (connection.verdict, connection.native) == (path, path == "rdma")
    client.write_back(buffer, 8, np.arange(3))
    expected[1:4] = np.arange(3)
    assert np.array_equal(client.fetch(buffer).numpy(), expected)
    for connect in (grpc.insecure_channel, tonic_rdma.insecure_channel):
        with connect(address) as channel:
            assert fetched_by_grpcio(channel, buffer) == expected.tobytes()
            assert channel.unary_unary("/test.Echo/Echo")(b"other services", timeout=20) == b"other services"
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary("/tonic_rdma.buffer.v1.BuffersX/Fetch")(b"", timeout=20)
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_pool_on_the_port_of_a_server(path):
    server = tonic_rdma.server(handlers=echo_handlers())
    with pytest.raises(ValueError, match="no port"):
        BufferPool(server=server)
    port = server.add_insecure_port("127.0.0.1:0")
    pool = BufferPool(server=server)
    assert pool.uri == f"http://127.0.0.1:{port}"
    with pytest.raises(ValueError, match="another pool"):
        BufferPool(server=server)
    buffer = share(filled(100_000), pool=pool, writable=True)
    server.start()
    with pytest.raises(ValueError, match="started"):
        BufferPool(server=server)
    check_pool_of_server(f"127.0.0.1:{port}", buffer, content(100_000), path)
    client = BufferClient(calls_itself=True)
    pool.close()
    with pytest.raises(tonic_rdma.Gone):
        client.fetch(buffer)
    server.stop(None)
    with pytest.raises(tonic_rdma.PeerLost):
        BufferClient(calls_itself=True).fetch(buffer)


@contextlib.contextmanager
def begun_fetch():
    """A fetch of 64 MiB, which is more than the windows take, and the server of its pool."""
    from tonic_rdma import buffer_pb2

    server = tonic_rdma.server()
    port = server.add_insecure_port("127.0.0.1:0")
    buffer = share(filled(8 << 20), pool=BufferPool(server=server))
    server.start()
    message = buffer.message
    key = buffer_pb2.BufferKey(generation=message.generation, id=message.id, token=message.token)
    ranges = buffer_pb2.BufferRanges(key=key, offsets=[0], lengths=[message.length])
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        fetch = channel.unary_stream(
            "/tonic_rdma.buffer.v1.Buffers/Fetch",
            request_serializer=buffer_pb2.FetchRequest.SerializeToString,
            response_deserializer=buffer_pb2.FetchReply.FromString,
        )
        replies = fetch(buffer_pb2.FetchRequest(buffers=[ranges]), timeout=30)
        yield server, buffer, replies, [next(replies)]


def test_the_end_of_a_server_waits_for_fetches(path):
    with begun_fetch() as (server, _, replies, received):
        stopped = server.stop(30)
        time.sleep(1.5)  # more than the server lets connections linger
        assert not stopped.is_set()
        received += replies
        assert b"".join(it for reply in received for it in reply.contents) == content(8 << 20).tobytes()
        assert stopped.wait(20)


@pytest.mark.parametrize("grace", [None, 0.5])
def test_the_end_of_a_server_cuts_fetches_off_after_the_grace(path, grace):
    with begun_fetch() as (server, buffer, replies, received):
        assert server.stop(grace).wait(20)
        buffer.close()
        buffer.wait_ended(20)  # although the reader has not seen it
        with pytest.raises(grpc.RpcError):
            received += replies
        assert not replies.is_active()


def test_a_pool_on_the_port_of_a_server_of_asyncio(path):
    async def run():
        server = tonic_rdma.aio.server(handlers=echo_handlers())
        port = server.add_insecure_port("[::]:0")
        pool = BufferPool("localhost:0", server=server)
        assert pool.uri == f"http://localhost:{port}"
        buffer = share(filled(100_000), pool=pool, writable=True)
        await server.start()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            None, check_pool_of_server, f"127.0.0.1:{port}", buffer, content(100_000), path
        )
        await server.stop(None)

    asyncio.run(run())


def test_a_pool_of_a_server_with_tls(tls):
    server = tonic_rdma.server(handlers=echo_handlers())
    credentials = tonic_rdma.ssl_server_credentials([(tls.server_key, tls.server)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    pool = BufferPool(server=server)
    assert pool.uri == f"https://127.0.0.1:{port}"
    buffer = share(filled(100_000), pool=pool)
    server.start()
    client = BufferClient(calls_itself=True, credentials=grpc.ssl_channel_credentials(tls.ca))
    assert np.array_equal(client.fetch(buffer).numpy(), content(100_000))
    assert client.owners()[0].connection.tls
    with pytest.raises(tonic_rdma.TensorError):
        BufferClient(calls_itself=True, timeout=5).fetch(buffer)
    with pytest.raises(ValueError, match="calls"):
        call = grpc.access_token_call_credentials("token")
        BufferClient(credentials=grpc.composite_channel_credentials(grpc.ssl_channel_credentials(tls.ca), call))
    server.stop(None)


# asyncio, threads, forks.


def test_fetches_are_awaited(peer, path):
    peer(
        "made = filled(1000, 50); view = made.numpy();"
        "kept = [share(view[i * 10 : i * 10 + 10], writable=True) for i in range(100)]"
    )
    buffers, expected = peer("kept"), content(1000, 50)

    async def run():
        client = BufferClient()
        for fetched in (
            await asyncio.gather(*(client.fetch_async(buffer) for buffer in buffers)),
            await asyncio.gather(*(buffer.fetch_async() for buffer in buffers)),
            await client.fetch_all_async(buffers),
        ):
            for place, got in enumerate(fetched):
                assert np.array_equal(got.numpy(), expected[place * 10 : place * 10 + 10])
        into = np.empty((10, 50), "int64")
        await buffers[3].fetch_into_async(into)
        assert np.array_equal(into, expected[30:40])
        [block] = await buffers[3].fetch_blocks_async([(8, 16)])
        assert block.tobytes() == expected[30].tobytes()[8:16]
        await buffers[3].write_back_async(0, np.arange(50))
        assert (await buffers[3].fetch_async()).numpy()[0].tolist() == list(range(50))
        mine = share(b"abc", writable=True)
        with pytest.raises(tonic_rdma.TensorTimeout):
            await mine.wait_ended_async(0.01)
        waits = asyncio.ensure_future(mine.wait_written_async(0, 20))
        await RemoteBuffer(bytes(mine)).write_back_async(0, b"x")
        assert await waits == 1
        waits = asyncio.ensure_future(mine.wait_ended_async(20))
        await asyncio.sleep(0)
        mine.close()
        await waits
        with pytest.raises(tonic_rdma.Gone):
            await mine.fetch_async()
        # One that is given up releases the memory.
        into = bytearray(1000)
        fetches = [asyncio.ensure_future(buffers[4].fetch_into_async(into)) for _ in range(20)]
        await asyncio.sleep(0)
        for fetch in fetches:
            fetch.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*fetches, return_exceptions=True)
        )
        for _ in range(1000):
            try:
                into.append(1)
                break
            except BufferError:
                await asyncio.sleep(0.01)
                assert buffers[4].nbytes  # the native part gives back what its threads have left to it
        else:
            pytest.fail("the memory is still in use")

    asyncio.run(run())


def test_a_fork_uses_no_buffers_of_its_parent():
    program = """
import os, signal, sys
import tonic_rdma
signal.alarm(30)
kept = tonic_rdma.share(b"abc")
client, pool, got = tonic_rdma.BufferClient(), kept._pool, kept.fetch()
child = os.fork()
if not child:
    uses = [lambda: tonic_rdma.share(b"x"), lambda: tonic_rdma.share(b"x", pool=pool), kept.fetch, kept.revoke,
            lambda: client.fetch(kept), tonic_rdma.BufferPool, tonic_rdma.BufferClient, pool.close, kept.close,
            kept.readers, lambda: kept.wait_ended(1), lambda: pool.admit("x"),
            lambda: pool.dismiss("x"), pool.statistics, client.owners]
    for use in uses:
        try:
            use()
        except RuntimeError as error:
            assert "fork" in str(error), error
        else:
            os._exit(1)
    del kept, client, pool, uses, use
    assert got.tobytes() == b"abc"
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kept.fetch().tobytes() == b"abc", "the child has ended nothing"
assert tonic_rdma.BufferClient(calls_itself=True).fetch(kept).tobytes() == b"abc"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=35)


def test_interrupts_end_a_fetch(peer):
    buffer = peer("kept = share(b'abc')") or peer("kept")
    peer.stand_still()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            BufferClient().fetch(buffer)
    finally:
        os.kill(peer.process.pid, signal.SIGCONT)


def test_many_arrays_with_threads_and_collections_at_random(peer, path):
    """What is left after it is what was there before."""
    client = BufferClient(landing_budget=8 << 20)
    pool = BufferPool()
    peer("lengths = {}; pool = BufferPool()")
    peer(
        "made = filled(20_000); view = made.numpy();"
        "theirs = [share(view[i : 2 * i + 9], pool=pool) for i in range(0, 10_000, 100)]"
    )
    theirs, whole = peer("theirs"), content(20_000)
    before = tonic_rdma.memory_statistics().arrays
    turns = 1700 if path == "rdma" else 200  # of six threads
    failures = []

    def work(seed):
        chance = random.Random(seed)
        kept = []
        try:
            for _turn in range(turns):
                match chance.randrange(6):
                    case 0:
                        length = chance.randrange(5000)
                        mine = share(filled(length, seed=length), pool=pool, readers=chance.choice([None, 100]))
                        kept.append((mine, content(length, seed=length)))
                    case 1 | 2:
                        at = chance.randrange(100)
                        kept.append((client.fetch(theirs[at]), whole[at * 100 : 2 * at * 100 + 9]))
                    case 3 if kept:
                        kept.pop(chance.randrange(len(kept)))
                    case 4 if kept:
                        held, expected = chance.choice(kept)
                        got = held if isinstance(held, tonic_rdma.Array) else held.fetch()
                        assert np.array_equal(got.numpy(), expected)
                    case 5 if chance.random() < 0.1:
                        gc.collect()
                del kept[: max(0, len(kept) - 50)]
        except BaseException as error:
            failures.append(error)
            raise

    with futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert not failures
    gc.collect()
    # A lease with a count of readers stays without its object.
    assert pool.statistics().leases <= 6 * turns
    pool.close()
    assert pool.statistics()[:2] == (0, 0)
    deadline = time.monotonic() + 20
    while tonic_rdma.memory_statistics().arrays > before:
        assert time.monotonic() < deadline, tonic_rdma.memory_statistics()
        gc.collect()
        time.sleep(0.01)
    assert peer("pool.statistics()")[0] == 100


def test_more_arrays_than_the_landing_budget_are_kept(peer, path):
    client = BufferClient(landing_budget=4 << 20)
    peer("made = filled(1 << 17); kept = share(made)")
    buffer = peer("kept")
    kept = [client.fetch(buffer) for _ in range(12)]
    assert all(np.array_equal(got.numpy(), content(1 << 17)) for got in kept)
    [owner] = client.owners()
    # With the messages around the arrays.
    landed, copied = owner.landed_bytes >> 20, owner.copied_bytes >> 20
    assert (landed, 8 <= copied <= 12) == (12, True) if path == "rdma" else (landed, copied) == (0, 0)


def test_pools_and_clients_are_collected():
    pool, client = BufferPool(), BufferClient()
    buffer = share(b"abc", pool=pool)
    references = [weakref.ref(pool), weakref.ref(client), weakref.ref(buffer)]
    del pool, client, buffer
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
