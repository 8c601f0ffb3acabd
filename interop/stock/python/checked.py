"""The cases whose payloads are checked byte for byte by both sides (interop/proto/checked.proto)."""

import queue

import grpc
from google.protobuf import any_pb2

import protos
from channel import connect, expect, refused
from content import content, first_mismatch
from protos import messages as m

SIZES = [0, 1, 1000, 20_000, 1 << 20, 8 << 20]
CASES = []


def case(body):
    def connected(arguments):
        with connect(arguments) as channel:
            body(protos.Stub(channel, protos.CHECKED), protos.Stub(channel, protos.TEST))

    connected.__name__ = body.__name__
    CASES.append(connected)
    return connected


def request(seed, length, reply=0, count=0, period=0):
    return m.CheckedRequest(
        seed=seed,
        payload=content(seed, length, period),
        reply_seed=seed + 1000,
        reply_bytes=reply,
        count=count,
        period=period,
    )


def right(reply, seed, length, received, period=0):
    expect("seed", reply.seed, seed)
    expect("reply's bytes", len(reply.payload), length)
    expect(f"first wrong byte of {length}, from 1", first_mismatch(seed, reply.payload, period), 0)
    expect("bytes the server received", reply.received_bytes, received)
    expect("first wrong byte the server received, from 1", reply.first_mismatch, 0)


@case
def checked_unary(stub, _):
    for seed, size in enumerate(SIZES):
        right(stub.Unary(request(seed, size, size)), seed + 1000, size, size)
    # The server's own check: the last of 100 bytes is wrong.
    spoiled = request(1, 100)
    spoiled.payload = spoiled.payload[:-1] + bytes([spoiled.payload[-1] ^ 1])
    expect("what the server says is wrong", stub.Unary(spoiled).first_mismatch, 100)


@case
def checked_client_streaming(stub, _):
    reply = stub.Collect(request(seed, size) for seed, size in enumerate(SIZES))
    expect("bytes the server received", reply.received_bytes, sum(SIZES))
    expect("first wrong byte the server received, from 1", reply.first_mismatch, 0)


@case
def checked_server_streaming(stub, _):
    count = 0
    for number, reply in enumerate(stub.Produce(request(5, 10, 100_000, 50))):
        right(reply, 1005 + number, 100_000, 10)
        count += 1
    expect("replies", count, 50)


@case
def checked_ping_pong(stub, _):
    requests = queue.Queue()
    replies = stub.Exchange(iter(requests.get, None))
    for seed, size in enumerate(SIZES):
        requests.put(request(seed, size, SIZES[-1 - seed]))
        right(next(replies), seed + 1000, SIZES[-1 - seed], size)
    requests.put(None)
    expect("end", next(replies, None), None)


@case
def checked_half_close(stub, _):
    """The client ends its half first. The server must still send its replies."""
    sent = [request(seed, 1000, 300_000) for seed in range(20)]
    replies = list(stub.Exchange(iter(sent)))
    expect("replies", len(replies), len(sent))
    for seed, reply in enumerate(replies):
        right(reply, seed + 1000, 300_000, 1000)


@case
def checked_concurrent(stub, _):
    calls = [(seed, stub.Unary.future(request(seed, 1000 * seed, 2000 * seed))) for seed in range(64)]
    for seed, call in calls:
        right(call.result(), seed + 1000, 2000 * seed, 1000 * seed)


@case
def checked_gzip(stub, _):
    for seed, size in enumerate(SIZES):
        asked = request(seed, size, size, period=100)
        right(stub.Unary(asked, compression=grpc.Compression.Gzip), seed + 1000, size, size, 100)


@case
def checked_binary_metadata(_, stub):
    every_byte = bytes(range(256)) * 2
    sent = [("x-grpc-test-echo-initial", "a  b ~!"), ("x-grpc-test-echo-trailing-bin", every_byte)]
    _, call = stub.UnaryCall.with_call(m.SimpleRequest(), metadata=sent)
    expect("initial metadata", dict(call.initial_metadata()).get(sent[0][0]), sent[0][1])
    expect("trailing metadata", dict(call.trailing_metadata()).get(sent[1][0]), every_byte)


@case
def checked_large_metadata(_, stub):
    sent = [("x-grpc-test-echo-initial", "0123456789abcdef" * 180), ("x-grpc-test-echo-trailing-bin", content(9, 2000))]
    _, call = stub.UnaryCall.with_call(m.SimpleRequest(), metadata=sent)
    expect("initial metadata", dict(call.initial_metadata()).get(sent[0][0]), sent[0][1])
    expect("trailing metadata", dict(call.trailing_metadata()).get(sent[1][0]), sent[1][1])


@case
def checked_status_details(stub, _):
    message = "not found: Größe ☺"
    # google.rpc.Status: code, message and one detail, of a type that does not exist.
    detail = any_pb2.Any(type_url="example.test/Unknown", value=content(3, 300)).SerializeToString()
    text = message.encode()
    details = bytes([0x08, 5, 0x12, len(text)]) + text + bytes([0x1A, len(detail) & 0x7F | 0x80, len(detail) >> 7]) + detail
    error = refused(grpc.StatusCode.NOT_FOUND, lambda: stub.Fail(m.FailRequest(code=5, message=message, details=details)))
    expect("message", error.details(), message)
    trailers = dict(error.trailing_metadata())
    for key in ("grpc-status-details-bin", "x-checked-bin"):
        expect(key, trailers.get(key), details)
