"""Measures torch.distributed's all_reduce of f32 sums with the backend gloo, for benches/compare-mpi.

It does the work that mpi.c describes. gloo reduces in place only, so there is one place.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 gloo.py --cells BYTES:ITERATIONS:WARMUPS,... [--cores CORE,...]

Rank 0 prints a line of JSON for each size.
"""

import argparse
import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as group

SHIFTS, MOST_BUFFERS, START, BUFFER_BYTES = 128, 16, 20_000, 64 << 20


def shift(rank, iteration):
    return (rank * 17 + iteration * 29) % SHIFTS


def measure(size, iterations, warmups, align):
    rank, ranks = group.get_rank(), group.get_world_size()
    count = size // 4
    buffers = max(2, min(MOST_BUFFERS, BUFFER_BYTES // size if size else MOST_BUFFERS))
    index = torch.arange(count + SHIFTS, dtype=torch.int64)
    pattern = (((index * 2654435761) & 0xFFFFFFFF) >> 7 & 1023).float()
    tensors = [torch.zeros(count) for _ in range(buffers)]
    times, errors = [], 0
    now = time.monotonic_ns
    for variant in range(warmups + iterations):
        tensor = tensors[variant % buffers]
        tensor.copy_(pattern[shift(rank, variant) :][:count])
        group.barrier()
        if align:
            start = (now() // START + 1) * START
            while now() < start:
                pass
        begin = now()
        group.all_reduce(tensor)
        end = now()
        if not align:
            group.barrier()
        if variant >= warmups:
            times.append(end - begin)
        expected = sum(pattern[shift(of, variant) :][:count] for of in range(ranks))
        errors += int((tensor != expected).sum())
    slowest, wrong = torch.tensor(times), torch.tensor([errors])
    group.all_reduce(slowest, op=group.ReduceOp.MAX)
    group.all_reduce(wrong)
    slowest = sorted(slowest.tolist())
    median = (slowest[(iterations - 1) // 2] + slowest[iterations // 2]) / 2000
    late = slowest[(iterations * 99 + 99) // 100 - 1] / 1000
    if rank == 0:
        row = {"ranks": ranks, "bytes": size, "place": "in", "p50_us": round(median, 3), "p99_us": round(late, 3), "errors": int(wrong)}
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(prog="gloo.py")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--cores", default="")
    options = parser.parse_args()
    cores = [int(core) for core in options.cores.split(",") if core]
    if cores:
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    group.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for cell in options.cells.split(","):
        size, iterations, warmups = map(int, cell.split(":"))
        measure(size, iterations, warmups, bool(cores))
    group.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
