//! A service of messages with several large fields, with the codec that takes landed messages, and a client
//! of it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use prost::Message;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::codec::{Codec, CompressionEncoding, EnabledCompressionEncodings, Streaming};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_rdma::gather::{self, GatherBoth, GatherCodec};
use tonic_rdma::memory::Pool;
use tonic_rdma::{
    CallConfig, Config, CounterSnapshot, RdmaChannel, RdmaIncoming, RdmaRequestExt as _, RdmaServer,
};

use support::{Content, config, within};

/// A message with large fields.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Parcel {
    #[prost(uint64, tag = "1")]
    pub(crate) seed: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) first: Bytes,
    #[prost(string, tag = "3")]
    pub(crate) note: String,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(crate) more: Vec<Bytes>,
}

/// What the service says about a parcel, or what a client wants of a parcel.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Receipt {
    #[prost(uint64, tag = "1")]
    pub(crate) seed: u64,
    /// The length of the longest field.
    #[prost(uint64, tag = "2")]
    pub(crate) length: u64,
    /// The remainder of the address of the longest field by 64.
    #[prost(uint64, tag = "3")]
    pub(crate) misaligned: u64,
    /// All fields are in one allocation.
    #[prost(bool, tag = "4")]
    pub(crate) together: bool,
    /// Bytes that the server's end of the connection took: landed and decoded in place, and landed and
    /// copied.
    #[prost(uint64, tag = "5")]
    pub(crate) in_place: u64,
    #[prost(uint64, tag = "6")]
    pub(crate) copied: u64,
    /// Bytes that the server's end offered: from where they lay, and copied.
    #[prost(uint64, tag = "7")]
    pub(crate) offered: u64,
    #[prost(uint64, tag = "8")]
    pub(crate) offered_copied: u64,
    /// The tasks of the server's runtime while the handler ran.
    #[prost(uint64, tag = "9")]
    pub(crate) tasks: u64,
    /// Bytes that landed at the server's end, taken or not.
    #[prost(uint64, tag = "10")]
    pub(crate) landed: u64,
}

impl Parcel {
    /// Makes a parcel whose content depends on the seed. `pool` gives the memory of the fields.
    pub(crate) fn new(seed: u64, first: usize, more: &[usize], pool: Option<&Pool>) -> Self {
        let mut content = Content::new(seed);
        let mut field = |length: usize| {
            let bytes = content.take(length);
            match pool {
                Some(pool) => {
                    let mut buffer = pool.allocate(length).unwrap();
                    buffer.copy_from_slice(&bytes);
                    buffer.freeze()
                }
                None => bytes.into(),
            }
        };
        let first = field(first);
        let more = more.iter().map(|&length| field(length)).collect();
        Self { seed, first, note: format!("parcel {seed}"), more }
    }

    /// Checks the content.
    pub(crate) fn check(&self) {
        let mut content = Content::new(self.seed);
        content.check(&self.first);
        self.more.iter().for_each(|field| content.check(field));
        assert_eq!(self.note, format!("parcel {}", self.seed));
    }

    fn fields(&self) -> impl Iterator<Item = &Bytes> + Clone {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// Says where the fields lie.
    pub(crate) fn receipt(&self) -> Receipt {
        // Of several that are equal, the first.
        let longest = self.fields().min_by_key(|field| std::cmp::Reverse(field.len())).unwrap();
        let ends = self.fields().filter(|field| !field.is_empty()).map(|field| field.as_ptr() as usize);
        let (least, most) = (ends.clone().min().unwrap_or(0), ends.max().unwrap_or(0));
        let whole = self.encoded_len();
        Receipt {
            seed: self.seed,
            length: longest.len() as u64,
            misaligned: (longest.as_ptr() as usize % 64) as u64,
            together: most - least < whole,
            ..Receipt::default()
        }
    }
}

impl Receipt {
    pub(crate) fn counts(mut self, counters: &CounterSnapshot) -> Self {
        self.in_place = counters.decoded_in_place_bytes;
        self.copied = counters.landed_copied_bytes;
        self.offered = counters.offered_in_place_bytes;
        self.offered_copied = counters.offered_copied_bytes;
        self.tasks = tasks();
        self.landed = counters.landed_bytes;
        self
    }
}

/// Returns the number of tasks of this runtime.
pub(crate) fn tasks() -> u64 {
    tokio::runtime::Handle::current().metrics().num_alive_tasks() as u64
}

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct Depot {
    limit: usize,
    pool: Pool,
}

impl Default for Depot {
    fn default() -> Self {
        Self::new(256 << 20)
    }
}

impl Depot {
    /// Makes a service that decodes messages of `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, pool: Pool::for_sending(1 << 30) }
    }

    fn put(&self, request: Request<Parcel>) -> Response<Receipt> {
        let counters = request.connection().map(|info| info.counters()).unwrap_or_default();
        let parcel = request.into_inner();
        parcel.check();
        let receipt = parcel.receipt().counts(&counters);
        Response::new(receipt)
    }

    fn get(&self, request: &Request<Receipt>) -> Response<Parcel> {
        let Receipt { seed, length, .. } = request.get_ref();
        Response::new(Parcel::new(*seed, *length as usize, &[], Some(&self.pool)))
    }
}

impl NamedService for Depot {
    const NAME: &'static str = "test.Depot";
}

type Replies = Pin<Box<dyn Stream<Item = Result<Parcel, Status>> + Send>>;

impl Service<http::Request<Body>> for Depot {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let depot = self.clone();
        Box::pin(async move {
            let mut encodings = EnabledCompressionEncodings::default();
            encodings.enable(CompressionEncoding::Gzip);
            let path = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            let limit = Some(depot.limit);
            Ok(match &*path {
                "Put" => {
                    let service = tower::service_fn(move |request: Request<Parcel>| {
                        let depot = depot.clone();
                        async move { Ok::<_, Status>(depot.put(request)) }
                    });
                    tonic::server::Grpc::new(GatherCodec::<Receipt, Parcel>::default())
                        .apply_compression_config(encodings, encodings)
                        .apply_max_message_size_config(limit, None)
                        .unary(service, request)
                        .await
                }
                "Get" => {
                    let service = tower::service_fn(move |request: Request<Receipt>| {
                        let depot = depot.clone();
                        async move { Ok::<_, Status>(depot.get(&request)) }
                    });
                    tonic::server::Grpc::new(GatherCodec::<Parcel, Receipt>::default())
                        .unary(service, request)
                        .await
                }
                "Echo" => {
                    let service = tower::service_fn(move |request: Request<Streaming<Parcel>>| async move {
                        let parcels = request.into_inner();
                        Ok::<_, Status>(Response::new(Box::pin(parcels) as Replies))
                    });
                    tonic::server::Grpc::new(GatherCodec::<Parcel, Parcel>::default())
                        .apply_max_message_size_config(limit, None)
                        .streaming(service, request)
                        .await
                }
                // Takes one message, and reads no further as long as the call lives.
                "Hold" => {
                    let service = tower::service_fn(move |request: Request<Streaming<Parcel>>| async move {
                        let mut parcels = request.into_inner();
                        next(&mut parcels).await.unwrap()?.check();
                        let replies = tokio_stream::pending().chain(parcels);
                        Ok::<_, Status>(Response::new(Box::pin(replies) as Replies))
                    });
                    tonic::server::Grpc::new(GatherCodec::<Parcel, Parcel>::default())
                        .apply_max_message_size_config(limit, None)
                        .streaming(service, request)
                        .await
                }
                // Takes messages with the codec of generated code.
                "Stock" => {
                    let service = tower::service_fn(move |request: Request<Parcel>| {
                        let depot = depot.clone();
                        async move { Ok::<_, Status>(depot.put(request)) }
                    });
                    tonic::server::Grpc::new(tonic_prost::ProstCodec::<Receipt, Parcel>::default())
                        .apply_max_message_size_config(limit, None)
                        .unary(service, request)
                        .await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// Starts a server with this service. With a limit its layer takes landed messages of this length.
pub(crate) async fn serve(depot: &Depot, landed: Option<usize>, calls: CallConfig) -> SocketAddr {
    serve_with(depot, landed, calls, config()).await
}

/// Does as [`serve`], with settings of the connection.
pub(crate) async fn serve_with(
    depot: &Depot,
    landed: Option<usize>,
    calls: CallConfig,
    config: Config,
) -> SocketAddr {
    let incoming = RdmaIncoming::builder().config(config).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let server = RdmaServer::new().calls(calls);
    match landed {
        Some(limit) => {
            let layer = gather::GatherBothLayer::new().max_decoding_message_size(limit);
            tokio::spawn(server.layer(layer).add_service(depot.clone()).serve_with_incoming(incoming));
        }
        None => {
            tokio::spawn(server.add_service(depot.clone()).serve_with_incoming(incoming));
        }
    }
    address
}

/// Connects to a server, and checks that calls are native.
pub(crate) async fn connect(address: SocketAddr, calls: CallConfig) -> RdmaChannel {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = RdmaChannel::builder(endpoint).config(config()).calls(calls);
    let channel = within(channel.connect()).await.unwrap();
    let info = channel.last_connection().unwrap();
    assert!(info.is_native(), "{}", info.reason());
    channel
}

/// Returns a channel that takes landed messages of at most `limit` bytes.
pub(crate) fn both(channel: &RdmaChannel, limit: usize) -> GatherBoth<RdmaChannel> {
    gather::GatherBoth::new(channel.clone()).max_decoding_message_size(limit)
}

pub(crate) fn path(method: &str) -> PathAndQuery {
    path_of(Depot::NAME, method)
}

pub(crate) fn path_of(service: &str, method: &str) -> PathAndQuery {
    format!("/{service}/{method}").parse().unwrap()
}

/// Calls a unary method with a codec.
pub(crate) async fn call_with<S, C, T, U>(
    channel: S,
    method: &str,
    message: T,
    codec: C,
    compress: bool,
) -> Result<Response<U>, Status>
where
    S: tonic::client::GrpcService<Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
    C: Codec<Encode = T, Decode = U>,
    T: Send + Sync + 'static,
    U: Send + Sync + 'static,
{
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(usize::MAX);
    if compress {
        client =
            client.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip);
    }
    within(client.ready()).await.map_err(|error| Status::from_error(error.into()))?;
    within(client.unary(Request::new(message), path(method), codec)).await
}

/// Sends a parcel.
pub(crate) async fn put<S>(channel: S, parcel: Parcel) -> Result<Receipt, Status>
where
    S: tonic::client::GrpcService<Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let codec = GatherCodec::<Parcel, Receipt>::default();
    Ok(call_with(channel, "Put", parcel, codec, false).await?.into_inner())
}

/// Asks for a parcel.
pub(crate) async fn get<S>(channel: S, seed: u64, length: usize) -> Result<Parcel, Status>
where
    S: tonic::client::GrpcService<Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let wish = Receipt { seed, length: length as u64, ..Receipt::default() };
    let codec = GatherCodec::<Receipt, Parcel>::default();
    Ok(call_with(channel, "Get", wish, codec, false).await?.into_inner())
}

/// Streams parcels to the server, which sends them back.
pub(crate) async fn echo<S>(
    channel: S,
    parcels: impl Stream<Item = Parcel> + Send + 'static,
) -> Result<Streaming<Parcel>, Status>
where
    S: tonic::client::GrpcService<Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    stream_to(path("Echo"), channel, parcels).await
}

/// Streams parcels to a method.
pub(crate) async fn stream_to<S>(
    path: PathAndQuery,
    channel: S,
    parcels: impl Stream<Item = Parcel> + Send + 'static,
) -> Result<Streaming<Parcel>, Status>
where
    S: tonic::client::GrpcService<Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(usize::MAX);
    within(client.ready()).await.map_err(|error| Status::from_error(error.into()))?;
    let codec = GatherCodec::<Parcel, Parcel>::default();
    Ok(within(client.streaming(Request::new(parcels), path, codec)).await?.into_inner())
}

/// Returns the next parcel of a stream.
pub(crate) async fn next(parcels: &mut Streaming<Parcel>) -> Option<Result<Parcel, Status>> {
    within(parcels.next()).await
}
