//! gRPC's own OpenTelemetry metrics, by a layer of tower for clients and one for servers.
//!
//! The metrics are those of [gRFC A66], with its names, units, attributes and buckets, so the dashboards and
//! alerts that exist for other gRPC libraries work. The layers take a [`MeterProvider`] and depend on
//! OpenTelemetry's API alone: the program chooses SDK and exporter. They work over
//! [`RdmaChannel`](tonic_rdma::RdmaChannel) and [`RdmaServer`](tonic_rdma::RdmaServer), over tonic's `Channel`
//! and `Server`, with and without RDMA, and measure the same on each path.
//!
//! | instrument | kind | unit | attributes |
//! |---|---|---|---|
//! | `grpc.client.attempt.started` | counter | `{attempt}` | method, target |
//! | `grpc.client.attempt.duration`, `grpc.client.call.duration` | histogram | `s` | method, target, status |
//! | `grpc.client.attempt.sent_total_compressed_message_size`, `….rcvd_…` | histogram | `By` | method, target, status |
//! | `grpc.server.call.started` | counter | `{call}` | method |
//! | `grpc.server.call.duration` | histogram | `s` | method, status |
//! | `grpc.server.call.sent_total_compressed_message_size`, `….rcvd_…` | histogram | `By` | method, status |
//!
//! The attributes are `grpc.method` (such as `helloworld.Greeter/SayHello`), `grpc.target` and `grpc.status`
//! (such as `OK`). A size is the sum of the messages of one call, as they were sent: compressed, without
//! headers and without the five bytes before each message. It includes large fields that
//! [`gather`](tonic_rdma::gather) sends or delivers without a copy.
//!
//! # Example
//!
//! ```
//! # use opentelemetry_sdk::metrics::SdkMeterProvider;
//! # use tonic::{Request, Response, Status};
//! # use tonic_rdma_proto::DESCRIPTORS as FILE_DESCRIPTOR_SET;
//! # use tonic_rdma_proto::transfer::transfer_client::TransferClient;
//! # use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
//! # use tonic_rdma_proto::transfer::{PutReply, PutRequest};
//! # #[derive(Debug)]
//! # struct Counts;
//! # #[tonic::async_trait]
//! # impl Transfer for Counts {
//! #     async fn put(&self, _: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
//! #         Ok(Response::new(PutReply::default()))
//! #     }
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
//! use tonic_rdma_opentelemetry::{ClientMetrics, ServerMetrics};
//! use tower::Layer as _;
//!
//! let provider = SdkMeterProvider::builder() /* .with_reader(...) */.build();
//!
//! // A server names its methods by their descriptors; all others count as "other".
//! let metrics = ServerMetrics::new(&provider).methods_of(FILE_DESCRIPTOR_SET)?;
//! let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! let target = format!("http://{}", incoming.local_addr());
//! let server = RdmaServer::new().layer(metrics).add_service(TransferServer::new(Counts));
//! tokio::spawn(server.serve_with_incoming(incoming));
//!
//! let channel = RdmaChannel::connect(target.clone()).await?;
//! let channel = ClientMetrics::new(&provider, target).layer(channel); // or over any other channel
//! TransferClient::new(channel).put(PutRequest::default()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What counts as what
//!
//! - **Attempts.** A layer sees one attempt of each call, so both durations of a client are equal. Where a
//!   layer for retries wraps this one, each retry counts as a call.
//! - **The end of a call** is its status: in the trailers, in the headers of a response without messages, or
//!   in the error of the channel. A call that is dropped before that counts as `CANCELLED`, and as
//!   `DEADLINE_EXCEEDED` if the time in its header `grpc-timeout` is over.
//! - **Methods.** A client takes the names of methods of generated code. A server can't tell which methods it
//!   has, so [`ServerMetrics::methods_of`] names them. All other names count as `other`, because callers
//!   could otherwise make any number of series.
//!
//! [gRFC A66]: https://github.com/grpc/proposal/blob/master/A66-otel-stats.md
//! [`MeterProvider`]: opentelemetry::metrics::MeterProvider
#![forbid(unsafe_code)]

mod instruments;
mod layers;
mod record;

pub use layers::{ClientMetrics, RecordedService, ServerMetrics};
pub use record::RecordedFuture;
