"""A process with a device, for tests of tensors. It runs the code that a test gives it."""

import inspect
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy


def pattern(step, shape, dtype="float32"):
    """Content that depends on every place, and on `step`."""
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    return ((numpy.arange(count) + 7 * step) % 97).astype(dtype).reshape(shape)


def wait_until(found):
    while not found():
        time.sleep(0.005)


PRELUDE = f"""
import asyncio, gc, math, sys, threading, time
import numpy
import tonic_rdma
from tonic_rdma.tensors import Device

{inspect.getsource(pattern)}
{inspect.getsource(wait_until)}
def say(*words):
    print(*words, flush=True)

def heard():
    return sys.stdin.readline().strip()

device = Device()
channel = device.channel(sys.argv[1]) if sys.argv[1] else None
say(device.endpoint)
"""


class Peer:
    """Runs `code` after the prelude. With `endpoint` it has a `channel` to the device there."""

    def __init__(self, code, endpoint=""):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rest = b""
        self.endpoint = self.hear()

    def hear(self, limit=20):
        """The next line that it says."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, left))
            assert ready, f"it said nothing within {limit} s"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"it ended with {self.process.wait(10)}"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def say(self, line):
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait(20)

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self):
        """Waits for its own end, which must be a success."""
        assert self.process.wait(20) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()
