//! The client of [`Probe`](crate::probe::Probe), as generated code would have it.

use bytes::Bytes;
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codec::CompressionEncoding;
use tonic::{IntoRequest, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::channel::{AnyChannel, BoxError};
use crate::probe::path;

/// Codec of both ends: a message of one field of bytes.
pub(crate) type Codec = ProstCodec<Bytes, Bytes>;

/// A client over any channel.
#[derive(Clone, Debug)]
pub(crate) struct Caller<T = AnyChannel>(Grpc<T>);

impl<T> Caller<T> {
    pub(crate) fn new(channel: T) -> Self {
        Self(Grpc::new(channel))
    }

    /// Accepts messages of up to `bytes` bytes.
    pub(crate) fn decoding(self, bytes: usize) -> Self {
        Self(self.0.max_decoding_message_size(bytes))
    }

    /// Sends messages of up to `bytes` bytes.
    pub(crate) fn encoding(self, bytes: usize) -> Self {
        Self(self.0.max_encoding_message_size(bytes))
    }

    /// Sends compressed messages.
    pub(crate) fn send(self, encoding: CompressionEncoding) -> Self {
        Self(self.0.send_compressed(encoding))
    }

    /// Accepts compressed messages.
    pub(crate) fn accept(self, encoding: CompressionEncoding) -> Self {
        Self(self.0.accept_compressed(encoding))
    }
}

impl<T> Caller<T>
where
    T: GrpcService<Body>,
    T::Error: Into<BoxError>,
    T::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<BoxError> + Send,
{
    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.0.ready().await;
        ready.map_err(|error| Status::unknown(format!("Service was not ready: {}", error.into())))
    }

    /// Calls `Unary`.
    pub(crate) async fn unary(
        &mut self,
        request: impl IntoRequest<Bytes>,
    ) -> Result<Response<Bytes>, Status> {
        self.unary_at(path("Unary"), request).await
    }

    /// Calls any path as a unary method.
    pub(crate) async fn unary_at(
        &mut self,
        path: http::uri::PathAndQuery,
        request: impl IntoRequest<Bytes>,
    ) -> Result<Response<Bytes>, Status> {
        self.ready().await?;
        self.0.unary(request.into_request(), path, Codec::default()).await
    }

    /// Calls `Unary`, and returns the reply without its metadata.
    pub(crate) async fn echo(&mut self, message: impl Into<Bytes>) -> Result<Bytes, Status> {
        Ok(self.unary(Request::new(message.into())).await?.into_inner())
    }

    /// Calls `Collect`, whose requests are a stream.
    pub(crate) async fn collect<S>(&mut self, request: Request<S>) -> Result<Response<Bytes>, Status>
    where
        S: Stream<Item = Bytes> + Send + 'static,
    {
        self.ready().await?;
        self.0.client_streaming(request, path("Collect"), Codec::default()).await
    }

    /// Calls `Produce`, whose replies are a stream.
    pub(crate) async fn produce(
        &mut self,
        request: impl IntoRequest<Bytes>,
    ) -> Result<Response<Streaming<Bytes>>, Status> {
        self.ready().await?;
        self.0.server_streaming(request.into_request(), path("Produce"), Codec::default()).await
    }

    /// Calls `Exchange`, which has streams both ways.
    pub(crate) async fn exchange<S>(
        &mut self,
        request: Request<S>,
    ) -> Result<Response<Streaming<Bytes>>, Status>
    where
        S: Stream<Item = Bytes> + Send + 'static,
    {
        self.ready().await?;
        self.0.streaming(request, path("Exchange"), Codec::default()).await
    }
}
