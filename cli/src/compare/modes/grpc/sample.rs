//! A sample of a turn's messages. The receiver keeps them until the measured time is over, and checks every byte of
//! them then.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use tonic_rdma_payload::content::check_buffers;
use tonic_rdma_payload::seeded::Draws;

/// The largest number of kept messages, and of bytes in them. A single message may be larger.
const MESSAGES: usize = 64;
const BYTES: u64 = 1 << 20;
/// Larger messages are not kept: a turn has few of them, and the allocation of memory for the next one would be much of
/// the measured time.
const LARGEST: u64 = 256 << 20;

/// A fair sample: each message of a turn is in the sample with equal probability. Clones share it.
///
/// A kept message costs a reference count, and its memory is not free for the next message. So the sample keeps no more
/// than fits into a cache, and replaces messages more seldom the larger they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    kept: Arc<Mutex<SampleState>>,
}

#[derive(Debug)]
struct SampleState {
    /// Number of messages of the turn so far.
    seen: u64,
    draws: Draws,
    messages: Vec<KeptMessage>,
}

#[derive(Debug)]
struct KeptMessage {
    seed: u64,
    buffers: Vec<Bytes>,
}

/// The result of the check of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampleCheck {
    /// Number of messages that were checked.
    pub(crate) messages: u64,
    /// Buffer, and offset in it, of the first wrong byte.
    pub(crate) wrong: Option<(u64, u64)>,
}

impl Default for SampleState {
    fn default() -> Self {
        Self { seen: 0, draws: Draws::new(0x5a3b_1e01), messages: Vec::new() }
    }
}

impl Sample {
    /// Offers a message of `buffers` with the content of `seed` to the sample. The message may replace an older one.
    pub(crate) fn arrived(&self, seed: u64, buffers: &[Bytes]) {
        let bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        if bytes > LARGEST {
            return;
        }
        let capacity = (BYTES / bytes.max(1)).clamp(1, MESSAGES as u64) as usize;
        let mut kept = self.lock();
        kept.seen += 1;
        let place = match kept.messages.len() {
            room if room < capacity => room,
            // The nth message stays with probability capacity / n.
            _ => (kept.draws.bits() % kept.seen) as usize,
        };
        if place < capacity {
            let message = KeptMessage { seed, buffers: buffers.to_vec() };
            match kept.messages.get_mut(place) {
                Some(other) => *other = message,
                None => kept.messages.push(message),
            }
        }
    }

    /// Checks every byte of the kept messages, and drops them.
    pub(crate) fn check(&self) -> SampleCheck {
        let messages = {
            let mut kept = self.lock();
            kept.seen = 0;
            std::mem::take(&mut kept.messages)
        };
        let wrong = messages.iter().find_map(|message| check_buffers(message.seed, &message.buffers, None));
        SampleCheck { messages: messages.len() as u64, wrong }
    }

    fn lock(&self) -> MutexGuard<'_, SampleState> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use tonic_rdma_payload::content::Content;

    #[test]
    fn every_message_of_a_turn_is_kept_with_the_same_probability() {
        let sample = Sample::default();
        let payload = Bytes::from(vec![0; BYTES as usize]);
        let mut kept = [0u32; 10];
        for _ in 0..5000 {
            for number in 0..10 {
                sample.arrived(number, std::slice::from_ref(&payload));
            }
            let mut inner = sample.lock();
            assert_eq!(inner.messages.len(), 1);
            kept[inner.messages[0].seed as usize] += 1;
            inner.messages.clear();
            inner.seen = 0;
        }
        assert!(kept.iter().all(|count| (400..600).contains(count)), "{kept:?}");
    }

    #[test]
    fn many_small_messages_are_kept_and_every_byte_of_them_is_checked() {
        let sample = Sample::default();
        assert_eq!(sample.check(), SampleCheck::default());
        let right = Content::new(10_000, 7).unwrap().cut(10_000);
        for _ in 0..1000 {
            sample.arrived(7, std::slice::from_ref(&right));
        }
        assert_eq!(sample.check(), SampleCheck { messages: 64, wrong: None });
        let mut wrong = right.to_vec();
        wrong[5001] ^= 1;
        sample.arrived(7, &[wrong.into()]);
        assert_eq!(sample.check(), SampleCheck { messages: 1, wrong: Some((0, 5001)) });
        assert_eq!(sample.check(), SampleCheck::default());
    }

    #[test]
    fn the_largest_messages_are_not_kept() {
        let sample = Sample::default();
        let piece = Content::new(1 << 20, 7).unwrap().cut(1 << 20);
        sample.arrived(7, &vec![piece.clone(); 257]);
        assert_eq!(sample.check().messages, 0);
        sample.arrived(7, &vec![piece; 256]);
        assert_eq!(sample.check().messages, 1);
    }
}
