"""Threads make, view, share and drop many arrays, while the garbage collector runs at random moments."""

import gc
import random
import sys
import threading

import pytest

import tonic_rdma

numpy = pytest.importorskip("numpy")

THREADS = 4
HELD = 24  # views that a thread keeps, at most
LARGEST = 256 << 10
SETTLED = (
    64 << 20
)  # bytes; all that the threads can hold have half of that, and the arrays of one round ten times as much


def resident():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


class Cycle:
    """Only the garbage collector frees it, and what it holds."""

    def __init__(self, held):
        self.held, self.itself = held, self


VIEWS = [
    lambda made: made,
    lambda made: made.numpy()[1:],
    lambda made: memoryview(made)[1:],
    lambda made: numpy.asarray(made)[::-2],
    lambda made: numpy.from_dlpack(made),
    lambda made: made.__dlpack__(),
    lambda made: made.__dlpack__(max_version=(1, 0)),
    lambda made: tonic_rdma.asarray(made.__dlpack__(copy=True)),
    lambda made: tonic_rdma.asarray(made.numpy()[2:]),
    lambda made: tonic_rdma.asarray(made.numpy()[::-1]),
    lambda made: tonic_rdma.share(made),
    lambda made: tonic_rdma.share(made.numpy()[1:]),
    Cycle,
]


def check(view, number):
    """The content of a view is still what the array had."""
    if isinstance(view, Cycle):
        view = view.held
    if isinstance(view, tonic_rdma.RemoteBuffer):
        view = view.fetch()
    if isinstance(view, tonic_rdma.Array | numpy.ndarray | memoryview):
        found = numpy.asarray(view)
        assert (found == number).all(), (found[:3], number)


def one_thread(seed, count, failures):
    rng = random.Random(seed)
    held = []
    try:
        for number in range(count):
            made = tonic_rdma.empty(
                rng.randrange(8, 2 << rng.randrange(3, LARGEST.bit_length() - 3)), "float32"
            )
            made.numpy()[...] = number
            held.append((rng.choice(VIEWS)(made), number))
            del made
            if len(held) == HELD:
                check(*held.pop(rng.randrange(HELD)))
            if rng.random() < 0.01:
                gc.collect(rng.randrange(3))
    except BaseException as failure:
        failures.append(failure)


def one_round(seed, count):
    failures = []
    threads = [
        threading.Thread(target=one_thread, args=(seed + each, count // THREADS, failures))
        for each in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    del failures, threads
    gc.collect()


@pytest.mark.timeout(120)
def test_ten_thousand_arrays():
    gc.collect()
    before = tonic_rdma.memory_statistics()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        one_round(1, 2000)
        warm = tonic_rdma.memory_statistics(), resident()
        one_round(2, 10_000)
    finally:
        sys.setswitchinterval(interval)
    after = tonic_rdma.memory_statistics()
    assert (after.arrays, after.bytes) == (warm[0].arrays, warm[0].bytes) == (before.arrays, before.bytes)
    assert after.reserved_bytes <= warm[0].reserved_bytes + SETTLED
    assert resident() <= warm[1] + SETTLED, "memory of arrays that are gone"
