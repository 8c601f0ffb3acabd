//! The codec that does not copy large fields if the message's body collects them.

use std::error::Error;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::{landed, pieces};
use tonic_rdma_verbs::internal::GatherBuf;

/// Encodes and decodes protocol buffers as [`ProstCodec`](tonic_prost::ProstCodec) does, but does not copy large `bytes` fields where
/// [`requests`](super::requests) or [`responses`](super::responses) collects them. Where [`both`](super::both) or
/// [`both_layer`](super::both_layer) delivers messages in the memory that they arrived in, it decodes them there: `Bytes` fields are slices
/// of that memory.
///
/// Generated code names this codec if the build script has `codec_path("tonic_rdma::gather::GatherCodec")`. A client that is written by
/// hand makes a codec for each call:
///
/// ```no_run
/// # use http::uri::PathAndQuery;
/// # use tonic::transport::Channel;
/// # use tonic::{Request, Response, Status};
/// # use tonic_rdma_proto::transfer::{PutReply, PutRequest};
/// use tonic_rdma::gather::{self, GatherCodec};
///
/// # async fn put(channel: Channel, request: PutRequest) -> Result<Response<PutReply>, Status> {
/// let mut grpc = tonic::client::Grpc::new(gather::requests(channel));
/// grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
/// let path = PathAndQuery::from_static("/tonic_rdma.transfer.v1.Transfer/Put");
/// grpc.unary(Request::new(request), path, GatherCodec::<PutRequest, PutReply>::default()).await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GatherCodec<T, U> {
    messages: PhantomData<fn(T) -> U>,
}

impl<T, U> Default for GatherCodec<T, U> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<T, U> Codec for GatherCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = GatherEncoder<T>;
    type Decoder = GatherDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        GatherEncoder { messages: PhantomData }
    }

    fn decoder(&mut self) -> Self::Decoder {
        GatherDecoder { messages: PhantomData }
    }
}

/// The [`Encoder`] of [`GatherCodec`].
#[derive(Clone, Debug)]
pub struct GatherEncoder<T> {
    messages: PhantomData<fn(T)>,
}

impl<T: Message> Encoder for GatherEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let failed = |error| failed("encoded", error);
        let Some(threshold) = pieces::threshold() else { return item.encode(buffer).map_err(failed) };
        let mut gather = GatherBuf::new(buffer, threshold);
        item.encode(&mut gather).map_err(failed)?;
        let (copied, pieces) = gather.finish();
        pieces::add(copied, pieces);
        Ok(())
    }
}

/// The [`Decoder`] of [`GatherCodec`].
#[derive(Clone, Debug)]
pub struct GatherDecoder<U> {
    messages: PhantomData<fn() -> U>,
}

impl<U: Message + Default> Decoder for GatherDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The stub is in one piece, because tonic's buffer is.
        let decoded = match landed::redeem(buffer.chunk())? {
            Some(message) => {
                buffer.advance(buffer.remaining());
                U::decode(message)
            }
            None => U::decode(buffer),
        };
        decoded.map(Some).map_err(|error| failed("decoded", error))
    }
}

fn failed(what: &str, error: impl Error + Send + Sync + 'static) -> Status {
    let mut status = Status::internal(format!("the message can't be {what}: {error}"));
    status.set_source(Arc::new(error));
    status
}
