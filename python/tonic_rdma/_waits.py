"""Operations of the native part that an event loop waits for."""

import asyncio
from functools import partial
from typing import Any

from tonic_rdma._native import Pending
from tonic_rdma.aio._loop import completions


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)


async def finish(pending: Pending) -> Any:
    """Carries an operation out, and returns its value. Cancelling the task gives the operation up."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    waiting = pending.start(completions(loop), partial(_settle, future))
    try:
        return await future
    finally:
        waiting.cancel()
