//! The codec and the body of gathered messages. The codec leaves large parts out of tonic's buffer, and adds
//! them to a list of the thread; the body takes the list, and puts the parts back in their order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::error::Error;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body::Frame;
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::landed::{self, NativeFlag};
use super::{NATIVE_THRESHOLD, THRESHOLD};
use tonic_rdma_verbs::unstable::{GatherBuf, LargePart};

/// Bytes before each message in the body: a flag and the length of the message.
const PREFIX: usize = 5;

/// A body of encoded messages, with the large parts that the codec did not copy.
#[derive(Debug)]
pub(super) struct GatherBody {
    inner: Body,
    ready: VecDeque<Bytes>,
    native: NativeFlag,
}

impl GatherBody {
    /// Makes a body of the messages of `inner`. Where `native` is set, each field keeps its own frame.
    pub(super) fn new(inner: Body, native: NativeFlag) -> Self {
        Self { inner, ready: VecDeque::new(), native }
    }
}

impl http_body::Body for GatherBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(data) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let transport = if self.native.is_set() { Transport::Native } else { Transport::Http2 };
        let (polled, partial) = collect(transport.threshold(), || {
            http_body::Body::poll_frame(Pin::new(&mut self.inner), context)
        });
        if partial.is_empty() {
            return polled;
        }
        let data = match polled {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().map_err(|_| misplaced()),
            Poll::Ready(Some(Err(status))) => Err(status),
            Poll::Ready(None) | Poll::Pending => Err(misplaced()),
        };
        Poll::Ready(match data.and_then(|data| assemble(data, partial, transport)) {
            Ok(ready) => {
                self.ready = ready;
                self.ready.pop_front().map(|data| Ok(Frame::data(data)))
            }
            Err(status) => Some(Err(status)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_empty() && http_body::Body::is_end_stream(&self.inner)
    }
}

/// Returns the error of a body whose messages do not fit the large parts, because another body encoded a
/// message while this body was polled.
fn misplaced() -> Status {
    Status::internal(
        "a message was encoded with GatherCodec for a body that is not gathered, inside one that is",
    )
}

/// The transport of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    /// HTTP/2, or any other one.
    Http2,
    /// A connection without HTTP/2. It takes each message apart at the large fields.
    Native,
}

impl Transport {
    /// Returns the shortest content of a field that is not copied.
    fn threshold(self) -> usize {
        match self {
            Self::Http2 => THRESHOLD,
            Self::Native => NATIVE_THRESHOLD,
        }
    }
}

/// Puts the large parts into the messages of `data`.
fn assemble(mut data: Bytes, partial: Vec<Partial>, transport: Transport) -> Result<VecDeque<Bytes>, Status> {
    let mut output = Output { transport, frames: VecDeque::new(), copied: BytesMut::new() };
    let mut partial = partial.into_iter().peekable();
    for index in 0.. {
        if data.is_empty() {
            break;
        }
        if data.len() < PREFIX {
            return Err(misplaced());
        }
        let copied = (&data[1..PREFIX]).get_u32() as usize;
        if data[0] != 0 || data.len() - PREFIX < copied {
            return Err(misplaced());
        }
        let mut message = data.split_to(PREFIX + copied);
        let Some(found) = partial.next_if(|partial| partial.index == index) else {
            output.small(message);
            output.end_of_message();
            continue;
        };
        if found.copied != copied {
            return Err(misplaced());
        }
        let length = copied + found.parts.iter().map(|part| part.bytes.len()).sum::<usize>();
        let length = u32::try_from(length).map_err(|_| {
            Status::resource_exhausted(format!(
                "a message of {length} bytes, of which {} can be sent",
                u32::MAX
            ))
        })?;
        message.advance(PREFIX);
        output.copied.put_u8(0);
        output.copied.put_u32(length);
        let mut at = 0;
        for part in found.parts {
            output.small(message.split_to(part.at - at));
            output.large(part.bytes);
            at = part.at;
        }
        output.small(message);
        output.end_of_message();
    }
    if partial.next().is_some() {
        return Err(misplaced());
    }
    Ok(output.finish())
}

/// The frames of the body: large parts in their own frames, small ones copied together.
#[derive(Debug)]
struct Output {
    transport: Transport,
    frames: VecDeque<Bytes>,
    copied: BytesMut,
}

impl Output {
    /// The longest part of tonic's buffer that is copied once more, to share a frame with other parts, in
    /// bytes. Up to this length the copy costs less than a frame.
    const COPY: usize = 4096;
    /// A frame before a large one is filled up to a multiple of this length, a page. The large part then has
    /// the same offset within a page in the receiver's buffers as in a body that was copied whole. If the two
    /// offsets differ by a few bytes, some processors copy 15 times slower (`copy.rs` in the package
    /// `verbs`).
    const ALIGNMENT: usize = 4096;

    fn small(&mut self, bytes: Bytes) {
        if bytes.len() > Self::COPY {
            self.large(bytes);
        } else {
            self.copied.extend_from_slice(&bytes);
        }
    }

    fn large(&mut self, mut bytes: Bytes) {
        if !self.copied.is_empty() && self.transport == Transport::Http2 {
            let missing = self.copied.len().next_multiple_of(Self::ALIGNMENT) - self.copied.len();
            self.copied.extend_from_slice(&bytes.split_to(missing.min(bytes.len())));
        }
        self.flush();
        if !bytes.is_empty() {
            self.frames.push_back(bytes);
        }
    }

    /// Begins the next message in a frame of its own, where the transport takes messages apart.
    fn end_of_message(&mut self) {
        if self.transport == Transport::Native {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if !self.copied.is_empty() {
            self.frames.push_back(self.copied.split().freeze());
        }
    }

    fn finish(mut self) -> VecDeque<Bytes> {
        self.flush();
        self.frames
    }
}

/// Encodes and decodes protocol buffers as [`ProstCodec`](tonic_prost::ProstCodec) does, but does not copy
/// large `bytes` fields where [`GatherRequests`](super::GatherRequests) or
/// [`GatherResponses`](super::GatherResponses) collects them. Where [`GatherBoth`](super::GatherBoth) or
/// [`GatherBothLayer`](super::GatherBothLayer) delivers messages in the memory that they arrived in, it
/// decodes them there: `Bytes` fields are slices of that memory.
///
/// Generated code names this codec if the build script has `codec_path("tonic_rdma::gather::GatherCodec")`. A
/// client that is written by hand makes a codec for each call:
///
/// ```no_run
/// # use http::uri::PathAndQuery;
/// # use tonic::transport::Channel;
/// # use tonic::{Request, Response, Status};
/// # use tonic_rdma_proto::transfer::{PutReply, PutRequest};
/// use tonic_rdma::gather::{self, GatherCodec};
///
/// # async fn put(channel: Channel, request: PutRequest) -> Result<Response<PutReply>, Status> {
/// let mut grpc = tonic::client::Grpc::new(gather::GatherRequests::new(channel));
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
        let (copied, parts) = gather.finish();
        add(copied, parts);
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
        // The stub is in one segment, because tonic's buffer is.
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
    /// The parts that are not in tonic's buffer.
    pub(super) parts: Vec<LargePart>,
}

/// tonic calls the codec inside the body's `poll_frame`, on one thread, and returns everything that was
/// encoded. So the body opens a list before the poll, the codec adds large parts to the list, and the body
/// takes the list after the poll.
#[derive(Debug)]
struct PartList {
    /// The shortest content of a field that is not copied, in bytes.
    threshold: usize,
    messages: usize,
    partial: Vec<Partial>,
}

thread_local! {
    static LIST: RefCell<Option<PartList>> = const { RefCell::new(None) };
}

/// Runs `poll` with an empty list, and returns the messages that were added to it. Fields of `threshold`
/// bytes or more are to be added.
pub(super) fn collect<R>(threshold: usize, poll: impl FnOnce() -> R) -> (R, Vec<Partial>) {
    /// Puts the list of an outer body back, also after a panic in `poll`.
    struct Outer(Option<PartList>);
    impl Drop for Outer {
        fn drop(&mut self) {
            LIST.with_borrow_mut(|list| *list = self.0.take());
        }
    }
    let list = PartList { threshold, messages: 0, partial: Vec::new() };
    let outer = Outer(LIST.with_borrow_mut(|outer| outer.replace(list)));
    let result = poll();
    let list = LIST.with_borrow_mut(Option::take);
    drop(outer);
    (result, list.map(|list| list.partial).unwrap_or_default())
}

/// Returns the threshold of the body that collects large parts, if there is such a body.
pub(super) fn threshold() -> Option<usize> {
    LIST.with_borrow(|list| list.as_ref().map(|list| list.threshold))
}

/// Returns the bytes of large parts that the body which polls on this thread has left out of tonic's buffer,
/// since its poll began; 0 without such a body. For what counts bytes between it and the encoder.
pub fn gathered_bytes() -> usize {
    LIST.with_borrow(|list| {
        let parts = list.iter().flat_map(|list| &list.partial).flat_map(|partial| &partial.parts);
        parts.map(|part| part.bytes.len()).sum()
    })
}

/// Notes that a message was encoded: `copied` bytes of it are in tonic's buffer, and `parts` are not.
pub(super) fn add(copied: usize, parts: Vec<LargePart>) {
    LIST.with_borrow_mut(|list| {
        if let Some(list) = list {
            let index = list.messages;
            list.messages += 1;
            if !parts.is_empty() {
                list.partial.push(Partial { index, copied, parts });
            }
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use tonic_rdma_verbs::unstable::LargePart;

    /// Returns `content` as a message of a body.
    fn framed(content: &[u8]) -> Vec<u8> {
        let mut framed = vec![0];
        framed.put_u32(content.len() as u32);
        framed.extend_from_slice(content);
        framed
    }

    fn partial(index: usize, copied: usize, parts: &[(usize, &'static [u8])]) -> Partial {
        let part = |&(at, bytes)| LargePart { at, bytes: Bytes::from_static(bytes) };
        Partial { index, copied, parts: parts.iter().map(part).collect() }
    }

    #[test]
    fn pieces_are_put_into_their_places() {
        let data = [framed(b"one"), framed(b"abef"), framed(b""), framed(b"xy")].concat();
        let partial = vec![partial(1, 4, &[(2, b"cd"), (4, b"gh")]), partial(3, 2, &[(0, b"-"), (0, b"+")])];
        let frames = assemble(data.into(), partial, Transport::Http2).unwrap();
        let whole = [framed(b"one"), framed(b"abcdefgh"), framed(b""), framed(b"-+xy")].concat();
        assert_eq!(frames.iter().flatten().copied().collect::<Vec<_>>(), whole);
    }

    #[test]
    fn a_large_piece_is_not_copied() {
        let large = Bytes::from(vec![1; 100_000]);
        let long = vec![2; Output::COPY + 1];
        let parts = vec![LargePart { at: 0, bytes: large.clone() }];
        let frames = assemble(
            framed(&long).into(),
            vec![Partial { index: 0, copied: long.len(), parts }],
            Transport::Http2,
        )
        .unwrap();
        let lengths: Vec<_> = frames.iter().map(Bytes::len).collect();
        let moved = Output::ALIGNMENT - PREFIX;
        assert_eq!(lengths, [Output::ALIGNMENT, large.len() - moved, long.len()]);
        assert_eq!(frames[1].as_ptr(), large[moved..].as_ptr());
    }

    #[test]
    fn without_http2_each_message_and_each_large_piece_has_its_own_frames() {
        let large = Bytes::from(vec![1; 10_000]);
        let data = [framed(b"one"), framed(b"abcd"), framed(b"two")].concat();
        let parts =
            vec![LargePart { at: 2, bytes: large.clone() }, LargePart { at: 4, bytes: large.clone() }];
        let partial = vec![Partial { index: 1, copied: 4, parts }];
        let frames = assemble(data.into(), partial, Transport::Native).unwrap();
        let lengths: Vec<_> = frames.iter().map(Bytes::len).collect();
        assert_eq!(lengths, [PREFIX + 3, PREFIX + 2, large.len(), 2, large.len(), PREFIX + 3]);
        assert!([2, 4].iter().all(|&index| frames[index].as_ptr() == large.as_ptr()));
        assert_eq!((&frames[1][1..PREFIX]).get_u32() as usize, 4 + 2 * large.len());
    }

    #[test]
    fn messages_that_do_not_fit_the_pieces_are_an_error() {
        let data = Bytes::from(framed(b"abcd"));
        let fits = || vec![partial(0, 4, &[(2, b"-")])];
        assert!(assemble(data.clone(), fits(), Transport::Native).is_ok());
        for (data, partial) in [
            (data.clone(), vec![partial(0, 3, &[(2, b"-")])]),
            (data.clone(), vec![partial(1, 4, &[(2, b"-")])]),
            (data.slice(..data.len() - 1), fits()),
            (data.slice(..3), fits()),
            (Bytes::from([vec![1], data[1..].to_vec()].concat()), fits()),
        ] {
            assert_eq!(assemble(data, partial, Transport::Http2).unwrap_err().code(), tonic::Code::Internal);
        }
    }
}

#[cfg(test)]
mod pieces_tests {
    use bytes::Bytes;

    use super::*;

    fn part() -> Vec<LargePart> {
        vec![LargePart { at: 1, bytes: Bytes::from_static(b"x") }]
    }

    #[test]
    fn lists_nest_and_end_with_their_poll() {
        assert_eq!(threshold(), None);
        add(1, part());
        let ((), outer) = collect(9, || {
            assert_eq!(threshold(), Some(9));
            add(1, Vec::new());
            let ((), inner) = collect(8, || {
                add(2, part());
                assert_eq!(gathered_bytes(), 1);
            });
            assert_eq!(gathered_bytes(), 0, "those of the inner body are not those of the outer one");
            assert_eq!(inner, [Partial { index: 0, copied: 2, parts: part() }]);
            add(3, part());
        });
        assert_eq!(outer, [Partial { index: 1, copied: 3, parts: part() }]);
        assert_eq!(threshold(), None);
    }

    #[test]
    fn a_panic_ends_the_list() {
        let caught = std::panic::catch_unwind(|| collect(7, || std::panic::resume_unwind(Box::new(()))));
        assert!(caught.is_err());
        assert_eq!(threshold(), None);
    }
}
