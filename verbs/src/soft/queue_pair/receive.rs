//! The receive queue: the posted receives, and the messages that filled them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::core::Core;
use crate::soft::completion_queue::Sink;
use crate::soft::domain::QUIESCENCE;
use crate::soft::limits::MAX_MESSAGE;
use crate::soft::shared::link::{Delivered, Delivery, DeliveryKind};
use crate::sync::lock;
use crate::{
    CompletionOpcode, CompletionStatus, PostError, PostErrorKind, QueuePairNumber, QueuePairState,
    ReceiveRequest, WorkCompletion,
};

/// Time until the next check, while the peer is in the middle of a section.
const AGAIN: Duration = Duration::from_micros(200);

/// The receive queue of a queue pair.
#[derive(Debug)]
pub(super) struct ReceiveQueue {
    core: Arc<Core>,
    state: Mutex<ReceiveState>,
}

/// The private records of this side about its receives. The other records are in the link.
#[derive(Debug)]
struct ReceiveState {
    /// The length is a power of two, as in the link.
    posted: Box<[Posted]>,
    next: u32,
    taken: u32,
    flush: Flush,
}

#[derive(Clone, Copy, Debug, Default)]
struct Posted {
    wr_id: u64,
    length: u64,
}

/// The state of flushing. Receives are flushed only after the peer stopped writing to them.
#[derive(Clone, Copy, Debug)]
enum Flush {
    /// No flush has begun.
    No,
    /// The peer was in this section. The flush waits until the section is over, at the latest until the deadline.
    After { section: u64, deadline: Instant },
    /// The peer no longer writes.
    Now,
}

impl ReceiveState {
    fn new(receives: u32) -> Self {
        let slots = (receives.max(1) as usize).next_power_of_two();
        Self { posted: vec![Posted::default(); slots].into(), next: 0, taken: 0, flush: Flush::No }
    }

    fn outstanding(&self) -> u32 {
        self.next.wrapping_sub(self.taken)
    }

    fn slot(&mut self, number: u32) -> &mut Posted {
        let mask = self.posted.len() - 1;
        &mut self.posted[number as usize & mask]
    }
}

impl ReceiveQueue {
    /// Creates the queue for `receives` outstanding requests.
    pub(super) fn new(core: &Arc<Core>, receives: u32) -> Self {
        Self { core: Arc::clone(core), state: Mutex::new(ReceiveState::new(receives)) }
    }

    /// Posts receives in order.
    pub(super) fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let mut queue = lock(&self.state);
        let result = requests.iter().enumerate().try_for_each(|(index, request)| {
            self.post_one(&mut queue, request).map_err(|kind| PostError { index, kind })
        });
        drop(queue);
        self.core.ring_waiting_peer();
        // SYNC: checked after publishing. Either the thread that moves to Error sees the receive when it rings, or this
        // thread sees the Error and rings.
        if self.core.is_ended() {
            self.core.ring_own();
        }
        result
    }

    fn post_one(&self, queue: &mut ReceiveState, request: &ReceiveRequest<'_>) -> Result<(), PostErrorKind> {
        if self.core.state() == QueuePairState::Reset {
            return Err(PostErrorKind::State(QueuePairState::Reset));
        }
        if request.into.len() > self.core.capacity.receive_segments as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        if queue.outstanding() >= self.core.capacity.receive_requests {
            return Err(PostErrorKind::QueueFull);
        }
        let number = queue.next;
        let length = request.into.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.length()));
        *queue.slot(number) = Posted { wr_id: request.wr_id, length };
        queue.next = number.wrapping_add(1);
        self.core.link.publish(number, request.into);
        Ok(())
    }

    /// Moves finished receives to `sink`; in Error, moves all receives. Returns true if `sink` has no room for all of them.
    pub(super) fn take(&self, sink: &mut Sink<'_>) -> bool {
        let mut queue = lock(&self.state);
        while queue.outstanding() > 0 {
            if sink.is_full() {
                return self.core.link.delivered(queue.taken) != Delivered::NotYet || self.core.is_ended();
            }
            let number = queue.taken;
            let posted = *queue.slot(number);
            let completion = match self.core.link.delivered(number) {
                Delivered::Message(delivery) if delivery.is_possible(&posted) => {
                    let completion = self.completion(&posted, &delivery);
                    if completion.status != CompletionStatus::Success {
                        self.core.fail();
                    }
                    completion
                }
                Delivered::NotYet if !self.core.is_ended() => return false,
                Delivered::NotYet if !self.may_flush(&mut queue) => return false,
                // The peer has finished this receive meanwhile.
                Delivered::NotYet if self.core.link.delivered(number) != Delivered::NotYet => continue,
                Delivered::NotYet => self.flushed(&posted),
                Delivered::Message(_) | Delivered::Violation => {
                    crate::throttled!(
                        warn,
                        queue_pair = self.core.number(),
                        "the connection ends: the peer wrote invalid values into the shared memory"
                    );
                    self.core.fail();
                    self.flushed(&posted)
                }
            };
            queue.taken = number.wrapping_add(1);
            sink.push(completion);
        }
        false
    }

    /// Returns whether the peer has stopped writing to our receives. If not, asks for another visit of this queue
    /// pair.
    fn may_flush(&self, queue: &mut ReceiveState) -> bool {
        let Some(connection) = self.core.connection() else { return true };
        let now = Instant::now();
        let section = connection.link.section();
        queue.flush = match queue.flush {
            Flush::Now => return true,
            Flush::No if section % 2 == 1 && !connection.peer.is_dead() => {
                Flush::After { section, deadline: now + QUIESCENCE }
            }
            Flush::After { section: first, deadline }
                if section == first && now < deadline && !connection.peer.is_dead() =>
            {
                Flush::After { section, deadline }
            }
            Flush::No | Flush::After { .. } => Flush::Now,
        };
        if let Flush::After { .. } = queue.flush {
            self.core.ring_at(now + AGAIN);
            return false;
        }
        true
    }

    fn completion(&self, posted: &Posted, delivery: &Delivery) -> WorkCompletion {
        let (status, opcode) = match delivery.kind {
            DeliveryKind::Send => (CompletionStatus::Success, CompletionOpcode::Receive),
            DeliveryKind::Write => (CompletionStatus::Success, CompletionOpcode::ReceiveWriteWithImmediate),
            DeliveryKind::TooLong => (CompletionStatus::LocalLength, CompletionOpcode::Receive),
            DeliveryKind::Protection => (CompletionStatus::LocalProtection, CompletionOpcode::Receive),
        };
        WorkCompletion {
            wr_id: posted.wr_id,
            status,
            opcode,
            byte_len: delivery.length,
            immediate: delivery.immediate,
            queue_pair: QueuePairNumber(self.core.number()),
        }
    }

    fn flushed(&self, posted: &Posted) -> WorkCompletion {
        WorkCompletion {
            wr_id: posted.wr_id,
            status: CompletionStatus::WorkRequestFlushed,
            opcode: CompletionOpcode::Receive,
            byte_len: 0,
            immediate: None,
            queue_pair: QueuePairNumber(self.core.number()),
        }
    }
}

impl Delivery {
    /// Returns whether a well-behaved peer can have reported this delivery for the receive `posted`.
    fn is_possible(&self, posted: &Posted) -> bool {
        match self.kind {
            DeliveryKind::Send => self.length <= posted.length,
            DeliveryKind::Write => self.immediate.is_some() && self.length <= MAX_MESSAGE,
            DeliveryKind::TooLong | DeliveryKind::Protection => true,
        }
    }
}
