"""gRPC's test service and the checked calls."""

import time
from concurrent import futures

import grpc

import protos
from content import content, first_mismatch
from protos import messages as m

LIMIT = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"


def serve(arguments, credentials):
    # Each call in flight occupies a thread.
    options = [*LIMIT, ("grpc.so_reuseport", 0)]
    server = arguments.implementation.server(futures.ThreadPoolExecutor(max_workers=32), options=options)
    services = [protos.handlers(protos.TEST, TestService()), protos.handlers(protos.CHECKED, Checked())]
    server.add_generic_rpc_handlers(services)
    address = f"{arguments.host}:{arguments.port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    print(bound, flush=True)
    server.wait_for_termination()


def payload(size, context):
    if not 0 <= size <= 64 << 20:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a payload of {size} bytes was asked for")
    return m.Payload(body=bytes(size))


def echo_metadata(context):
    sent = dict(context.invocation_metadata())
    if ECHO_INITIAL in sent:
        context.send_initial_metadata([(ECHO_INITIAL, sent[ECHO_INITIAL])])
    if ECHO_TRAILING in sent:
        context.set_trailing_metadata([(ECHO_TRAILING, sent[ECHO_TRAILING])])


def echo_status(request, context):
    if request.HasField("response_status"):
        status = request.response_status
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        if code is not grpc.StatusCode.OK:
            context.abort(code, status.message)


def compress(asked, context):
    """Leaves the next message uncompressed unless the request asks for compression."""
    if not asked.value:
        context.disable_next_message_compression()


class TestService:
    def EmptyCall(self, request, context):
        return m.Empty()

    def UnaryCall(self, request, context):
        if request.response_compressed.value:
            context.set_compression(grpc.Compression.Gzip)
        echo_metadata(context)
        echo_status(request, context)
        return m.SimpleResponse(payload=payload(request.response_size, context))

    def CacheableUnaryCall(self, request, context):
        context.send_initial_metadata([("cache-control", "max-age=60, public")])
        # The reply is the time, as in the official servers, so that a reply from a cache can be recognised.
        return m.SimpleResponse(payload=m.Payload(body=str(time.time_ns()).encode()))

    def StreamingOutputCall(self, request, context):
        if any(it.compressed.value for it in request.response_parameters):
            context.set_compression(grpc.Compression.Gzip)
        yield from self.replies(request, context)

    def StreamingInputCall(self, requests, context):
        return m.StreamingInputCallResponse(aggregated_payload_size=sum(len(it.payload.body) for it in requests))

    def FullDuplexCall(self, requests, context):
        echo_metadata(context)
        for request in requests:
            echo_status(request, context)
            yield from self.replies(request, context)

    def HalfDuplexCall(self, requests, context):
        for request in list(requests):
            yield from self.replies(request, context)

    def replies(self, request, context):
        for it in request.response_parameters:
            time.sleep(max(0, min(it.interval_us, 60_000_000)) / 1e6)
            compress(it.compressed, context)
            yield m.StreamingOutputCallResponse(payload=payload(it.size, context))


def compress_what_compresses(request, context):
    """Compresses all replies of the call if the content has a period, because only such content gets shorter."""
    if request.period:
        context.set_compression(grpc.Compression.Gzip)


class Checked:
    def Unary(self, request, context):
        compress_what_compresses(request, context)
        return self.reply(request, context)

    def Collect(self, requests, context):
        total, mismatch = 0, 0
        for request in requests:
            total += len(request.payload)
            mismatch = mismatch or first_mismatch(request.seed, request.payload, request.period)
        return m.CheckedReply(received_bytes=total, first_mismatch=mismatch)

    def Produce(self, request, context):
        compress_what_compresses(request, context)
        for number in range(request.count):
            yield self.reply(request, context, number)

    def Exchange(self, requests, context):
        for number, request in enumerate(requests):
            if number == 0:
                compress_what_compresses(request, context)
            yield self.reply(request, context)

    def Fail(self, request, context):
        context.set_trailing_metadata([("grpc-status-details-bin", request.details), ("x-checked-bin", request.details)])
        code = next((code for code in grpc.StatusCode if code.value[0] == request.code), grpc.StatusCode.UNKNOWN)
        context.abort(code, request.message)

    def reply(self, request, context, number=0):
        if request.reply_bytes > 64 << 20:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a reply of {request.reply_bytes} bytes was asked for")
        seed = (request.reply_seed + number) & 0xFFFFFFFF
        return m.CheckedReply(
            seed=seed,
            payload=content(seed, request.reply_bytes, request.period),
            received_bytes=len(request.payload),
            first_mismatch=first_mismatch(request.seed, request.payload, request.period),
        )
