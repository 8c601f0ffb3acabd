//! Landed messages: large messages that reach their decoder as [`Bytes`] over the registered memory that they arrived in.
//!
//! tonic gives a decoder its own copy of a message. [`GatherCodec`](crate::gather::GatherCodec) gets the arrived memory by another way.
//! This module owns the parts of that way, and the limits on it. It does no IO, and does not know tonic's bodies.
//!
//! ```text
//!  wrapper of the client, layer of the server     ask for landed messages, with a limit of their length: Landing
//!       │ in the extensions of the request
//!       ▼
//!  stream: one OFFER is one message ── check the limit, admit it to the budget, READ it ──▶ LandedMessage
//!       │
//!       ▼
//!  body: Presenter::present keeps the message, and returns a stub of a few bytes, which tonic's decoder takes for the message
//!       │ on the same thread, within the same poll
//!       ▼
//!  decoder of GatherCodec: redeem finds the message by the stub, and decodes its bytes in place
//! ```
//!
//! # How the other modules use it
//!
//! - The client's call looks for a [`Landing`] in the extensions of its `http::Request`. If there is one, it calls
//!   `stream.deliver_landed(landing)` when it opens the stream. If there is a [`NativeCall`], it sets it before it polls the body.
//! - The server puts a [`LandingSwitch`] into the extensions of each request and keeps a clone in the request's body. The body looks at
//!   the switch before it asks the stream for the first part; if it is on, it calls `stream.deliver_landed(landing)`.
//! - A stream in this mode delivers an OFFER of one whole message as `Part::Landed(LandedMessage)`: the prefix of gRPC's framing, then the
//!   message. It delivers everything else as before. It calls [`Landing::check`] before it fetches an OFFER, and
//!   [`LandingBudget::admit`] for its memory. If there is no room, it keeps the OFFER, and tries again when the reader asks for the next
//!   part, with the reader's waker.
//! - Bodies pass a `Part::Landed` through a [`Presenter`], of which each body has one.
//!
//! The stub is a valid frame of gRPC whose content no other decoder accepts: it begins with a key of wire type 7, which protocol buffers
//! do not have. So a decoder that does not know stubs reports an error.

use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;

use bytes::{BufMut, Bytes, BytesMut};
use tonic::Status;

/// Bytes before each message: a flag, which says whether the message is compressed, and its length.
pub(crate) const PREFIX: usize = 5;

/// The wish for landed messages, with the limit of their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landing {
    limit: usize,
}

impl Landing {
    /// The limit of tonic's decoders, in bytes.
    pub(crate) const DEFAULT_LIMIT: usize = 4 << 20;

    /// Asks for landed messages of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit }
    }

    /// Checks the length of a message, without its prefix, before memory is used for it.
    ///
    /// # Errors
    /// The message is too long. The status is that of tonic's decoder.
    pub(crate) fn check(self, length: u64) -> Result<(), Status> {
        if length <= self.limit as u64 {
            return Ok(());
        }
        let limit = self.limit;
        Err(Status::out_of_range(format!(
            "Error, decoded message length too large: found {length} bytes, the limit is: {limit} bytes"
        )))
    }
}

/// The wish of a server's layer, which the layer makes after the request's body exists.
#[derive(Clone, Debug, Default)]
pub(crate) struct LandingSwitch(Arc<OnceLock<Landing>>);

impl LandingSwitch {
    /// Asks for landed messages. The first wish counts.
    pub(crate) fn set(&self, landing: Landing) {
        let _ = self.0.set(landing);
    }

    /// Returns the wish, if there is one.
    pub(crate) fn get(&self) -> Option<Landing> {
        self.0.get().copied()
    }
}

/// A flag of one call: the call goes without HTTP/2. The wrapper of a client puts it into the extensions of the request and keeps a clone
/// in the request's body, and the channel sets it before it polls this body. Such a body leaves large fields as they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct NativeCall(Arc<AtomicBool>);

impl NativeCall {
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

/// The memory that landed messages of one connection may occupy, while they arrive and until the application drops them.
///
/// One call gets at most as much as it leaves to others, except that a call without any memory gets what is free. So a call whose
/// reader keeps everything stops while others go on.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    limit: u64,
    state: Mutex<BudgetState>,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: u64,
    waiting: Vec<Waker>,
}

/// The memory of one call.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallShare(Arc<AtomicU64>);

impl LandingBudget {
    /// Makes a budget of `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default() })
    }

    /// Admits a message of `length` bytes, if there is room for it. Otherwise `waker`, if there is one, is woken when memory comes back.
    pub(crate) fn admit(
        self: &Arc<Self>,
        length: u64,
        share: &CallShare,
        waker: Option<&Waker>,
    ) -> Option<Charge> {
        let mut state = self.lock();
        let free = self.limit.saturating_sub(state.used);
        // Relaxed: the lock guards the share.
        let held = share.0.load(Ordering::Relaxed);
        let most = if held == 0 { free } else { free.saturating_sub(held) };
        if length > most {
            if let Some(waker) =
                waker.filter(|waker| !state.waiting.iter().any(|known| known.will_wake(waker)))
            {
                state.waiting.push(waker.clone());
            }
            return None;
        }
        state.used += length;
        share.0.store(held + length, Ordering::Relaxed);
        Some(Charge { budget: Arc::clone(self), share: share.clone(), bytes: length })
    }

    /// Checks whether a message of `length` bytes fits at all.
    ///
    /// # Errors
    /// The message is longer than the budget.
    pub(crate) fn check(&self, length: u64) -> Result<(), Status> {
        if length <= self.limit {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "a message of {length} bytes is longer than the landing budget of {} bytes: raise CallConfig::landing_budget",
            self.limit
        )))
    }

    /// Returns the error of a call that got no memory for a message of `length` bytes for `seconds`.
    pub(crate) fn exhausted(&self, length: u64, seconds: u64) -> Status {
        let used = self.lock().used;
        Status::resource_exhausted(format!(
            "a message of {length} bytes waited {seconds} s for memory: the application holds {used} bytes of earlier messages, of the \
             {} bytes of the landing budget; drop them sooner, or raise CallConfig::landing_budget",
            self.limit
        ))
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a budget. They come back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<LandingBudget>,
    share: CallShare,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.budget.lock();
            state.used -= self.bytes;
            self.share.0.fetch_sub(self.bytes, Ordering::Relaxed);
            std::mem::take(&mut state.waiting)
        };
        for waker in waiting {
            waker.wake();
        }
    }
}

/// A message in the memory that it arrived in: the prefix, and the content.
#[derive(Clone, Debug)]
pub(crate) struct LandedMessage {
    bytes: Bytes,
}

/// Memory with its charge. The memory is dropped first.
struct Charged {
    bytes: Bytes,
    _charge: Charge,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl LandedMessage {
    /// Makes a message of `bytes`, prefix included. The charge ends when all slices of the content are dropped.
    ///
    /// # Errors
    /// The prefix does not fit the bytes. Only the status of an error comes back.
    pub(crate) fn new(bytes: Bytes, charge: Charge) -> Result<Self, Status> {
        match content_length(&bytes) {
            Some((_, length)) if length + PREFIX as u64 == bytes.len() as u64 => {}
            _ => {
                return Err(Status::internal(
                    "the peer offered a message whose prefix has a different length",
                ));
            }
        }
        Ok(Self { bytes: Bytes::from_owner(Charged { bytes, _charge: charge }) })
    }

    /// Returns all bytes, for a reader that takes no landed message.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.bytes
    }

    /// Returns whether the message is compressed. Such a message goes to tonic as it is.
    pub(crate) fn is_compressed(&self) -> bool {
        self.bytes.first() != Some(&0)
    }
}

/// Returns the flag and the length in the prefix of a message, if `bytes` has a whole prefix.
pub(crate) fn content_length(bytes: &[u8]) -> Option<(u8, u64)> {
    let (prefix, _) = bytes.split_first_chunk::<PREFIX>()?;
    let [flag, length @ ..] = *prefix;
    Some((flag, u64::from(u32::from_be_bytes(length))))
}

/// The first bytes of a stub's content. `0x07` is a key of wire type 7.
const MAGIC: [u8; 8] = *b"\x07landed\x07";
/// Bytes of a stub's content.
const STUB: usize = MAGIC.len() + size_of::<u64>();

/// The message that a body has delivered as a stub.
type Slot = Mutex<Option<Bytes>>;

/// Turns the landed messages of one body into stubs. It keeps the last message until the decoder has taken it. Dropping it drops the
/// message.
#[derive(Debug, Default)]
pub(crate) struct Presenter {
    slot: Option<Arc<Slot>>,
}

/// The message that was presented last on this thread.
struct Presented {
    token: u64,
    slot: Weak<Slot>,
}

thread_local! {
    static PRESENTED: RefCell<Option<Presented>> = const { RefCell::new(None) };
}

impl Presenter {
    /// Returns the stub of `message`, prefix included. A compressed message comes back as it is, because tonic has to decompress
    /// it. The decoder must run on this thread before another message is presented on it, as tonic's decoder does.
    pub(crate) fn present(&mut self, message: LandedMessage) -> Bytes {
        if message.is_compressed() {
            return message.into_bytes();
        }
        let content = message.bytes.slice(PREFIX..);
        let slot = Arc::new(Mutex::new(Some(content)));
        let token = next_token();
        let presented = Presented { token, slot: Arc::downgrade(&slot) };
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

/// Returns the token of the next message. Peers can't guess tokens.
fn next_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEY.hash_one(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the landed message that `content`, the content of a message, stands for; `None` if it is no stub.
///
/// # Errors
/// `content` is a stub, but its message is not there: something between the body and the decoder moved the stub to another thread
/// or kept it, or the peer sent these bytes.
pub(crate) fn redeem(content: &[u8]) -> Result<Option<Bytes>, Status> {
    let Some((magic, token)) = content.split_first_chunk() else { return Ok(None) };
    if *magic != MAGIC || content.len() != STUB {
        return Ok(None);
    }
    let missing = || {
        Status::internal(
            "the memory of a landed message is not there: the body has to be decoded where it is polled; take gather::both or \
             gather::both_layer away if something between them buffers bodies",
        )
    };
    let token = u64::from_be_bytes(token.try_into().map_err(|_| missing())?);
    let presented = PRESENTED.take().filter(|last| last.token == token).ok_or_else(missing)?;
    let slot = presented.slot.upgrade().ok_or_else(missing)?;
    let message = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    message.ok_or_else(missing).map(Some)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    fn message(flag: u8, content: &[u8], budget: &Arc<LandingBudget>) -> Result<LandedMessage, Status> {
        let mut bytes = vec![flag];
        bytes.put_u32(content.len() as u32);
        bytes.extend_from_slice(content);
        let charge = budget.admit(bytes.len() as u64, &CallShare::default(), None).unwrap();
        LandedMessage::new(bytes.into(), charge)
    }

    fn used(budget: &LandingBudget) -> u64 {
        budget.lock().used
    }

    #[test]
    fn a_stub_brings_its_message_once() {
        let budget = LandingBudget::new(1000);
        let mut presenter = Presenter::default();
        let stub = presenter.present(message(0, b"content", &budget).unwrap());
        assert_eq!(content_length(&stub), Some((0, (stub.len() - PREFIX) as u64)));
        let content = redeem(&stub[PREFIX..]).unwrap().unwrap();
        assert_eq!((&content[..], used(&budget)), (&b"content"[..], 12));
        assert_eq!(redeem(&stub[PREFIX..]).unwrap_err().code(), tonic::Code::Internal);
        let part = content.slice(3..);
        drop((content, presenter));
        assert_eq!(used(&budget), 12, "a slice holds the memory");
        drop(part);
        assert_eq!(used(&budget), 0);
    }

    #[test]
    fn a_message_that_is_not_decoded_ends_with_its_body() {
        let budget = LandingBudget::new(1000);
        let mut presenter = Presenter::default();
        let first = presenter.present(message(0, b"first", &budget).unwrap());
        let second = presenter.present(message(0, b"second", &budget).unwrap());
        assert_eq!(used(&budget), 11, "the next message takes the place of the first");
        assert!(redeem(&first[PREFIX..]).is_err());
        drop(presenter);
        assert_eq!(used(&budget), 0);
        assert!(redeem(&second[PREFIX..]).is_err());
    }

    #[test]
    fn a_stub_of_another_thread_or_peer_is_refused() {
        let budget = LandingBudget::new(1000);
        let mut presenter = Presenter::default();
        let stub = presenter.present(message(0, b"content", &budget).unwrap()).slice(PREFIX..);
        let copy = stub.clone();
        assert!(std::thread::spawn(move || redeem(&copy)).join().unwrap().is_err());
        let mut forged = stub.to_vec();
        forged[MAGIC.len()] ^= 1;
        assert!(redeem(&forged).is_err());
        assert_eq!(redeem(&stub[1..]).unwrap(), None);
        assert_eq!(redeem(b"").unwrap(), None);
    }

    #[test]
    fn a_compressed_message_goes_to_tonic_as_it_is() {
        let budget = LandingBudget::new(1000);
        let frame = Presenter::default().present(message(1, b"small", &budget).unwrap());
        assert_eq!(&frame[..], b"\x01\0\0\0\x05small");
    }

    #[test]
    fn a_prefix_that_does_not_fit_is_refused() {
        let budget = LandingBudget::new(1000);
        for bytes in [&b"\0\0\0\0\x06small"[..], b"\0\0\0\0\x04small", b"\0\0\0", b""] {
            let charge = budget.admit(bytes.len() as u64, &CallShare::default(), None).unwrap();
            let error = LandedMessage::new(Bytes::copy_from_slice(bytes), charge).unwrap_err();
            assert_eq!(error.code(), tonic::Code::Internal);
        }
        assert_eq!(used(&budget), 0);
    }

    #[test]
    fn limits_have_the_words_of_tonic() {
        assert!(Landing::new(10).check(10).is_ok());
        let error = Landing::new(10).check(11).unwrap_err();
        assert_eq!(error.code(), tonic::Code::OutOfRange);
        assert_eq!(
            error.message(),
            "Error, decoded message length too large: found 11 bytes, the limit is: 10 bytes"
        );
    }

    #[test]
    fn a_call_that_keeps_its_memory_leaves_as_much_to_others() {
        let budget = LandingBudget::new(100);
        assert_eq!(budget.check(101).unwrap_err().code(), tonic::Code::ResourceExhausted);
        assert!(budget.check(100).is_ok());
        let (hoarder, other) = (CallShare::default(), CallShare::default());
        let held: Vec<_> = std::iter::from_fn(|| budget.admit(10, &hoarder, None)).collect();
        assert_eq!(held.len(), 5);
        let first = budget.admit(40, &other, None).unwrap();
        assert!(budget.admit(1, &other, None).is_none());
        drop(first);
        assert!(budget.admit(50, &other, None).is_some(), "a call without memory gets what is free");
        drop(held);
        assert!(budget.admit(100, &hoarder, None).is_some());
    }

    #[test]
    fn memory_that_comes_back_wakes_each_reader_once() {
        #[derive(Default)]
        struct Wakes(AtomicUsize);
        impl Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (budget, share) = (LandingBudget::new(100), CallShare::default());
        let held = budget.admit(100, &share, None).unwrap();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        assert!(budget.admit(1, &share, Some(&waker)).is_none());
        assert!(budget.admit(1, &share, Some(&waker)).is_none());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        drop(held);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        assert!(budget.admit(100, &share, None).is_some());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1, "nothing waits any more");
        assert!(budget.exhausted(7, 3).message().contains("CallConfig::landing_budget"));
    }
}
