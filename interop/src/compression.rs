//! Compression of single messages. tonic compresses all messages of a call or none, and returns them
//! decompressed. The official cases need more, so the functions here read the flags of messages, and
//! decompress each outgoing message that is to go plain.
//!
//! The decompressed content and the result of the call stay the same.

use std::collections::VecDeque;
use std::io::Read as _;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::{BufMut as _, Bytes, BytesMut};
use flate2::read::GzDecoder;
use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic_rdma_verbs::unstable::lock;

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// Flags of the received messages: in a request's extensions on a server, in a response's extensions on a
/// client.
#[derive(Clone, Debug)]
pub(crate) struct Received(pub(crate) Flags);

/// Flags of the sent messages, in a response's extensions on a client.
#[derive(Clone, Debug)]
pub(crate) struct Sent(pub(crate) Flags);

/// Flags for the messages to send, in order, if compression is on. A client puts them into the extensions of
/// a request, a server into those of a response. Messages without a flag are sent in tonic's way.
#[derive(Clone, Debug)]
pub(crate) struct Wanted(pub(crate) Flags);

/// Makes a call of a client. The request may have [`Wanted`] among its extensions, and the response has
/// [`Received`] and [`Sent`].
pub(crate) async fn at_client<E>(
    mut request: Request,
    call: impl AsyncFnOnce(Request) -> Result<Response, E>,
) -> Result<Response, E> {
    if let Some(Wanted(wanted)) = request.extensions_mut().remove::<Wanted>() {
        request = request.map(|body| as_wanted(body, wanted));
    }
    let (sent, received) = (Flags::default(), Flags::default());
    let observed_request = request.map(|body| observed(body, sent.clone()));
    let mut response = call(observed_request).await?;
    response.extensions_mut().insert(Sent(sent));
    response.extensions_mut().insert(Received(received.clone()));
    Ok(response.map(|body| observed(body, received)))
}

/// Answers a call at a server. The request has [`Received`] among its extensions, and the response may have
/// [`Wanted`].
pub(crate) async fn at_server<E>(
    mut request: Request,
    answer: impl AsyncFnOnce(Request) -> Result<Response, E>,
) -> Result<Response, E> {
    let received = Flags::default();
    request.extensions_mut().insert(Received(received.clone()));
    let mut response = answer(request.map(|body| observed(body, received))).await?;
    Ok(match response.extensions_mut().remove::<Wanted>() {
        Some(Wanted(wanted)) => response.map(|body| as_wanted(body, wanted)),
        None => response,
    })
}

/// Returns a body that adds the flags of its messages to `flags`.
fn observed(body: Body, flags: Flags) -> Body {
    let mut scanner = Scanner::new(flags);
    Body::new(body.map_frame(move |frame| {
        if let Some(data) = frame.data_ref() {
            scanner.scan(data);
        }
        frame
    }))
}

/// Returns a body that decompresses the messages whose flag in `wanted` is false.
fn as_wanted(body: Body, wanted: Flags) -> Body {
    Body::new(body.map_frame(move |frame| frame.map_data(|data| without_unwanted(data, &wanted))))
}

/// Number of bytes before each message: a flag of compression, and four bytes of length.
const PREFIX: usize = 5;

/// Maximum number of stored flags. Later flags are dropped, so that a peer can't fill memory.
const WAITING: usize = 64 << 10;

/// The compression flags of messages, in order. Clones share one queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    shared: Arc<Mutex<VecDeque<bool>>>,
}

impl Flags {
    /// Removes the first flag, and returns it.
    pub(crate) fn next(&self) -> Option<bool> {
        self.lock().pop_front()
    }

    /// Removes all flags, and returns them.
    pub(crate) fn rest(&self) -> Vec<bool> {
        self.lock().drain(..).collect()
    }

    /// Adds the flag of the next message.
    pub(crate) fn push(&self, compressed: bool) {
        let mut waiting = self.lock();
        if waiting.len() < WAITING {
            waiting.push_back(compressed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<bool>> {
        lock(&self.shared)
    }
}

impl<const COUNT: usize> From<[bool; COUNT]> for Flags {
    fn from(flags: [bool; COUNT]) -> Self {
        Self { shared: Arc::new(Mutex::new(flags.into())) }
    }
}

/// Finds the flags in a body, with any division into frames.
#[derive(Debug)]
struct Scanner {
    prefix: [u8; PREFIX],
    /// Number of bytes of the prefix that have arrived.
    filled: usize,
    /// Number of bytes of the message that are missing.
    remaining: usize,
    flags: Flags,
}

impl Scanner {
    fn new(flags: Flags) -> Self {
        Self { prefix: [0; PREFIX], filled: 0, remaining: 0, flags }
    }

    fn scan(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let skipped = self.remaining.min(data.len());
            self.remaining -= skipped;
            data = &data[skipped..];
            let taken = data.len().min(PREFIX - self.filled);
            self.prefix[self.filled..self.filled + taken].copy_from_slice(&data[..taken]);
            self.filled += taken;
            data = &data[taken..];
            if self.filled == PREFIX {
                let (compressed, length) = parse(self.prefix);
                self.flags.push(compressed);
                (self.filled, self.remaining) = (0, length);
            }
        }
    }
}

/// Returns whether a message is compressed, and its length.
fn parse([flag, length @ ..]: [u8; PREFIX]) -> (bool, usize) {
    (flag != 0, u32::from_be_bytes(length) as usize)
}

/// Returns `data` after decompression of the messages whose flag in `wanted` is false.
///
/// tonic's encoder puts whole messages into a frame, and the services that send some messages plain use gzip.
/// Other data stay unchanged, and the peer, which checks the flags, reports a failure. The messages can be
/// trusted, because tonic has compressed them in this process.
fn without_unwanted(mut data: Bytes, wanted: &Flags) -> Bytes {
    let mut result = BytesMut::with_capacity(data.len());
    while let Some((compressed, length)) = data.first_chunk().map(|prefix| parse(*prefix))
        && length <= data.len() - PREFIX
    {
        let message = data.split_to(PREFIX + length);
        let (is_unwanted, mut plain) = (wanted.next() == Some(false) && compressed, Vec::new());
        if is_unwanted && GzDecoder::new(&message[PREFIX..]).read_to_end(&mut plain).is_ok() {
            result.put_u8(0);
            result.put_u32(plain.len() as u32);
            result.put_slice(&plain);
        } else {
            result.put_slice(&message);
        }
    }
    result.put_slice(&data);
    result.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn flags_are_found_with_any_division_of_the_body() {
        let mut body = Vec::new();
        let messages = [(true, 300usize), (false, 0), (true, 0), (false, 1), (true, 5)];
        for (compressed, length) in messages {
            body.push(u8::from(compressed));
            body.extend((length as u32).to_be_bytes());
            body.extend(std::iter::repeat_n(1, length));
        }
        for size in [1, 2, 3, 4, 5, 6, 7, 100, 304, 305, 306, body.len()] {
            let flags = Flags::default();
            let mut scanner = Scanner::new(flags.clone());
            body.chunks(size).for_each(|chunk| scanner.scan(chunk));
            assert_eq!(flags.rest(), messages.map(|(compressed, _)| compressed), "frames of {size} bytes");
        }
    }

    #[test]
    fn stored_flags_are_bounded() {
        let flags = Flags::default();
        let mut scanner = Scanner::new(flags.clone());
        for _ in 0..WAITING + 10 {
            scanner.scan(&[0; PREFIX]);
        }
        assert_eq!(flags.rest().len(), WAITING);
        assert_eq!(flags.next(), None);
    }
    fn message(compressed: bool, text: &[u8]) -> Vec<u8> {
        let mut body = text.to_vec();
        if compressed {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            body = encoder.finish().unwrap();
        }
        let mut message = vec![u8::from(compressed)];
        message.extend((body.len() as u32).to_be_bytes());
        message.extend(body);
        message
    }

    #[test]
    fn unwanted_compression_is_removed() {
        let data =
            [message(true, b"one"), message(true, b"two"), message(false, b"three"), message(true, b"")];
        let expected =
            [message(true, b"one"), message(false, b"two"), message(false, b"three"), message(true, b"")];
        let result = without_unwanted(data.concat().into(), &Flags::from([true, false, false]));
        assert_eq!(result, expected.concat());
    }

    #[test]
    fn other_data_stay_unchanged() {
        for data in [&[1, 0, 0][..], &[1, 0, 0, 0, 9, 1], &[1, 0, 0, 0, 1, 0]] {
            let data = Bytes::copy_from_slice(data);
            assert_eq!(without_unwanted(data.clone(), &Flags::from([false])), data);
        }
    }
}
