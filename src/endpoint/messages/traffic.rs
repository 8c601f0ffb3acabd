//! The part of a connection's state that only message connections have.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;

use super::fetches::Fetches;
use super::handler::MessageHandler;
use super::memory::MessageMemory;
use super::sender::Sender;
use super::settings::MessageSettings;
use crate::endpoint::aftermath::{Aftermath, Run};
use crate::endpoint::counters::Counters;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::link::Link;
use crate::protocol::{self, Part};
use tonic_rdma_verbs::ProtectionDomain;
use tonic_rdma_verbs::memory::Budget;

/// The state of a message connection beside its protocol and its link.
#[derive(Debug)]
pub(crate) struct Messages {
    /// The handler; `None` before the start and after the end.
    handler: Option<Arc<dyn MessageHandler>>,
    /// A handler has taken the connection over.
    pub(crate) started: bool,
    pub(crate) memory: MessageMemory,
    pub(crate) fetches: Fetches,
    /// Memory that short messages are copied into, one behind the other.
    inbox: BytesMut,
    /// Work for the thread that holds the lock, once it does not hold it any more.
    pub(crate) after: Aftermath,
    /// The handler gave all that it had in its last turn.
    exhausted: bool,
    told_finished: bool,
}

/// Tells a handler that its connection is over, and drops it, without the connection's lock.
#[derive(Debug)]
struct Ending {
    handler: Arc<dyn MessageHandler>,
    /// The reason, if the connection ended early.
    fault: Option<ConnectionFault>,
}

impl Run for Ending {
    fn run(self: Arc<Self>) {
        let mut after = Aftermath::default();
        if let Some(fault) = &self.fault {
            self.handler.ended(fault, &mut after);
        }
        after.carry_out();
    }
}

impl Messages {
    /// Bytes of the memory that short messages share.
    const INBOX: usize = 16 << 10;
    /// Longer messages have memory of their own, so that no short message keeps it.
    const SHORT: usize = 2 << 10;

    /// Makes the state of a connection in `domain` that posts at most `reads` READs at a time. `changed` wakes the connection's
    /// supervisor.
    pub(crate) fn new(
        domain: Arc<dyn ProtectionDomain>,
        budget: Arc<Budget>,
        reads: u32,
        changed: Arc<Notify>,
    ) -> Box<Self> {
        Box::new(Self {
            handler: None,
            started: false,
            memory: MessageMemory::new(domain, budget, changed),
            fetches: Fetches::new(reads),
            inbox: BytesMut::new(),
            after: Aftermath::default(),
            exhausted: true,
            told_finished: false,
        })
    }

    /// Takes the handler, unless there was one before. `by_copy`: a READ is a copy by the thread that posts it, as the queue pair says once
    /// it is connected.
    pub(crate) fn start(
        &mut self,
        handler: Arc<dyn MessageHandler>,
        settings: &MessageSettings,
        by_copy: bool,
    ) {
        if !std::mem::replace(&mut self.started, true) {
            self.memory.set(settings);
            self.fetches.start(by_copy);
            self.handler = Some(handler);
        }
    }

    /// Returns whether the handler had nothing more to send in its last turn, and no fetch is under way.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.exhausted && self.fetches.is_empty() && !self.fetches.has_over()
    }

    /// Hands fetches that are over and messages that have arrived to the handler. Returns whether [`transmit`](Self::transmit) may have
    /// something to do.
    pub(crate) fn deliver(
        &mut self,
        link: &Link,
        protocol: &mut protocol::Connection,
        counters: &Counters,
    ) -> Result<bool, ConnectionFault> {
        let Some(handler) = self.handler.take() else { return Ok(true) };
        let delivered = self.deliver_to(&*handler, link, protocol, counters);
        self.handler = Some(handler);
        delivered
    }

    fn deliver_to(
        &mut self,
        handler: &dyn MessageHandler,
        link: &Link,
        protocol: &mut protocol::Connection,
        counters: &Counters,
    ) -> Result<bool, ConnectionFault> {
        // Only the answer to the last message counts, as nothing else changes the handler's state meanwhile but what drives by itself.
        let mut has_work = true;
        while let Some((fetch, landed)) = self.fetches.poll_over() {
            if let Some(landed) = &landed {
                counters.landed_bytes.add(landed.len() as u64);
            }
            let memory = landed.map(|landed| self.memory.lend(landed));
            handler.landed(fetch, memory, &mut self.after)?;
        }
        while let Some(part) = protocol.front() {
            let Part::Eager { slot, offset, length } = part else {
                return Err(protocol::Violation::Offer.into());
            };
            let (block, start) = link.receives.slot(slot.0)?;
            let range = start + offset..start + offset + length;
            let message = if length > Self::SHORT {
                let mut message = Vec::with_capacity(length);
                block.copy_out_to(range, &mut message).map_err(ConnectionFault::local)?;
                Bytes::from(message)
            } else {
                if self.inbox.capacity() < length {
                    self.inbox = BytesMut::with_capacity(Self::INBOX);
                }
                block.copy_out_to(range, &mut self.inbox).map_err(ConnectionFault::local)?;
                self.inbox.split().freeze()
            };
            protocol.consume(length);
            has_work = handler.receive(message, &mut self.after)?;
        }
        if !self.told_finished && protocol.is_read_closed() {
            self.told_finished = true;
            handler.peer_finished(&mut self.after);
        }
        Ok(has_work || !self.is_exhausted())
    }

    /// Asks the handler for messages and fetches, and sends them.
    pub(crate) fn transmit(
        &mut self,
        link: &mut Link,
        protocol: &mut protocol::Connection,
        counters: &Counters,
    ) -> Result<(), ConnectionFault> {
        let Some(handler) = self.handler.take() else { return Ok(()) };
        let Self { memory, fetches, after, .. } = self;
        memory.will_ask();
        let mut sender = Sender { link, protocol, memory, fetches, counters, refused: false };
        let sent = handler.transmit(&mut sender, after);
        let refused = sender.refused;
        self.exhausted = !refused && sender.room() > 0;
        self.memory.note_refused(refused);
        self.handler = Some(handler);
        sent?;
        let (reads, read_at_once) = self.fetches.post(link)?;
        counters.rendezvous_received_bytes.add(read_at_once);
        counters.reads.add(reads);
        counters.work_requests.add(reads);
        Ok(())
    }

    /// Tells the handler of the end of the connection, and lets go of it: `fault` is the reason if the connection ended early,
    /// `finished` says whether there is nothing left to do.
    pub(crate) fn conclude(&mut self, fault: Option<&ConnectionFault>, finished: bool) {
        if !finished {
            return;
        }
        let Some(handler) = self.handler.take() else { return };
        self.after.runs.push(Arc::new(Ending { handler, fault: fault.cloned() }));
    }
}
