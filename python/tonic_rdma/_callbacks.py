"""The thread that runs callbacks of calls that no event loop serves. It starts with the first callback."""

import atexit
import threading

from ._native import Completions

_lock = threading.Lock()
_running: list[Completions] = []


def completions() -> Completions:
    """The Completions that the thread drains."""
    if not _running:
        with _lock:
            if not _running:
                _running.append(_start())
    return _running[0]


def _start() -> Completions:
    made = Completions()
    thread = threading.Thread(target=made.run_until_closed, name="tonic-rdma-callbacks", daemon=True)
    thread.start()

    def end() -> None:
        # A daemon thread must be out of native code before the interpreter ends, or the process aborts.
        made.close()
        thread.join(5)

    atexit.register(end)
    return made
