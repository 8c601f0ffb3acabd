//! The codec that does not copy large fields if the message's body collects them, and the list in which these pieces go to the body.

use std::cell::RefCell;
use std::error::Error;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::landed;
use tonic_rdma_verbs::internal::{GatherBuf, LargePart};

/// Encodes and decodes protocol buffers as [`ProstCodec`](tonic_prost::ProstCodec) does, but does not copy large `bytes` fields where
/// [`requests`](super::requests) or [`responses`](super::responses) collects them. Where [`both`](super) or
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
        let Some(threshold) = threshold() else { return item.encode(buffer).map_err(failed) };
        let mut gather = GatherBuf::new(buffer, threshold);
        item.encode(&mut gather).map_err(failed)?;
        let (copied, pieces) = gather.finish();
        add(copied, pieces);
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

/// A message that is not whole in tonic's buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Partial {
    /// The number of the message among the messages that were encoded during the poll.
    pub(super) index: usize,
    /// The number of its bytes in tonic's buffer, without the prefix of the message.
    pub(super) copied: usize,
    /// The pieces that are not in tonic's buffer.
    pub(super) pieces: Vec<LargePart>,
}

/// tonic calls the codec inside the body's `poll_frame`, on one thread, and returns everything that was encoded. So the body opens a list
/// before the poll, the codec adds its pieces to the list, and the body takes the list after the poll.
#[derive(Debug)]
struct PieceList {
    /// The shortest content of a field that is not copied, in bytes.
    threshold: usize,
    messages: usize,
    partial: Vec<Partial>,
}

thread_local! {
    static LIST: RefCell<Option<PieceList>> = const { RefCell::new(None) };
}

/// Runs `poll` with an empty list, and returns the messages that were added to it. Fields of `threshold` bytes or more are to be added.
pub(super) fn collect<R>(threshold: usize, poll: impl FnOnce() -> R) -> (R, Vec<Partial>) {
    /// Puts the list of an outer body back, also after a panic in `poll`.
    struct Outer(Option<PieceList>);
    impl Drop for Outer {
        fn drop(&mut self) {
            LIST.with_borrow_mut(|list| *list = self.0.take());
        }
    }
    let list = PieceList { threshold, messages: 0, partial: Vec::new() };
    let outer = Outer(LIST.with_borrow_mut(|outer| outer.replace(list)));
    let result = poll();
    let list = LIST.with_borrow_mut(Option::take);
    drop(outer);
    (result, list.map(|list| list.partial).unwrap_or_default())
}

/// Returns the threshold of the body that collects pieces which are not copied, if there is such a body.
pub(super) fn threshold() -> Option<usize> {
    LIST.with_borrow(|list| list.as_ref().map(|list| list.threshold))
}

/// Notes that a message was encoded: `copied` bytes of it are in tonic's buffer, and `pieces` are not.
pub(super) fn add(copied: usize, pieces: Vec<LargePart>) {
    LIST.with_borrow_mut(|list| {
        if let Some(list) = list {
            let index = list.messages;
            list.messages += 1;
            if !pieces.is_empty() {
                list.partial.push(Partial { index, copied, pieces });
            }
        }
    });
}

#[cfg(test)]
mod pieces_tests {
    use bytes::Bytes;

    use super::*;

    fn piece() -> Vec<LargePart> {
        vec![LargePart { at: 1, bytes: Bytes::from_static(b"x") }]
    }

    #[test]
    fn lists_nest_and_end_with_their_poll() {
        assert_eq!(threshold(), None);
        add(1, piece());
        let ((), outer) = collect(9, || {
            assert_eq!(threshold(), Some(9));
            add(1, Vec::new());
            let ((), inner) = collect(8, || add(2, piece()));
            assert_eq!(inner, [Partial { index: 0, copied: 2, pieces: piece() }]);
            add(3, piece());
        });
        assert_eq!(outer, [Partial { index: 1, copied: 3, pieces: piece() }]);
        assert_eq!(threshold(), None);
    }

    #[test]
    fn a_panic_ends_the_list() {
        let caught = std::panic::catch_unwind(|| collect(7, || std::panic::resume_unwind(Box::new(()))));
        assert!(caught.is_err());
        assert_eq!(threshold(), None);
    }
}
