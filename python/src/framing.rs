//! gRPC's messages in the bodies of requests and responses: a prefix of five bytes before each.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http::{HeaderMap, HeaderValue};
use http_body::{Body as _, Frame};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use tonic::body::Body;

/// Bytes before each message: a flag, which says whether the message is compressed, and its length.
const PREFIX: usize = 5;
/// Messages of this length and more are sent from Python's memory. A copy of a shorter one costs less.
const LARGE: usize = 4096;

/// An encoding of compressed messages, by the number that `grpc.Compression` has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Deflate,
    Gzip,
}

impl Encoding {
    /// What a receiver of this package can read.
    pub(crate) const ACCEPTED: HeaderValue = HeaderValue::from_static("identity,deflate,gzip");

    pub(crate) fn of_number(number: i32) -> Option<Self> {
        match number {
            1 => Some(Self::Deflate),
            2 => Some(Self::Gzip),
            _ => None,
        }
    }

    /// Returns the encoding that the header `grpc-encoding` names.
    fn of_headers(headers: &HeaderMap) -> Result<Option<Self>, Status> {
        match headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
            None | Some(b"identity") => Ok(None),
            Some(b"deflate") => Ok(Some(Self::Deflate)),
            Some(b"gzip") => Ok(Some(Self::Gzip)),
            Some(other) => {
                let other = String::from_utf8_lossy(other);
                Err(Status::unimplemented(format!(
                    "messages are compressed by {other}, which this end can't read"
                )))
            }
        }
    }

    pub(crate) fn name(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Deflate => "deflate",
            Self::Gzip => "gzip",
        })
    }

    fn compress(self, message: &[u8]) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
                encoder.write_all(message)?;
                encoder.finish()
            }
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
                encoder.write_all(message)?;
                encoder.finish()
            }
        }
    }

    fn decompress(self, message: &Message, limit: usize) -> Result<Message, Status> {
        let mut whole = Vec::with_capacity(message.length);
        message.chunks.iter().for_each(|chunk| whole.extend_from_slice(chunk));
        let mut output = Vec::new();
        let most = (limit as u64).saturating_add(1);
        let read = match self {
            Self::Deflate => ZlibDecoder::new(&*whole).take(most).read_to_end(&mut output),
            Self::Gzip => GzDecoder::new(&*whole).take(most).read_to_end(&mut output),
        };
        read.map_err(|error| Status::internal(format!("a compressed message can't be read: {error}")))?;
        within(output.len(), limit)?;
        Ok(Message { length: output.len(), chunks: vec![output.into()] })
    }
}

/// Refuses a received message of more than `limit` bytes.
fn within(length: usize, limit: usize) -> Result<(), Status> {
    if length <= limit {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!("Received message larger than max ({length} vs. {limit})")))
}

/// A message that has arrived, in the memory that it arrived in.
#[derive(Debug, Default)]
pub(crate) struct Message {
    chunks: Vec<Bytes>,
    length: usize,
}

impl Message {
    /// Copies the message to Python's memory. A large copy is made without the interpreter's lock.
    pub(crate) fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        match &*self.chunks {
            [] => Ok(PyBytes::new(py, b"")),
            [only] if only.len() < 16 * LARGE => Ok(PyBytes::new(py, only)),
            chunks => crate::memory::bytes_of(py, chunks, self.length),
        }
    }
}

/// The frames of one message: the message, or its prefix and the message itself.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    first: Option<Bytes>,
    second: Option<Bytes>,
    /// The room that the message takes until it is sent.
    #[allow(dead_code, reason = "dropping it gives the room back")]
    room: Option<OwnedSemaphorePermit>,
}

impl Clone for Frames {
    /// Returns frames of the same bytes, which take no room.
    fn clone(&self) -> Self {
        Self { first: self.first.clone(), second: self.second.clone(), room: None }
    }
}

impl Frames {
    /// Makes the frames of `message`. With an encoding, the message is compressed.
    ///
    /// # Errors
    /// The message has more than `limit` bytes, or more than a prefix can state.
    pub(crate) fn new(
        message: PyBackedBytes,
        encoding: Option<Encoding>,
        limit: usize,
    ) -> Result<Self, Status> {
        let length = message.len();
        if length > limit || u32::try_from(length).is_err() {
            let limit = limit.min(u32::MAX as usize);
            return Err(Status::resource_exhausted(format!(
                "Sent message larger than max ({length} vs. {limit})"
            )));
        }
        if let Some(encoding) = encoding {
            let compressed =
                encoding.compress(&message).map_err(|error| Status::internal(error.to_string()))?;
            if u32::try_from(compressed.len()).is_err() {
                return Err(Status::resource_exhausted("the compressed message has 4 GiB or more"));
            }
            return Ok(Self {
                first: Some(prefix(true, compressed.len(), 0)),
                second: Some(compressed.into()),
                room: None,
            });
        }
        if length < LARGE {
            let mut whole = BytesMut::from(prefix(false, length, length));
            whole.put_slice(&message);
            return Ok(Self { first: Some(whole.freeze()), second: None, room: None });
        }
        Ok(Self {
            first: Some(prefix(false, length, 0)),
            second: Some(Bytes::from_owner(message)),
            room: None,
        })
    }

    /// Returns the frames in `room`.
    pub(crate) fn within(self, room: OwnedSemaphorePermit) -> Self {
        Self { room: Some(room), ..self }
    }

    pub(crate) fn length(&self) -> usize {
        [&self.first, &self.second].into_iter().flatten().map(Bytes::len).sum()
    }

    pub(crate) fn next(&mut self) -> Option<Bytes> {
        let next = self.first.take().or_else(|| self.second.take());
        if self.is_empty() {
            self.room = None;
        }
        next
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none() && self.second.is_none()
    }
}

/// Makes a prefix, with room for `more` bytes.
fn prefix(compressed: bool, length: usize, more: usize) -> Bytes {
    let mut prefix = BytesMut::with_capacity(PREFIX + more);
    prefix.put_u8(compressed.into());
    prefix.put_u32(length as u32);
    prefix.freeze()
}

/// The body of a request or a response whose one message is there, with trailers or without.
#[derive(Debug)]
pub(crate) struct WholeBody {
    pub(crate) frames: Frames,
    pub(crate) trailers: Option<HeaderMap>,
    /// Set when the body is polled.
    pub(crate) begun: Option<Arc<AtomicBool>>,
}

impl http_body::Body for WholeBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(begun) = self.begun.take() {
            begun.store(true, Ordering::Release);
        }
        let next = self.frames.next().map(Frame::data);
        Poll::Ready(next.or_else(|| self.trailers.take().map(Frame::trailers)).map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.trailers.is_none()
    }
}

/// The messages of a body.
#[derive(Debug)]
pub(crate) struct Messages {
    body: Body,
    chunks: VecDeque<Bytes>,
    /// Bytes in `chunks`.
    there: usize,
    encoding: Option<Encoding>,
    limit: usize,
    /// These are requests, which have no trailers to show that they are complete.
    of_request: bool,
    /// The first message, or what came instead, until it is taken.
    first: Option<Result<Option<Message>, Status>>,
    begun: bool,
    /// What came after the last message.
    pub(crate) trailers: Option<HeaderMap>,
}

impl Messages {
    /// # Errors
    /// The headers name an encoding that is not known.
    pub(crate) fn new(
        headers: &HeaderMap,
        body: Body,
        limit: usize,
        of_request: bool,
    ) -> Result<Self, Status> {
        let encoding = Encoding::of_headers(headers)?;
        Ok(Self {
            body,
            chunks: VecDeque::new(),
            there: 0,
            encoding,
            limit,
            of_request,
            first: None,
            begun: false,
            trailers: None,
        })
    }

    /// Returns the next message; `None` after the last one.
    ///
    /// # Errors
    /// The connection or the peer ended the call, or a message can't be read.
    pub(crate) async fn next(&mut self) -> Result<Option<Message>, Status> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// Drops what has arrived and was not taken.
    pub(crate) fn clear(&mut self) {
        (self.first, self.there) = (None, 0);
        self.chunks.clear();
    }

    /// Reads the first message, and keeps it.
    pub(crate) fn read_ahead(&mut self, context: &mut Context<'_>) {
        if !self.begun
            && let Poll::Ready(first) = self.poll_next(context)
        {
            self.first = Some(first);
        }
    }

    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Message>, Status>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(first);
        }
        let next = std::task::ready!(self.poll_body(context));
        self.begun = true;
        Poll::Ready(next)
    }

    fn poll_body(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Message>, Status>> {
        loop {
            if let Some(message) = self.take()? {
                return Poll::Ready(Ok(Some(message)));
            }
            let Some(frame) = std::task::ready!(Pin::new(&mut self.body).poll_frame(context)) else {
                return Poll::Ready(match self.there {
                    // hyper has a reset without an error for the end of a body.
                    0 if self.of_request && !self.body.is_end_stream() => {
                        Err(Status::cancelled("the client ended the call before its requests"))
                    }
                    0 => Ok(None),
                    _ => Err(Status::internal("the peer ended the call within a message")),
                });
            };
            match frame?.into_data() {
                Ok(data) => {
                    self.there += data.len();
                    self.chunks.push_back(data);
                }
                Err(frame) => self.trailers = frame.into_trailers().ok(),
            }
        }
    }

    /// Takes the first message, if it is there.
    fn take(&mut self) -> Result<Option<Message>, Status> {
        if self.there < PREFIX {
            return Ok(None);
        }
        let mut prefix = [0; PREFIX];
        let bytes = self.chunks.iter().flat_map(|chunk| chunk.iter().take(PREFIX));
        prefix.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        let [flag, length @ ..] = prefix;
        let length = u32::from_be_bytes(length) as usize;
        within(length, self.limit)?;
        if self.there < PREFIX + length {
            return Ok(None);
        }
        self.split(PREFIX);
        let message = Message { chunks: self.split(length), length };
        match (flag, self.encoding) {
            (0, _) => Ok(Some(message)),
            (1, Some(encoding)) => encoding.decompress(&message, self.limit).map(Some),
            _ => Err(Status::internal(format!(
                "a message has the flag {flag}, and the call has no compression"
            ))),
        }
    }

    /// Takes the first `length` bytes.
    fn split(&mut self, mut length: usize) -> Vec<Bytes> {
        self.there -= length;
        let mut taken = Vec::with_capacity(1);
        while length > 0 {
            let Some(chunk) = self.chunks.front_mut() else { break };
            let part = chunk.split_to(length.min(chunk.len()));
            length -= part.len();
            if !chunk.has_remaining() {
                self.chunks.pop_front();
            }
            if !part.is_empty() {
                taken.push(part);
            }
        }
        taken
    }
}
