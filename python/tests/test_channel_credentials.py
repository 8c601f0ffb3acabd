"""TLS, client certificates, call credentials."""

import threading

import echo_pb2
import echo_pb2_grpc
import echo_service
import grpc
import pytest

Request = echo_pb2.Request


@pytest.fixture(scope="module")
def tls_address(tls):
    credentials = grpc.ssl_server_credentials([(tls.server_key, tls.server)])
    server, port = echo_service.serve(grpc, credentials=credentials)
    yield f"localhost:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def mutual_address(tls):
    credentials = grpc.ssl_server_credentials([(tls.server_key, tls.server)], tls.ca, require_client_auth=True)
    server, port = echo_service.serve(grpc, credentials=credentials)
    yield f"localhost:{port}"
    server.stop(None)


def call(implementation, address, of_channel, options=None, **more):
    with implementation.secure_channel(address, of_channel, options) as channel:
        return echo_pb2_grpc.EchoStub(channel).Unary(Request(), timeout=30, **more)


def code_of(*arguments, **more):
    with pytest.raises(grpc.RpcError) as info:
        call(*arguments, **more)
    return info.value


def test_tls(implementation, tls_address, tls):
    credentials = grpc.ssl_channel_credentials(tls.ca)
    assert call(implementation, tls_address, credentials).received == 1
    with implementation.secure_channel(tls_address, credentials) as channel:
        replies = list(echo_pb2_grpc.EchoStub(channel).Bidi(iter([Request()] * 3)))
        assert len(replies) == 3


def test_an_untrusted_server(implementation, tls_address, tls):
    error = code_of(implementation, tls_address, grpc.ssl_channel_credentials(tls.client))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "certificate" in error.details().lower()


def test_the_name_of_the_server(implementation, tls_address, tls):
    credentials = grpc.ssl_channel_credentials(tls.ca)
    for name in ("named.example", "localhost"):
        options = [("grpc.ssl_target_name_override", name)]
        assert call(implementation, tls_address, credentials, options).received == 1
    wrong = [("grpc.ssl_target_name_override", "other.example")]
    assert code_of(implementation, tls_address, credentials, wrong).code() is grpc.StatusCode.UNAVAILABLE


def test_client_certificates(implementation, mutual_address, tls):
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.client_key, tls.client)
    assert call(implementation, mutual_address, credentials).received == 1
    none = grpc.ssl_channel_credentials(tls.ca)
    assert code_of(implementation, mutual_address, none).code() is grpc.StatusCode.UNAVAILABLE


def test_tls_where_one_end_has_none(implementation, tls_address, tls):
    with implementation.insecure_channel(tls_address) as channel:
        with pytest.raises(grpc.RpcError) as info:
            echo_pb2_grpc.EchoStub(channel).Unary(Request(), timeout=30)
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
    server, port = echo_service.serve(grpc)
    error = code_of(implementation, f"localhost:{port}", grpc.ssl_channel_credentials(tls.ca))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    server.stop(None)


class Token(grpc.AuthMetadataPlugin):
    """Gives `pairs` at once, later from another thread, or an error."""

    def __init__(self, *pairs, later=False, error=None):
        self.pairs, self.later, self.error = pairs, later, error
        self.contexts = []

    def __call__(self, context, callback):
        self.contexts.append((context.service_url, context.method_name))
        if isinstance(self.error, BaseException):
            raise self.error
        if self.later:
            threading.Timer(0.05, callback, (self.pairs, self.error)).start()
        else:
            callback(self.pairs, self.error)


def metadata_of(reply):
    return [(pair.key, pair.value) for pair in reply.metadata]


@pytest.mark.parametrize("later", [False, True])
def test_call_credentials(implementation, tls_address, tls, later):
    token = Token(("token", "t"), ("token-bin", b"\0"), later=later)
    ssl, plugin = grpc.ssl_channel_credentials(tls.ca), grpc.metadata_call_credentials(token)
    reply = call(implementation, tls_address, ssl, credentials=plugin, metadata=(("own", "o"),))
    got = metadata_of(reply)
    assert ("token", b"t") in got and ("token-bin", b"\0") in got and ("own", b"o") in got
    assert token.contexts == [(f"https://{tls_address}/tonic_rdma.test.Echo", "Unary")]
    reply = call(implementation, tls_address, ssl, credentials=grpc.access_token_call_credentials("abc"))
    assert ("authorization", b"Bearer abc") in metadata_of(reply)


def test_call_credentials_of_channels(implementation, tls_address, tls):
    first = grpc.metadata_call_credentials(Token(("one", "1")))
    second = grpc.metadata_call_credentials(Token(("two", "2")))
    third = grpc.metadata_call_credentials(Token(("three", "3")))
    both = grpc.composite_call_credentials(second, third)
    credentials = grpc.composite_channel_credentials(grpc.ssl_channel_credentials(tls.ca), first)
    assert ("one", b"1") in metadata_of(call(implementation, tls_address, credentials))
    got = metadata_of(call(implementation, tls_address, credentials, credentials=both))
    assert {("one", b"1"), ("two", b"2"), ("three", b"3")} <= set(got)
    with implementation.secure_channel(tls_address, credentials) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        replies = [stub.Unary.future(Request()).result(), stub.ClientStream(iter([Request()]))]
        replies += list(stub.ServerStream(Request(replies=1))) + list(stub.Bidi(iter([Request()])))
        assert len(replies) == 4 and all(("one", b"1") in metadata_of(reply) for reply in replies)


@pytest.mark.parametrize("error", [ValueError("no token"), "no token"])
def test_call_credentials_that_fail(implementation, tls_address, tls, error):
    plugin = grpc.metadata_call_credentials(Token(error=error))
    with implementation.secure_channel(tls_address, grpc.ssl_channel_credentials(tls.ca)) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        for invoke in (
            lambda: stub.Unary(Request(), credentials=plugin),
            lambda: stub.Unary.with_call(Request(), credentials=plugin),
            lambda: stub.Unary.future(Request(), credentials=plugin).result(),
            lambda: next(stub.ServerStream(Request(), credentials=plugin)),
            lambda: stub.ClientStream(iter([Request()]), credentials=plugin),
            lambda: next(stub.Bidi(iter([Request()]), credentials=plugin)),
        ):
            with pytest.raises(grpc.RpcError) as info:
                invoke()
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE
            assert info.value.details() == "Getting metadata from plugin failed with error: no token"


def test_call_credentials_that_do_not_answer(implementation, tls_address, tls):
    class Silent(grpc.AuthMetadataPlugin):
        def __call__(self, context, callback):
            pass

    with implementation.secure_channel(tls_address, grpc.ssl_channel_credentials(tls.ca)) as channel:
        with pytest.raises(grpc.RpcError) as info:
            plugin = grpc.metadata_call_credentials(Silent())
            echo_pb2_grpc.EchoStub(channel).Unary(Request(), timeout=0.2, credentials=plugin)
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_call_credentials_need_tls(implementation, echo_address):
    token = Token(("token", "t"))
    with implementation.insecure_channel(echo_address) as channel:
        with pytest.raises(grpc.RpcError) as info:
            plugin = grpc.metadata_call_credentials(token)
            echo_pb2_grpc.EchoStub(channel).Unary(Request(), credentials=plugin)
        assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not token.contexts  # nothing was asked for


def test_wrong_credentials(implementation):
    with pytest.raises((TypeError, AttributeError)):
        implementation.secure_channel("localhost:1", None)
    with pytest.raises(TypeError):
        implementation.secure_channel("localhost:1", grpc.access_token_call_credentials("token"))


def test_connection_of_tls(tls_address, tls):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    with tonic_rdma.secure_channel(tls_address, grpc.ssl_channel_credentials(tls.ca)) as channel:
        echo_pb2_grpc.EchoStub(channel).Unary(Request())
        assert channel.connection.tls and channel.verdict == "tcp"


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_where_both_ends_are_ours(tls, mutual):
    tonic_rdma = pytest.importorskip("tonic_rdma")
    roots = tls.ca if mutual else None
    credentials = tonic_rdma.ssl_server_credentials([(tls.server_key, tls.server)], roots, mutual)
    server, port = echo_service.serve(tonic_rdma, credentials=credentials)
    mine = grpc.ssl_channel_credentials(tls.ca, tls.client_key, tls.client)
    with tonic_rdma.secure_channel(f"localhost:{port}", mine) as channel:
        reply = echo_pb2_grpc.EchoStub(channel).Unary(
            Request(), credentials=grpc.access_token_call_credentials("abc"), timeout=30
        )
        assert ("authorization", b"Bearer abc") in metadata_of(reply)
        assert channel.connection.tls
    server.stop(None)
