"""The backend of torch.distributed, over real processes. `check-torch` runs these tests
with two versions of torch.

A test starts this file once for each rank, with the name of a function below as its argument.
"""

import copy
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import tonic_rdma.torch as ours  # noqa: E402

NEW = int(torch.__version__.split(".")[0]) >= 2
only_new = pytest.mark.skipif(not NEW, reason="torch 1.13 can't run this over a group in Python")
EXAMPLE = Path(__file__).parent.parent / "examples" / "train_fashion_mnist.py"
PICTURES = Path("/usr/share/datasets/fashion-mnist")


def run(*command, size, dies=(), stops=(), limit=150):
    """Runs a Python program on `size` ranks. Returns what each printed. The ranks `dies` end by SIGKILL."""
    # The store is that of the test, as torchrun's agent has one, so it outlives each rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    places |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = []
    try:
        for rank in range(size):
            settings = {**os.environ, **places, "RANK": str(rank)}
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": settings}
            ranks.append(subprocess.Popen([sys.executable, *command], **options))
        until = time.monotonic() + limit
        said = [
            "" if rank in stops else process.communicate(timeout=max(until - time.monotonic(), 1))[0]
            for rank, process in enumerate(ranks)
        ]
        wrong = [
            f"rank {rank} ended with {process.returncode}:\n{said[rank]}"
            for rank, process in enumerate(ranks)
            if rank not in stops and process.returncode != (-signal.SIGKILL if rank in dies else 0)
        ]
        assert not wrong, "\n".join(wrong)
        return said
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


# Tests


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations(size):
    run(__file__, "operations", size=size)


def test_works_end_in_any_order():
    run(__file__, "any_order", size=3)


def test_groups_come_and_go():
    run(__file__, "groups", size=3)


def test_what_is_not_carried_is_refused_by_name():
    run(__file__, "refusals", size=2)


def test_hook_gives_the_means_of_gloo():
    run(__file__, "hook", size=2)


def test_killed_rank_is_named_and_survivors_go_on():
    run(__file__, "killed", size=3, dies=[1])


def test_killed_rank_0_is_named_and_survivors_go_on():
    run(__file__, "killed_first", size=3, dies=[0])


def test_stopped_rank_is_named_after_the_deadline():
    run(__file__, "stopped", size=3, stops=[1])


def test_completed_works_have_their_results():
    run(__file__, "completed", size=2)


def test_reductions_of_parts():
    run(__file__, "parts_of_reductions", size=2)


def test_callbacks_wait_for_later_futures():
    run(__file__, "callbacks", size=2)


def test_rank_killed_before_the_first_exchange_is_named():
    run(__file__, "killed_before_exchange", size=3, dies=[1])


def test_rank_killed_in_an_exchange_is_named():
    run(__file__, "killed_in_exchange", size=3, dies=[1])


def test_limits():
    run(__file__, "limits", size=3)


def test_address_of_rank_0(monkeypatch):
    monkeypatch.setenv("TONIC_RDMA_HOST", "127.0.0.5")
    assert ours._host() == "127.0.0.5"
    run(__file__, "address", size=2)
    monkeypatch.setenv("TONIC_RDMA_HOST", "no.such.host.invalid")
    with pytest.raises(OSError):
        ours._host()


@only_new
@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel_training_equals_that_of_gloo(size):
    run(__file__, "data_parallel", size=size)


@only_new
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_training_equals_that_of_gloo(size):
    run(__file__, "sharded", size=size)


@only_new
def test_functional_collectives():
    run(__file__, "functional", size=2)


@only_new
def test_rank_killed_in_training_is_named_and_survivors_train_on():
    run(__file__, "killed_in_training", size=3, dies=[1])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 4] if NEW else [2])
def test_example_has_the_losses_of_gloo(size):
    if not PICTURES.exists():
        pytest.skip("the pictures of Fashion-MNIST are not installed (training/prepare pictures)")
    reference = losses(size, "--backend", "gloo")
    tried = losses(size, "--backend", "tonic_rdma") if NEW else losses(size, "--backend", "gloo", "--hook")
    assert len(reference) == len(tried) == 10
    if size == 2:
        assert tried == reference
    assert tried == pytest.approx(reference, abs=1e-5)
    assert reference[-1] < reference[0]


def losses(size, *options):
    """The losses of ten steps of the example, which imports no `tonic_rdma.torch` for the backend."""
    command = [str(EXAMPLE), "--steps", "10", "--batch", "16", *options]
    if NEW:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        ended = subprocess.run(torchrun + command, capture_output=True, text=True, timeout=150)
        assert ended.returncode == 0, ended.stderr
        said = ended.stdout
    else:
        # Debian's torchrun does not work with its Python 3.11.
        said = run(*command, size=size)[0]
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+) ", said, re.MULTILINE)]


# What the ranks run


def begin(backend="tonic_rdma", **settings):
    dist.init_process_group(backend, **settings)
    return dist.get_rank(), dist.get_world_size()


def end():
    dist.barrier()
    dist.destroy_process_group()


def value(rank, shape=(5,), dtype=torch.float32):
    count = 1
    for length in shape:
        count *= length
    return torch.arange(count).add(3 * rank).remainder(5).add(1).reshape(shape).to(dtype)


def same(tensor, expected):
    assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), (tensor, expected)


def operations():
    rank, size = begin()
    everyone = range(size)

    kinds = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
    ]
    reductions = {
        dist.ReduceOp.SUM: lambda parts: parts.sum(0),
        dist.ReduceOp.MIN: lambda parts: parts.amin(0),
        dist.ReduceOp.MAX: lambda parts: parts.amax(0),
        dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    }
    for kind in [*kinds, torch.int64]:
        for shape in [(), (0,), (5,), (3, 4), (9000,)]:
            for op, function in reductions.items():
                tensor = value(rank, shape, kind)
                dist.all_reduce(tensor, op)
                same(
                    tensor,
                    function(torch.stack([value(other, shape, torch.int64) for other in everyone])).to(kind),
                )
    bits = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    for op, function in bits.items():
        for kind in (torch.int32, torch.bool):
            given = [
                value(other, (7,), torch.int32) - 1 if kind == torch.int32 else value(other, (7,)) > 3
                for other in everyone
            ]
            tensor = given[rank].clone()
            dist.all_reduce(tensor, op)
            expected = given[0]
            for part in given[1:]:
                expected = function(expected, part)
            same(tensor, expected)
    tensor = torch.complex(value(rank), value(rank + 1))
    dist.all_reduce(tensor)
    same(tensor, sum(torch.complex(value(other), value(other + 1)) for other in everyone))
    # Not contiguous: the result is in the tensor nevertheless, and nothing beside it changes.
    around = torch.zeros(6, 8)
    tensor = around[1:5, 2:6].t()
    tensor.copy_(value(rank, (4, 4)))
    dist.all_reduce(tensor)
    same(tensor, sum(value(other, (4, 4)) for other in everyone))
    assert around.sum() == tensor.sum()
    # A parameter, whose gradient must not see it.
    tensor = value(rank).requires_grad_()
    dist.all_reduce(tensor.data)
    same(tensor.data, sum(value(other) for other in everyone))
    dist.all_reduce(tensor)

    for root in everyone:
        for kind in (torch.float32, torch.bool, torch.complex64):
            tensor = value(rank, (3, 2), torch.int32).gt(2).to(kind)
            dist.broadcast(tensor, root)
            same(tensor, value(root, (3, 2), torch.int32).gt(2).to(kind))
        tensor = value(rank)
        dist.reduce(tensor, root)
        same(tensor, sum(value(other) for other in everyone) if rank == root else value(rank))
        parts = [torch.zeros(2, 3) for _ in everyone] if rank == root else None
        dist.gather(value(rank, (2, 3)), parts, root)
        for other, part in enumerate(parts or []):
            same(part, value(other, (2, 3)))
        tensor = torch.zeros(5)
        dist.scatter(tensor, [value(root + other) for other in everyone] if rank == root else None, root)
        same(tensor, value(root + rank))
        given = [None] * size
        dist.gather_object({"rank": rank}, given if rank == root else None, root)
        assert rank != root or given == [{"rank": other} for other in everyone]
        taken = [None]
        dist.scatter_object_list(taken, [f"{root} to {other}" for other in everyone], root)
        assert taken == [f"{root} to {rank}"]
        told = [f"of {rank}"]
        dist.broadcast_object_list(told, root)
        assert told == [f"of {root}"]

    parts = [torch.zeros(2, 3, dtype=torch.int64) for _ in everyone]
    dist.all_gather(parts, value(rank, (2, 3), torch.int64))
    for other, part in enumerate(parts):
        same(part, value(other, (2, 3), torch.int64))
    whole = torch.zeros(size, 2, 3)
    dist.all_gather(list(whole.unbind()), value(rank, (2, 3)))
    same(whole, torch.stack([value(other, (2, 3)) for other in everyone]))
    parts = [torch.zeros(other + 1) for other in everyone]
    if NEW:  # Older versions compare the lengths.
        dist.all_gather(parts, value(rank, (rank + 1,)))
        for other, part in enumerate(parts):
            same(part, value(other, (other + 1,)))
    given = [None] * size
    dist.all_gather_object(given, "x" * rank)
    assert given == ["x" * other for other in everyone]
    gather = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
    scatter = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
    tensor = torch.zeros(size * 5)
    gather(tensor, value(rank))
    same(tensor, torch.cat([value(other) for other in everyone]))
    for op, function in reductions.items():
        expected = function(torch.stack([value(other, (size, 5)) for other in everyone]))[rank]
        tensor = torch.zeros(5)
        scatter(tensor, value(rank, (size, 5)).view(-1), op)
        same(tensor, expected)
        tensor = torch.zeros(5)
        dist.reduce_scatter(tensor, [part.clone() for part in value(rank, (size, 5)).unbind()], op)
        same(tensor, expected)

    # Rank a sends a + b + 1 rows to rank b.
    rows = [rank + other + 1 for other in everyone]
    given = torch.cat([torch.full((count, 2), 10.0 * rank + other) for other, count in enumerate(rows)])
    tensor = torch.zeros(sum(rows), 2)
    dist.all_to_all_single(tensor, given, rows, rows)
    same(tensor, torch.cat([torch.full((count, 2), 10.0 * other + rank) for other, count in enumerate(rows)]))
    tensor = torch.zeros(size, 3)
    dist.all_to_all_single(tensor, value(rank, (size, 3)))
    same(tensor, torch.stack([value(other, (size, 3))[rank] for other in everyone]))
    parts = [torch.zeros(4) for _ in everyone]
    dist.all_to_all(parts, [value(10 * rank + other, (4,)) for other in everyone])
    for other, part in enumerate(parts):
        same(part, value(10 * other + rank, (4,)))

    after, before = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        tensor, long = torch.zeros(5), torch.zeros(100_000)
        works = [dist.isend(value(rank), after), dist.isend(torch.full((100_000,), float(rank)), after)]
        # Between a send and its receive, so that an operation made of sends must not take them.
        parts = [torch.zeros(5) for _ in everyone]
        dist.all_to_all(parts, [value(rank + 1)] * size)
        works += [dist.irecv(tensor, before), dist.irecv(long, before)]
        for work in reversed(works):
            work.wait()
        same(tensor, value(before))
        same(long, torch.full((100_000,), float(before)))
        same(parts[before], value(before + 1))
        if rank == 0:
            dist.send(value(7), 1)
        elif rank == 1:
            assert dist.recv(tensor, 0) == 0
            same(tensor, value(7))
    dist.group.WORLD.monitored_barrier()
    end()


def any_order():
    rank, size = begin()
    total = size * (size - 1) / 2
    for turn in range(10):
        tensors = [torch.full((length,), float(rank)) for length in (1, 100, 5000, 70_000, 1_000_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        gathered = torch.zeros(size * 3)
        works.append(dist.group.WORLD.all_gather_single(gathered, torch.full((3,), float(rank))))
        works.append(dist.barrier(async_op=True))
        # Each rank waits in an order of its own, and in each of the ways to wait.
        for place in sorted(range(len(works)), key=lambda place: (place * (2 * rank + 1) + turn) % len(works)):
            if (place + rank) % 3 == 0:
                works[place].get_future().wait()
            elif (place + rank) % 3 == 1:
                while not works[place].is_completed():
                    time.sleep(0)
                works[place].wait()
            else:
                works[place].wait(timedelta(seconds=40))
            assert works[place].is_completed()
        assert all(torch.all(tensor == total) for tensor in tensors)
        same(gathered, torch.arange(float(size)).repeat_interleave(3))
    # Works that nobody waits for end too.
    tensors = [torch.ones(300_000) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()
    for work in works:
        while not work.is_completed():
            time.sleep(0.001)
    end()


def completed():
    rank, size = begin()

    def reached(work):
        until = time.monotonic() + 60
        while not work.is_completed():
            assert time.monotonic() < until
            time.sleep(0.001)
        return work

    tensor = torch.ones(4, 4)[:, ::2]
    assert reached(dist.all_reduce(tensor, async_op=True)).is_success()
    same(tensor, torch.full((4, 2), 2.0))
    tensor = torch.full((3,), 2.0)
    work = reached(dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, async_op=True))
    same(tensor, torch.full((3,), 4.0))
    assert work.is_success() and work.exception() is None
    # What is transposed is reduced too, also where the result is not.
    tensor = torch.arange(6.0).view(2, 3).t()
    dist.reduce(tensor, 0)
    same(tensor, torch.arange(6.0).view(2, 3).t() * (2 if rank == 0 else 1))
    # An error is kept: of an operation, and of a step after it.
    work = reached(dist.group.WORLD.allreduce([torch.ones(3, dtype=torch.int32)], _options(dist.ReduceOp.AVG)))
    assert "mean" in str(work.exception()) and not work.is_success()
    work = dist.barrier(async_op=True)
    steps = []
    work._then.append(lambda: steps.append(0) or 1 / 0)
    assert isinstance(reached(work).exception(), ZeroDivisionError) and not work.is_success()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert steps == [0]
    end()


def parts_of_reductions():
    rank, size = begin()
    scatter = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
    for op, due in ((dist.ReduceOp.SUM, 22.0), (dist.ReduceOp.PRODUCT, 121.0)):
        # Parts of different lengths.
        output = torch.zeros([2, 1][rank])
        given = [torch.full((2,), 1.0), torch.full((1,), 11.0)]
        dist.group.WORLD.reduce_scatter([output], [given], _scatter_options(op)).wait()
        same(output, torch.full((2,), 1.0 * (2 if due == 22 else 1)) if rank == 0 else torch.full((1,), due))
        for long in (3, 10):
            with pytest.raises(ValueError, match=f"2 times 2 elements don't fill a tensor of {long}"):
                scatter(torch.zeros(2), torch.ones(long), op)
        with pytest.raises(ValueError, match=r"the part of rank \d has \d elements, and not 5"):
            dist.group.WORLD.reduce_scatter([torch.zeros(5)], [given], _scatter_options(op))
        # In place: nothing but the part changes.
        for count in (2, 300_000):
            tensor = torch.full((size * count,), 3.0)
            own = slice(rank * count, (rank + 1) * count)
            scatter(tensor[own], tensor, op)
            expected = torch.full((size * count,), 3.0)
            expected[own] = 6 if due == 22 else 9
            same(tensor, expected)
    end()


def _scatter_options(op):
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def callbacks():
    rank, size = begin()
    dist.barrier()
    later, made = [], threading.Event()

    def waits(_):
        assert made.wait(60)
        return later[0].wait()[0]

    future = dist.all_reduce(torch.ones(100_000), async_op=True).get_future().then(waits)
    tensor = torch.ones(5)
    later.append(dist.all_reduce(tensor, async_op=True).get_future())
    made.set()
    same(future.wait(), torch.full((5,), float(size)))
    # So may callbacks of operations.
    communicator, ended = dist.group.WORLD.communicator, threading.Event()
    communicator.barrier().add_done_callback(lambda _: ended.wait(60))
    communicator.barrier().add_done_callback(lambda _: ended.set())
    assert ended.wait(50)
    # An error in a callback ends no thread that others need.
    errors = queue.SimpleQueue()
    threading.excepthook = errors.put
    communicator.barrier().add_done_callback(lambda _: 1 / 0)
    again = threading.Event()
    communicator.barrier().add_done_callback(lambda _: again.set())
    assert again.wait(60) and errors.get(timeout=60).exc_type is ZeroDivisionError
    end()


def killed_before_exchange(warm=False):
    rank, size = begin()
    tensors = [torch.zeros(3) for _ in range(size)]
    if warm:
        dist.all_to_all(tensors, [torch.zeros(3)] * size)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failed:
        dist.all_to_all(tensors, [torch.zeros(3)] * size)
    survive(failed.value, 1, rank, size)
    end()


def killed_in_exchange():
    killed_before_exchange(True)


def limits():
    rank, size = begin()
    # One limit is for all operations of a work together. What is waited for ends after the limit only.
    work = ours.Work([])
    asked = []

    class Operation:
        def wait(self, limit):
            asked.append(limit)
            time.sleep(0.05)

    work._operations = [Operation() for _ in range(4)]
    work.wait(timedelta(seconds=30))
    assert asked == sorted(asked, reverse=True) and 30 >= asked[0] >= asked[3] + 0.15
    # The group's timeout is that of later operations.
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    with pytest.raises(NotImplementedError, match="can't abort"):
        dist.group.WORLD.abort()
    if rank == 0:
        with pytest.raises(RuntimeError, match="1 s|1s|deadline"):
            dist.recv(torch.zeros(1), 1)
        os._exit(0)
    with pytest.raises(RuntimeError):
        dist.barrier()
        dist.recv(torch.zeros(1), 0)
    os._exit(0)


def address():
    rank, _ = begin()
    if rank == 0:
        said = subprocess.run(["ss", "-ltnp"], check=False, capture_output=True, text=True).stdout
        assert "127.0.0.5" in said or not said
    end()


def groups():
    rank, size = begin()
    everyone, pair = dist.new_group(range(size)), dist.new_group([0, 2])
    for turn in range(8):
        tensor = torch.full((turn + 1,), float(rank))
        works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for group in (everyone, None)]
        if rank != 1:
            given = tensor.clone()
            dist.all_reduce(given, group=pair)
            same(given, torch.full((turn + 1,), 2.0))
        for work in reversed(works):
            same(work.result()[0], torch.full((turn + 1,), 3.0))
    if rank != 1:
        assert dist.get_rank(pair) == rank // 2
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, 2, group=pair)
        same(tensor, torch.full((3,), 2.0))
        dist.destroy_process_group(pair)
    for _ in range(5):
        group = dist.new_group(range(size))
        dist.barrier(group)
        dist.destroy_process_group(group)
    end()
    if not NEW:
        return  # Its barrier of the store works once.
    # The store is the one from before, and remembers where the ranks met.
    begin()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(size)))
    end()


def refusals():
    rank, size = begin()

    def refused(kind, words, function, *arguments, **options):
        with pytest.raises(kind, match=words):
            function(*arguments, **options)

    refused(NotImplementedError, "has no tag 3", dist.isend, torch.ones(1), 1 - rank, tag=3)
    refused(NotImplementedError, "give recv a src", dist.recv, torch.ones(1))
    refused(NotImplementedError, "layout torch.sparse_coo", dist.all_reduce, torch.eye(2).to_sparse())
    refused(NotImplementedError, "no reduction .* of torch.complex64", dist.group.WORLD.allreduce,
            [torch.ones(1, dtype=torch.complex64)], _options(dist.ReduceOp.MAX))  # fmt: skip
    refused(ValueError, "2 times 3 elements don't fill a tensor of 5", dist.group.WORLD.all_gather_single,
            torch.zeros(5), torch.zeros(3))  # fmt: skip
    refused(ValueError, "3 rows are no equal parts for 2 ranks", dist.group.WORLD.all_to_all_single,
            torch.zeros(3), torch.zeros(3))  # fmt: skip
    refused(TypeError, "shrink takes a group of the backend tonic_rdma", ours.shrink, "everyone")
    tensor = torch.ones(3, dtype=torch.int32)
    refused(ValueError, "mean", dist.group.WORLD.allreduce([tensor], _options(dist.ReduceOp.AVG)).wait)
    # The group is as good as before.
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), size, dtype=torch.int32))
    end()


def _options(op):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300),
        torch.nn.ReLU(), torch.nn.Linear(300, 3)
    )  # fmt: skip


def train(model, rank, steps=6):
    """Returns the losses, and the values of all parameters after these steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = []
    for step in range(steps):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        made.append(loss.item())
    values = [
        getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
        for parameter in model.parameters()
    ]
    return made, [parameter.detach().clone() for parameter in values]


def equal(size, one, other, within=1e-5):
    # Two addends have one sum, whatever their order.
    within = 0 if size == 2 else within
    for first, second in zip([torch.tensor(one[0]), *one[1]], [torch.tensor(other[0]), *other[1]], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=within)
    assert one[0][0] != one[0][-1]


def hook():
    rank, size = begin("gloo")
    plain = torch.nn.parallel.DistributedDataParallel(network())
    reference = train(plain, rank)
    group = dist.new_group(backend="tonic_rdma")
    for state in (group, group.communicator):
        # Small buckets, so that several are under way.
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.05)
        model.register_comm_hook(state, ours.allreduce_hook)
        equal(size, reference, train(model, rank))
    end()


def data_parallel():
    rank, size = begin("gloo")
    group = dist.new_group(backend="tonic_rdma")
    check_hooks(rank, size, group)
    for settings in ({}, {"bucket_cap_mb": 0.05}, {"find_unused_parameters": True}, {"static_graph": True}):
        plain = torch.nn.parallel.DistributedDataParallel(network(), **settings)
        model = torch.nn.parallel.DistributedDataParallel(network(), process_group=group, **settings)
        equal(size, train(plain, rank), train(model, rank))
    end()


def check_hooks(rank, size, group):
    """Hooks of torch. That of PowerSGD waits for a future in a callback of another one, and needs one bucket: its
    callbacks start operations, and several buckets could end in another order at each rank."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for kind in ("half", "power"):
        trained = []
        for over in (dist.group.WORLD, group):
            model = torch.nn.parallel.DistributedDataParallel(network(), process_group=over)
            if kind == "half":
                model.register_comm_hook(over, default_hooks.fp16_compress_hook)
            else:
                state = powerSGD_hook.PowerSGDState(over, start_powerSGD_iter=2)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            trained.append(train(model, rank))
        equal(size, *trained, within=1e-3)  # the hooks round to 16 bits, or approximate


def sharded():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    rank, size = begin("gloo")
    ways = [dist.group.WORLD, dist.new_group(backend="tonic_rdma")]
    trained = []
    for group in ways:
        model = FullyShardedDataParallel(network(), process_group=group, device_id=torch.device("cpu"))
        trained.append(train(model, rank))
    equal(size, *trained)
    trained = []
    for group in ways:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = network()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        trained.append(train(fully_shard(model, mesh=mesh), rank))
    equal(size, *trained)
    end()


def functional():
    import torch.distributed._functional_collectives as functions

    rank, size = begin()
    group = dist.group.WORLD
    both = torch.cat([value(0), value(1)])
    same(functions.all_reduce(value(rank), "sum", group) + 0, value(0) + value(1))
    same(functions.all_gather_tensor(value(rank), 0, group) + 0, both)
    same(functions.reduce_scatter_tensor(both, "sum", 0, group) + 0, 2 * value(rank))
    same(functions.broadcast(value(rank), 1, group) + 0, value(1))
    same(functions.all_to_all_single(both[:4], None, None, group) + 0, both[2 * rank :][:2].repeat(2))
    received = torch.zeros(5)
    given = [dist.P2POp(dist.isend, value(rank), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(given):
        work.wait()
    same(received, value(1 - rank))
    with dist._coalescing_manager():
        tensors = [value(rank), value(rank + 1)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    same(tensors[1], value(1) + value(2))
    end()


def survive(error, lost, rank, size):
    """After the loss of a rank: checks its name, and goes on with the others."""
    assert re.search(rf"rank {lost}\b", str(error)), error
    group = ours.shrink()
    assert group is dist.group.WORLD and dist.get_world_size() == size - 1
    assert dist.get_rank() == rank - (rank > lost)
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert torch.all(tensor == size * (size - 1) / 2 - lost)
    dist.broadcast(tensor, size - 2)
    tensors = [torch.zeros(3) for _ in range(size - 1)]
    dist.all_to_all(tensors, [torch.full((3,), float(dist.get_rank()))] * (size - 1))
    same(torch.stack(tensors)[:, 0], torch.arange(float(size - 1)))


def killed(lost=1):
    rank, size = begin()
    smaller = dist.new_group([0, 1])
    tensor = torch.ones(200_000)
    with pytest.raises(RuntimeError) as failed:
        for step in range(10_000):
            works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(3)]
            if step == 5 and rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            for work in works:
                work.wait()
    survive(failed.value, lost, rank, size)
    assert smaller is not None
    end()


def killed_first():
    killed(0)


def killed_in_training():
    rank, size = begin()
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.05)
    train(model, rank)
    if rank == 1:
        # In the middle of a backward: the last layers' gradients are under way.
        model.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    inner = copy.deepcopy(model.module)
    with pytest.raises(RuntimeError) as failed:
        train(model, rank, 10_000)
    survive(failed.value, 1, rank, size)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    made, _ = train(model, rank, 20)
    assert made[-1] < made[0]
    end()


def stopped():
    rank, size = begin(timeout=timedelta(seconds=4))
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"rank 1\b"):
        dist.all_reduce(tensor)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
