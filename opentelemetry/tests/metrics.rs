//! What the layers record of each kind of call, over each path, read from the SDK's exporter in memory.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use opentelemetry_sdk::metrics::data::{AggregatedMetrics, MetricData};
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, PeriodicReader, SdkMeterProvider};
use prost::Message as _;
use tokio_stream::StreamExt as _;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::BoxStream;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, GrpcMethod, Request, Response, Status, Streaming};
use tonic_rdma::gather::{GatherBoth, GatherBothLayer, GatherCodec};
use tonic_rdma::{Config, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer};
use tonic_rdma_opentelemetry::{ClientMetrics, ServerMetrics};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};
use tower::Layer as _;
use tower::util::BoxCloneService;

use support::{Port, Runtime, until};

const SERVICE: &str = "tonic_rdma.transfer.v1.Transfer";
const TARGET: &str = "http://a.name";

/// The path of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    /// Native calls over the device.
    Native,
    /// Native calls that stay in the process.
    InProcess,
    /// `RdmaChannel` to tonic's server, over RDMA.
    NativeToHttp2,
    /// tonic's channel and server over RDMA.
    DropIn,
    /// tonic's channel and server over TCP.
    Tcp,
}

impl Over {
    const ALL: [Self; 5] = [Self::Native, Self::InProcess, Self::NativeToHttp2, Self::DropIn, Self::Tcp];

    fn config(self) -> Config {
        support::config().in_process(self == Self::InProcess)
    }

    async fn serve(self, metrics: ServerMetrics, service: Scripted) -> SocketAddr {
        let service = TransferServer::new(service)
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip);
        if self == Self::Tcp {
            let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let address = incoming.local_addr().unwrap();
            let server = Server::builder().layer(metrics).add_service(service);
            tokio::spawn(server.serve_with_incoming(incoming));
            return address;
        }
        let incoming = RdmaIncoming::builder().config(self.config()).bind("127.0.0.1:0").await.unwrap();
        let address = incoming.local_addr();
        if matches!(self, Self::Native | Self::InProcess) {
            let server = RdmaServer::new().layer(metrics).add_service(service);
            tokio::spawn(server.serve_with_incoming(incoming));
        } else {
            let server = Server::builder().layer(metrics).add_service(service);
            tokio::spawn(server.serve_with_incoming(incoming));
        }
        address
    }

    async fn connect(self, metrics: ClientMetrics, address: SocketAddr) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        match self {
            Self::Tcp => BoxCloneService::new(metrics.layer(endpoint.connect().await.unwrap())),
            Self::DropIn => {
                let connector = RdmaConnector::new().config(self.config());
                let channel = endpoint.connect_with_connector(connector).await.unwrap();
                BoxCloneService::new(metrics.layer(channel))
            }
            Self::Native | Self::InProcess | Self::NativeToHttp2 => {
                let builder = RdmaChannel::builder(endpoint).config(self.config());
                let channel = builder.connect().await.unwrap();
                let info = channel.last_connection().unwrap();
                let expected = (self != Self::NativeToHttp2, self == Self::InProcess);
                assert_eq!((info.is_native(), info.is_in_process()), expected, "{}", info.reason());
                BoxCloneService::new(metrics.layer(channel))
            }
        }
    }
}

type Channel = BoxCloneService<http::Request<Body>, http::Response<Body>, Status>;

/// The seeds of requests that are answered otherwise.
const MISSING: u64 = 100;
const HELD: u64 = 101;
const BREAKS: u64 = 102;
const STAYS: u64 = 103;

/// Answers `put` with the length of the payload, and `echo` with each message as often as its seed says. An echo
/// that stays sends a message twice, and never ends.
#[derive(Clone, Debug, Default)]
struct Scripted {
    held: Arc<AtomicUsize>,
}

impl Scripted {
    async fn hold<T>(&self) -> T {
        self.held.fetch_add(1, Ordering::SeqCst);
        std::future::pending().await
    }
}

#[tonic::async_trait]
impl Transfer for Scripted {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        match request.get_ref().seed {
            MISSING => Err(Status::not_found("no such seed")),
            HELD => self.hold().await,
            _ => Ok(Response::new(reply(request.get_ref().payload.len()))),
        }
    }

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<BoxStream<PutRequest>>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let mut requests = request.into_inner();
        tokio::spawn(async move {
            while let Ok(Some(message)) = requests.message().await {
                let broken = message.seed == BREAKS;
                let (answer, copies) = match broken {
                    true => (Err(Status::data_loss("the stream breaks")), 1),
                    false if message.seed == STAYS => (Ok(message.clone()), 2),
                    false => (Ok(message.clone()), message.seed),
                };
                for _ in 0..copies {
                    if sender.send(answer.clone()).await.is_err() || broken {
                        return;
                    }
                }
                if message.seed == STAYS {
                    std::future::pending::<()>().await;
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        self.hold().await
    }
}

fn request(seed: u64, length: usize) -> PutRequest {
    PutRequest { seed, payload: Bytes::from(vec![7; length]), ..PutRequest::default() }
}

fn reply(length: usize) -> PutReply {
    PutReply { bytes: length as u64, ..PutReply::default() }
}

/// The SDK, and what it has to export.
struct Expected {
    provider: SdkMeterProvider,
    exporter: InMemoryMetricExporter,
    points: Points,
}

/// The count and, of sizes, the sum of each instrument and its attributes.
type Points = BTreeMap<String, (u64, u64)>;

impl Expected {
    fn new() -> Self {
        let exporter = InMemoryMetricExporter::default();
        let reader =
            PeriodicReader::builder(exporter.clone()).with_interval(Duration::from_secs(3600)).build();
        Self {
            provider: SdkMeterProvider::builder().with_reader(reader).build(),
            exporter,
            points: Points::new(),
        }
    }

    fn client(&self) -> ClientMetrics {
        ClientMetrics::new(&self.provider, TARGET)
    }

    fn server(&self) -> ServerMetrics {
        ServerMetrics::new(&self.provider).methods_of(tonic_rdma_proto::DESCRIPTORS).unwrap()
    }

    fn add(&mut self, name: &str, attributes: &str, bytes: u64) {
        let point = self.points.entry(format!("{name} {attributes}")).or_default();
        *point = (point.0 + 1, point.1 + bytes);
    }

    /// Expects a call at the client.
    fn at_client(&mut self, method: &str, status: &str, sent: usize, received: usize) {
        let method = format!("grpc.method={method}");
        let all = format!("{method} grpc.status={status} grpc.target={TARGET}");
        self.add("grpc.client.attempt.started {attempt}", &format!("{method} grpc.target={TARGET}"), 0);
        self.add("grpc.client.attempt.duration s", &all, 0);
        self.add("grpc.client.call.duration s", &all, 0);
        self.add("grpc.client.attempt.sent_total_compressed_message_size By", &all, sent as u64);
        self.add("grpc.client.attempt.rcvd_total_compressed_message_size By", &all, received as u64);
    }

    /// Expects a call at the server.
    fn at_server(&mut self, method: &str, status: &str, received: usize, sent: usize) {
        let method = format!("grpc.method={method}");
        let all = format!("{method} grpc.status={status}");
        self.add("grpc.server.call.started {call}", &method, 0);
        self.add("grpc.server.call.duration s", &all, 0);
        self.add("grpc.server.call.rcvd_total_compressed_message_size By", &all, received as u64);
        self.add("grpc.server.call.sent_total_compressed_message_size By", &all, sent as u64);
    }

    /// Expects a call that both sides see alike.
    fn call(&mut self, method: &str, status: &str, request: usize, response: usize) {
        let method = format!("{SERVICE}/{method}");
        self.at_client(&method, status, request, response);
        self.at_server(&method, status, request, response);
    }

    /// Waits until the exporter has what is expected. Servers end cancelled calls a little later.
    async fn reached(&self) {
        let mut exported = Points::new();
        let wait = until(|| {
            exported = self.exported();
            exported == self.points
        });
        if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
            let list = |points: &Points| format!("{points:#?}");
            panic!("expected {}\nexported {}", list(&self.points), list(&exported));
        }
    }

    fn exported(&self) -> Points {
        self.exporter.reset();
        self.provider.force_flush().unwrap();
        let metrics = self.exporter.get_finished_metrics().unwrap();
        let all = metrics.iter().flat_map(|it| it.scope_metrics());
        let mut points = Points::new();
        for metric in all.flat_map(|scope| scope.metrics()) {
            let mut add = |attributes: Vec<String>, count, sum| {
                let mut attributes = attributes;
                attributes.sort_unstable();
                let point =
                    points.entry(format!("{} {} {}", metric.name(), metric.unit(), attributes.join(" ")));
                assert!(point.or_insert((count, sum)) == &(count, sum), "one point");
            };
            let texts = |it: &opentelemetry::KeyValue| format!("{}={}", it.key, it.value);
            match metric.data() {
                AggregatedMetrics::U64(MetricData::Sum(sum)) => {
                    sum.data_points().for_each(|it| add(it.attributes().map(texts).collect(), it.value(), 0));
                }
                AggregatedMetrics::U64(MetricData::Histogram(sizes)) => {
                    sizes
                        .data_points()
                        .for_each(|it| add(it.attributes().map(texts).collect(), it.count(), it.sum()));
                }
                AggregatedMetrics::F64(MetricData::Histogram(times)) => times.data_points().for_each(|it| {
                    assert!(it.sum() > 0.0 && it.bounds().count() == 41, "{}: {it:?}", metric.name());
                    add(it.attributes().map(texts).collect(), it.count(), 0);
                }),
                other => panic!("{}: {other:?}", metric.name()),
            }
        }
        points
    }
}

/// Runs a test over each path.
fn everywhere(test: impl AsyncFn(Over)) {
    for over in Over::ALL {
        println!("{over:?}");
        Runtime::MultiThread.run(test(over));
    }
}

/// Returns the echo method for any kind of call, as generated code would name it.
fn echo<T>(message: T) -> (Request<T>, PathAndQuery, GatherCodec<PutRequest, PutRequest>) {
    let mut request = Request::new(message);
    request.extensions_mut().insert(GrpcMethod::new(SERVICE, "Echo"));
    let path = PathAndQuery::from_static("/tonic_rdma.transfer.v1.Transfer/Echo");
    (request, path, GatherCodec::default())
}

#[test]
fn each_kind_of_call_counts_once_with_its_bytes() {
    everywhere(async |over| {
        let mut expected = Expected::new();
        let address = over.serve(expected.server(), Scripted::default()).await;
        let channel = over.connect(expected.client(), address).await;
        let mut client = TransferClient::new(channel.clone());
        let mut plain = tonic::client::Grpc::new(channel);

        for length in [0, 64, 100_000] {
            client.put(request(1, length)).await.unwrap();
            expected.call("Put", "OK", request(1, length).encoded_len(), reply(length).encoded_len());
        }

        let status = client.put(request(MISSING, 10)).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        expected.call("Put", "NOT_FOUND", request(MISSING, 10).encoded_len(), 0);

        // Three messages there, one back.
        let messages = [request(0, 5000), request(0, 9), request(1, 300)];
        plain.ready().await.unwrap();
        let (call, path, codec) = echo(tokio_stream::iter(messages.clone()));
        plain.client_streaming(call, path, codec).await.unwrap();
        let sent = messages.iter().map(PutRequest::encoded_len).sum();
        expected.call("Echo", "OK", sent, messages[2].encoded_len());

        // One there, four back.
        plain.ready().await.unwrap();
        let (call, path, codec) = echo(request(4, 70_000));
        let answers = plain.server_streaming(call, path, codec).await.unwrap().into_inner();
        assert_eq!(answers.collect::<Vec<_>>().await.len(), 4);
        let length = request(4, 70_000).encoded_len();
        expected.call("Echo", "OK", length, 4 * length);

        // Both ways, one after the other.
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let messages = tokio_stream::wrappers::ReceiverStream::new(receiver);
        sender.send(request(1, 77)).await.unwrap();
        let mut answers = client.echo(messages).await.unwrap().into_inner();
        let mut bytes = 0;
        for length in [77, 1 << 20, 0] {
            if length != 77 {
                sender.send(request(1, length)).await.unwrap();
            }
            bytes += answers.message().await.unwrap().unwrap().encoded_len();
        }
        drop(sender);
        assert!(answers.message().await.unwrap().is_none());
        expected.call("Echo", "OK", bytes, bytes);

        // An error behind a message.
        let messages = [request(1, 20), request(BREAKS, 30)];
        let mut answers = client.echo(tokio_stream::iter(messages.clone())).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap();
        assert_eq!(answers.message().await.unwrap_err().code(), Code::DataLoss);
        let sent = messages.iter().map(PutRequest::encoded_len).sum();
        expected.call("Echo", "DATA_LOSS", sent, messages[0].encoded_len());

        expected.reached().await;
    });
}

#[test]
fn a_call_that_is_dropped_counts_as_cancelled() {
    everywhere(async |over| {
        let (mut expected, service) = (Expected::new(), Scripted::default());
        let address = over.serve(expected.server(), service.clone()).await;
        let mut client = TransferClient::new(over.connect(expected.client(), address).await);

        // Before the response.
        let mut caller = client.clone();
        let call = tokio::spawn(async move { caller.put(request(HELD, 64)).await });
        until(|| service.held.load(Ordering::SeqCst) == 1).await;
        call.abort();
        call.await.unwrap_err();
        expected.call("Put", "CANCELLED", request(HELD, 64).encoded_len(), 0);

        // Between two messages of the response.
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        sender.send(request(STAYS, 50)).await.unwrap();
        let messages = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut answers = client.echo(messages).await.unwrap().into_inner();
        for _ in 0..2 {
            answers.message().await.unwrap().unwrap();
        }
        // hyper cancels a call when neither the request's body nor the response's is needed any more.
        drop((answers, sender));
        let length = request(STAYS, 50).encoded_len();
        expected.call("Echo", "CANCELLED", length, 2 * length);
        expected.reached().await;
    });
}

#[test]
fn a_late_call_counts_with_the_status_that_its_caller_sees() {
    everywhere(async |over| {
        let mut expected = Expected::new();
        let address = over.serve(expected.server(), Scripted::default()).await;
        let mut client = TransferClient::new(over.connect(expected.client(), address).await);
        let mut call = Request::new(UsageRequest::default());
        call.set_timeout(Duration::from_millis(300));
        let status = client.usage(call).await.unwrap_err();
        // tonic's channel says that the call was cancelled.
        let seen = match over {
            Over::DropIn | Over::Tcp => (Code::Cancelled, "CANCELLED"),
            _ => (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
        };
        assert_eq!(status.code(), seen.0, "{status}");
        let method = format!("{SERVICE}/Usage");
        expected.at_client(&method, seen.1, 0, 0);
        // The server's clock began a little later, so the client's cancellation may come first.
        let of_client = expected.points.clone();
        let both = ["DEADLINE_EXCEEDED", "CANCELLED"].map(|status| {
            expected.points.clone_from(&of_client);
            expected.at_server(&method, status, 0, 0);
            expected.points.clone()
        });
        until(|| both.contains(&expected.exported())).await;
    });
}

#[test]
fn names_that_nobody_has_registered_count_as_other() {
    everywhere(async |over| {
        let mut expected = Expected::new();
        let address = over.serve(expected.server(), Scripted::default()).await;
        for (metrics, name) in [
            (expected.client(), "other"),
            (expected.client().generic_methods(|name| name.starts_with("no.Such/")), "no.Such/Method"),
        ] {
            let mut client = tonic::client::Grpc::new(over.connect(metrics, address).await);
            client.ready().await.unwrap();
            let path = PathAndQuery::from_static("/no.Such/Method");
            let codec = GatherCodec::<PutRequest, PutRequest>::default();
            let status = client.unary(Request::new(request(1, 3)), path, codec).await.unwrap_err();
            assert_eq!(status.code(), Code::Unimplemented, "{status}");
            expected.at_client(name, "UNIMPLEMENTED", 0, 0);
        }
        // A server may refuse a request before it has read it, or before the client has sent it.
        let unread = ["grpc.server.call.rcvd_total", "grpc.client.attempt.sent_total"];
        for _ in 0..2 {
            expected.at_server("other", "UNIMPLEMENTED", 0, 0);
        }
        until(|| {
            let mut exported = expected.exported();
            for (point, (_, sum)) in &mut exported {
                *sum = if unread.iter().any(|name| point.starts_with(name)) { 0 } else { *sum };
            }
            exported == expected.points
        })
        .await;
    });
}

#[test]
fn sizes_are_those_of_compressed_messages() {
    everywhere(async |over| {
        let expected = Expected::new();
        let address = over.serve(expected.server(), Scripted::default()).await;
        let client = TransferClient::new(over.connect(expected.client(), address).await);
        let mut client = client.send_compressed(CompressionEncoding::Gzip);
        client.put(request(1, 500_000)).await.unwrap();
        let exported = expected.exported();
        let sum = |name: &str| exported.iter().find(|(point, _)| point.starts_with(name)).unwrap().1.1;
        let sent = sum("grpc.client.attempt.sent_total");
        assert!((20..20_000).contains(&sent), "{sent} bytes");
        assert_eq!(sum("grpc.server.call.rcvd_total"), sent);
        assert_eq!(sum("grpc.client.attempt.rcvd_total"), reply(500_000).encoded_len() as u64);
    });
}

/// Large fields are beside the frames that a layer sees: at the sender if it is around the body that gathers,
/// at the receiver always.
#[test]
fn large_fields_by_reference_count_wherever_the_layer_is() {
    for metrics_outside in [false, true] {
        Runtime::MultiThread.run(async {
            let mut expected = Expected::new();
            let config = support::config().in_process(false);
            let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
            let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
            let (metrics, gather) = (expected.server(), GatherBothLayer::new());
            let service = TransferServer::new(Scripted::default());
            if metrics_outside {
                let server = RdmaServer::new().layer(metrics).layer(gather).add_service(service);
                tokio::spawn(server.serve_with_incoming(incoming));
            } else {
                let server = RdmaServer::new().layer(gather).layer(metrics).add_service(service);
                tokio::spawn(server.serve_with_incoming(incoming));
            }
            let channel = RdmaChannel::builder(endpoint).config(config).connect().await.unwrap();
            let counters = channel.clone();
            let channel = if metrics_outside {
                BoxCloneService::new(expected.client().layer(GatherBoth::new(channel)))
            } else {
                BoxCloneService::new(
                    tower::ServiceBuilder::new()
                        .layer_fn(GatherBoth::new)
                        .service(expected.client().layer(channel)),
                )
            };
            let mut client = TransferClient::new(channel);
            let messages: Vec<_> = [10, 5000, 1 << 20, 3 << 20].map(|length| request(1, length)).into();
            let answers = client.echo(tokio_stream::iter(messages.clone())).await.unwrap().into_inner();
            let answers: Vec<_> = answers.map(Result::unwrap).collect().await;
            assert_eq!(answers, messages);
            let bytes = messages.iter().map(PutRequest::encoded_len).sum();
            expected.call("Echo", "OK", bytes, bytes);
            expected.reached().await;
            let counters = counters.last_connection().unwrap().counters();
            assert!(counters.decoded_in_place_bytes > 4 << 20, "they landed: {counters:?}");
            assert_eq!(counters.landed_copied_bytes, 0);
        });
    }
}

#[test]
fn a_server_that_is_not_there_is_unavailable() {
    Runtime::MultiThread.run(async {
        let mut expected = Expected::new();
        let port = Port::reserve();
        let channel = RdmaChannel::builder(port.endpoint()).config(support::config()).connect_lazy();
        let mut client = TransferClient::new(expected.client().layer(channel));
        client.put(request(1, 1)).await.unwrap_err();
        let mut client = TransferClient::new(expected.client().layer(port.endpoint().connect_lazy()));
        client.put(request(1, 1)).await.unwrap_err();
        for _ in 0..2 {
            expected.at_client(&format!("{SERVICE}/Put"), "UNAVAILABLE", 0, 0);
        }
        expected.reached().await;
    });
}

#[test]
fn a_server_names_the_transport_if_asked() {
    everywhere(async |over| {
        let expected = Expected::new();
        let address = over.serve(expected.server().with_transport(), Scripted::default()).await;
        let mut client = TransferClient::new(over.connect(expected.client(), address).await);
        client.put(request(1, 1)).await.unwrap();
        let transport = match over {
            Over::Native | Over::NativeToHttp2 | Over::DropIn => " tonic_rdma.transport=rdma",
            Over::InProcess => " tonic_rdma.transport=in_process",
            // A listener of tonic's.
            Over::Tcp => "",
        };
        let point = format!("grpc.server.call.started {{call}} grpc.method={SERVICE}/Put{transport}");
        assert_eq!(expected.exported().get(&point), Some(&(1, 0)), "{:#?}", expected.exported());
    });
}

#[test]
fn descriptors_that_are_none_are_refused() {
    let expected = Expected::new();
    ServerMetrics::new(&expected.provider).methods_of(b"\xff").unwrap_err();
}
