"""What a tensor device has on offer, asked by a stock gRPC client (grpcio and grpcio-tools; no RDMA needed).

tensor_device.py HOST:PORT           prints a table of regions, slots and links
tensor_device.py HOST:PORT --check   checks the answers of `interop tensors`, with calls that have to fail
"""

import pathlib
import sys

import grpc

# grpc makes stubs from the proto at run time, and looks for the proto in the path of modules.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "proto"))
protos, services = grpc.protos_and_services("tensor_device.proto")

TIMEOUT = 30


def kind(number):
    return protos.Kind.Name(number).removeprefix("KIND_").lower()


def printable(text):
    """Names come from peers, and must not control the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def table(heads, rows):
    rows = [heads] + [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def show(endpoint, found):
    versions = ", ".join(map(str, found.versions))
    print(f"{endpoint}: {printable(found.software)}, versions of the tensor service: {versions}")
    offered = [
        [it.name, kind(it.kind), it.length, it.depth, it.spec, it.arrived, it.attached] for it in found.offered
    ]
    print()
    print(table(["offered", "kind", "bytes", "depth", "of", "arrived", "attached"], offered))
    links = [
        [it.peer, it.provider, it.device, it.queue_pairs, it.bytes_written, it.bytes_read] for it in found.links
    ]
    print()
    print(table(["link to", "provider", "device", "queue pairs", "bytes written", "bytes read"], links))


def check(stub, found):
    versions = list(found.versions)
    assert versions and versions == list(range(versions[0], versions[-1] + 1)) and versions[-1] < 7, versions
    assert found.software.startswith("tonic-rdma "), found.software
    offered = {it.name: it for it in found.offered}
    assert sorted(offered) == ["activations", "parameters", "weights"], sorted(offered)
    parameters, weights = offered["parameters"], offered["weights"]
    assert (kind(parameters.kind), parameters.length) == ("region", 1 << 20), parameters
    assert (kind(weights.kind), weights.length, weights.depth) == ("static", 4 * 1024 * 1000, 2), weights
    assert "1024" in weights.spec and "1000" in weights.spec, weights
    assert (weights.arrived, bool(weights.attached)) == (1, True), weights
    assert kind(offered["activations"].kind) == "dynamic", offered
    (link,) = found.links
    assert link.queue_pairs == 2 and link.provider and link.device and link.peer, link
    refused(stub.Attach, protos.AttachRequest(link=b"made-up link id!", name="weights"), "NOT_FOUND")
    refused(stub.Confirm, protos.ConfirmRequest(link=b"", read=[0]), "ABORTED")
    refused(lambda *call, **limit: next(stub.Open(*call, **limit)), protos.OpenRequest(version=7), "FAILED_PRECONDITION")
    assert stub.Describe(protos.DescribeRequest(), timeout=TIMEOUT).offered == found.offered
    print("ok: stock grpcio", grpc.__version__, "looked at a tensor device")


def refused(call, request, code):
    try:
        reply = call(request, timeout=TIMEOUT)
    except grpc.RpcError as error:
        assert error.code().name == code, error
    else:
        raise AssertionError(f"{request} was answered by {reply}")


def main(endpoint, checking):
    with grpc.insecure_channel(endpoint) as channel:
        stub = services.TensorDeviceStub(channel)
        try:
            found = stub.Describe(protos.DescribeRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            sys.exit(f"{endpoint}: {error.code().name}: {error.details()}")
        check(stub, found) if checking else show(endpoint, found)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    main(arguments[0], arguments[1:] == ["--check"])
