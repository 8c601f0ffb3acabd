#!/usr/bin/env python3
"""Measures NIXL within one host: one-sided transfers between the ordinary memory of two processes, by its UCX backend.

    benches/alternatives/nixl                       installs the wheel into target/nixl, and runs this file
    benches/alternatives/nixl --pin --json FILE     each process on a core of its own

A transfer is posted again and again from Python, as its own examples do, and its state is polled. Every byte of every READ is
checked, and every byte of the last WRITE of each of four contents.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from datetime import date

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import numpy
from nixl import nixl_agent, nixl_agent_config

SIZES = {"64 B": 64, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
ROOM = SIZES["16 MiB"]
CONTENTS = 4


def content(number):
    """Bytes that depend on their place and on the number."""
    words = numpy.arange(ROOM // 8, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    return (words ^ (words >> numpy.uint64(29)) ^ numpy.uint64(number << 56)).view(numpy.uint8)


class Side:
    """An agent with registered memory for all contents."""

    def __init__(self, name, core):
        if core is not None:
            os.sched_setaffinity(0, {core})
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.memory = [numpy.zeros(ROOM, dtype=numpy.uint8) for _ in range(CONTENTS)]
        places = [(memory.ctypes.data, ROOM, 0, "") for memory in self.memory]
        self.registered = self.agent.register_memory(places, "DRAM")

    def descriptors(self, number, length):
        return self.agent.get_xfer_descs([(self.memory[number].ctypes.data, length, 0)], "DRAM")


def target(pipe, core):
    side = Side("target", core)
    pipe.send((side.agent.get_agent_metadata(), [memory.ctypes.data for memory in side.memory]))
    while (request := pipe.recv()) is not None:
        what, length = request
        for number, memory in enumerate(side.memory):
            if what == "fill":
                memory[:] = content(number)
            else:
                assert (memory[:length] == content(number + CONTENTS)[:length]).all(), f"a WRITE of {length} bytes is wrong"
                memory[:] = 0
        pipe.send("done")
    # The end of an agent crashes at times, and everything was checked before.
    os._exit(0)


def ask(pipe, *request):
    pipe.send(request)
    assert pipe.recv() == "done"


def transfers(side, remote, addresses, operation, length, seconds):
    """Makes transfers for so long, at least one of each content. Returns the seconds of each."""
    agent, handles, took = side.agent, [], []
    for number, address in enumerate(addresses):
        to = agent.get_xfer_descs([(address, length, 0)], "DRAM")
        handles.append(agent.initialize_xfer(operation, side.descriptors(number, length), to, remote))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < CONTENTS:
        number = len(took) % CONTENTS
        if operation == "READ":
            side.memory[number][:length] = 0
        begin = time.perf_counter()
        state = agent.transfer(handles[number])
        while state == "PROC":
            state = agent.check_xfer_state(handles[number])
        took.append(time.perf_counter() - begin)
        assert state == "DONE", f"a {operation} of {length} bytes ended as {state}"
        if operation == "READ":
            assert (side.memory[number][:length] == side.right[number][:length]).all(), f"a READ of {length} bytes is wrong"
    for handle in handles:
        agent.release_xfer_handle(handle)
    return took


def measure(options, cores):
    """Returns the median time of each cell, of one round with two fresh processes."""
    pipe, other = multiprocessing.Pipe()
    peer = multiprocessing.Process(target=target, args=(other, cores[1]))
    peer.start()
    other.close()
    side = Side("initiator", cores[0])
    metadata, addresses = pipe.recv()
    remote = side.agent.add_remote_agent(metadata)
    cells = {}
    for operation in ("WRITE", "READ"):
        first = CONTENTS if operation == "WRITE" else 0
        side.right = [content(first + number) for number in range(CONTENTS)]
        for name, length in SIZES.items():
            if operation == "READ":
                ask(pipe, "fill", 0)
            else:
                for memory, right in zip(side.memory, side.right):
                    memory[:] = right
            transfers(side, remote, addresses, operation, length, options.duration / 5)
            took = transfers(side, remote, addresses, operation, length, options.duration)
            if operation == "WRITE":
                ask(pipe, "check", length)
            cells[operation, name] = statistics.median(took) * 1e6
    pipe.send(None)
    peer.join()
    assert peer.exitcode == 0, "the target has failed"
    return cells


def one_round(options, cores, results):
    results.send(measure(options, cores))


def main():
    parser = argparse.ArgumentParser(description="Measures NIXL between two processes of this host.")
    parser.add_argument("--pin", action="store_true", help="keep each process on a core of its own")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with fresh processes [5]")
    parser.add_argument("--duration", type=float, default=0.5, help="seconds to measure each cell in each round [0.5]")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if options.pin and len(cores) < 2:
        parser.error("--pin needs two cores")
    cores = (cores[0], cores[1]) if options.pin else (None, None)
    multiprocessing.set_start_method("spawn")
    rounds = []
    for _ in range(options.rounds):
        results, to = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=one_round, args=(options, cores, to))
        process.start()
        to.close()
        try:
            rounds.append(results.recv())
        except EOFError:
            sys.exit("a round has failed")
        process.join()
    rows = [
        {"mode": f"nixl-{operation.lower()}", "bytes": length, "inflight": 1,
         "p50_us": statistics.median(cells[operation, name] for cells in rounds)}
        for name, length in SIZES.items() for operation in ("WRITE", "READ")
    ]
    print("| payload | operation | p50 |\n|---|---|---|")
    for row in rows:
        print(f"| {row['bytes']} B | {row['mode']} | {row['p50_us']:.1f} µs |")
    if options.json:
        from importlib.metadata import version
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        machine = {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "optimised": True, "pin": options.pin, "rounds": options.rounds,
                       "nixl": version("nixl"), "date": str(date.today()), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
