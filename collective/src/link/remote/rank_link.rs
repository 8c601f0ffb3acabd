//! The link between this rank and one peer.

use std::sync::Arc;

use tonic_rdma_tensor::Channel;

use crate::link::remote::element_read::{ElementRead, PeerRegion, PeerRegions, Scratch, Sink};
use crate::link::remote::message::{
    self, Content, ElementReference, HEADER, Header, LINE, Layout, LinkCounters, SHORT,
};
use crate::link::remote::wire::{MappedWire, WriteWire};
use crate::link::{LinkFault, Tag, violation};

/// The link between this rank and one peer: messages in both directions.
pub(super) struct RankLink {
    wire: Wire,
    layout: Layout,
    /// The number of messages sent.
    sent: u64,
    /// The number of these that the peer has taken, as far as this rank knows.
    done: u64,
    /// The number of messages of the peer that were taken.
    next: u64,
    /// The operation of the last message of the peer.
    operation: u64,
    /// The next message of the peer, if it has arrived.
    shown: Option<NextMessage>,
    channel: Channel,
    pub(super) regions: PeerRegions,
    read: ElementRead,
    /// The error of the channel, once the channel has closed. What had arrived before is still received.
    closed: Option<Arc<str>>,
    /// The first fault of this link.
    fault: Option<LinkFault>,
    /// Whether the peer is on another host.
    pub(super) is_across: bool,
}

/// How messages travel.
pub(super) enum Wire {
    Mapped(MappedWire),
    Write(Box<WriteWire>),
}

struct NextMessage {
    tag: Tag,
    content: Content,
    length: usize,
}

/// What the links to all peers use together.
pub(super) struct LinkContext {
    pub(super) counters: LinkCounters,
    pub(super) scratch: Scratch,
    /// Whether a read has delivered bytes since the engine asked.
    pub(super) delivered: bool,
}

impl RankLink {
    pub(super) fn new(
        wire: Wire,
        layout: Layout,
        channel: Channel,
        regions: PeerRegions,
        read: ElementRead,
    ) -> Self {
        Self {
            wire,
            layout,
            sent: 0,
            done: 0,
            next: 0,
            operation: 0,
            shown: None,
            channel,
            regions,
            read,
            closed: None,
            fault: None,
            is_across: false,
        }
    }

    pub(super) fn is_view(&self) -> bool {
        matches!(self.wire, Wire::Mapped(_))
    }

    /// Returns the length of the longest inline message to this peer, in bytes.
    pub(super) fn inline(&self) -> usize {
        let inline = self.layout.inline as usize;
        match &self.wire {
            Wire::Mapped(_) => inline,
            Wire::Write(_) => inline.min(self.channel.max_inline().saturating_sub(HEADER)),
        }
    }

    /// Returns the fault of this link, if there is one.
    #[inline]
    pub(super) fn check(&self) -> Result<(), LinkFault> {
        match &self.fault {
            None => Ok(()),
            Some(fault) => Err(fault.clone()),
        }
    }

    /// Notes a fault.
    #[cold]
    pub(super) fn note(&mut self, fault: LinkFault) -> LinkFault {
        match &fault {
            LinkFault::Lost(reason) => _ = self.closed.get_or_insert(Arc::clone(reason)),
            LinkFault::Violation(_) => self.fault = Some(fault.clone()),
        }
        fault
    }

    /// Writes nothing more to the peer.
    pub(super) fn give_up(&mut self) {
        match &mut self.wire {
            Wire::Mapped(_) => {}
            Wire::Write(wire) => wire.give_up(),
        }
    }

    /// Notes it if the channel has closed, and why if that is known.
    pub(super) fn check_channel(&mut self, reason: Option<&str>) {
        if self.closed.is_none() && !self.channel.is_open() {
            let peer = self.channel.endpoint();
            let unknown = || format!("the link to {peer} is lost: the channel has closed").into();
            self.closed = Some(reason.map_or_else(unknown, Arc::from));
        }
    }

    /// Sends an inline message. Returns false if there is no room.
    #[inline]
    pub(super) fn send(
        &mut self,
        tag: Tag,
        payload: &[u8],
        counters: &mut LinkCounters,
    ) -> Result<bool, LinkFault> {
        if !self.has_room()? {
            return Ok(false);
        }
        if payload.len() > self.layout.inline as usize {
            return Err(violation(format!(
                "this rank sends {} bytes inline, and the limit is {}",
                payload.len(),
                self.layout.inline
            )));
        }
        if !self.put(Header::inline(self.sent, tag, payload.len()), payload)? {
            return Ok(false);
        }
        counters.inline_bytes += payload.len() as u64;
        counters.copied_bytes += payload.len() as u64;
        self.count_sent(payload.len() as u64, counters);
        Ok(true)
    }

    /// Sends a reference. Returns its number, or `None` if there is no room.
    #[inline]
    pub(super) fn send_reference(
        &mut self,
        tag: Tag,
        reference: ElementReference,
        counters: &mut LinkCounters,
    ) -> Result<Option<u64>, LinkFault> {
        if !self.has_room()? {
            return Ok(None);
        }
        let number = self.sent;
        if !self.put(Header::reference(number, tag), &reference.to_bytes())? {
            return Ok(None);
        }
        counters.referenced_bytes += reference.length;
        self.count_sent(reference.length, counters);
        Ok(Some(number))
    }

    #[inline]
    fn count_sent(&self, bytes: u64, counters: &mut LinkCounters) {
        counters.sent += 1;
        counters.across_bytes += if self.is_across { bytes } else { 0 };
    }

    /// Returns how many messages the peer has taken.
    #[inline]
    pub(super) fn taken(&mut self) -> Result<u64, LinkFault> {
        if self.done < self.sent {
            self.refresh_taken()?;
            if self.done < self.sent {
                self.check_open()?;
            }
        }
        Ok(self.done)
    }

    /// Returns the next message of the peer, if it has arrived.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<(Tag, usize)>, LinkFault> {
        if let Some(shown) = &self.shown {
            return Ok(Some((shown.tag, shown.length)));
        }
        let (slot, slots) = (self.layout.slot(self.next), self.layout.slots);
        let found = match &mut self.wire {
            Wire::Mapped(wire) => wire.poll(slot, self.next, slots)?,
            Wire::Write(wire) => wire.poll(slot, self.next, slots)?,
        };
        let Some(header) = found else {
            self.check_open()?;
            return Ok(None);
        };
        let (content, length) = match header.length() {
            Some(length) if length <= self.layout.inline as usize => (Content::Inline { length }, length),
            Some(length) => {
                let inline = self.layout.inline;
                return Err(violation(format!("an inline message of {length} bytes; the limit is {inline}")));
            }
            None => {
                let mut bytes = [0; message::REFERENCE];
                self.copy_out(0, &mut bytes)?;
                let reference = ElementReference::from_bytes(bytes);
                let length = usize::try_from(reference.length).map_err(|_| {
                    violation(format!("a reference to {} bytes, more than memory has", reference.length))
                })?;
                (Content::Reference(reference), length)
            }
        };
        let tag = header.tag(self.operation);
        self.operation = tag.operation;
        self.shown = Some(NextMessage { tag, content, length });
        Ok(Some((tag, length)))
    }

    /// Passes to `sink` what is there of the next message, and returns whether the message was taken.
    #[inline]
    pub(super) fn receive(
        &mut self,
        mut sink: Sink<'_>,
        common: &mut LinkContext,
    ) -> Result<bool, LinkFault> {
        if self.shown.is_none() && self.peek()?.is_none() {
            return Ok(false);
        }
        let Some(shown) = &self.shown else { return Ok(false) };
        let length = shown.length;
        if let Sink::Memory(into) = &sink
            && into.len() != length
        {
            let room = into.len();
            return Err(violation(format!("a message of {length} bytes for memory of {room}")));
        }
        match shown.content {
            Content::Inline { .. } => {
                if length <= SHORT {
                    let mut words = [0; SHORT / 8];
                    self.short_payload(&mut words[..length.div_ceil(8)])?;
                    let payload = &bytemuck::bytes_of(&words)[..length];
                    match &mut sink {
                        Sink::Memory(into) => into.copy_from_slice(payload),
                        Sink::Chunks(then) if length > 0 => then(0, payload),
                        Sink::Chunks(_) => {}
                    }
                } else {
                    self.copy_payload(length, &mut sink, &mut common.scratch)?;
                }
                common.counters.received_bytes += length as u64;
                self.take(false, &mut common.counters)?;
                Ok(true)
            }
            Content::Reference(reference) => self.read(reference, sink, common),
        }
    }

    /// Carries out work that is due.
    pub(super) fn progress(&mut self) -> Result<(), LinkFault> {
        match &mut self.wire {
            Wire::Mapped(_) => Ok(()),
            Wire::Write(_) if self.closed.is_some() => Ok(()),
            Wire::Write(wire) => {
                let result = wire.progress(self.layout.slots);
                self.unless_lost(result)
            }
        }
    }

    /// Notes the loss of the peer, which other calls report when nothing more can be received.
    fn unless_lost(&mut self, result: Result<(), LinkFault>) -> Result<(), LinkFault> {
        match result {
            Err(LinkFault::Lost(error)) => {
                self.closed.get_or_insert(error);
                Ok(())
            }
            result => result,
        }
    }

    #[inline]
    fn has_room(&mut self) -> Result<bool, LinkFault> {
        self.check_open()?;
        let slots = u64::from(self.layout.slots);
        if self.sent - self.done < slots {
            return Ok(true);
        }
        self.refresh_taken()?;
        Ok(self.sent - self.done < slots)
    }

    #[inline]
    fn put(&mut self, header: Header, payload: &[u8]) -> Result<bool, LinkFault> {
        let slot = self.layout.slot(self.sent);
        match &mut self.wire {
            Wire::Mapped(wire) => {
                wire.put(slot, header, payload)?;
                self.sent += 1;
                // The next message to this peer often follows only after a message of the peer, so there is
                // time for this now.
                if self.sent - self.done < u64::from(self.layout.slots) {
                    wire.claim(self.layout.slot(self.sent), payload.len())?;
                }
                Ok(true)
            }
            Wire::Write(wire) => {
                let put = wire.put(slot, header, payload)?;
                self.sent += u64::from(put);
                Ok(put)
            }
        }
    }

    fn refresh_taken(&mut self) -> Result<(), LinkFault> {
        let said = match &mut self.wire {
            Wire::Mapped(wire) => Some(wire.taken()?),
            Wire::Write(wire) => wire.taken(self.layout.slots)?,
        };
        let Some(said) = said else { return Ok(()) };
        if !(self.done..=self.sent).contains(&said) {
            let (done, sent) = (self.done, self.sent);
            return Err(violation(format!(
                "it says that it took {said} messages; it took {done} before, and {sent} were sent"
            )));
        }
        self.done = said;
        Ok(())
    }

    /// Copies payload bytes of the next message, from `at` on.
    #[inline]
    fn copy_out(&self, at: usize, into: &mut [u8]) -> Result<(), LinkFault> {
        let at = self.layout.slot(self.next) + HEADER + at;
        match &self.wire {
            Wire::Mapped(wire) => wire.copy_out(at, into),
            Wire::Write(wire) => wire.copy_out(at, into),
        }
    }

    /// Fills `into` with the payload of the next message, all of which lies in the first cache line.
    #[inline]
    fn short_payload(&self, into: &mut [u64]) -> Result<(), LinkFault> {
        match &self.wire {
            Wire::Mapped(wire) => wire.words(self.layout.slot(self.next) + HEADER, into),
            Wire::Write(_) => self.copy_out(0, bytemuck::cast_slice_mut(into)),
        }
    }

    /// Copies an inline payload that is longer than the first line.
    fn copy_payload(
        &self,
        length: usize,
        sink: &mut Sink<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LinkFault> {
        let copy = |at: usize, chunk: &mut [u8]| self.copy_out(at, chunk);
        match sink {
            Sink::Memory(into) => copy(0, into),
            Sink::Chunks(then) => scratch.chunks(length, copy, then),
        }
    }

    /// Passes to `sink` the next bytes of a reference, and returns whether the message was taken.
    fn read(
        &mut self,
        reference: ElementReference,
        mut sink: Sink<'_>,
        common: &mut LinkContext,
    ) -> Result<bool, LinkFault> {
        if reference.length > 0 {
            let before = self.read.delivered;
            let found = self.regions.find(reference.number);
            let ended = match found {
                Ok(None) => {
                    self.check_open()?;
                    return Ok(false);
                }
                Ok(Some(PeerRegion::View(view, _))) => {
                    self.read.read_from_view(view, reference, &mut sink, &mut common.scratch)
                }
                Ok(Some(PeerRegion::Remote(remote))) => {
                    self.read.read_from_remote(remote, reference, &mut sink, &mut common.counters)
                }
                Err(fault) => Err(fault),
            };
            common.delivered |= self.read.delivered != before;
            match ended {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(fault) => {
                    // A peer that died has withdrawn its memory, and breaks no rule by that.
                    self.check_channel(None);
                    let fault = self.check_open().err().unwrap_or(fault);
                    // Bytes of this message may be missing, so nothing more is received.
                    self.fault = Some(fault.clone());
                    return Err(fault);
                }
            }
        }
        self.read.reset();
        common.counters.read_bytes += reference.length;
        common.counters.received_bytes += reference.length;
        self.take(true, &mut common.counters)?;
        Ok(true)
    }

    /// Notes that the message was taken, and tells the peer.
    #[inline]
    fn take(&mut self, urgent: bool, counters: &mut LinkCounters) -> Result<(), LinkFault> {
        self.shown = None;
        self.next += 1;
        counters.taken += 1;
        match &mut self.wire {
            Wire::Mapped(wire) => wire.report(self.next),
            // A peer that is gone needs no report, and what it sent is still received.
            Wire::Write(_) if self.closed.is_some() => Ok(()),
            Wire::Write(wire) => {
                let result = wire.report(self.next, urgent, self.layout.slots);
                self.unless_lost(result)
            }
        }
    }

    #[inline]
    fn check_open(&self) -> Result<(), LinkFault> {
        match &self.closed {
            None => Ok(()),
            Some(error) => Err(LinkFault::Lost(error.clone())),
        }
    }
}

const _: () = assert!(HEADER + message::REFERENCE <= LINE);
