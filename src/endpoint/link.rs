//! A queue pair with its receive buffers: posting requests, and telling what completed.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use super::fault::ConnectionFault;
use super::receive::Receives;
use super::source::{self, Source};
use super::work_id::{Kind, WorkId};
use crate::protocol::{self, ReadRequest, SlotIndex};
use crate::wire::Header;
use tonic_rdma_verbs::internal::SlabRegistrations;
use tonic_rdma_verbs::memory::{Block, Pool};
use tonic_rdma_verbs::{Operation, Payload, QueuePair, RemoteSegment, Rkey, SendRequest};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Link {
    queue_pair: Arc<dyn QueuePair>,
    connection: u32,
    receives: Receives,
    pool: Pool,
    signal_every: u32,
    signal_all: bool,
    signal_next: bool,
    unsignaled: u32,
    posted: u64,
    completed: u64,
    /// Memory of the application's that we send from.
    registrations: SlabRegistrations,
    /// What messages that did not go inline hold on to, by the count of sends up to and with them.
    sources: VecDeque<(u64, Source)>,
}

impl Link {
    /// Most slices of one message.
    pub(crate) const SLICES: usize = 16;

    /// Takes over a queue pair in Init or later, and posts the receive buffers that are its own.
    pub(crate) fn new(
        queue_pair: Arc<dyn QueuePair>,
        connection: u32,
        pool: Pool,
        registrations: SlabRegistrations,
        receives: Receives,
    ) -> Result<Self, ConnectionFault> {
        receives.post_first(&*queue_pair, connection)?;
        let signal_every = (queue_pair.capacity().send_requests / 8).clamp(1, 64);
        Ok(Self {
            queue_pair,
            connection,
            receives,
            pool,
            signal_every,
            signal_all: false,
            signal_next: false,
            unsignaled: 0,
            posted: 0,
            completed: 0,
            registrations,
            sources: VecDeque::new(),
        })
    }

    pub(crate) fn queue_pair(&self) -> &Arc<dyn QueuePair> {
        &self.queue_pair
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Posts the receive buffer of `slot` again.
    pub(crate) fn post_receive(&self, slot: SlotIndex) -> Result<(), ConnectionFault> {
        self.receives.post(slot.0, &*self.queue_pair, self.connection)
    }

    /// A message has come into the receive buffer of `slot`.
    pub(crate) fn hold(&mut self, slot: u32) {
        self.receives.hold(slot);
    }

    /// Has the receive buffers that are kept for the connection follow what the protocol has use for.
    pub(crate) fn follow(&mut self, protocol: &mut protocol::Connection) {
        self.receives.follow(protocol);
    }

    /// Sends one message, the concatenation of `slices`. How many bytes of it were not copied on this side.
    pub(crate) fn post_message(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, ConnectionFault> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let inline = length <= self.queue_pair.capacity().inline as usize;
        self.unsignaled += 1;
        let signaled = self.signal_all || self.signal_next || self.unsignaled >= self.signal_every;
        let wr_id = self.id(Kind::Send, self.unsignaled);
        let in_place = if inline {
            self.post_send(wr_id, Payload::Inline(slices), signaled)?;
            length
        } else {
            let (number, most) = (self.posted + 1, self.queue_pair.capacity().send_segments as usize);
            let keep = |source| self.sources.push_back((number, source));
            let gathered = source::gather(slices, most, &self.pool, &mut self.registrations, keep)?;
            self.post_send(wr_id, Payload::Registered(gathered.segments()), signaled)?;
            gathered.in_place
        };
        self.posted += 1;
        if signaled {
            self.unsignaled = 0;
            self.signal_next = false;
        }
        Ok(in_place)
    }

    fn post_send(&self, wr_id: u64, data: Payload<'_>, signaled: bool) -> Result<(), ConnectionFault> {
        let operation = Operation::Send { data, immediate: None };
        Ok(self.queue_pair.post_send(&[SendRequest { wr_id, operation, signaled }])?)
    }

    /// From now on the completion of every message is reported: the connection is about to end, and the queue pair
    /// must not go before the last message has arrived.
    pub(crate) fn signal_all(&mut self) {
        self.signal_all = true;
    }

    /// Nothing was sent for a while: memory that is kept for sending goes, and with the next message what waits for its
    /// completion, so that it goes the next time.
    pub(crate) fn rest(&mut self) {
        self.signal_next = !self.sources.is_empty();
        self.pool.trim();
        self.registrations.prune();
    }

    /// Whether everything that was posted has completed.
    pub(crate) fn is_drained(&self) -> bool {
        self.completed == self.posted
    }

    /// `count` sends, the oldest outstanding, have completed.
    pub(crate) fn sends_completed(&mut self, count: u32) {
        self.completed += u64::from(count);
        while self.sources.front().is_some_and(|(sends, _)| *sends <= self.completed) {
            self.sources.pop_front();
        }
    }

    /// Fetches what the peer offered into `block`.
    pub(crate) fn post_read(&mut self, request: &ReadRequest, block: &Block) -> Result<(), ConnectionFault> {
        let into = block.segment(0..request.length as usize).map_err(local)?;
        let remote = RemoteSegment { address: request.address, rkey: Rkey(request.rkey) };
        let operation = Operation::Read { into: &[into], remote };
        let wr_id = self.id(Kind::Read, request.id.0);
        Ok(self.queue_pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])?)
    }

    /// The first bytes of a received message.
    pub(crate) fn head<const LENGTH: usize>(&self, slot: u32) -> Result<[u8; LENGTH], ConnectionFault> {
        let mut head = [0; LENGTH];
        let (block, start) = self.receives.slot(slot)?;
        block.copy_out(start, &mut head).map_err(local)?;
        Ok(head)
    }

    /// What follows the header of a received message, as much as `body` takes.
    pub(crate) fn body(&self, slot: u32, body: &mut [u8]) -> Result<(), ConnectionFault> {
        let (block, start) = self.receives.slot(slot)?;
        block.copy_out(start + Header::LENGTH, body).map_err(local)
    }

    /// The memory that has `slot`, and where it begins there.
    pub(crate) fn slot(&self, slot: SlotIndex) -> Result<(&Block, usize), ConnectionFault> {
        self.receives.slot(slot.0)
    }

    fn id(&self, kind: Kind, value: u32) -> u64 {
        WorkId { kind, connection: self.connection, value }.to_bits()
    }
}

fn local(error: impl std::fmt::Display) -> ConnectionFault {
    ConnectionFault::Local(error.to_string().into())
}
