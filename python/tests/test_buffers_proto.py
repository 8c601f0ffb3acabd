"""`tonic_rdma/buffer.proto` and its module: the library's proto, for each protobuf of grpcio's users."""

import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import tonic_rdma

pytest.importorskip("google.protobuf", reason="protobuf is not installed")
protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools are not installed")

PACKAGE = pathlib.Path(tonic_rdma.__file__).parent
OF_LIBRARY = pathlib.Path(__file__).parents[2] / "tensor" / "proto" / "tonic_rdma" / "buffer.proto"


def generate(folder, proto, *include):
    arguments = ["protoc", *(f"-I{path}" for path in include), f"--python_out={folder}", str(proto)]
    assert protoc.main(arguments) == 0


def test_the_package_has_the_proto_of_the_library():
    assert (PACKAGE / "buffer.proto").read_text() == OF_LIBRARY.read_text(), (
        "copy tensor/proto/tonic_rdma/buffer.proto"
    )


def test_its_module_has_what_protoc_makes_of_the_proto(tmp_path):
    from tonic_rdma import buffer_pb2

    generate(tmp_path, "tonic_rdma/buffer.proto", PACKAGE.parent)
    path = tmp_path / "tonic_rdma" / "buffer_pb2.py"
    # protoc's own module, under another name: the default pool takes the same file twice, and no other one.
    spec = importlib.util.spec_from_file_location("fresh_buffer_pb2", path)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.DESCRIPTOR.serialized_pb == buffer_pb2.DESCRIPTOR.serialized_pb
    public = {name for name in vars(fresh) if not name.startswith("_")}
    assert public == {name for name in vars(buffer_pb2) if not name.startswith("_")}
    stub = (PACKAGE / "buffer_pb2.pyi").read_text()
    for field in buffer_pb2.RemoteBuffer.DESCRIPTOR.fields:
        assert f"    {field.name}: " in stub and f"        {field.name}: " in stub


USER = """
syntax = "proto3";
package user;
import "tonic_rdma/buffer.proto";
message Image { string name = 1; tonic_rdma.buffer.v1.RemoteBuffer pixels = 2; }
"""

PROGRAM = """
import image_pb2
from tonic_rdma import buffer_pb2
import tonic_rdma
pixels = buffer_pb2.RemoteBuffer(owner="http://h:1", length=12, token=bytes(16), dtype="float32", shape=[3])
image = image_pb2.Image(name="a", pixels=pixels)
again = image_pb2.Image.FromString(image.SerializeToString())
assert type(again.pixels) is buffer_pb2.RemoteBuffer
buffer = tonic_rdma.RemoteBuffer(again.pixels)
assert (buffer.owner, buffer.shape, buffer.dtype, buffer.nbytes) == ("http://h:1", (3,), "float32", 12)
assert buffer.message == pixels and bytes(buffer) == pixels.SerializeToString()
print("same")
"""


def run(program, *folders):
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_proto_of_the_user_imports_it(tmp_path):
    (tmp_path / "image.proto").write_text(USER)
    generate(tmp_path, "image.proto", tmp_path, PACKAGE.parent)
    assert run(PROGRAM, tmp_path).split() == ["same"]


@pytest.mark.parametrize("first", ["tonic_rdma.buffer_pb2", "a module of the user"])
def test_generated_code_of_the_user_may_have_the_same_file(tmp_path, first):
    generate(tmp_path, "tonic_rdma/buffer.proto", PACKAGE.parent)
    (tmp_path / "vendored").mkdir()
    (tmp_path / "tonic_rdma" / "buffer_pb2.py").rename(tmp_path / "vendored" / "buffer_pb2.py")
    (tmp_path / "tonic_rdma").rmdir()
    imports = ["from tonic_rdma import buffer_pb2 as ours", "from vendored import buffer_pb2 as theirs"]
    lines = imports if first.startswith("tonic") else imports[::-1]
    lines += ["import tonic_rdma", "message = theirs.RemoteBuffer(owner='http://h:1', token=bytes(16))"]
    lines += ["assert tonic_rdma.RemoteBuffer(message).owner == 'http://h:1'"]
    run("\n".join(lines), tmp_path)


def test_without_protobuf_a_handle_has_its_bytes(tmp_path):
    program = """
import sys
sys.modules["google.protobuf"] = None  # not installed
import pickle, tonic_rdma
data = bytes.fromhex("0a0a687474703a2f2f683a31" "110700000000000000" "2003" "2a10" + "00" * 16)
buffer = tonic_rdma.RemoteBuffer(data)
assert (buffer.owner, buffer.nbytes, buffer.dtype, buffer.shape) == ("http://h:1", 3, "uint8", (3,)), buffer
assert bytes(pickle.loads(pickle.dumps(buffer))) == bytes(buffer)
try:
    buffer.message
except ImportError as error:
    print("protobuf" in str(error))
"""
    assert run(program).split() == ["True"]


@pytest.mark.parametrize("version", ["4.25.0", "5.29.0", "6.31.0"])
def test_it_works_with_older_versions_of_protobuf(tmp_path, version):
    """They are installed by pip into a folder of their own."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path),
        f"protobuf=={version}",
    ]
    if subprocess.run(command, check=False, capture_output=True, timeout=50).returncode:
        pytest.skip(f"protobuf {version} can't be installed here")
    program = """
import google.protobuf
from tonic_rdma import buffer_pb2
message = buffer_pb2.RemoteBuffer(owner="http://h:1", shape=[2, 3], xxh3=5)
assert buffer_pb2.RemoteBuffer.FromString(message.SerializeToString()) == message and message.HasField("xxh3")
assert buffer_pb2.FAULT_KIND_GONE == 1 and buffer_pb2.FaultKind.Name(2) == "FAULT_KIND_REVOKED"
print(google.protobuf.__version__)
"""
    for implementation in ("upb", "python"):
        told = run(
            f"import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = '{implementation}'\n" + program,
            tmp_path,
        )
        assert told.strip() == version
