//! gRPC over RDMA, for tonic.
//!
//! A tonic service changes two lines: the line that listens and the line that connects. Between processes of
//! one host its calls then go through shared memory, by a software RDMA device that needs no network card.
//! The feature `ibverbs` adds InfiniBand, RoCE and iWARP devices between hosts. Where one side has no RDMA,
//! calls go over TCP on the same port, so stock gRPC clients and servers work unchanged.
//!
//! | what | by | changes |
//! |---|---|---|
//! | the drop-in: tonic's own HTTP/2 over RDMA | [`RdmaIncoming`], [`RdmaConnector`] | [two lines](#two-lines) |
//! | native calls: gRPC without HTTP/2 where both sides are yours, which gains more | [`RdmaServer`], [`RdmaChannel`], [`CallConfig`] | [two lines](#native-calls), and nothing of the generated code |
//! | large fields by reference | [`gather`], [`memory`] | [one line more on each side](#large-fields-by-reference) |
//! | one channel over several servers | [`BalancedChannel`], [`RdmaChannel::balance_list`], [`RdmaChannel::balance_channel`] | the line that connects |
//! | tensors, collectives, graphs, Arrow Flight | [other packages](#packages) | |
//!
//! This page is a tour: [the packages](#packages), [the two changed lines](#two-lines),
//! [native calls](#native-calls), [cargo features](#cargo-features),
//! [what works as with plain tonic and what differs](#compatibility-with-tonic),
//! [the ways to move data](#which-path-for-which-job), [settings](#where-settings-come-from),
//! [errors](#errors) and [observability](#observability).
//!
//! # Packages
//!
//! | package | has |
//! |---|---|
//! | `tonic-rdma`, this one | the transport for tonic, native calls, [`gather`] and [`memory`] |
//! | `tonic-rdma-flight` | Arrow Flight: record batches that are used where they arrived |
//! | `tonic-rdma-opentelemetry` | gRPC's OpenTelemetry metrics, by layers for clients and servers |
//! | `tonic-rdma-tensor` | tensors without a call for each: slots, rendezvous and regions, written by one-sided RDMA |
//! | `tonic-rdma-collective` | collectives: allreduce and its family, over N processes |
//! | `tonic-rdma-graph` | data-flow graphs that are split over processes, such as ONNX models |
//! | `tonic-rdma-verbs` | RDMA devices and registered memory, without tonic. It has all of the unsafe code |
//!
//! They are not on crates.io yet. Each has the same line in `Cargo.toml`, with its own name:
//! `tonic-rdma = { git = "https://github.com/tonic-rdma/tonic-rdma" }`. Add `rev = "..."` with one commit for
//! all your programs. `cargo doc --open` shows the pages of the packages that you use. The repository also has a
//! package for Python.
//!
//! # Two lines
//!
//! ```
//! use tonic::transport::{Endpoint, Server};
//! use tonic_rdma::{RdmaConnector, RdmaIncoming, Verdict};
//! # use tonic::{Request, Response, Status};
//! # use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
//! # use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
//! # use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
//! # #[derive(Debug)]
//! # struct Greets;
//! # #[tonic::async_trait]
//! # impl Greeter for Greets {
//! #     async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
//! #         Ok(Response::new(HelloReply { message: format!("Hello {}!", request.get_ref().name) }))
//! #     }
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let service = GreeterServer::new(Greets);
//!
//! // The server. The first line was: TcpIncoming::bind
//! let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! let address = incoming.local_addr();
//! tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
//!
//! // The client. The second line ended with: connect()
//! let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
//! let connector = RdmaConnector::new();
//! let channel = endpoint.connect_with_connector(connector.clone()).await?;
//! let mut client = GreeterClient::new(channel);
//! let reply = client.say_hello(HelloRequest { name: "Ada".into() }).await?;
//! assert_eq!(reply.into_inner().message, "Hello Ada!");
//!
//! // What carried the call?
//! let info = connector.last_connection().expect("a connection was made");
//! assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
//! # Ok(())
//! # }
//! ```
//!
//! For the lowest latency build the runtime with [`runtime::idle_polling`]. Any other tokio runtime works
//! too.
//!
//! # Native calls
//!
//! Where both sides are yours and there is no TLS, take these two lines instead. Calls between [`RdmaServer`]
//! and [`RdmaChannel`] go without HTTP/2, which takes most of the time of a small call. All other peers get
//! HTTP/2 on the same port, over RDMA or TCP. [`CallConfig`] has the limits.
//!
//! ```
//! use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
//! # use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (_reporter, service) = tonic_health::server::health_reporter();
//! # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! # let url = format!("http://{}", incoming.local_addr());
//!
//! // The server. `RdmaServer::serve` takes an address in place of `incoming`.
//! tokio::spawn(RdmaServer::new().add_service(service).serve_with_incoming(incoming));
//!
//! // The client: generated code takes the channel as it takes tonic's.
//! let channel = RdmaChannel::connect(url).await?;
//! let mut client = HealthClient::new(channel.clone());
//! # client.check(HealthCheckRequest::default()).await?;
//! assert!(channel.last_connection().expect("a connection was made").is_native());
//! # Ok(())
//! # }
//! ```
//!
//! Calls to a server of the same process, as here, stay in it, and no device carries them
//! ([`RdmaConnectInfo::is_in_process`], [`Config::in_process`]).
//!
//! # Cargo features
//!
//! No feature is on by default.
//!
//! | feature | adds | needs |
//! |---|---|---|
//! | `ibverbs` | RDMA devices with a driver in the kernel (InfiniBand, RoCE, iWARP), through libibverbs, which the program looks for when it runs | on Debian: `cmake make python3 pkg-config libclang-dev libnl-3-dev libnl-route-3-dev libibverbs-dev librdmacm-dev`; running: `libibverbs1 librdmacm1 ibverbs-providers` |
//! | `tls-ring` | tonic's TLS with ring, and `RdmaRequestExt::peer_certificates` | a C compiler |
//! | `tls-aws-lc` | tonic's TLS with AWS-LC, and `RdmaRequestExt::peer_certificates` | a C compiler; on some platforms also CMake |
//!
//! `tonic-rdma-tensor` has these features, too, and besides them `ndarray` and `safetensors`.
//!
//! # Compatibility with tonic
//!
//! The crate builds on tonic 0.14.9 and tokio 1.54, or later versions that Cargo takes for compatible, and on
//! Linux on a 64-bit machine. A connection is a byte stream below HTTP/2, so everything above it is tonic's
//! own code:
//!
//! - **Unchanged:** generated code, all four kinds of calls, metadata, deadlines, cancellation, interceptors,
//!   tower layers, compression, message size limits, keepalive, lazy channels, graceful shutdown, health,
//!   reflection, gRPC-Web and TLS (`tls_config` on `Endpoint` and on `Server`).
//! - **`request.remote_addr()` and `local_addr()`** return `None` unless the server has the layer
//!   [`RemoteAddresses`], because tonic fills them in for its own listeners alone. The same addresses are in
//!   [`RdmaConnectInfo`], which [`RdmaRequestExt::connection`] finds in each request.
//! - **`request.peer_certs()`** returns `None`, for the same reason. `RdmaRequestExt::peer_certificates`
//!   returns the certificates (features `tls-ring` and `tls-aws-lc`).
//! - **`Channel::balance_list` and `balance_channel`** take no connector. [`BalancedChannel::from_list`] and
//!   [`BalancedChannel::from_changes`] do, and generated clients take this channel as they take tonic's
//!   `Channel`. An [`RdmaChannel`] has methods of the same names.
//! - **Fallback:** a connection to a stock server, or from a stock client, is TCP.
//!   [`RdmaConnectInfo::verdict`] and [`RdmaConnectInfo::reason`] say what carries a connection and why.
//!   [`Policy::Require`] makes a connection without RDMA an error.
//!
//! # Which path for which job
//!
//! | job | path |
//! |---|---|
//! | services whose clients are yours too, without TLS | [native calls](#native-calls): no HTTP/2 |
//! | all other services and clients | [the drop-in](#two-lines): tonic's HTTP/2 over RDMA |
//! | messages with `bytes` fields of 32 KiB and more | [`gather`]: sends these fields from where they are |
//! | such messages over a network card | [`Pool::for_sending`](memory::Pool::for_sending): memory that a card can send from |
//! | a loop that fills buffers and sends some of them | [`memory::sites`]: learns which buffers need such memory |
//! | record batches of Arrow | `tonic-rdma-flight`: the receiver uses them where they arrived |
//! | large data that others pass on, or read in parts | [`tonic_rdma_tensor::buffer`](#tensors): a message carries a handle, and its reader fetches the bytes |
//! | tensors without a call for each | [`tonic-rdma-tensor`](#tensors): slots, rendezvous and regions, written by one-sided RDMA |
//! | sums, means and extremes over N processes | `tonic-rdma-collective` |
//! | a model or a computation that is split over processes | `tonic-rdma-graph` |
//!
//! ## Large fields by reference
//!
//! tonic copies a message when it encodes it. [`gather`] leaves out that copy for large `bytes` fields. The
//! generated code names [`gather::GatherCodec`] (an option of `tonic-prost-build`), and the channel or the
//! server gets one wrapper:
//!
//! ```
//! # use tonic::transport::{Channel, Server};
//! # use tonic_rdma_proto::transfer::transfer_client::TransferClient;
//! use tonic_rdma::gather::{GatherRequests, GatherResponses};
//!
//! # fn clients(channel: Channel) {
//! let client = TransferClient::new(GatherRequests::new(channel)); // was: TransferClient::new(channel)
//! let server = Server::builder().layer(GatherResponses::new()); // was: Server::builder()
//! # }
//! ```
//!
//! ## Sending from where the application wrote
//!
//! A network card sends without a copy from registered memory alone. Buffers of [`memory::Pool::for_sending`]
//! lie in such memory. Together with [`gather`] no copy of the payload is made on the sending side:
//!
//! ```
//! use tonic_rdma::memory::Pool;
//!
//! let pool = Pool::for_sending(1 << 30); // bytes in use at a time
//! let mut buffer = pool.allocate(4 << 20)?;
//! buffer.fill(7);
//! let payload: bytes::Bytes = buffer.freeze(); // goes into a `bytes` field
//! # assert_eq!(payload.len(), 4 << 20);
//! # Ok::<(), tonic_rdma::VerbsError>(())
//! ```
//!
//! ## Allocation sites
//!
//! A program that repeats itself, such as a training loop, shows in one iteration which of its buffers it
//! sends. A [`SiteAllocator`](memory::sites::SiteAllocator) notes that and places these buffers in registered
//! memory from the next iteration on:
//!
//! ```
//! use tonic_rdma::memory::Pool;
//! use tonic_rdma::memory::sites::{SiteAllocator, SiteSettings};
//!
//! let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
//! for _step in 0..3 {
//!     let mut gradients = sites.allocate(1 << 20);
//!     gradients.fill(0);
//!     let payload = gradients.freeze(); // send it
//!     # tonic_rdma::memory::sites::sent(&payload);
//!     sites.next_iteration();
//! }
//! println!("{}", sites.report());
//! ```
//!
//! ## Tensors
//!
//! The package `tonic-rdma-tensor` has tensor devices. A tensor device owns memory that peers read and write
//! by one-sided operations; devices find one another's memory by gRPC, over this package's transport. The
//! front page of that package says when to use which of its four ways, with an example of each.
//!
//! # Where settings come from
//!
//! [`Config`] has the settings of connectors, listeners and tensor devices. [`Config::default`] suits most
//! programs. [`Config::from_env`] starts from it and applies the environment variables `RDMA_*`; its
//! documentation has a table of them. [`RdmaConnector::new`], [`RdmaIncoming::bind`], [`RdmaChannel`] and
//! [`RdmaServer`] use [`Config::from_env`] unless they get a configuration, which they take as it is. A value
//! that can't be used is an [`RdmaError`] that names the variable.
//!
//! ```
//! use tonic_rdma::{Config, Policy, RdmaConnector};
//!
//! let config = Config::from_env()?.policy(Policy::Require);
//! let connector = RdmaConnector::new().config(config);
//! # drop(connector);
//! # Ok::<(), tonic_rdma::RdmaError>(())
//! ```
//!
//! # Errors
//!
//! There is one error, [`RdmaError`]. Its [`kind`](RdmaError::kind) is what a program decides by, its
//! [`reason`](RdmaError::reason) says what happened, to which peer, device or setting, and what to do.
//!
//! | operation | where the [`RdmaError`] is |
//! |---|---|
//! | [`Config::from_env`], [`Config::validate`], [`RdmaChannel::connect`], [`RdmaServer::serve`], [`Dialer::dial`] | returned |
//! | connecting through tonic, with [`RdmaConnector`] | a source of `tonic::transport::Error` |
//! | listening, and streams whose connection ended early | inside the [`std::io::Error`] |
//! | a native call that the connection or the peer ended | the source of its `tonic::Status` |
//! | a call through a [`BalancedChannel`] | returned by the channel; clients turn it into a status |
//! | allocating registered memory | [`VerbsError`], returned |
//!
//! [`memory::Pool`] has the error of `tonic-rdma-verbs`, because that package has the memory. A device that
//! is missing, or too little memory that may be locked, is no error under [`Policy::Prefer`]: the connection
//! is TCP then, and [`RdmaConnectInfo::reason`] says why.
//!
//! # Names
//!
//! The prefix `Rdma` marks exactly the types that take the part of a tonic type of the same name, such as
//! [`RdmaChannel`] and [`RdmaServer`], with their builders, futures and error, so that both can be imported
//! side by side. Nothing else has it.
//!
//! # Observability
//!
//! - [`RdmaConnectInfo`] has the verdict, the reason, the device, live [counters](RdmaConnectInfo::counters)
//!   and [`why`](RdmaConnectInfo::why), which explains how a write of some size would go. A service finds it
//!   in each request, a client in [`RdmaConnector::last_connection`] or [`BalancedChannel::endpoints`].
//! - `tracing` events report each negotiation and each connection that fails.
//! - Counters, gauges and, with [`Config::histograms`], times of the process go to the `metrics` facade, under
//!   names that begin with `tonic_rdma_`. They are visible once the program has installed a recorder, such as an
//!   exporter for Prometheus. [`describe_metrics`] tells it what each means:
//!
//! ```
//! # use tonic::transport::{Endpoint, Server};
//! # use tonic_rdma::{RdmaConnector, RdmaIncoming};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use metrics_util::debugging::DebuggingRecorder;
//!
//! let recorder = DebuggingRecorder::new(); // your exporter
//! let snapshotter = recorder.snapshotter();
//! metrics::set_global_recorder(recorder)?;
//! # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! # let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr()))?;
//! # let (_reporter, service) = tonic_health::server::health_reporter();
//! # tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
//! # let connected = endpoint.connect_with_connector(RdmaConnector::new()).await?;
//!
//! // After the first connection:
//! let found = snapshotter.snapshot().into_vec();
//! let names: Vec<_> = found.iter().map(|(key, ..)| key.key().name()).collect();
//! assert!(names.contains(&"tonic_rdma_negotiations_total"), "{names:?}");
//! # drop(connected);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to read on
//!
//! - The guides in [`gather`] and [`memory::sites`]: when to use each, how, its overhead, and its limits.
//! - The folder `examples` of the repository: a greeter, native calls, streams, fallback, mutual TLS,
//!   balancing, large messages, allocation sites and a parameter server that trains.
//! - README and the book in the repository (`docs/book`): first call, Kubernetes, tuning, troubleshooting,
//!   figures. ARCHITECTURE.md has the layers of the code and the life of one message.

#![forbid(unsafe_code)]

mod endpoint;
mod error;
mod grpc;
mod protocol;
mod transport;
mod wire;

pub mod unstable;

pub use endpoint::tuner::{ThresholdSource, TransferDecision};
pub use endpoint::{
    Config, CounterSnapshot, Dialer, EagerThreshold, EndpointStream, Listener, Policy, PollMode, Provider,
    RdmaConnectInfo, ReasonCode, SharedReceive, StockClients, Verdict, describe_metrics,
};
pub use error::{RdmaError, RdmaErrorKind};
pub use grpc::{
    CallConfig, GrpcService, RdmaChannel, RdmaChannelBuilder, RdmaResponseFuture, RdmaRoutes, RdmaServer,
};
pub use transport::balance::{BalancedChannel, EndpointState, EndpointStatus};
pub use transport::{
    RdmaConnector, RdmaIncoming, RdmaIncomingBuilder, RdmaRequestExt, RemoteAddresses, gather,
};

pub use tonic_rdma_verbs::{PathSettings, VerbsError, VerbsErrorKind, memory};

/// Builds tokio runtimes that poll RDMA devices when they are idle, with
/// [`idle_polling`](runtime::idle_polling).
pub mod runtime {
    pub use crate::endpoint::idle_polling;
}
