"""What all tests share.

- `echo_pb2`, `echo_pb2_grpc` and `echo_service` can be imported in tests (they are generated at the start).
- `implementation`: grpcio or tonic_rdma, the module that the test shall use. `TEST_IMPLEMENTATIONS=grpcio` runs
  the tests on grpcio, so what they say of both can be checked. Default: tonic_rdma; `grpcio,tonic_rdma`: both.
- `echo_address`: an Echo server by grpcio, by tonic_rdma in this process, and by tonic_rdma in another process.
- `tls`: certificates. Each test has a limit of 60 s; `@pytest.mark.timeout(n)` sets another.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The package of this folder, where none is installed. Only this process has the working directory on its path.
_found = importlib.util.find_spec("tonic_rdma")
_installed = _found is not None and not Path(_found.origin or "").is_relative_to(HERE.parent)
SOURCES = [] if _installed else [str(HERE.parent)]
sys.path[:0] = SOURCES

_generated = tempfile.TemporaryDirectory(prefix="tonic-rdma-protos-")


def _generate():
    from grpc_tools import protoc

    out = _generated.name
    protos = HERE / "protos"
    arguments = ["protoc", f"-I{protos}", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(arguments + [str(path) for path in sorted(protos.glob("*.proto"))]):
        raise RuntimeError("protoc failed")
    folders = [out, str(protos), *SOURCES]
    sys.path[:0] = folders[:2]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + [p for p in [os.environ.get("PYTHONPATH")] if p])


_generate()

# A job in the background of a shell, such as one of CI, ignores Ctrl-C, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

NAMES = os.environ.get("TEST_IMPLEMENTATIONS", "tonic_rdma").split(",")


def module_of(name):
    """The module that has `insecure_channel`, `server`, `aio`, ... of an implementation."""
    return importlib.import_module({"grpcio": "grpc"}.get(name, name))


def available(name):
    """Whether the implementation can be imported, and why not."""
    try:
        return module_of(name), None
    except ImportError as error:
        return None, str(error)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60))


@pytest.fixture(params=NAMES)
def implementation(request):
    module, why = available(request.param)
    if module is None:
        pytest.skip(why)
    return module


class ServerProcess:
    """An Echo server in another process. `address` is where it listens."""

    def __init__(self, name, address="127.0.0.1:0"):
        script = str(HERE / "protos" / "echo_service.py")
        command = [sys.executable, script, module_of(name).__name__, address]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        port = self.process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the server by {name} ended with {self.process.wait()}")
        self.address = f"127.0.0.1:{port}"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


SERVERS = ["grpcio"] + (["tonic_rdma", "tonic_rdma-process"] if "tonic_rdma" in NAMES else [])


@pytest.fixture(scope="session", params=SERVERS)
def echo_address(request):
    """Where a server of Echo listens. Three of them: see the top of this file."""
    name, _, process = request.param.partition("-")
    module, why = available(name)
    if module is None or not hasattr(module, "server"):
        pytest.skip(why or "no servers yet")
    if process:
        server = ServerProcess(name)
        yield server.address
        server.stop()
    else:
        import echo_service

        server, port = echo_service.serve(module)
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(10)


@pytest.fixture
def server_process(request):
    """A function that starts an Echo server in another process, such as `server_process("grpcio")`."""
    started = []

    def start(name, address="127.0.0.1:0"):
        started.append(ServerProcess(name, address))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@dataclass(frozen=True)
class Certificates:
    """PEM. `server` names localhost, 127.0.0.1, ::1 and named.example; `ca` signed both chains."""

    ca: bytes
    server_key: bytes
    server: bytes
    client_key: bytes
    client: bytes


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name=name\nprompt=no\n[name]\nCN=tonic-rdma test\n"
        "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\nsubjectKeyIdentifier=hash\n"
        "[server]\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n"
        "subjectAltName=DNS:localhost,DNS:named.example,IP:127.0.0.1,IP:::1\n"
        "[client]\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=clientAuth\n"
        "subjectAltName=DNS:client.example\n"
    )

    def make(name, *more):
        command = ["openssl", "req", "-x509", "-config", "openssl.cnf", "-extensions", name, "-days", "30"]
        command += ["-sha256", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-subj", f"/CN=tonic-rdma {name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *more]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    make("ca")
    make("server", "-CA", "ca.pem", "-CAkey", "ca.key")
    make("client", "-CA", "ca.pem", "-CAkey", "ca.key")
    names = ["ca.pem", "server.key", "server.pem", "client.key", "client.pem"]
    return Certificates(*((folder / name).read_bytes() for name in names))
