//! Settings of tonic's `Endpoint`, and deadlines.

use std::error::Error as _;
use std::time::Duration;

use http::Uri;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tonic::transport::Endpoint;
use tonic::{Code, Request};
use tonic_rdma::{
    Config, Policy, RdmaChannel, RdmaConnector, RdmaError, RdmaErrorKind, RdmaIncoming, RdmaServer, Verdict,
};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::util::MapRequestLayer;

use crate::servers::{Kind, everywhere};
use support::{Runtime, ScriptedGreeter, config, say, until};

const SHORT: Duration = Duration::from_millis(60);

async fn channel(endpoint: tonic::transport::Endpoint) -> RdmaChannel {
    RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap()
}

#[test]
fn the_user_agent_of_the_endpoint_reaches_the_server() {
    everywhere(async |kind| {
        let running = kind.serve(&ScriptedGreeter::new()).await;
        let endpoint = running.endpoint().user_agent("trainer/7").unwrap();
        let mut client = GreeterClient::new(channel(endpoint).await);
        let agent = say(&mut client, "header user-agent").await.unwrap();
        assert!(agent.starts_with("Some(\"trainer/7 tonic/"), "{agent}");
    });
}

#[test]
fn the_time_out_of_the_endpoint_ends_calls_that_wait_for_their_head() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let mut client = GreeterClient::new(channel(running.endpoint().timeout(SHORT)).await);
        // On a busy machine the time may be over before the server has the call, or the client the head of a
        // response. Then the call is made again.
        while greeter.calls() < 3 {
            let status = say(&mut client, "hold").await.unwrap_err();
            assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
            until(|| greeter.held() == 0).await;
        }
        // A response whose head has come may take longer.
        let mut chat = loop {
            match client.chat(tokio_stream::pending::<HelloRequest>()).await {
                Ok(response) => break response.into_inner(),
                Err(status) => assert_eq!(status.code(), Code::DeadlineExceeded, "{status}"),
            }
        };
        let silent = tokio::time::timeout(SHORT * 3, chat.next()).await;
        assert!(silent.is_err(), "{silent:?}");
    });
}

#[test]
fn a_calls_own_deadline_ends_it_at_both_ends() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let mut client = running.client().await;
        let limited = |limit| {
            let mut request = Request::new(HelloRequest { name: "hold".into() });
            request.set_timeout(limit);
            request
        };
        // A deadline that has passed already: the call does not reach the server.
        let status = client.say_hello(limited(Duration::ZERO)).await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert_eq!(say(&mut client, "quick").await.unwrap(), "quick");
        assert_eq!(greeter.calls(), 1);
        // On a busy machine the deadline may pass before the server has the call, or the client the head of a
        // response. Then the call is made again.
        while greeter.calls() < 4 {
            let status = client.say_hello(limited(SHORT)).await.unwrap_err();
            assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        }
        until(|| greeter.held() == 0).await;
        // The deadline of a call holds until the end of its response.
        let mut chat = loop {
            let mut request = Request::new(tokio_stream::pending::<HelloRequest>());
            request.set_timeout(SHORT);
            match client.chat(request).await {
                Ok(response) => break response.into_inner(),
                Err(status) => assert_eq!(status.code(), Code::DeadlineExceeded, "{status}"),
            }
        };
        let status = chat.next().await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        // A long one does no harm.
        let mut request = Request::new(HelloRequest { name: "quick".into() });
        request.set_timeout(Duration::from_secs(99_999_999));
        assert_eq!(client.say_hello(request).await.unwrap().into_inner().message, "quick");
    });
}

#[test]
fn a_unix_socket_is_refused_with_what_is_accepted() {
    Runtime::CurrentThread.run(async {
        for address in ["unix:/run/greeter.sock", "unix:///run/greeter.sock"] {
            let by_channel = RdmaChannel::connect(address).await.unwrap_err();
            assert_eq!(by_channel.kind(), RdmaErrorKind::InvalidEndpoint);
            let endpoint = Endpoint::from_static(address);
            let by_connector = endpoint.connect_with_connector(RdmaConnector::new()).await.unwrap_err();
            let mut causes = std::iter::successors(by_connector.source(), |&error| error.source());
            let by_connector = causes.find_map(|error| error.downcast_ref::<RdmaError>());
            assert_eq!(by_connector.map(ToString::to_string), Some(by_channel.to_string()));
            assert!(by_channel.to_string().contains("a `unix:` address"), "{by_channel}");
        }
    });
}

#[test]
fn a_deadline_ends_the_wait_for_a_connection() {
    Runtime::MultiThread.run(async {
        // Takes connections, and never answers.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap());
        let mut client = GreeterClient::new(RdmaChannel::connect_lazy(uri).unwrap());
        let mut request = Request::new(HelloRequest { name: "x".into() });
        request.set_timeout(SHORT);
        let status = client.say_hello(request).await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    });
}

#[test]
fn the_connect_time_out_of_the_endpoint_ends_a_dial() {
    Runtime::CurrentThread.run(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let endpoint = crate::servers::endpoint(address).connect_timeout(SHORT);
        let error = RdmaChannel::builder(endpoint).connect().await.unwrap_err();
        assert!(error.to_string().contains("no answer within 60ms"), "{error}");
    });
}

#[test]
fn policies_hold_for_native_calls() {
    Runtime::MultiThread.run(async {
        let running = Kind::Native.serve(&ScriptedGreeter::new()).await;
        let connect = |config: Config| RdmaChannel::builder(running.endpoint()).config(config).connect();
        let tcp = connect(config().policy(Policy::TcpOnly)).await.unwrap();
        let info = tcp.last_connection().unwrap();
        assert_eq!((info.verdict(), info.is_native()), (Verdict::Tcp, false), "{}", info.reason());
        assert_eq!(say(&mut GreeterClient::new(tcp), "hello").await.unwrap(), "hello");
        let native = connect(config().policy(Policy::Require)).await.unwrap();
        assert!(native.last_connection().unwrap().is_native());
        assert_eq!(say(&mut GreeterClient::new(native), "hello").await.unwrap(), "hello");
        let stock = Kind::Stock.serve(&ScriptedGreeter::new()).await;
        let required = RdmaChannel::builder(stock.endpoint()).config(config().policy(Policy::Require));
        assert!(required.connect().await.unwrap_err().to_string().contains("RDMA is required"));
    });
}

#[test]
fn a_native_call_has_the_origin_and_the_user_agent_that_tonic_gives_a_call() {
    Runtime::MultiThread.run(async {
        let (sender, mut seen) = mpsc::unbounded_channel();
        let look = move |request: http::Request<tonic::body::Body>| {
            let authority = request.uri().authority().map(ToString::to_string);
            let agent = request.headers()["user-agent"].to_str().unwrap().to_string();
            sender.send((authority.unwrap_or_default(), agent)).unwrap();
            request
        };
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let address = incoming.local_addr();
        let server = RdmaServer::new().layer(MapRequestLayer::new(look));
        let server = server.add_service(GreeterServer::new(ScriptedGreeter::new()));
        tokio::spawn(server.serve_with_incoming(incoming));
        let endpoint = crate::servers::endpoint(address);
        // A server behind a name of its own: the authority is the origin's, the connection goes to the
        // address.
        let origin = endpoint.clone().origin(Uri::from_static("http://service.example"));
        let agent = endpoint.clone().user_agent("trainer/7").unwrap();
        let (address, tonics) = (address.to_string(), "tonic/");
        for (endpoint, authority, begin) in [
            (endpoint, address.as_str(), tonics),
            (origin, "service.example", tonics),
            (agent, &address, "trainer/7 tonic/"),
        ] {
            let mut calls = Vec::new();
            for native in [true, false] {
                let policy = if native { Policy::Require } else { Policy::TcpOnly };
                let channel = RdmaChannel::builder(endpoint.clone()).config(config().policy(policy));
                let channel = channel.connect().await.unwrap();
                assert_eq!(channel.last_connection().unwrap().is_native(), native);
                assert_eq!(say(&mut GreeterClient::new(channel), "hello").await.unwrap(), "hello");
                calls.push(seen.recv().await.unwrap());
            }
            assert_eq!(calls[0], calls[1], "native, and over HTTP/2");
            assert!(calls[0].0 == authority && calls[0].1.starts_with(begin), "{calls:?}");
        }
    });
}

#[test]
fn without_a_time_out_of_the_endpoint_a_call_may_take_long() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let mut client = running.client().await;
        let call = tokio::spawn(async move { say(&mut client, "hold").await });
        until(|| greeter.held() == 1).await;
        tokio::time::sleep(SHORT * 3).await;
        greeter.release(1);
        assert_eq!(call.await.unwrap().unwrap(), "held");
    });
}
