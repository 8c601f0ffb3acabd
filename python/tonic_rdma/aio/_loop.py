"""The Completions of each event loop: through it the native part's results reach that loop's thread."""

import asyncio
import contextvars
import threading
import weakref

from .._native import Completions

_lock = threading.Lock()
_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Completions] = weakref.WeakKeyDictionary()


def completions(loop: asyncio.AbstractEventLoop) -> Completions:
    """The Completions that `loop` drains. Call it from the loop's thread, or before the loop runs."""
    found = _of_loop.get(loop)
    return found if found is not None else _make(loop)


def _make(loop: asyncio.AbstractEventLoop) -> Completions:
    with _lock:
        # A loop does not tell when it is closed, so the next loop clears up. Otherwise a result that a closed
        # loop never took would keep its call alive, the call its loop, and the loop its Completions.
        for other, of_other in list(_of_loop.items()):
            if other.is_closed():
                del _of_loop[other]
                of_other.discard()
        made = Completions()
        # The loop keeps the context that it is given here for its life: an empty one, not the first caller's.
        contextvars.Context().run(loop.add_reader, made.fileno(), made.run_ready)
        _of_loop[loop] = made
    return made
