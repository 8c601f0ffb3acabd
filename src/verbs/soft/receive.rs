//! The receive queue: posted receives are published in the ring that the peer takes them from, and its deliveries
//! become completions.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::super::{
    CompletionOpcode, CompletionStatus, PostErrorKind, QueuePair as _, QueuePairState, ReceiveRequest,
    WorkCompletion,
};
use super::layout::pair_page;
use super::lock;
use super::queue_pair::SoftQueuePair;

/// What the receive queue's lock guards.
#[derive(Debug, Default)]
pub(super) struct ReceiveSide {
    /// Receives that have not completed, oldest first. What the ring says of them is for the peer alone.
    posted: VecDeque<Posted>,
    /// Receives ever published, and deliveries ever taken.
    published: u64,
    taken: u64,
}

#[derive(Clone, Copy, Debug)]
struct Posted {
    wr_id: u64,
    length: u64,
}

/// What a delivery says, as the peer wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    pub(super) opcode: CompletionOpcode,
    pub(super) status: CompletionStatus,
    pub(super) length: u64,
    pub(super) immediate: Option<u32>,
}

impl Delivery {
    const SEND: u64 = 1;
    const WRITE: u64 = 2;
    const IMMEDIATE: u64 = 1 << 8;
    const TOO_LONG: u64 = 1 << 16;
    const DENIED: u64 = 1 << 17;

    /// The words of the ring.
    pub(super) fn encode(self) -> [u64; 3] {
        let kind = if self.opcode == CompletionOpcode::Receive { Self::SEND } else { Self::WRITE };
        let immediate = if self.immediate.is_some() { Self::IMMEDIATE } else { 0 };
        let status = match self.status {
            CompletionStatus::Success => 0,
            CompletionStatus::LocalLength => Self::TOO_LONG,
            _ => Self::DENIED,
        };
        [kind | immediate | status, self.length, self.immediate.unwrap_or(0).into()]
    }

    /// Reads them; `None` for words that no device of ours writes.
    pub(super) fn decode([head, length, immediate]: [u64; 3]) -> Option<Self> {
        let opcode = match head & 0xff {
            Self::SEND => CompletionOpcode::Receive,
            Self::WRITE => CompletionOpcode::ReceiveWriteWithImmediate,
            _ => return None,
        };
        let status = match head & !(0xff | Self::IMMEDIATE) {
            0 => CompletionStatus::Success,
            Self::TOO_LONG => CompletionStatus::LocalLength,
            Self::DENIED => CompletionStatus::LocalProtection,
            _ => return None,
        };
        let immediate = (head & Self::IMMEDIATE != 0).then_some(immediate as u32);
        Some(Self { opcode, status, length, immediate })
    }
}

impl SoftQueuePair {
    pub(super) fn post_one_receive(
        &self,
        side: &mut ReceiveSide,
        request: &ReceiveRequest<'_>,
    ) -> Result<(), PostErrorKind> {
        if request.into.len() > self.rings.segments {
            return Err(PostErrorKind::TooManySegments);
        }
        if side.posted.len() >= self.capacity.receive_requests as usize {
            return Err(PostErrorKind::QueueFull);
        }
        let entry = self.rings.receive(side.published);
        let word = |index: usize, value: u64| self.page.at(entry + index).store(value, Ordering::Relaxed);
        word(0, request.into.len() as u64);
        for (index, segment) in request.into.iter().enumerate() {
            word(1 + 3 * index, segment.lkey().0.into());
            word(2 + 3 * index, segment.address());
            word(3 + 3 * index, segment.length());
        }
        let length = request.into.iter().map(|segment| segment.length()).sum();
        side.posted.push_back(Posted { wr_id: request.wr_id, length });
        side.published += 1;
        // SYNC: after the entry, and before `WAITING` is read: either the peer sees the receive, or we see it wait.
        self.page.at(pair_page::POSTED).store(side.published, Ordering::SeqCst);
        Ok(())
    }

    /// Wakes a peer whose send waits for a receive.
    pub(super) fn wake_waiting_peer(&self) {
        let waiting = self.page.at(pair_page::WAITING);
        if waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Some(pair) = self.peer.get()
            && waiting.swap(0, Ordering::SeqCst) != 0
        {
            let (queue, slot) = &pair.sends;
            queue.mark(*slot);
        }
    }

    /// Turns deliveries into completions; in Error, flushes what is posted. Returns how many, and whether there are
    /// more.
    pub(super) fn take_receives(&self, completions: &mut [WorkCompletion]) -> (usize, bool) {
        let doomed = self.is_doomed();
        let mut side = lock(&self.receives);
        // SYNC: `doomed` was read before the deliveries are counted: what came before the end is seen.
        let delivered = self.page.at(pair_page::DELIVERED).load(Ordering::Acquire);
        let mut fatal = delivered.wrapping_sub(side.taken) > side.posted.len() as u64;
        let mut count = 0;
        while !fatal && side.taken != delivered {
            let Some(place) = completions.get_mut(count) else { return (count, true) };
            match self.take_one(&mut side) {
                Some(completion) => {
                    fatal = completion.status != CompletionStatus::Success;
                    *place = completion;
                    count += 1;
                }
                None => fatal = true,
            }
        }
        if (fatal || doomed) && !self.is_in(QueuePairState::Error) {
            drop(side);
            self.to_error();
            side = lock(&self.receives);
        }
        if self.is_in(QueuePairState::Error) {
            while let Some(posted) = side.posted.front() {
                let Some(place) = completions.get_mut(count) else { return (count, true) };
                *place = WorkCompletion {
                    wr_id: posted.wr_id,
                    status: CompletionStatus::WorkRequestFlushed,
                    opcode: CompletionOpcode::Receive,
                    queue_pair: self.number(),
                    ..WorkCompletion::EMPTY
                };
                side.posted.pop_front();
                count += 1;
            }
        }
        (count, false)
    }

    /// The next delivery; `None` if it is nonsense.
    fn take_one(&self, side: &mut ReceiveSide) -> Option<WorkCompletion> {
        let entry = self.rings.delivery(side.taken);
        let words = [0, 1, 2].map(|index| self.page.at(entry + index).load(Ordering::Relaxed));
        let delivery = Delivery::decode(words)?;
        let posted = *side.posted.front()?;
        let ends_well = delivery.status == CompletionStatus::Success;
        if ends_well && delivery.opcode == CompletionOpcode::Receive && delivery.length > posted.length {
            return None;
        }
        side.posted.pop_front();
        side.taken += 1;
        Some(WorkCompletion {
            wr_id: posted.wr_id,
            status: delivery.status,
            opcode: delivery.opcode,
            byte_len: delivery.length,
            immediate: delivery.immediate,
            queue_pair: self.number(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_survive_the_ring() {
        for opcode in [CompletionOpcode::Receive, CompletionOpcode::ReceiveWriteWithImmediate] {
            for status in
                [CompletionStatus::Success, CompletionStatus::LocalLength, CompletionStatus::LocalProtection]
            {
                for immediate in [None, Some(0), Some(u32::MAX)] {
                    let delivery = Delivery { opcode, status, length: 77, immediate };
                    assert_eq!(Delivery::decode(delivery.encode()), Some(delivery));
                }
            }
        }
        for head in [0, 3, 1 | 1 << 9, u64::MAX] {
            assert_eq!(Delivery::decode([head, 0, 0]), None);
        }
    }
}
