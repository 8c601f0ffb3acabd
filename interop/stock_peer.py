"""A stock gRPC peer (grpcio, C-core) for the Transfer service; stubs are made from the proto at run time.

stock_peer.py call PORT   calls our server and checks what comes back
stock_peer.py serve       serves on a free port and prints it
"""

import os
import sys
from concurrent import futures

import grpc

# Protos are looked for where modules are; the script is started beside them.
sys.path.append(os.getcwd())
protos, services = grpc.protos_and_services("transfer.proto")

LIMIT = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
SIZES = [0, 1, 1000, 20_000, 1 << 20, 8 << 20]


def content(seed, length):
    period = bytes((i * 31 + seed) % 251 for i in range(251))
    return (period * (length // 251 + 1))[:length]


def first_mismatch(seed, payload):
    expected = content(seed, len(payload))
    if payload == expected:
        return 0
    return next(i for i in range(len(payload)) if payload[i] != expected[i]) + 1


class Transfer(services.TransferServicer):
    def Put(self, request, context):
        mismatch = first_mismatch(request.seed, request.payload)
        return protos.PutReply(bytes=len(request.payload), first_mismatch=mismatch)

    def Echo(self, requests, context):
        yield from requests


def serve():
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=LIMIT)
    services.add_TransferServicer_to_server(Transfer(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


def call(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=LIMIT) as channel:
        stub = services.TransferStub(channel)
        for seed, length in enumerate(SIZES, 1):
            reply = stub.Put(protos.PutRequest(seed=seed, payload=content(seed, length)), timeout=30)
            assert (reply.bytes, reply.first_mismatch) == (length, 0), (length, reply)
        wrong = stub.Put(protos.PutRequest(seed=1, payload=content(2, 100)), timeout=30)
        assert wrong.first_mismatch == 1, wrong
        sent = [protos.PutRequest(seed=n, payload=content(n, n)) for n in SIZES]
        assert list(stub.Echo(iter(sent), timeout=30)) == sent
        try:
            stub.Usage(protos.UsageRequest(), timeout=30)
            raise AssertionError("an unimplemented method answered")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error
    print("ok: stock grpcio", grpc.__version__)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else call(sys.argv[2])
