"""Groups of ranks that reduce, gather, broadcast and exchange arrays: as the crate tonic-rdma-collective."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from tonic_rdma import _callbacks, _native
from tonic_rdma._native import Operation
from tonic_rdma._waits import _settle, finish
from tonic_rdma.aio._loop import completions


class CollectiveStatistics(NamedTuple):
    """What a communicator has done since it was made."""

    operations: int  # started
    short: int  # operations of few elements that ended within one call
    messages: int  # sent
    inline_bytes: int  # that went with messages
    referenced_bytes: int  # that other ranks were asked to read
    read_bytes: int  # that this rank read
    copied_bytes: int  # elements that this rank copied to or from registered memory


class Communicator:
    """A group of ranks that carry out operations together. All ranks start the same operations in the same
    order, and wait for them in any order.

        communicator = tonic_rdma.Communicator()           # mpirun, torchrun or srun set rank, size, address
        communicator.all_reduce(gradients, "mean").wait()  # in place: an array of numpy, a tensor of torch

    An array is an object with the buffer protocol or `__dlpack__`, or a capsule of DLPack: in host memory,
    contiguous, and writable if it gets a result; otherwise ValueError. Each method returns an `Operation` that
    has started. It goes on by itself: `operation.wait()`, `await operation`, or compute something else first.
    Do not write to an array while an operation has it. The operation keeps it alive; one whose `Operation`
    is dropped lets its arrays go at the next use of this package after its end.

    An operation that fails raises CollectiveError, or RankLost if a rank's process has ended. Then all later
    ones fail, and `shrink` makes a group of the others. `deadline`, in seconds, counts from the start of an
    operation.
    """

    __slots__ = ("__weakref__", "_made", "rank", "size")

    _made: _native.Communicator
    rank: int  # the number of this rank, from 0
    size: int  # the number of ranks

    def __init__(
        self,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        *,
        job: str | None = None,
        deadline: float = 30.0,
        bootstrap_timeout: float = 60.0,
        answer_timeout: float = 0.1,
        plans: str | None = None,
    ) -> None:
        """Meets the other ranks. CollectiveError: they did not come in time, or can't be connected.

        rank, size, address: all or none. Rank 0 listens at `address`, "host:port", and the others connect to
            it. Without them they come from the launcher's variables.
        job: a name that all ranks give, which strangers can't guess.
        deadline: seconds that an operation may take.
        bootstrap_timeout: seconds that the ranks wait for one another here.
        answer_timeout: seconds in which a rank answers another one after a deadline or a loss.
        plans: which algorithm operations of a length use, as in the variable RDMA_COLLECTIVE_PLANS.
        """
        launch = _launch(rank, size, address, job)
        self._take(
            _native.Communicator.connect(launch, job, deadline, bootstrap_timeout, answer_timeout, plans).wait()
        )

    @classmethod
    async def connect(
        cls,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        *,
        job: str | None = None,
        deadline: float = 30.0,
        bootstrap_timeout: float = 60.0,
        answer_timeout: float = 0.1,
        plans: str | None = None,
    ) -> Self:
        """Makes a communicator as `Communicator(...)` does, without holding up the event loop."""
        launch = _launch(rank, size, address, job)
        pending = _native.Communicator.connect(launch, job, deadline, bootstrap_timeout, answer_timeout, plans)
        return cls._of(await finish(pending))

    @classmethod
    def _of(cls, native: _native.Communicator) -> Self:
        made = cls.__new__(cls)
        made._take(native)
        return made

    def _take(self, native: _native.Communicator) -> None:
        self._made, self.rank, self.size = native, native.rank, native.size

    def all_reduce(
        self, array: Any, op: str = "sum", *, out: Any = None, deadline: float | None = None
    ) -> Operation:
        """Reduces the elements of all ranks, index by index; all ranks get the result, in `out` or in place.

        op: "sum", "mean", "min" or "max". Integers have no mean. Complex numbers have sum and mean, and
        booleans min ("and") and max ("or").
        """
        return self._made.all_reduce(array, op, out, deadline)

    def reduce_scatter(
        self, array: Any, op: str = "sum", *, out: Any = None, deadline: float | None = None
    ) -> Operation:
        """Reduces as `all_reduce` does; each rank gets its own `part` of the result.

        It is in `out`, which has the length of the part, or where the part lies in `array`, whose other
        elements may then be anything.
        """
        return self._made.reduce_scatter(array, op, out, deadline)

    def all_gather(self, array: Any, *, out: Any = None, deadline: float | None = None) -> Operation:
        """Gathers the parts of all ranks; all ranks get the whole, in `out`.

        Without `out`, `array` is the whole, and this rank's `part` lies where it lies in the whole.
        """
        return self._made.all_gather(array, out, deadline)

    def broadcast(self, array: Any, root: int = 0, *, deadline: float | None = None) -> Operation:
        """Gives all ranks the elements of rank `root`."""
        return self._made.broadcast(array, root, deadline)

    def send(self, to: int, array: Any, *, deadline: float | None = None) -> Operation:
        """Sends elements to rank `to`, which calls `recv` with as many. Messages of a pair arrive in order."""
        return self._made.send(to, array, deadline)

    def recv(self, source: int, array: Any, *, deadline: float | None = None) -> Operation:
        """Receives the next elements that rank `source` sends to this one."""
        return self._made.recv(source, array, deadline)

    def barrier(self, *, deadline: float | None = None) -> Operation:
        """Ends when all ranks have come to this call."""
        return self._made.barrier(deadline)

    def part(self, elements: int, rank: int | None = None) -> slice:
        """Returns which of so many elements are the part of this rank, or of `rank`."""
        return slice(*self._made.part(elements, self.rank if rank is None else rank))

    def plans(self) -> str:
        """Returns which algorithm operations of which length use, and why. It is equal on all ranks."""
        return self._made.plans()

    def statistics(self) -> CollectiveStatistics:
        """Returns what this communicator has done."""
        return CollectiveStatistics(*self._made.statistics())

    def shrink(self) -> Self:
        """Makes a group of the ranks that are left after a failure. All of them call this.

        Their ranks are new, in the old order. CollectiveError of kind "excluded": the others go on without it.
        """
        return self._of(self._made.shrink().wait())

    async def shrink_async(self) -> Self:
        """Does what `shrink` does, without holding up the event loop."""
        return self._of(await finish(self._made.shrink()))

    def close(self) -> None:
        """Leaves the group. Operations that have started go on. For the others this rank is then lost, so call
        `barrier` before."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tonic_rdma.Communicator: rank {self.rank} of {self.size}>"


def _launch(
    rank: int | None, size: int | None, address: str | None, job: str | None
) -> tuple[int, int, str] | None:
    if rank is not None and size is not None and address is not None:
        if not 0 <= rank < size:
            raise ValueError(f"rank: there is no rank {rank} among {size}")
        return rank, size, address
    if rank is None and size is None and address is None and job is None:
        return None
    raise ValueError("give all of rank, size and address, or none of them: then they come from the launcher")


def _call_when_done(operation: Operation, function: Callable[[Operation], object]) -> None:
    operation.then(
        _callbacks.completions(), lambda _: _callbacks.run_aside(partial(function, operation))
    )


async def _finish(operation: Operation) -> Any:
    if operation.done():
        return operation.wait()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    operation.then(completions(loop), partial(_settle, future))
    return await future
