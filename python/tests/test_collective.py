"""Groups of processes that reduce, gather, broadcast and exchange arrays.

Ranks are functions of this file. `group` starts a process for each, and returns what the functions return.
"""

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
tonic_rdma = pytest.importorskip("tonic_rdma")

LIMIT = 50


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def group(ranks, function, *arguments, expected=None, **environment):
    """Runs `function(communicator, *arguments)` on each rank, and returns the results."""
    address = free_address()
    environment = {
        **os.environ,
        "RDMA_COLLECTIVE_SIZE": str(ranks),
        "RDMA_COLLECTIVE_ADDRESS": address,
        **environment,
    }
    command = [sys.executable, __file__, function.__name__, json.dumps(arguments)]
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RDMA_COLLECTIVE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends, end = [], time.monotonic() + LIMIT
    due = [(expected or {}).get(rank, 0) for rank in range(ranks)]
    try:
        for process, code in zip(processes, due, strict=True):
            try:
                seconds = 0 if code == "stopped" else max(0.1, end - time.monotonic())
                out, error = process.communicate(timeout=seconds)
                ends.append((process.returncode, out, error))
            except subprocess.TimeoutExpired as late:
                ends.append(("stopped" if code == "stopped" else "late", "", (late.stderr or b"").decode()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    assert [code for code, _, _ in ends] == due, "\n".join(f"{code}: {error}" for code, _, error in ends)
    return [json.loads(out.splitlines()[-1]) if code == 0 else None for code, out, _ in ends]


def main(name, arguments):
    communicator = tonic_rdma.Communicator(deadline=40)
    print(json.dumps(globals()[name](communicator, *json.loads(arguments))))


DTYPES = [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
DTYPES += ["complex64", "complex128", "bool"]


def elements(dtype, rank, count):
    """Small whole numbers, so that sums are exact in each type."""
    return ((np.arange(count) * 7 + rank * 3) % 11).astype(dtype)


def results(communicator):
    rank, size = communicator.rank, communicator.size
    for dtype in DTYPES:
        for count in (0, 1, size, 1000 * size, 9001, 70_001 * size):
            every = [elements(dtype, other, count) for other in range(size)]
            own, kind = every[rank], np.dtype(dtype).kind
            reductions = {"sum": np.sum, "min": np.min, "max": np.max, "mean": np.mean}
            for op in {"c": ["sum", "mean"], "b": ["min", "max"], "f": list(reductions)}.get(
                kind, ["sum", "min", "max"]
            ):
                due = reductions[op](every, axis=0).astype(dtype)
                array = own.copy()
                assert communicator.all_reduce(array, op).wait() is array
                # A mean of 3 is rounded once more by numpy.
                assert np.allclose(array, due, rtol=1e-2 if op == "mean" else 0), (dtype, op, count)
                out = np.zeros_like(own)
                assert communicator.all_reduce(own, op, out=out).wait() is out
                assert out.tobytes() == array.tobytes() and (own == every[rank]).all()
                if kind == "c" and count % size:
                    continue
                part = communicator.part(count)
                out = np.zeros_like(own[part])
                communicator.reduce_scatter(own, op, out=out).wait()
                assert out.tobytes() == array[part].tobytes(), (dtype, op, count)
                whole = own.copy()
                communicator.reduce_scatter(whole, op).wait()
                assert whole[part].tobytes() == array[part].tobytes()
            if kind != "c" or count % size == 0:
                whole, part = np.zeros_like(own), communicator.part(count)
                communicator.all_gather(every[0][part].copy(), out=whole).wait()
                assert (whole == every[0]).all(), (dtype, count)
                whole[: part.start] = whole[part.stop :] = 0
                communicator.all_gather(whole).wait()
                assert (whole == every[0]).all()
                # The part of the array itself is in place too.
                whole[: part.start] = whole[part.stop :] = 0
                communicator.all_gather(whole[part], out=whole).wait()
                assert (whole == every[0]).all()
            array = own.copy()
            communicator.broadcast(array, size - 1).wait()
            assert (array == every[-1]).all(), (dtype, count)
            following, before = (rank + 1) % size, (rank - 1) % size
            sent = communicator.send(following, own)
            received = np.zeros_like(own)
            communicator.recv(before, received).wait()
            sent.wait()
            assert (received == every[before]).all()
    assert communicator.barrier().wait() is None


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results(ranks):
    group(ranks, results)


def shapes_and_objects(communicator):
    import array

    size = communicator.size
    matrix = np.full((3, 4, 5), 1.0)
    assert communicator.all_reduce(matrix).wait().shape == (3, 4, 5) and (matrix == size).all()
    scalar = np.array(2.0)
    communicator.all_reduce(scalar).wait()
    assert scalar == 2 * size
    plain = array.array("i", [1, 2, 3])
    communicator.all_reduce(plain).wait()
    assert list(plain) == [size, 2 * size, 3 * size]
    data = bytearray(b"abc" if communicator.rank == 1 else b"xyz")
    communicator.broadcast(data, 1).wait()
    assert data == b"abc"
    own = tonic_rdma.zeros(1000, "float32")
    own.numpy().fill(1)
    assert communicator.all_reduce(own).wait() is own and (own.numpy() == size).all()
    words = np.ones(100_000, np.float32)
    communicator.all_reduce(words.__dlpack__()).wait()
    assert (words == size).all()
    # What is sent may be read-only.
    if communicator.rank == 0:
        communicator.send(1, b"from 0").wait()
    elif communicator.rank == 1:
        text = bytearray(6)
        communicator.recv(0, text).wait()
        assert text == b"from 0"
    communicator.barrier().wait()


def test_shapes_and_objects():
    group(2, shapes_and_objects)


def waits(communicator):
    rank, size = communicator.rank, communicator.size
    counts = [10, 300_000, 3, 0, 1_000_000, 1000]
    under_way = [communicator.all_reduce(np.full(count, rank + 1.0)) for count in counts]
    due = size * (size + 1) / 2
    ended = []
    for operation in under_way:
        operation.add_done_callback(ended.append)
    for operation in reversed(under_way):
        assert (operation.wait() == due).all() and operation.done() and operation.exception() is None
    end = time.monotonic() + LIMIT
    while len(ended) < len(counts) and time.monotonic() < end:
        time.sleep(0.001)
    assert set(map(id, ended)) == set(map(id, under_way))

    async def in_a_loop():
        under_way = [communicator.all_reduce(np.full(count, rank + 1.0)) for count in counts]
        for operation in reversed(under_way):
            assert (await operation == due).all()
        every = [communicator.all_reduce(np.full(count, rank + 1.0)) for count in counts]

        async def of(operation):
            return await operation

        for array in await asyncio.gather(*map(of, every)):
            assert (array == due).all()
        # Two tasks may wait for one, and one that is cancelled does not end it.
        received = communicator.recv((rank - 1) % size, np.zeros(1))
        tasks = [asyncio.ensure_future(of(received)) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await communicator.barrier()
        await communicator.send((rank + 1) % size, np.full(1, 7.0))
        assert [(await task)[0] for task in tasks[1:]] == [7, 7]
        try:
            await tasks[0]
            raise AssertionError("it was cancelled")
        except asyncio.CancelledError:
            pass

    asyncio.run(in_a_loop())

    # It has not ended, but goes on.
    received = communicator.recv((rank - 1) % size, np.zeros(100_000))
    for timeout in (0, 0.05, -1):
        try:
            received.wait(timeout)
            raise AssertionError("nothing was sent")
        except TimeoutError:
            pass
    assert not received.done()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        received.wait()
        raise AssertionError("nothing was sent")
    except KeyboardInterrupt:
        pass
    communicator.barrier().wait()
    # Several threads wait for one operation.
    found = []
    threads = [threading.Thread(target=lambda: found.append(received.wait()[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    communicator.send((rank + 1) % size, np.full(100_000, 5.0)).wait()
    for thread in threads:
        thread.join(LIMIT)
    assert found == [5.0] * 4
    communicator.barrier().wait()


def test_waits():
    group(3, waits)


def looks(communicator):
    """Threads that look whether an operation has ended, and threads that wait for it, all see its result."""
    wrong = []

    def look(operation):
        try:
            while not operation.done():
                pass
        except Exception as error:
            wrong.append(repr(error))

    def wait(operation):
        try:
            assert (operation.wait(LIMIT) == communicator.size).all()
        except Exception as error:
            wrong.append(repr(error))

    for _ in range(200):
        operation = communicator.all_reduce(np.ones(100_000, np.float32))
        threads = [threading.Thread(target=what, args=(operation,)) for what in (look, wait, look, wait)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    communicator.barrier().wait()
    assert not wrong, wrong


def test_threads_that_look_and_wait():
    group(2, looks)


def read_only_views(communicator):
    """The array may be a read-only view of `out`."""
    rank, size = communicator.rank, communicator.size
    for dtype in (np.float64, np.uint8):
        for count in (4, 100_000):
            out = np.ones(count, dtype)
            view = out.view()
            view.flags.writeable = False
            assert communicator.all_reduce(view, out=out).wait() is out
            assert (out == size).all()
            part = communicator.part(count)
            with pytest.raises(ValueError, match="read-only"):
                communicator.reduce_scatter(view, out=out[part]).wait()
            out[: part.start] = out[part.stop :] = 0
            communicator.all_gather(view[part], out=out).wait()
            assert (out == size).all()
    # At an address that is none of their type.
    pairs = np.zeros(9, "f4")[1:].view("c8")
    pairs[:] = rank
    communicator.broadcast(pairs, 1).wait()
    assert (pairs == 1).all()
    communicator.barrier().wait()


def test_read_only_views_and_addresses():
    group(2, read_only_views)


def drops(communicator):
    """Operations that are dropped end, and let their arrays go then."""
    for count in (4, 50_000, 2_000_000):
        array = np.ones(count, np.float32)
        kept = weakref.ref(array)
        if communicator.rank == 0:
            communicator.all_reduce(array)
            del array
            gc.collect()
            end = time.monotonic() + LIMIT
            while kept() is not None and time.monotonic() < end:
                # A thread without the interpreter's lock leaves objects to the next call.
                communicator.statistics()
                time.sleep(0.001)
            assert kept() is None, "the operation keeps its array"
        else:
            assert (communicator.all_reduce(array).wait() == communicator.size).all()
    # One that nobody waits for ends, too.
    array = np.ones(10, np.float32)
    operation = communicator.all_reduce(array)
    end = time.monotonic() + LIMIT
    while array[0] != communicator.size and time.monotonic() < end:
        time.sleep(0.001)
    assert operation.done()
    communicator.barrier().wait()
    # What a failure ended lets its arrays go, too.
    array = np.ones(100_000, np.float32)
    kept = weakref.ref(array)
    if communicator.rank == 0:
        operation = communicator.recv(1, array)
        del array
        assert isinstance(operation.exception(), tonic_rdma.CollectiveError)
        del operation
        assert kept() is None
    communicator.close()


def test_dropped_operations_go_on():
    group(2, drops)


def survives(communicator, count):
    rank, size = communicator.rank, communicator.size
    communicator.barrier().wait()
    array = np.ones(count, np.float32)
    if rank == 1:
        communicator.all_reduce(array)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            communicator.all_reduce(array).wait()
    except tonic_rdma.RankLost as error:
        assert error.lost_rank == error.rank == 1 and error.kind == "rank_lost", repr(error)
        assert "rank 1" in str(error)
    later = communicator.all_reduce(array).exception()
    assert isinstance(later, tonic_rdma.RankLost) and later.kind == "revoked", repr(later)
    communicator = communicator.shrink()
    assert (communicator.size, communicator.rank) == (size - 1, rank - (rank > 1))
    array.fill(1)
    assert (communicator.all_reduce(array).wait() == size - 1).all()
    communicator.barrier().wait()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [100, 16 << 20])
def test_a_rank_is_killed(ranks, count):
    group(ranks, survives, count, expected={1: -signal.SIGKILL})


def outlasts(communicator):
    communicator.barrier().wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LIMIT)
    array = np.ones(100_000)
    error = communicator.all_reduce(array, deadline=1).exception()
    # One rank may learn it from the other.
    assert error.kind == "deadline" and error.rank == 1 or error.kind == "reported", repr(error)
    communicator = asyncio.run(communicator.shrink_async())
    assert communicator.size == 2
    communicator.all_reduce(array).wait()
    communicator.barrier().wait()
    return error.kind


def test_a_rank_is_stopped():
    kinds = group(3, outlasts, expected={1: "stopped"})
    assert "deadline" in kinds


def differs(communicator, what, seen):
    communicator.barrier().wait()
    odd = communicator.rank == 1
    arguments = {
        "length": (np.ones(11 if odd else 10), "sum"),
        "dtype": (np.ones(10, np.int64 if odd else np.float64), "sum"),
        "op": (np.ones(10), "max" if odd else "sum"),
    }[what]
    error = communicator.all_reduce(*arguments).exception() or communicator.barrier().exception()
    # It lives until the other one has seen the mismatch, too.
    Path(seen, str(communicator.rank)).touch()
    end = time.monotonic() + LIMIT
    while len(os.listdir(seen)) < communicator.size and time.monotonic() < end:
        time.sleep(0.01)
    return error.kind, error.rank, str(error)


@pytest.mark.parametrize("what", ["length", "dtype", "op"])
def test_calls_that_differ(what, tmp_path):
    found = group(2, differs, what, str(tmp_path))
    assert any(kind == "mismatch" for kind, _, _ in found), found
    for kind, _, text in found:
        assert kind in ("mismatch", "reported") and "all_reduce of 10 elements" in text, found


def soak(communicator, seed):
    """Operations of all sizes and kinds, by threads, with arrays and operations that are dropped at random."""
    common, own = random.Random(seed), random.Random(communicator.rank)
    size, live = communicator.size, []
    stop = threading.Event()

    def collect():
        while not stop.wait(0.002):
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    waiting = []
    for number in range(300):
        count = common.choice([1, 7, 500, 5000, 60_000])
        array = np.full(count, 1, common.choice(["float32", "int64", "float16"]))
        live.append(weakref.ref(array))
        match common.randrange(4):
            case 0:
                operation, due = communicator.all_reduce(array), size
            case 1:
                out = np.zeros_like(array)
                live.append(weakref.ref(out))
                operation, due = communicator.all_reduce(array, "max", out=out), 1
                del out
            case 2:
                operation, due = communicator.broadcast(array, number % size), 1
            case _:
                operation, due = communicator.all_gather(array), 1
        del array
        match own.randrange(4):
            case 0:
                pass  # dropped
            case 1:
                assert (operation.wait() == due).all()
            case 2:
                waiting.append((operation, due))
            case _:
                operation.add_done_callback(
                    lambda operation, due=due: checked.append((operation.wait() == due).all())
                )
        del operation
        if number % 50 == 49:
            own.shuffle(waiting)
            for operation, due in waiting:
                assert (operation.wait() == due).all()
            waiting, operation = [], None
    checked_due = communicator.barrier()
    checked_due.wait()
    stop.set()
    collector.join(LIMIT)
    end = time.monotonic() + LIMIT
    while any(kept() is not None for kept in live) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert not [kept for kept in live if kept() is not None]
    assert all(checked) and checked
    communicator.barrier().wait()


checked = []


@pytest.mark.parametrize("ranks", [2, 3])
def test_soak(ranks):
    group(ranks, soak, 1)


def forks(communicator):
    communicator.barrier().wait()
    operation = communicator.recv(1 - communicator.rank, np.zeros(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            communicator.barrier()
        except RuntimeError:
            try:
                operation.wait()
            except RuntimeError:
                code = 0
        del operation, communicator
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    communicator.send(1 - communicator.rank, np.ones(1)).wait()
    assert operation.wait()[0] == 1
    communicator.barrier().wait()


def test_a_fork_can_not_use_it():
    group(2, forks)


@pytest.fixture(scope="module")
def alone():
    with tonic_rdma.Communicator(0, 1, "127.0.0.1:0") as communicator:
        yield communicator


def test_one_rank(alone):
    array = np.arange(5.0)
    assert (alone.all_reduce(array, "mean").wait() == np.arange(5.0)).all()
    out = np.zeros(5)
    assert (alone.all_gather(array, out=out).wait() == array).all()
    assert alone.part(10) == slice(0, 10) and (alone.rank, alone.size) == (0, 1)
    assert "one-shot" in alone.plans() or alone.plans()
    assert alone.statistics().operations > 0
    assert repr(alone) == "<tonic_rdma.Communicator: rank 0 of 1>"


def read_only(count):
    array = np.zeros(count)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.all_reduce(np.zeros((4, 4)).T), ValueError, "contiguous"),
        (lambda c: c.all_reduce(np.zeros(10)[::2]), ValueError, "contiguous"),
        (lambda c: c.all_reduce(read_only(3)), ValueError, "read-only"),
        (lambda c: c.all_reduce(b"abc"), ValueError, "read-only"),
        (lambda c: c.all_reduce(np.zeros(3), out=read_only(3)), ValueError, "read-only"),
        (lambda c: c.all_reduce(np.zeros(3), out=np.zeros(3, "f4")), ValueError, "float64.*float32"),
        (lambda c: c.all_reduce(np.zeros(3), out=np.zeros(4)), ValueError, "do not fit"),
        (lambda c: c.all_reduce(np.zeros(3), "median"), ValueError, "median.*sum, mean, min, max"),
        (lambda c: c.all_reduce(np.zeros(3, int), "mean"), ValueError, "mean"),
        (lambda c: c.all_reduce(np.zeros(3, complex), "min"), ValueError, "complex128.*min"),
        (lambda c: c.all_reduce(np.zeros(3, bool)), ValueError, "bool.*sum"),
        (lambda c: c.all_reduce("abc"), TypeError, "str"),
        (lambda c: c.all_reduce([1.0, 2.0]), TypeError, "list"),
        (lambda c: c.all_reduce(np.array(["a"])), TypeError, "elements can be"),
        (
            lambda c: c.all_reduce(np.zeros(4), out=(a := np.zeros(4))[:]) and c.all_reduce(a[:3], out=a[1:]),
            ValueError,
            "overlap",
        ),
        (lambda c: c.broadcast(np.zeros(3), 1), ValueError, "no rank 1"),
        (lambda c: c.broadcast(np.zeros(3), -1), OverflowError, "negative"),
        (lambda c: c.send(0, np.zeros(3)), ValueError, "itself"),
        (lambda c: c.recv(7, np.zeros(3)), ValueError, "no rank 7"),
        (lambda c: c.part(3, 1), ValueError, "no rank 1"),
        (lambda c: c.barrier(deadline=float("nan")), ValueError, "expected seconds"),
        (lambda c: c.barrier().wait(float("nan")), ValueError, "expected seconds"),
    ],
)
def test_arguments(alone, call, error, text):
    with pytest.raises(error, match=text):
        call(alone).wait()
    # The group still works.
    alone.barrier().wait()


def test_elements_at_any_address(alone):
    odd = np.frombuffer(bytearray(9), "f4", 2, 1)
    odd[:] = 1, 2
    assert (alone.all_reduce(odd).wait() == (1, 2)).all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0,), "all of rank, size and address"),
        ((0, 2), "all of rank, size and address"),
        ((2, 2, "127.0.0.1:1"), "no rank 2"),
        ((-1, 2, "127.0.0.1:1"), "no rank -1"),
        ((0, 1, "nowhere"), "nowhere"),
    ],
)
def test_arguments_of_a_communicator(arguments, text):
    with pytest.raises((ValueError, tonic_rdma.CollectiveError), match=text):
        tonic_rdma.Communicator(*arguments)
    with pytest.raises(ValueError, match="plans|algorithm"):
        tonic_rdma.Communicator(0, 1, "127.0.0.1:0", plans="fast")


def test_ranks_that_do_not_come():
    with pytest.raises(tonic_rdma.CollectiveError) as failed:
        tonic_rdma.Communicator(0, 2, free_address(), bootstrap_timeout=0.3)
    assert failed.value.kind == "setup"


def test_a_closed_communicator():
    communicator = asyncio.run(tonic_rdma.Communicator.connect(0, 1, "127.0.0.1:0"))
    operation = communicator.all_reduce(np.ones(3))
    communicator.close()
    communicator.close()
    assert (operation.wait() == 1).all()
    for call in (
        communicator.barrier,
        communicator.shrink,
        communicator.plans,
        lambda: communicator.all_reduce(np.ones(3)),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def tensors(communicator):
    import torch
    from torch.utils.dlpack import to_dlpack

    size = communicator.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for count in (3, 100_000):
            tensor = torch.ones(count, dtype=dtype)
            communicator.all_reduce(to_dlpack(tensor)).wait()
            assert (tensor == size).all(), dtype
            assert communicator.all_reduce(tensor, "max").wait() is tensor
    communicator.barrier().wait()


def test_tensors_of_torch():
    pytest.importorskip("torch")
    group(2, tensors)


def comes_and_goes(first):
    """Groups that are closed or collected leave no thread and no descriptor."""

    def counts():
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

    def grown():
        return [now > earlier for now, earlier in zip(counts(), before, strict=True)]

    before = None
    for number in range(20):
        communicator = tonic_rdma.Communicator(0, 1, "127.0.0.1:0")
        operation = communicator.all_reduce(np.ones(100_000))
        if number % 2:
            communicator.close()
        del communicator
        assert (operation.wait() == 1).all()
        del operation
        if number == 4:
            time.sleep(1)
            before = counts()
    end = time.monotonic() + LIMIT
    while any(grown()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(grown()), (before, counts())
    first.barrier().wait()


def test_groups_come_and_go():
    group(1, comes_and_goes)


def leaves(communicator):
    communicator.barrier().wait()
    operations = [communicator.recv(1 - communicator.rank, np.zeros(count)) for count in (1, 100_000)]
    operations[0].add_done_callback(print)
    threading.Thread(target=operations[1].wait, daemon=True).start()
    time.sleep(0.05)


def test_the_interpreter_ends_during_operations():
    group(2, leaves)


def test_the_command():
    command = "-m tonic_rdma compare-collectives --ranks 2 --sizes 1KiB,1MiB --rounds 1 --duration 0.01"
    ended = subprocess.run(
        [sys.executable, *command.split()], check=False, capture_output=True, text=True, timeout=LIMIT
    )
    try:
        import torch  # noqa: F401
    except ImportError:
        assert ended.returncode == 2 and "needs torch" in ended.stderr
    else:
        assert ended.returncode == 0 and "1048576" in ended.stdout, ended.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
