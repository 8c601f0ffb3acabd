"""The backend "tonic_rdma" of torch.distributed, for tensors in the memory of the CPU.

    torch.distributed.init_process_group("tonic_rdma")                     # was: "gloo"

Newer versions of torch find the backend by its entry point; for older ones, `import tonic_rdma.torch`
registers it. A process group is a `tonic_rdma.Communicator`: within a host its elements move through shared
memory, between hosts by a network card.
"""

import inspect
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.dlpack import to_dlpack

from tonic_rdma import Communicator

__all__ = ["ProcessGroup", "Work", "allreduce_hook", "register", "shrink"]

# What communicators reduce.
_NATIVE = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
]
# Of one bit, the sum and the maximum are "or", and the product and the minimum are "and".
_NATIVE_BITS = [
    (dist.ReduceOp.SUM, "max"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BOR, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "min"),
    (dist.ReduceOp.BAND, "min"),
]
# What is reduced here, after the elements of all ranks were gathered.
_LOCAL = [
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
]
_NUMBERS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_NUMBERS |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

# Whether this thread runs the callbacks of a future.
_thread = threading.local()


class Work(dist.Work):
    """Operations of a communicator, and the steps that remain when all have ended."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._operations: list[Any] = []
        self._then: list[Callable[[], object]] = []
        self._error: BaseException | None = None
        self._ended = False
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits on this thread, at most `timeout`. Raises what ended an operation, such as `RankLost`."""
        if not self._ended:
            limit = _limit(timeout)
            until = None if limit is None else time.monotonic() + limit
            error = None
            for operation in self._operations:
                try:
                    operation.wait(None if until is None else max(0, until - time.monotonic()))
                except TimeoutError:
                    raise
                except Exception as failed:
                    error = error or failed
            with self._lock:
                if not self._ended:
                    try:
                        for step in () if error else self._then:
                            step()
                    except Exception as failed:
                        error = failed
                    self._error, self._ended = error, True
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._ended and all(operation.done() for operation in self._operations):
            with suppress(Exception):
                self.wait()  # takes the steps that remain, and keeps the error
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """Returns a future of the tensors, which code in C++ waits for, such as DistributedDataParallel's."""
        return self._future(self._tensors)

    def _future(self, value: object) -> Any:
        future = torch.futures.Future()
        left = len(self._operations)

        def complete() -> None:
            _thread.completes = True
            try:
                future.set_result(None)
            finally:
                _thread.completes = False

        def ended(_: object) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                complete()

        def wait_and_complete() -> None:
            for operation in self._operations:
                operation.exception()
            complete()

        def result(_: object) -> object:
            # What is raised here is an error for C++ too. The exception of `set_exception` is a value there.
            self.wait()
            return value

        then = future.then(result)
        if getattr(_thread, "completes", False):
            # Some hooks wait for a future in a callback of another one, on the thread that completes futures.
            threading.Thread(target=wait_and_complete, daemon=True).start()
        elif self.is_completed():
            complete()
        else:
            for operation in self._operations:
                operation.add_done_callback(ended)
        return then


class ProcessGroup(dist.ProcessGroup):
    """A process group over a `Communicator`.

    All ranks start the same operations in the same order, and wait for them in any order. Sends and
    receives of two ranks are matched in the order in which they start, so tags other than 0 are refused. So
    is a receive from any rank.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout.total_seconds()
        self._names = ["", ""]
        self._pairs: Communicator | None = None
        # How often this rank made a group of this name: a group that is made anew finds the store as it was
        # left.
        key = f"tonic_rdma/address {store.add(f'tonic_rdma/groups of {rank}', 1)}"
        self._communicator = self._meet(rank, size, lambda own: _by_store(store, key, own))

    def _meet(self, rank: int, size: int, agree: Callable[[str | None], str]) -> Communicator:
        """Makes a communicator of all ranks. `agree` gives each rank the text that rank 0 has."""

        def connect(text: str) -> Communicator:
            address, job = text.split()
            limit = self._timeout
            return Communicator(rank, size, address, job=job, deadline=limit, bootstrap_timeout=limit)

        if rank > 0:
            return connect(agree(None))
        host = _host()
        # This socket keeps the port for the communicator: both have SO_REUSEADDR, and this one does not listen.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, 0))
            address = f"[{host}]" if ":" in host else host
            return connect(agree(f"{address}:{kept.getsockname()[1]} {secrets.token_hex(16)}"))

    @property
    def communicator(self) -> Communicator:
        """The communicator of all operations but `alltoall`, `gather` and `scatter`."""
        return self._communicator

    # What torch asks of a group. The names with capitals are those that C++ calls.

    def rank(self) -> int:
        return self._communicator.rank

    def size(self) -> int:
        return self._communicator.size

    def name(self) -> str:
        return "tonic_rdma"

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name

    def _set_group_name(self, name: str) -> None:
        self._names[0] = name

    def _set_group_desc(self, description: str) -> None:
        self._names[1] = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._names[0]

    def getGroupDesc(self) -> str:
        return self._names[1]

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    supports_splitting = supports_coalescing = supports_shrinking = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        self._communicator.close()
        if self._pairs is not None:
            self._pairs.close()

    def abort(self) -> None:
        raise NotImplementedError("tonic_rdma can't abort operations: they end by their timeout")

    # Operations.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        work = Work(tensors)
        for tensor in tensors:
            self._reduce(work, _whole(work, tensor), opts)
        return work

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        work = Work(tensors)
        root = self.rank() == opts.rootRank
        self._reduce(work, _whole(work, tensor) if root else _whole(Work([]), tensor).clone(), opts)
        return work

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        work = Work(tensors)
        for tensor in tensors:
            memory = _moved(_whole(work, tensor))
            work._operations.append(
                self._communicator.broadcast(memory, opts.rootRank, deadline=self._deadline(opts))
            )
        return work

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        work = Work([output for parts in outputs for output in parts])
        for parts, tensor in zip(outputs, inputs, strict=True):
            if all(part.numel() == tensor.numel() for part in parts):
                whole = _row(parts)
                if whole is None:
                    whole = torch.empty(len(parts) * tensor.numel(), dtype=tensor.dtype)
                    for part, own in zip(parts, whole.split(tensor.numel() or 1), strict=False):
                        work._then.append(partial(part.detach().copy_, own.view(part.shape)))
                self._gather(work, whole, tensor, opts)
                continue
            # Ranks have different numbers of elements.
            parts[self.rank()].detach().copy_(tensor)
            for root, part in enumerate(parts):
                memory = _moved(_whole(work, part))
                work._operations.append(
                    self._communicator.broadcast(memory, root, deadline=self._deadline(opts))
                )
        return work

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        work = Work(outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._gather(work, _whole(work, output), tensor, opts)
        return work

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Work:
        work = Work(outputs)
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([part.reshape(-1) for part in parts]) if (row := _row(parts)) is None else row
            if all(part.numel() == parts[0].numel() for part in parts):
                self._scatter(work, output, whole, opts)
            else:
                self._reduce_all(work, output, whole, [part.numel() for part in parts], opts)
        return work

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        work = Work(outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scatter(work, output, tensor, opts)
        return work

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = (
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
    )

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Work:
        given: list[Any] = [None] * self.size()
        given[opts.rootRank] = inputs[0]
        return self._exchange(outputs[0] if self.rank() == opts.rootRank else [None] * self.size(), given, opts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self.gather([output.chunk(self.size())] if self.rank() == opts.rootRank else [], [input], opts)

    gather_into_tensor = gather_single

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Work:
        taken: list[Any] = [None] * self.size()
        taken[opts.rootRank] = outputs[0]
        return self._exchange(taken, inputs[0] if self.rank() == opts.rootRank else [None] * self.size(), opts)

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._exchange(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        def parts(tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
            if not sizes and tensor.shape[0] % self.size():
                raise ValueError(f"{tensor.shape[0]} rows are no equal parts for {self.size()} ranks")
            return tensor.split(list(sizes) or [tensor.shape[0] // self.size()] * self.size())

        return self._exchange(parts(output, output_split_sizes), parts(input, input_split_sizes), opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Work:
        return self._pair(tensors, self._communicator.send, to, tag)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Work:
        return self._pair(tensors, self._communicator.recv, source, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        raise NotImplementedError("tonic_rdma receives from a rank that is named: give recv a src")

    recvAnysource = recv_anysource

    def barrier(self, opts: Any = None) -> Work:
        work = Work([])
        work._operations.append(self._communicator.barrier(deadline=self._deadline(opts)))
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. Its error names a rank that is lost, or that has not come within `timeout`."""
        self._communicator.barrier(deadline=_limit(timeout) or self._timeout).wait()

    # How they are made.

    def _deadline(self, opts: Any) -> float:
        return _limit(getattr(opts, "timeout", None)) or self._timeout

    def _reduce(self, work: Work, tensor: torch.Tensor, opts: Any) -> None:
        """Adds the reduction of a contiguous tensor, in place."""
        name, memory = _named(_NATIVE, opts.reduceOp), tensor
        if tensor.dtype == torch.bool:
            name, memory = _named(_NATIVE_BITS, opts.reduceOp), tensor.view(torch.uint8)
        elif tensor.is_complex():
            name, memory = name if name in ("sum", "mean") else None, torch.view_as_real(tensor)
        if name:
            work._operations.append(
                self._communicator.all_reduce(to_dlpack(memory), name, deadline=self._deadline(opts))
            )
            return
        function = _named(_LOCAL, opts.reduceOp)
        if function is None:
            kind = getattr(opts.reduceOp, "op", opts.reduceOp)
            raise NotImplementedError(f"tonic_rdma has no reduction {kind} of {tensor.dtype}")
        ranks = torch.empty((self.size(), *tensor.shape), dtype=tensor.dtype)
        self._gather(work, ranks, tensor, opts)
        work._then.append(lambda: tensor.copy_(reduce(function, ranks)))

    def _scatter(self, work: Work, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        self._fits(tensor, output)
        name = _named(_NATIVE, opts.reduceOp)
        if not name or tensor.dtype not in _NUMBERS:
            self._reduce_all(work, output, tensor, [output.numel()] * self.size(), opts)
            return
        given, taken = tensor.detach().contiguous(), _whole(work, output)
        if given.data_ptr() <= taken.data_ptr() < given.data_ptr() + given.numel() * given.element_size():
            # In place, a communicator may change the parts of other ranks too.
            given = given.clone()
        work._operations.append(
            self._communicator.reduce_scatter(
                to_dlpack(given), name, out=to_dlpack(taken), deadline=self._deadline(opts)
            )
        )

    def _reduce_all(
        self, work: Work, output: torch.Tensor, tensor: torch.Tensor, lengths: list[int], opts: Any
    ) -> None:
        """Adds the reduction of a whole, of which this rank takes its part."""
        if output.numel() != lengths[self.rank()]:
            raise ValueError(
                f"the part of rank {self.rank()} has {lengths[self.rank()]} elements, and not {output.numel()}"
            )
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._reduce(work, whole, opts)
        part = whole.view(-1).split(lengths)[self.rank()]
        work._then.append(partial(output.detach().copy_, part.view(output.shape)))

    def _gather(self, work: Work, whole: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        self._fits(whole, tensor)
        given, taken = _moved(tensor.detach().contiguous()), _moved(whole)
        work._operations.append(self._communicator.all_gather(given, out=taken, deadline=self._deadline(opts)))

    def _fits(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self.size():
            raise ValueError(
                f"{self.size()} times {part.numel()} elements don't fill a tensor of {whole.numel()}"
            )

    def _exchange(self, taken: Sequence[Any], given: Sequence[Any], opts: Any) -> Work:
        """Sends `given[rank]` to each rank, and receives `taken[rank]` of it. None stands for nothing."""
        if self._pairs is None:
            # A communicator of its own, because the user's sends and receives are matched in their order too.
            self._pairs = self._meet(self.rank(), self.size(), self._by_broadcast)
        work = Work([tensor for tensor in taken if tensor is not None])
        for rank, (output, tensor) in enumerate(zip(taken, given, strict=True)):
            if rank == self.rank():
                if output is not None:
                    output.detach().copy_(tensor)
                continue
            if tensor is not None and tensor.numel():
                memory = _moved(tensor.detach().contiguous())
                work._operations.append(self._pairs.send(rank, memory, deadline=self._deadline(opts)))
            if output is not None and output.numel():
                work._operations.append(
                    self._pairs.recv(rank, _moved(_whole(work, output)), deadline=self._deadline(opts))
                )
        return work

    def _pair(self, tensors: Sequence[torch.Tensor], start: Callable[..., Any], rank: int, tag: int) -> Work:
        if tag:
            raise NotImplementedError(
                f"tonic_rdma matches sends and receives in their order; it has no tag {tag}"
            )
        work = Work(tensors)
        for tensor in tensors:
            work._operations.append(start(rank, _moved(_whole(work, tensor)), deadline=self._timeout))
        return work

    def _by_broadcast(self, own: str | None) -> str:
        text = torch.zeros(128, dtype=torch.uint8)
        if own is not None:
            text[: len(own)] = torch.tensor(list(own.encode()), dtype=torch.uint8)
        self._communicator.broadcast(to_dlpack(text), 0).wait()
        # The root of a broadcast only sends. In a barrier all ranks notice one that is lost.
        self._communicator.barrier().wait()
        return bytes(text.tolist()).rstrip(b"\0").decode()

    def _shrink(self) -> list[int]:
        """Goes on with the ranks that live. Returns their numbers from before."""
        before = torch.tensor([self.rank()])
        self._communicator, self._pairs = self._communicator.shrink(), None
        survivors = torch.empty(self.size(), dtype=before.dtype)
        self.all_gather_single(survivors, before).wait()
        return survivors.tolist()


def shrink(group: Any = None) -> Any:
    """Makes the group one of the ranks that live, after an error that named a lost rank. All survivors call it.

    The group stays the same object. Its ranks have new numbers, in the old order, as `dist.get_rank` says.
    If it is the default group (None), all other groups are destroyed, because their ranks are numbers of
    the default group. What was made with the old ranks, such as a DistributedDataParallel or a DeviceMesh,
    has to be made anew.
    """
    default = c10d._get_default_group()
    group = default if group is None else group
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"shrink takes a group of the backend tonic_rdma, and not {group!r}")
    numbers = c10d._world.pg_group_ranks if hasattr(c10d, "_world") else c10d._pg_group_ranks
    survivors = group._shrink()
    if group is default:
        for other in [other for other in numbers if other is not group]:
            dist.destroy_process_group(other)
        numbers[group] = {rank: rank for rank in range(group.size())}
    else:
        before = {rank: number for number, rank in numbers[group].items()}
        numbers[group] = {before[old]: new for new, old in enumerate(survivors)}
    return group


def allreduce_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: means of gradients by `state`.

    `state` is a `Communicator`, a group of the backend tonic_rdma, or None for the default group. With
    torch 1.13, DistributedDataParallel can't use such a group. There it runs over gloo, and

        model.register_comm_hook(communicator, tonic_rdma.torch.allreduce_hook)

    reduces its gradients here.
    """
    communicator = (
        state if isinstance(state, Communicator) else (state or c10d._get_default_group()).communicator
    )
    tensor = bucket.buffer()
    work = Work([tensor])
    work._operations.append(communicator.all_reduce(to_dlpack(tensor), "mean"))
    return work._future(tensor)


def register() -> None:
    """Registers the backend, once. It is the entry point that torch calls."""
    if "TONIC_RDMA" in dist.Backend._plugins:
        return
    takes = inspect.signature(dist.Backend.register_backend).parameters
    dist.Backend.register_backend(
        "tonic_rdma", ProcessGroup, **({"devices": ["cpu"]} if "devices" in takes else {})
    )


def _whole(work: Work, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor, whose elements `tensor` has when the work ends: itself, if it can."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"tonic_rdma carries dense tensors, and not those of layout {tensor.layout}")
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    whole = tensor.contiguous()
    work._then.append(partial(tensor.copy_, whole))
    return whole


def _moved(tensor: torch.Tensor) -> Any:
    """Returns the memory of a contiguous tensor for an operation that only moves elements, of any type."""
    return to_dlpack(tensor if tensor.dtype in _NUMBERS else tensor.view(-1).view(torch.uint8))


def _row(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the one tensor whose parts follow one another in memory, if there is one."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.numel() * part.element_size()
    try:
        return parts[0].detach().as_strided((sum(part.numel() for part in parts),), (1,))
    except RuntimeError:
        # They are neighbours by chance.
        return None


def _named(table: list[tuple[Any, Any]], reduction: Any) -> Any:
    return next((value for key, value in table if reduction == key), None)


def _limit(timeout: timedelta | None) -> float | None:
    return timeout.total_seconds() if timeout and timeout > timedelta() else None


def _by_store(store: Any, key: str, own: str | None) -> str:
    if own is not None:
        store.set(key, own)
    return store.get(key).decode()


def _host() -> str:
    """Returns the variable TONIC_RDMA_HOST, or this host's address as the job's first host sees it."""
    own = os.environ.get("TONIC_RDMA_HOST")
    to = own or os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
        if own:
            return str(address[0])
        with socket.socket(family, kind) as unconnected:
            unconnected.connect(address)  # sends nothing, and chooses the way
            return str(unconnected.getsockname()[0])
    except OSError:
        if own:
            raise
        return "127.0.0.1"


register()
