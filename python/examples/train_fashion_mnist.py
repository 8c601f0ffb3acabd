"""Trains a small network on the pictures of Fashion-MNIST, on several ranks by DistributedDataParallel.

    torchrun --nproc-per-node 2 python/examples/train_fashion_mnist.py --backend tonic_rdma

The backend is all that differs from gloo. Rank 0 prints the mean loss of all ranks, and the time of each
step. `training/prepare pictures` installs the pictures. torch 1.13 can't run DistributedDataParallel over
such a backend. There, `--backend gloo --hook` reduces the gradients by tonic_rdma.
"""

import argparse
import gzip
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="tonic_rdma", help="tonic_rdma (default) or gloo")
parser.add_argument("--hook", action="store_true", help="reduce gradients by a hook of tonic_rdma")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch", type=int, default=64, help="pictures of one rank in one step")
parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
options = parser.parse_args()


def read(name: str, header: int) -> torch.Tensor:
    content = gzip.decompress((options.data / name).read_bytes())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header)


dist.init_process_group(options.backend)
rank, size = dist.get_rank(), dist.get_world_size()

pictures = read("train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
labels = read("train-labels-idx1-ubyte.gz", 8).long()

torch.manual_seed(1)
width = options.width
model = nn.Sequential(
    nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(2 * width * 49, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
model = nn.parallel.DistributedDataParallel(model)
if options.hook:
    import tonic_rdma.torch

    model.register_comm_hook(dist.new_group(backend="tonic_rdma"), tonic_rdma.torch.allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))
times = []
for step in range(options.steps):
    first = (step * size + rank) * options.batch
    batch = order[torch.arange(first, first + options.batch) % len(order)]
    inputs, targets = pictures[batch].float() / 255, labels[batch]
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    times.append(1000 * (time.perf_counter() - began))
    mean = loss.detach().double()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / size!r} {times[-1]:.2f} ms", flush=True)
if rank == 0:
    print(f"median {statistics.median(times):.2f} ms")
dist.barrier()
dist.destroy_process_group()
