"""The programs of README and of the book's pages on Python run as written, but for ports."""

import array
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = "docs/book/src"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def write_programs(folder, page, port="50051"):
    """Writes each program to the file that its first line names."""
    for text in blocks(page, "python"):
        (folder / text.split("\n")[0].removeprefix("# ")).write_text(text.replace("50051", port))


def run(folder, *command, limit=50):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Serving:
    """A program that serves. `asks` runs a client again until the server listens."""

    def __init__(self, folder, program):
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, program], cwd=folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def asks(self, program):
        while self.process.poll() is None:
            done = subprocess.run(
                [sys.executable, program], cwd=self.folder, capture_output=True, text=True, timeout=50
            )
            if done.returncode == 0:
                return done.stdout
            assert "UNAVAILABLE" in done.stderr, done.stderr
        raise AssertionError(f"the server ended with {self.process.returncode}")


def test_the_programs_of_the_book(tmp_path):
    port = str(free_port())
    proto = next(text for text in blocks(f"{BOOK}/start.md", "proto"))
    (tmp_path / "hello.proto").write_text(proto)
    write_programs(tmp_path, f"{BOOK}/python.md", port)
    run(tmp_path, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", "hello.proto")
    with Serving(tmp_path, "server.py") as server:
        assert server.asks("client.py").startswith("Hello Ada! over rdma, because ")
        assert server.asks("aio_client.py") == "Hello Ada!\n"


HEALTH_SERVER = """
import tonic_rdma
from grpc_health.v1 import health, health_pb2_grpc

server = tonic_rdma.server()
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port("127.0.0.1:50051")
server.start()
server.wait_for_termination()
"""


def test_the_program_of_readme(tmp_path):
    port = str(free_port())
    [client] = blocks("README.md", "python")
    (tmp_path / "client.py").write_text(client.replace("50051", port))
    (tmp_path / "server.py").write_text(HEALTH_SERVER.replace("50051", port))
    with Serving(tmp_path, "server.py") as server:
        said = server.asks("client.py")
    assert "SERVING" in said and " rdma both ends have " in said


# Arrays

ARRAYS = f"{BOOK}/python-arrays.md"


def test_arrays_are_shared_and_fetched(tmp_path):
    [proto], [generate] = blocks(ARRAYS, "proto"), blocks(ARRAYS, "sh")
    (tmp_path / "images.proto").write_text(proto)
    write_programs(tmp_path, ARRAYS, str(free_port()))
    generate = re.sub(r"\bpython(?= -)", sys.executable, generate)
    subprocess.run(["bash", "-ec", generate], cwd=tmp_path, check=True, timeout=50)
    with Serving(tmp_path, "owner.py") as owner:
        assert owner.asks("reader.py") == "Ada (2160, 3840, 3) 7\n"


def test_views_of_arrays(tmp_path):
    write_programs(tmp_path, ARRAYS)
    assert run(tmp_path, "views.py").splitlines() == ["8192", "2048.0 1024.0"]


FETCHING = """
import sys, tonic_rdma
buffer = tonic_rdma.RemoteBuffer(bytes.fromhex(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("torch", "tensor = torch.empty(buffer.shape); buffer.fetch_into(tensor); print(tensor.sum().item())"),
        ("torch", "print(torch.from_dlpack(buffer).sum().item())"),
        (
            "jax",
            "made = tonic_rdma.empty(buffer.shape); buffer.fetch_into(made);"
            "print(jax.dlpack.from_dlpack(made).sum())",
        ),
        ("jax", "print(jax.dlpack.from_dlpack(buffer).sum())"),
    ],
)
def test_libraries_without_read_only_arrays(tmp_path, library, program):
    """The ways that the page's section on them names."""
    pytest.importorskip(library)
    import tonic_rdma

    shared = tonic_rdma.share(array.array("f", [0.5] * 3000))
    program = f"{FETCHING}\nimport {library}\n{program}"
    assert run(tmp_path, "-c", program, bytes(shared).hex()) == "1500.0\n"


@pytest.mark.timeout(200)
def test_actors_of_ray(tmp_path):
    pytest.importorskip("ray")
    write_programs(tmp_path, ARRAYS)
    assert run(tmp_path, "actors.py", limit=180).splitlines()[-1] == "524288.0"


def test_slots_named_tensors_and_regions(tmp_path):
    write_programs(tmp_path, f"{BOOK}/python-tensors.md")
    said = run(tmp_path, "devices.py").splitlines()
    assert sorted(said) == ["cache: 3072", "gradients: 1.024e+06", "weights: 5.0"]


# Collectives


def run_ranks(folder, program, size, *, lost=None):
    """Runs a program of the page on collectives. Rank `lost` ends with 1. Returns each rank's lines."""
    write_programs(folder, f"{BOOK}/python-collectives.md")
    torch_port, port = free_port(), free_port()
    ranks = []
    try:
        for rank in range(size):
            settings = {"RDMA_COLLECTIVE_RANK": rank, "RDMA_COLLECTIVE_SIZE": size, "OMP_NUM_THREADS": 1}
            settings |= {"RDMA_COLLECTIVE_ADDRESS": f"127.0.0.1:{port}", "MASTER_ADDR": "127.0.0.1"}
            settings |= {"MASTER_PORT": torch_port, "RANK": rank, "WORLD_SIZE": size}
            env = os.environ | {name: str(value) for name, value in settings.items()}
            command = [sys.executable, program]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, cwd=folder, env=env, **pipes))
        said = [process.communicate(timeout=150) for process in ranks]
        for rank, process in enumerate(ranks):
            assert process.returncode == (rank == lost), f"rank {rank}:\n{said[rank][1]}"
        return [output.splitlines() for output, _ in said]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_group_of_ranks(tmp_path):
    assert run_ranks(tmp_path, "mean.py", 2) == [["rank 0 of 2: 0.5"], ["rank 1 of 2: 0.5"]]


def check_survivors(said):
    for number, lines in enumerate([said[0], said[2]]):
        assert "rank 1 is lost" in lines[0] and lines[1:] == [f"rank {number} of 2: 2.0"]


def test_ranks_go_on_after_a_loss(tmp_path):
    check_survivors(run_ranks(tmp_path, "survivors.py", 3, lost=1))


@pytest.mark.timeout(200)
def test_ranks_go_on_after_a_loss_in_torch(tmp_path):
    pytest.importorskip("torch")
    check_survivors(run_ranks(tmp_path, "go_on.py", 3, lost=1))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", ["train.py", "hook.py"])
def test_training_with_torch(tmp_path, program):
    torch = pytest.importorskip("torch")
    if program == "train.py":
        if torch.__version__.startswith("1."):
            pytest.skip("torch 1.13 can't run DistributedDataParallel over a group in Python")
        try:
            importlib.metadata.distribution("tonic-rdma")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("torch finds the backend only if the package is installed")
    first, second = run_ranks(tmp_path, program, 2)
    assert first[-1].split(": ")[1] == second[-1].split(": ")[1], "all ranks have the same model"
