"""The threads that run callbacks that no event loop serves. They start with the first callback."""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ._native import Completions

_lock = threading.Lock()
_running: list[Completions] = []
# Functions to run, each with the event of its end; the threads that run them, and how many of these are free.
_given: SimpleQueue[tuple[Callable[[], object], threading.Event] | None] = SimpleQueue()
_threads: list[threading.Thread] = []
_free = threading.Semaphore(0)


def completions() -> Completions:
    """The Completions that the thread drains."""
    if not _running:
        with _lock:
            if not _running:
                _running.append(_start())
    return _running[0]


def run_aside(function: Callable[[], object]) -> None:
    """Runs a function that may wait for other callbacks. Those that don't wait run in the order of the calls.

    At the interpreter's end, when it starts no more threads, RuntimeError.
    """
    ended = threading.Event()
    _given.put((function, ended))
    if not _free.acquire(blocking=False):
        thread = threading.Thread(target=_run, name="tonic-rdma-callback", daemon=True)
        thread.start()
        _threads.append(thread)
    ended.wait(0.1)


def _run() -> None:
    while given := _given.get():
        function, ended = given
        try:
            function()
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del given, function
        _free.release()
        ended.set()


def _start() -> Completions:
    made = Completions()
    thread = threading.Thread(target=made.run_until_closed, name="tonic-rdma-callbacks", daemon=True)
    thread.start()

    def end() -> None:
        # A daemon thread must be out of native code before the interpreter ends, or the process aborts.
        made.close()
        until = time.monotonic() + 5
        thread.join(5)
        for _ in _threads:
            _given.put(None)
        for aside in _threads:
            aside.join(max(0, until - time.monotonic()))

    atexit.register(end)
    return made
