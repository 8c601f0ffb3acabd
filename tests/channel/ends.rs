//! Servers that are not there, go away, come back or die, and channels that are dropped.

use std::error::Error;
use std::io::Write as _;
use std::net::{Ipv6Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic_rdma::{
    CallConfig, Policy, RdmaChannel, RdmaConnector, RdmaError, RdmaErrorKind, RdmaIncoming, RdmaServer,
    Verdict,
};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use crate::servers::{Kind, check, endpoint, everywhere};
use support::{BlackHole, Child, Port, Runtime, ScriptedGreeter, config, say, until};

#[test]
fn a_lazy_channel_connects_with_its_first_call() {
    everywhere(async |kind| {
        let port = Port::reserve();
        let channel = RdmaChannel::builder(port.endpoint()).config(config()).connect_lazy();
        assert!(channel.last_connection().is_none());
        let mut client = GreeterClient::new(channel.clone());
        let refused = say(&mut client, "hello").await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains(&port.address.to_string()), "{refused}");
        assert!(rdma_error(&refused).is_some(), "{refused:?}");
        let address = port.address.to_string();
        let _running = kind.serve_at(&address, &ScriptedGreeter::new(), CallConfig::default()).await;
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        check(&channel, kind);
    });
}

fn rdma_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a RdmaError> {
    error.downcast_ref().or_else(|| rdma_error(error.source()?))
}

#[test]
fn a_bad_endpoint_is_named() {
    Runtime::CurrentThread.run(async {
        let error = RdmaChannel::connect("http://no-such-host.invalid:1").await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::Unreachable, "{error:?}");
        assert!(error.to_string().contains("no-such-host.invalid"), "{error}");
        let error = RdmaChannel::connect("/only/a/path").await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::InvalidEndpoint, "{error:?}");
        let error = RdmaChannel::connect_lazy("http:// :1").unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::InvalidEndpoint, "{error:?}");
        let error = RdmaChannel::balance([]).connect().await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::InvalidEndpoint, "{error:?}");
        let port = Port::reserve();
        let calls = CallConfig::default().max_concurrent_streams(0);
        let error = RdmaChannel::builder(port.endpoint()).calls(calls.clone()).connect().await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::InvalidSetting, "{error:?}");
        let lazy = RdmaChannel::builder(port.endpoint()).calls(calls).connect_lazy();
        let status = say(&mut GreeterClient::new(lazy), "hello").await.unwrap_err();
        assert!(status.message().contains("max_concurrent_streams"), "{status}");
        let lazy = RdmaChannel::connect_lazy(port.endpoint()).unwrap();
        let status = say(&mut GreeterClient::new(lazy), "hello").await.unwrap_err();
        assert!(rdma_error(&status).unwrap().may_resend(), "{status:?}");
    });
}

/// A name has three addresses, and packets to two of them vanish. In a namespace of its own, the client has a
/// hosts file with this name.
#[test]
fn an_address_that_swallows_packets_does_not_hide_the_others() {
    const IN_NAMESPACE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--mount"];
    let mut hosts = tempfile::NamedTempFile::new().unwrap();
    hosts.write_all(b"::1 several.test\n127.0.0.2 several.test\n127.0.0.1 several.test\n").unwrap();
    let mount = format!("mount --bind {} /etc/hosts && exec \"$0\" \"$@\"", hosts.path().display());
    let wrapper = [&IN_NAMESPACE[..], &["sh", "-c", &mount]].concat();
    let works = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
    if !works.is_ok_and(|output| output.status.success()) {
        println!("skipped: a new user namespace is not permitted here");
        return;
    }
    for kind in Kind::ALL {
        Runtime::MultiThread.run(async {
            let running = kind.serve(&ScriptedGreeter::new()).await;
            let port = running.address.port();
            let _one = BlackHole::at(SocketAddr::from(([127, 0, 0, 2], port))).unwrap();
            // A machine without IPv6 refuses this address at once.
            let _other = BlackHole::at(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).ok();
            // This blocks no worker, and the server runs on the workers.
            let child = Child::start(&wrapper, &format!("call http://several.test:{port}"));
            assert_eq!(child.word, "one two", "{kind:?}");
        });
    }
}

#[test]
fn a_channel_outlives_its_server_more_than_once() {
    everywhere(async |kind| {
        let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
        let address = port.address.to_string();
        let serve = || kind.serve_at(&address, &greeter, CallConfig::default());
        let mut running = serve().await;
        let mut client = running.client().await;
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        for _ in 0..3 {
            running.end().await;
            // CANCELLED while the channel gives calls to the old connection, before it sees its end.
            let mut codes = vec![Code::Cancelled];
            while codes.ends_with(&[Code::Cancelled]) {
                codes.push(say(&mut client, "hello").await.unwrap_err().code());
            }
            codes.push(say(&mut client, "hello").await.unwrap_err().code());
            assert!(codes.ends_with(&[Code::Unavailable; 2]), "{codes:?}");
            running = serve().await;
            assert_eq!(say(&mut client, "again").await.unwrap(), "again");
        }
    });
}

#[test]
fn a_shutdown_lets_running_calls_finish() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let client = running.client().await;
        let mut held = client.clone();
        let call = tokio::spawn(async move { say(&mut held, "hold").await });
        until(|| greeter.held() == 1).await;
        let ended = running.shut_down();
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(!ended.is_finished());
        greeter.release(1);
        assert_eq!(call.await.unwrap().unwrap(), "held");
        drop(client);
        ended.await.unwrap();
    });
}

#[test]
fn calls_go_on_over_a_restart_without_an_error() {
    // The server says GOAWAY each few milliseconds: no call may notice.
    for runtime in Runtime::ALL {
        runtime.run(async {
            let calls = CallConfig::default().max_connection_age(Duration::from_millis(50));
            let greeter = ScriptedGreeter::new();
            let running = Kind::Native.serve_at("127.0.0.1:0", &greeter, calls).await;
            let channel = running.channel().await;
            let client = GreeterClient::new(channel.clone());
            let first = channel.last_connection().unwrap();
            let mut callers = tokio::task::JoinSet::new();
            for _ in 0..4 {
                let mut client = client.clone();
                callers.spawn(async move {
                    for number in 0..100 {
                        assert_eq!(say(&mut client, number.to_string()).await.unwrap(), number.to_string());
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                });
            }
            callers.join_all().await;
            let last = channel.last_connection().unwrap();
            assert!(!last.is_same_connection(&first), "the connection was replaced");
        });
    }
}

/// The server falls to TCP, and comes back.
#[test]
fn a_receiver_is_told_of_each_change_of_the_transport() {
    Runtime::MultiThread.run(async {
        let (port, connector) = (Port::reserve(), RdmaConnector::new().config(config()));
        let channel = RdmaChannel::builder(port.endpoint()).config(config()).connect_lazy();
        let tonics = port.endpoint().connect_with_connector_lazy(connector.clone());
        let mut watched = [channel.watch_connection(), connector.watch_connection()];
        // Nobody takes what this one is told.
        let ignored = channel.watch_connection();
        assert!(watched.iter().all(|it| it.borrow().is_none() && !it.has_changed().unwrap()));
        let (mut native, mut http2) = (GreeterClient::new(channel.clone()), GreeterClient::new(tonics));
        for policy in [Policy::Prefer, Policy::TcpOnly, Policy::Prefer] {
            let builder = RdmaIncoming::builder().config(config().policy(policy));
            let incoming = builder.bind(port.address).await.unwrap();
            let (stop, stopped) = oneshot::channel::<()>();
            let server = RdmaServer::new().add_service(GreeterServer::new(ScriptedGreeter::new()));
            let stopped = async { drop(stopped.await) };
            let server = tokio::spawn(server.serve_with_incoming_shutdown(incoming, stopped));
            // The first calls may find the end of the connection to the last server.
            while say(&mut native, "hello").await.is_err() || say(&mut http2, "hello").await.is_err() {}
            let verdict = if policy == Policy::TcpOnly { Verdict::Tcp } else { Verdict::Rdma };
            for watched in &mut watched {
                watched.changed().await.unwrap();
                let info = watched.borrow_and_update().clone().unwrap();
                assert_eq!(info.verdict(), verdict, "{}", info.reason());
                assert!(!watched.has_changed().unwrap(), "one change");
            }
            stop.send(()).unwrap();
            server.await.unwrap().unwrap();
        }
        let last = ignored.borrow().clone().unwrap();
        assert!(last.is_native() && last.is_same_connection(&channel.last_connection().unwrap()));
        drop((native, channel, http2, connector));
        for mut watched in watched {
            watched.changed().await.unwrap_err();
        }
    });
}

#[test]
fn a_killed_server_fails_its_calls_and_comes_back() {
    for kind in Kind::ALL {
        Runtime::MultiThread.run(async {
            let port = Port::reserve();
            let role = format!("serve {kind:?} {}", port.address);
            let start = || {
                let role = role.clone();
                async { tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap() }
            };
            let doomed = start().await;
            let channel =
                RdmaChannel::builder(endpoint(port.address)).config(config()).connect().await.unwrap();
            check(&channel, kind);
            let mut client = GreeterClient::new(channel.clone());
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            let mut chat = client.chat(tokio_stream::pending::<HelloRequest>()).await.unwrap().into_inner();
            let mut held = client.clone();
            let call = tokio::spawn(async move { say(&mut held, "hold").await });
            tokio::time::sleep(Duration::from_millis(50)).await;
            tokio::task::spawn_blocking(move || drop(doomed)).await.unwrap();
            let codes = [Code::Unavailable, Code::Unknown, Code::Internal, Code::Cancelled];
            let status = call.await.unwrap().unwrap_err();
            assert!(codes.contains(&status.code()), "{status:?}");
            assert!(chat.next().await.unwrap().is_err());
            let next = say(&mut client, "hello").await.unwrap_err();
            // hyper cancels a call that meets the end of its connection.
            assert!(codes.contains(&next.code()), "{next:?}");
            if kind == Kind::Native {
                assert_eq!([status.code(), next.code()], [Code::Unavailable; 2], "{status:?}, {next:?}");
                assert!(!rdma_error(&status).unwrap().may_resend(), "{status:?}");
            }
            let _back = start().await;
            assert_eq!(say(&mut client, "back").await.unwrap(), "back");
            check(&channel, kind);
        });
    }
}

#[test]
fn a_dropped_channel_lets_its_calls_finish() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let mut client = running.client().await;
        let call = tokio::spawn(async move { say(&mut client, "hold").await });
        until(|| greeter.held() == 1).await;
        let mut client = running.client().await;
        let mut chat =
            client.chat(tokio_stream::once(HelloRequest { name: "one".into() })).await.unwrap().into_inner();
        drop(client);
        assert_eq!(chat.next().await.unwrap().unwrap().message, "one");
        assert!(chat.next().await.is_none());
        greeter.release(1);
        assert_eq!(call.await.unwrap().unwrap(), "held");
        // Nothing of the channel keeps the server.
        running.end().await;
    });
}
