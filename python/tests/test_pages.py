"""The programs of README and of the book's page on Python run as written, but for the port."""

import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=50)
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
    proto = next(text for text in blocks("docs/book/src/start.md", "proto"))
    (tmp_path / "hello.proto").write_text(proto)
    for text in blocks("docs/book/src/python.md", "python"):
        name = text.split("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(text.replace("50051", port))
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
