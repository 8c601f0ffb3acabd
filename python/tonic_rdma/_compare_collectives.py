"""`python -m tonic_rdma compare-collectives`: all-reduces of torch tensors by this package beside those by gloo.

Each rank is a process that has both groups. In each round each of them reduces each size, in turn, so that a slow
minute of the machine meets both. All elements are checked after each batch of operations.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tonic_rdma._compare import KIB, count, list_of, seconds, size

HELP = "measure all-reduces of torch tensors beside gloo's, with checked content"
DESCRIPTION = (
    "Measures all-reduces of float32 tensors of torch, by the backend gloo, by `tonic_rdma.Communicator`, and by"
    " the backend tonic_rdma. Each rank is a process of this machine."
)
MODES = ["gloo", "communicator", "backend"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=list_of(count), default=[2, 4], metavar="LIST", help="numbers of ranks (default: 2,4)"
    )
    parser.add_argument(
        "--sizes",
        type=list_of(size),
        default=[KIB << at for at in range(0, 17, 2)],
        metavar="LIST",
        help="bytes of the tensor, with units (default: 1KiB to 64MiB by fours)",
    )
    parser.add_argument(
        "--rounds", type=count, default=5, metavar="N", help="rounds; figures are medians (default: 5)"
    )
    parser.add_argument(
        "--duration",
        type=seconds,
        default=0.2,
        metavar="S",
        help="seconds a size and group, a round (default: 0.2)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE too")


def run(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError as error:
        print(f"compare-collectives needs torch: {error}", file=sys.stderr)
        return 2
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores; microseconds of an all-reduce; × is gloo's time over it"
    )
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        names = ["bytes", *(f"{mode} µs" for mode in MODES), *(f"{mode} ×" for mode in MODES[1:])]
        print(f"\n{ranks} ranks\n" + "".join(f"{name:>17}" for name in names), flush=True)
        found = _measure(ranks, options)
        if found is None:
            return 1
        for length, times in zip(options.sizes, found, strict=True):
            ratios = {mode: times["gloo"] / times[mode] for mode in MODES[1:]}
            rows.append({"ranks": ranks, "bytes": length, "microseconds": times, "ratios": ratios})
            texts = [
                str(length),
                *(f"{times[mode]:.1f}" for mode in MODES),
                *(f"{ratios[mode]:.2f}" for mode in ratios),
            ]
            print("".join(f"{text:>17}" for text in texts))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    slower = [row for row in rows if min(row["ratios"].values()) < 1]
    print(f"\n{len(rows) - len(slower)} of {len(rows)} sizes are faster than gloo's")
    return 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _measure(ranks: int, options: argparse.Namespace) -> list[dict[str, float]] | None:
    """The medians in microseconds, by size and mode."""
    settings = [_free_port(), _free_port(), ranks, options.sizes, options.rounds, options.duration]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command = [sys.executable, "-m", "tonic_rdma._compare_collectives", json.dumps(settings)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=variables, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        limit = 120 + 10 * options.rounds * options.duration * len(MODES) * len(options.sizes)
        out, _ = processes[0].communicate(timeout=limit)
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        print(f"a rank failed: they ended with {codes}", file=sys.stderr)
        return None
    found: list[dict[str, float]] = json.loads(out.splitlines()[-1])
    return found


def _rank(settings: str, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.dlpack import to_dlpack

    import tonic_rdma
    import tonic_rdma.torch  # the backend

    port, own_port, ranks, sizes, rounds, duration = json.loads(settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    backend = dist.new_group(backend="tonic_rdma")
    communicator = tonic_rdma.Communicator(rank, ranks, f"127.0.0.1:{own_port}")
    operations: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": dist.all_reduce,
        "communicator": lambda tensor: communicator.all_reduce(to_dlpack(tensor)).wait(),
        "backend": lambda tensor: dist.all_reduce(tensor, group=backend),
    }
    # Of so many operations on ones, each sum is a whole number that a float32 has exactly.
    batch = max(1, int(24 / max(1, (ranks - 1).bit_length())))

    def measure(operation: Callable[[torch.Tensor], object], tensor: torch.Tensor, batches: int) -> list[float]:
        times = []
        for _ in range(batches):
            tensor.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(batch):
                operation(tensor)
            times.append((time.perf_counter() - began) / batch * 1e6)
            if not bool((tensor == ranks**batch).all()):
                raise SystemExit(f"rank {rank}: a wrong sum of {tensor.numel()} elements")
        return times

    found: list[dict[str, list[float]]] = [{mode: [] for mode in operations} for _ in sizes]
    for number in range(rounds):
        for at, length in enumerate(sizes):
            tensor = torch.empty(max(1, length // 4), dtype=torch.float32)
            for mode in list(operations) if number % 2 == 0 else reversed(operations):
                # All ranks measure as often as rank 0 says.
                first = measure(operations[mode], tensor, 2)[-1]
                batches = torch.tensor([max(1, int(duration * 1e6 / (first * batch)))])
                dist.broadcast(batches, 0)
                found[at][mode] += measure(operations[mode], tensor, min(1000, int(batches)))
    communicator.barrier().wait()
    dist.barrier()
    if rank == 0:
        print(json.dumps([{mode: statistics.median(times) for mode, times in row.items()} for row in found]))
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
