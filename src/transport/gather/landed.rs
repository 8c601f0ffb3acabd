//! Landed messages: large messages of native calls that reach their decoder as [`Bytes`] over the registered
//! memory that they arrived in.
//!
//! tonic gives a decoder its own copy of a message. [`GatherCodec`](crate::gather::GatherCodec) gets the
//! arrived memory another way, whose parts are in this module. It does no IO.
//!
//! ```text
//!  wrapper of the client, layer of the server     ask for landed messages, with a limit of their length: Landing
//!       │ in the extensions of the request
//!       ▼
//!  stream: one offer is one message ── checks the limit, takes memory of the budget, READs ──▶ Part::Message
//!       │
//!       ▼
//!  body: Presenter::present keeps the message, and returns a stub of a few bytes, which tonic takes for the message
//!       │ on the same thread, within the same poll
//!       ▼
//!  decoder of GatherCodec: redeem finds the message by its stub, and decodes the bytes in place
//! ```
//!
//! # How native calls use it
//!
//! - The client's call looks for a [`Landing`] in the extensions of its `http::Request`. If there is one, it
//!   calls `Stream::land` when it has opened the stream. If there is a [`NativeFlag`], it sets it before it
//!   polls the body.
//! - The server puts a [`LandingSwitch`] of the stream into the extensions of each request.
//! - Bodies pass each `Part::Message` through their [`Presenter`].
//!
//! The stub is a valid frame of gRPC whose content no other decoder accepts: it begins with a key of wire
//! type 7, which protocol buffers do not have. So a decoder that does not know stubs reports an error.

use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::fmt::Debug;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use bytes::{BufMut, Bytes, BytesMut};
use tonic::Status;
use tonic_rdma_verbs::unstable::lock;

/// Bytes before each message: a flag, which says whether the message is compressed, and its length.
pub(crate) const PREFIX: usize = 5;

/// The large field of a message that lands at a multiple of 64 bytes at the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AlignedField {
    #[default]
    Longest,
    Last,
}

/// Asks for landed messages, with the limit of their length, and chooses the alignment of this side's
/// messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landing {
    /// In bytes, without the prefix.
    pub(crate) limit: usize,
    /// The field of this side's messages that is aligned.
    pub(crate) aligned: AlignedField,
}

impl Default for Landing {
    /// Returns the limit of tonic's decoders, 4 MiB.
    fn default() -> Self {
        Self { limit: 4 << 20, aligned: AlignedField::default() }
    }
}

/// A stream that can deliver landed messages.
pub(crate) trait LandingTarget: Debug + Send + Sync {
    /// Delivers messages of at most [`Landing::limit`] bytes, without their prefix, in the memory that they
    /// land in, and aligns messages of this side at [`Landing::aligned`].
    fn land(&self, landing: Landing);
}

/// By this, a server's layer asks for landed messages. The server puts it into the extensions of each native
/// request.
#[derive(Clone, Debug)]
pub(crate) struct LandingSwitch(
    /// The switch does not keep the stream.
    pub(crate) Weak<dyn LandingTarget>,
);

impl LandingSwitch {
    /// Asks for landed messages, if the stream still exists.
    pub(super) fn set(&self, landing: Landing) {
        if let Some(target) = self.0.upgrade() {
            target.land(landing);
        }
    }
}

/// A flag of one call: the call goes without HTTP/2. The wrapper of a client puts it into the extensions of
/// the request and keeps a clone in the request's body, and the channel sets it before it polls this body.
/// Such a body leaves large fields as they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct NativeFlag(Arc<AtomicBool>);

impl NativeFlag {
    /// Notes that the call goes without HTTP/2.
    pub(crate) fn set(&self) {
        // Relaxed: the flag guards no other memory.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the call is known to go without HTTP/2.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The first bytes of a stub's content. `0x07` is a key of wire type 7.
const MAGIC: [u8; 8] = *b"\x07landed\x07";
/// Bytes of a stub's content.
const STUB: usize = MAGIC.len() + size_of::<u64>();

/// The message that a body has delivered as a stub.
type MessageSlot = Mutex<Option<Bytes>>;

/// Turns the landed messages of one body into stubs. It keeps the last message until the decoder has taken
/// it. Dropping it drops the message.
#[derive(Debug, Default)]
pub(crate) struct Presenter {
    slot: Option<Arc<MessageSlot>>,
}

/// The message that was presented last on this thread.
struct PresentedMessage {
    token: u64,
    slot: Weak<MessageSlot>,
}

thread_local! {
    static PRESENTED: RefCell<Option<PresentedMessage>> = const { RefCell::new(None) };
}

impl Presenter {
    /// Returns the stub of `message`, which is one whole message with its prefix. A compressed message comes
    /// back as it is, because tonic has to decompress it. The decoder must run on this thread before another
    /// message is presented on it, as tonic's decoder does.
    pub(crate) fn present(&mut self, message: Bytes) -> Bytes {
        if !is_whole_and_plain(&message) {
            return message;
        }
        let content = message.slice(PREFIX..);
        let slot = Arc::new(Mutex::new(Some(content)));
        let token = next_token();
        let presented = PresentedMessage { token, slot: Arc::downgrade(&slot) };
        PRESENTED.with_borrow_mut(|last| *last = Some(presented));
        self.slot = Some(slot);
        let mut stub = BytesMut::with_capacity(PREFIX + STUB);
        stub.put_u8(0);
        stub.put_u32(STUB as u32);
        stub.put_slice(&MAGIC);
        stub.put_u64(token);
        stub.freeze()
    }
}

/// Returns whether `message` is one whole message with a prefix that says so, and not compressed.
fn is_whole_and_plain(message: &[u8]) -> bool {
    let Some(([flag, length @ ..], content)) = message.split_first_chunk::<PREFIX>() else { return false };
    *flag == 0 && u32::from_be_bytes(*length) as usize == content.len()
}

/// Returns the token of the next message. Peers can't guess tokens.
fn next_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEY.hash_one(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the landed message that `content`, the content of a message, stands for; `None` if it is no stub.
///
/// # Errors
/// `content` is a stub, but its message is not there: something between the body and the decoder moved the
/// stub to another thread or kept it, or the peer sent these bytes.
pub(crate) fn redeem(content: &[u8]) -> Result<Option<Bytes>, Status> {
    let Some(token) = token_of(content) else { return Ok(None) };
    let missing = || {
        Status::internal(
            "the memory of a landed message is not there: the body has to be decoded where it is polled; take gather::GatherBoth or \
             gather::GatherBothLayer away if something between them buffers bodies",
        )
    };
    let presented = PRESENTED.take().filter(|last| last.token == token).ok_or_else(missing)?;
    let slot = presented.slot.upgrade().ok_or_else(missing)?;
    lock(&slot).take().ok_or_else(missing).map(Some)
}

/// Returns the token in `content`, if it is the content of a stub.
fn token_of(content: &[u8]) -> Option<u64> {
    let (magic, token) = content.split_first_chunk()?;
    (*magic == MAGIC).then(|| token.try_into().ok().map(u64::from_be_bytes)).flatten()
}

/// Returns the length of the landed message that `frame`, a frame of a body, stands for, without its prefix.
/// `None` if it is no stub of the message that was presented last on this thread. For what counts bytes
/// between the body and the decoder.
pub fn landed_length(frame: &[u8]) -> Option<usize> {
    let token = token_of(frame.get(PREFIX..)?)?;
    PRESENTED.with_borrow(|last| {
        let last = last.as_ref().filter(|last| last.token == token)?;
        lock(&*last.slot.upgrade()?).as_ref().map(Bytes::len)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn message(flag: u8, content: &[u8]) -> Bytes {
        let mut bytes = vec![flag];
        bytes.put_u32(content.len() as u32);
        bytes.extend_from_slice(content);
        bytes.into()
    }

    /// Returns a message, and a handle that is unique when the message has been dropped.
    fn counted(content: &'static [u8]) -> (Bytes, Arc<Vec<u8>>) {
        struct Owner(Arc<Vec<u8>>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let memory = Arc::new(message(0, content).to_vec());
        (Bytes::from_owner(Owner(Arc::clone(&memory))), memory)
    }

    #[test]
    fn a_stub_brings_its_message_once() {
        let (message, memory) = counted(b"content");
        let place = message[PREFIX..].as_ptr();
        let mut presenter = Presenter::default();
        let stub = presenter.present(message);
        assert!(is_whole_and_plain(&stub), "tonic takes it for a message");
        assert_eq!(landed_length(&stub), Some(7));
        assert_eq!(landed_length(&stub[1..]), None);
        let content = redeem(&stub[PREFIX..]).unwrap().unwrap();
        assert_eq!((&content[..], content.as_ptr()), (&b"content"[..], place));
        assert_eq!(landed_length(&stub), None, "it was taken");
        assert_eq!(redeem(&stub[PREFIX..]).unwrap_err().code(), tonic::Code::Internal);
        drop(presenter);
        assert_eq!(Arc::strong_count(&memory), 2, "the content holds the memory");
        drop(content);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_message_that_is_not_decoded_ends_with_its_body() {
        let mut presenter = Presenter::default();
        let ((first, first_memory), (second, second_memory)) = (counted(b"first"), counted(b"second"));
        let first = presenter.present(first);
        let second = presenter.present(second);
        assert_eq!(Arc::strong_count(&first_memory), 1, "the next message takes the place of the first");
        assert!(redeem(&first[PREFIX..]).is_err());
        drop(presenter);
        assert_eq!(Arc::strong_count(&second_memory), 1);
        assert!(redeem(&second[PREFIX..]).is_err());
    }

    #[test]
    fn a_stub_of_another_thread_or_peer_is_refused() {
        let mut presenter = Presenter::default();
        let stub = presenter.present(message(0, b"content")).slice(PREFIX..);
        let copy = stub.clone();
        assert!(std::thread::spawn(move || redeem(&copy)).join().unwrap().is_err());
        let mut forged = stub.to_vec();
        forged[MAGIC.len()] ^= 1;
        assert!(redeem(&forged).is_err());
        assert_eq!(redeem(&stub[1..]).unwrap(), None);
        assert_eq!(redeem(b"").unwrap(), None);
    }

    #[test]
    fn what_is_not_one_plain_message_goes_to_tonic_as_it_is() {
        let other = [&b"\x01\0\0\0\x05small"[..], b"\0\0\0\0\x06small", b"\0\0\0\0\x04small", b"\0\0\0", b""];
        for bytes in other {
            assert_eq!(Presenter::default().present(Bytes::from_static(bytes)), bytes);
        }
    }

    #[test]
    fn a_switch_reaches_its_stream_while_there_is_one() {
        #[derive(Debug, Default)]
        struct Target(AtomicU64);
        impl LandingTarget for Target {
            fn land(&self, landing: Landing) {
                self.0.store(landing.limit as u64, Ordering::SeqCst);
            }
        }
        let target = Arc::new(Target::default());
        let weak: Weak<Target> = Arc::downgrade(&target);
        let switch = LandingSwitch(weak);
        switch.clone().set(Landing { limit: 7, ..Landing::default() });
        assert_eq!(target.0.load(Ordering::SeqCst), 7);
        drop(target);
        switch.set(Landing::default());
    }
}
