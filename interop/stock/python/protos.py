"""Makes messages, stubs and handlers of interop/proto at run time, so that no code is generated for them."""

import os
import pathlib
import tempfile

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"
TEST = "grpc.testing.TestService"
UNIMPLEMENTED = "grpc.testing.UnimplementedService"
CHECKED = "tonic_rdma.interop.v1.Checked"


def load():
    files = descriptor_pb2.FileDescriptorSet()
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "protos")
        names = ["grpc/testing/test.proto", "checked.proto"]
        if protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={path}", "--include_imports", *names]):
            raise SystemExit(f"the protos in {PROTO} don't compile")
        with open(path, "rb") as file:
            files.ParseFromString(file.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


POOL = load()


def message(name):
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


class Messages:
    """The messages of gRPC's tests and of the checked calls, as attributes with their names."""

    def __getattr__(self, name):
        package = "tonic_rdma.interop.v1" if name.startswith(("Checked", "Fail")) else "grpc.testing"
        found = message(f"{package}.{name}")
        setattr(self, name, found)
        return found


messages = Messages()


def shape(method):
    return f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"


class Stub:
    def __init__(self, channel, service):
        for method in POOL.FindServiceByName(service).methods:
            call = getattr(channel, shape(method))
            reply = message_factory.GetMessageClass(method.output_type)
            path = f"/{service}/{method.name}"
            setattr(self, method.name, call(path, lambda request: request.SerializeToString(), reply.FromString))


def handlers(service, servicer):
    """Returns handlers for the methods that the servicer implements."""
    table = {}
    for method in POOL.FindServiceByName(service).methods:
        if behaviour := getattr(servicer, method.name, None):
            handler = getattr(grpc, f"{shape(method)}_rpc_method_handler")
            request = message_factory.GetMessageClass(method.input_type)
            table[method.name] = handler(behaviour, request.FromString, lambda reply: reply.SerializeToString())
    return grpc.method_handlers_generic_handler(service, table)
