//! The words of an end that show its state: how far the owner has come, and the record that the owner refused.

use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word, fence_of};
use crate::CompletionStatus;

/// The state that an end shows to its peer. An end goes through the states in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndState {
    /// The owner is not connected yet. The peer tries again later.
    Waiting,
    /// The owner takes records.
    Ready,
    /// The owner is in Error, or gone. Its memory may not be read any more, except for this segment.
    Ended,
}

impl EndState {
    /// Returns the state in `word`, which may have any value.
    #[inline]
    pub fn of<P: Platform, O: Orders>(word: &P::Word) -> Self {
        // SYNC: pairs with `show`: a peer that sees the state sees what the owner stored before.
        match word.load(O::LOOK) {
            0 => Self::Waiting,
            1 => Self::Ready,
            _ => Self::Ended,
        }
    }

    /// Moves the state in `word` forward to this one, never back. Called by the owner.
    pub fn show<P: Platform, O: Orders>(self, word: &P::Word) {
        word.raise(self as u64, O::SHOW);
        // SYNC: pairs with the fence of `unless_revoked`: a peer that has read what the owner stores from now on sees the state.
        fence_of::<P>(O::REVOKE_FENCE);
    }
}

/// Calls `is_valid`, which looks whether memory that this thread has read was revoked meanwhile: whether a key has become
/// invalid, or an end has ended.
#[inline]
pub fn unless_revoked<P: Platform, O: Orders>(is_valid: impl FnOnce() -> bool) -> bool {
    // SYNC: pairs with the fence after the store that revokes memory: if this thread has read what the owner stored afterwards,
    // it sees that the memory was revoked.
    fence_of::<P>(O::CHECK_FENCE);
    is_valid()
}

/// The record that an end refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The position in the ring up to which the records before the refused one reach.
    pub at: u64,
    /// The status of the request.
    pub status: CompletionStatus,
}

impl Failure {
    /// Shows the failure in two words. Called by the owner, once, before the state is [`Ended`](EndState::Ended).
    pub fn show<P: Platform, O: Orders>(self, [code, at]: [&P::Word; 2]) {
        let number = match self.status {
            CompletionStatus::RemoteInvalidRequest => 1,
            CompletionStatus::RemoteAccess => 2,
            _ => 3,
        };
        at.store(self.at, Relaxed);
        // SYNC: pairs with `of`: a peer that sees the code sees the position.
        code.store(number, O::SHOW);
    }

    /// Returns the failure in two words, which may have any value.
    #[inline]
    pub fn of<P: Platform, O: Orders>([code, at]: [&P::Word; 2]) -> Option<Self> {
        let status = match code.load(O::LOOK) {
            0 => return None,
            1 => CompletionStatus::RemoteInvalidRequest,
            2 => CompletionStatus::RemoteAccess,
            _ => CompletionStatus::RemoteOperation,
        };
        Some(Self { at: at.load(Relaxed), status })
    }
}
