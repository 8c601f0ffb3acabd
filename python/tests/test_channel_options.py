"""Targets, channel arguments and credentials, as the native part gets them."""

import grpc
import grpc.experimental
import pytest

options = pytest.importorskip("tonic_rdma._options")


@pytest.mark.parametrize(
    "target, addresses",
    [
        ("localhost:50051", ["localhost:50051"]),
        (b"localhost:50051", ["localhost:50051"]),
        ("dns:///localhost:50051", ["localhost:50051"]),
        ("dns:localhost:50051", ["localhost:50051"]),
        ("dns://8.8.8.8/localhost:50051", ["localhost:50051"]),
        ("localhost", ["localhost:443"]),
        ("127.0.0.1:1", ["127.0.0.1:1"]),
        ("ipv4:127.0.0.1:1", ["127.0.0.1:1"]),
        ("ipv4:127.0.0.1:1,127.0.0.2:65535", ["127.0.0.1:1", "127.0.0.2:65535"]),
        ("ipv6:[::1]:1,[::2]:2", ["[::1]:1", "[::2]:2"]),
        ("[::1]:50051", ["[::1]:50051"]),
        ("[::1]", ["[::1]:443"]),
        ("::1", ["[::1]:443"]),
    ],
)
def test_targets(target, addresses):
    assert options.parse_target(target) == addresses


@pytest.mark.parametrize(
    "target", ["", "dns:///", "ipv4:127.0.0.1", "a:port", "a:65536", "foo/bar", "http://a"]
)
def test_targets_that_name_no_address(target):
    with pytest.raises(options.InvalidTarget, match="use 'host:port'"):
        options.parse_target(target)


@pytest.mark.parametrize("target", ["unix:/run/socket", "unix:///run/socket", "unix-abstract:a", "xds:///a"])
def test_targets_that_are_not_carried(target):
    with pytest.raises(ValueError, match="is not carried"):
        options.channel_arguments(target, None, None, None)


def native(channel_options=None, credentials=None):
    return options.channel_arguments("localhost:1", credentials, channel_options, None).native


def test_channel_arguments():
    known = [
        ("grpc.max_send_message_length", 10),
        ("grpc.max_receive_message_length", -1),
        ("grpc.primary_user_agent", "mine/1"),
        ("grpc.keepalive_time_ms", 1500),
        ("grpc.keepalive_timeout_ms", 250),
        ("grpc.default_authority", b"example.org"),
        ("grpc.ssl_target_name_override", "for TLS alone"),
        ("grpc.enable_retries", 0),
        ("unknown", object()),
    ]
    made = native(known)
    assert (made["max_send"], made["max_receive"]) == (10, -1)
    assert made["user_agent"] == "mine/1"
    assert made["keepalive"] == (1.5, 0.25)
    assert made["authority"] == "example.org"
    assert made["tls"] is None


def test_defaults():
    made = native()
    assert (made["max_send"], made["max_receive"]) == (-1, 4 << 20)
    assert made["keepalive"] is None and made["authority"] is None
    assert native([("grpc.keepalive_time_ms", 2**31 - 1)])["keepalive"] is None
    assert native([("grpc.keepalive_time_ms", 1000)])["keepalive"] == (1.0, 20.0)
    assert native([("grpc.max_send_message_length", "text")])["max_send"] == -1


@pytest.mark.parametrize("wrong", [[5], [("name",)], [("name", 1, 2)], [(5, 5)], "text", {"name": "value"}])
def test_wrong_arguments(wrong):
    with pytest.raises((TypeError, ValueError), match="channel argument"):
        native(wrong)


def test_compression():
    def compression(argument, channel_options=None):
        return options.channel_arguments("localhost:1", None, channel_options, argument).compression

    assert compression(None) == 0
    assert compression(grpc.Compression.Gzip) == 2
    assert compression(None, [("grpc.default_compression_algorithm", 1)]) == 1


def test_credentials():
    credentials = grpc.ssl_channel_credentials(b"roots", b"key", b"chain")
    made = native([("grpc.ssl_target_name_override", "named.example")], credentials)
    assert made["tls"] == (b"roots", b"key", b"chain")
    assert made["authority"] == "named.example"
    call = grpc.access_token_call_credentials("token")
    both = grpc.composite_channel_credentials(credentials, call, grpc.composite_call_credentials(call, call))
    made = options.channel_arguments("localhost:1", both, None, None)
    assert made.native["tls"] == (b"roots", b"key", b"chain")
    assert len(made.authorize.plugins) == 3


def test_roots_of_the_system(tmp_path, monkeypatch):
    (tmp_path / "roots.pem").write_bytes(b"those of the system")
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(tmp_path / "roots.pem"))
    assert native(None, grpc.ssl_channel_credentials())["tls"] == (b"those of the system", None, None)


def test_credentials_that_are_not_carried():
    with pytest.raises(ValueError, match="LocalChannelCredentials are not carried"):
        native(None, grpc.local_channel_credentials())
    with pytest.raises(TypeError, match="grpc.ChannelCredentials expected, not CallCredentials"):
        native(None, grpc.access_token_call_credentials("token"))
    with pytest.raises(TypeError, match="grpc.ChannelCredentials expected, not str"):
        native(None, "text")
