//! The service that all behaviours call. A behaviour gives it the handlers that it needs; the others echo.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::uri::PathAndQuery;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::codec::{CompressionEncoding, EnabledCompressionEncodings};
use tonic::server::{
    ClientStreamingService, Grpc, NamedService, ServerStreamingService, StreamingService, UnaryService,
};
use tonic::{Request, Response, Status, Streaming};
use tower::Service;

use crate::caller::Codec;

/// A stream of replies.
pub(crate) struct Replies(Pin<Box<dyn Stream<Item = Result<Bytes, Status>> + Send>>);

impl Stream for Replies {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(context)
    }
}

type Answer<T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send>>;
type Handler<Q, A> = Arc<dyn Fn(Request<Q>) -> Answer<A> + Send + Sync>;

/// Returns the path of a method.
pub(crate) fn path(method: &str) -> PathAndQuery {
    format!("/{}/{method}", Probe::NAME).parse().unwrap()
}

/// The service, and its settings.
#[derive(Clone)]
pub(crate) struct Probe {
    unary: Handler<Bytes, Bytes>,
    collect: Handler<Streaming<Bytes>, Bytes>,
    produce: Handler<Bytes, Replies>,
    exchange: Handler<Streaming<Bytes>, Replies>,
    accepts: EnabledCompressionEncodings,
    sends: EnabledCompressionEncodings,
    decoding: Option<usize>,
    encoding: Option<usize>,
}

impl Probe {
    /// Returns a service that echoes: `Collect` joins the requests, and `Produce` answers with the bytes of
    /// the request, one by one.
    pub(crate) fn new() -> Self {
        Self {
            unary: handler(async |request| Ok(Response::new(request.into_inner()))),
            collect: handler(async |request: Request<Streaming<Bytes>>| {
                let mut requests = request.into_inner();
                let mut joined = Vec::new();
                while let Some(message) = requests.message().await? {
                    joined.extend_from_slice(&message);
                }
                Ok(Response::new(joined.into()))
            }),
            produce: handler(async |request: Request<Bytes>| {
                let message = request.into_inner();
                let replies = (0..message.len()).map(move |at| Ok(message.slice(at..=at)));
                Ok(Response::new(stream(tokio_stream::iter(replies))))
            }),
            exchange: handler(async |request: Request<Streaming<Bytes>>| {
                Ok(Response::new(stream(request.into_inner())))
            }),
            accepts: EnabledCompressionEncodings::default(),
            sends: EnabledCompressionEncodings::default(),
            decoding: None,
            encoding: None,
        }
    }

    /// Sets the handler of `Unary`.
    pub(crate) fn unary<F>(self, handle: impl Fn(Request<Bytes>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Response<Bytes>, Status>> + Send + 'static,
    {
        Self { unary: handler(handle), ..self }
    }

    /// Sets the handler of `Collect`.
    pub(crate) fn collect<F>(
        self,
        handle: impl Fn(Request<Streaming<Bytes>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Response<Bytes>, Status>> + Send + 'static,
    {
        Self { collect: handler(handle), ..self }
    }

    /// Sets the handler of `Produce`.
    pub(crate) fn produce<F>(self, handle: impl Fn(Request<Bytes>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Response<Replies>, Status>> + Send + 'static,
    {
        Self { produce: handler(handle), ..self }
    }

    /// Sets the handler of `Exchange`.
    pub(crate) fn exchange<F>(
        self,
        handle: impl Fn(Request<Streaming<Bytes>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Response<Replies>, Status>> + Send + 'static,
    {
        Self { exchange: handler(handle), ..self }
    }

    /// Accepts compressed messages.
    pub(crate) fn accept(mut self, encoding: CompressionEncoding) -> Self {
        self.accepts.enable(encoding);
        self
    }

    /// Sends compressed messages.
    pub(crate) fn send(mut self, encoding: CompressionEncoding) -> Self {
        self.sends.enable(encoding);
        self
    }

    /// Accepts messages of up to `bytes` bytes.
    pub(crate) fn decoding(self, bytes: usize) -> Self {
        Self { decoding: Some(bytes), ..self }
    }

    /// Sends messages of up to `bytes` bytes.
    pub(crate) fn encoding(self, bytes: usize) -> Self {
        Self { encoding: Some(bytes), ..self }
    }

    fn grpc(&self) -> Grpc<Codec> {
        Grpc::new(Codec::default())
            .apply_compression_config(self.accepts, self.sends)
            .apply_max_message_size_config(self.decoding, self.encoding)
    }
}

/// Boxes a stream of replies.
pub(crate) fn stream(replies: impl Stream<Item = Result<Bytes, Status>> + Send + 'static) -> Replies {
    Replies(Box::pin(replies))
}

/// Returns the replies that a channel yields, and the channel's other end.
pub(crate) fn channel() -> (tokio::sync::mpsc::Sender<Result<Bytes, Status>>, Replies) {
    let (sender, replies) = tokio::sync::mpsc::channel(1);
    (sender, stream(tokio_stream::wrappers::ReceiverStream::new(replies)))
}

/// Returns the first message of a stream, or the reason why there is none.
pub(crate) async fn first(replies: &mut Streaming<Bytes>) -> Result<Bytes, Status> {
    replies.next().await.unwrap_or_else(|| Err(Status::not_found("the stream ended")))
}

fn handler<Q, A, F>(handle: impl Fn(Request<Q>) -> F + Send + Sync + 'static) -> Handler<Q, A>
where
    F: Future<Output = Result<Response<A>, Status>> + Send + 'static,
{
    Arc::new(move |request| Box::pin(handle(request)))
}

impl NamedService for Probe {
    const NAME: &'static str = "semantics.Probe";
}

impl Service<http::Request<Body>> for Probe {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (mut grpc, probe) = (self.grpc(), self.clone());
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        Box::pin(async move {
            Ok(match &*method {
                "Unary" => grpc.unary(Method(probe.unary), request).await,
                "Collect" => grpc.client_streaming(Method(probe.collect), request).await,
                "Produce" => grpc.server_streaming(Method(probe.produce), request).await,
                "Exchange" => grpc.streaming(Method(probe.exchange), request).await,
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

/// A handler as the type that tonic calls.
struct Method<Q, A>(Handler<Q, A>);

impl UnaryService<Bytes> for Method<Bytes, Bytes> {
    type Response = Bytes;
    type Future = Answer<Bytes>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        (self.0)(request)
    }
}

impl ClientStreamingService<Bytes> for Method<Streaming<Bytes>, Bytes> {
    type Response = Bytes;
    type Future = Answer<Bytes>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        (self.0)(request)
    }
}

impl ServerStreamingService<Bytes> for Method<Bytes, Replies> {
    type Response = Bytes;
    type ResponseStream = Replies;
    type Future = Answer<Replies>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        (self.0)(request)
    }
}

impl StreamingService<Bytes> for Method<Streaming<Bytes>, Replies> {
    type Response = Bytes;
    type ResponseStream = Replies;
    type Future = Answer<Replies>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        (self.0)(request)
    }
}
