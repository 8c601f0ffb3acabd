//! The sending end of a slot, whatever it holds.

use std::io::IoSlice;
use std::sync::Arc;

use tokio::task::consume_budget;

use super::super::channel::place_of;
use super::super::link::token::Token;
use super::super::link::{End, Link, Wait};
use super::super::proto::Kind;
use super::super::{Channel, ChannelError, Notification};
use super::Layout;
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::{CopyRange, CopyRanges, LocalMemory, RemotePlace, Transfer, TransferKind};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sender {
    name: Arc<str>,
    link: Arc<Link>,
    end: Arc<End>,
    /// Nothing is kept at this end but the pair of words.
    ours: Arc<End>,
    port: u32,
    place: RemotePlace,
    layout: Layout,
    /// The epoch that comes next, and the first.
    next: u64,
    first: u64,
    misses: u32,
}

impl Sender {
    /// Every so many times that a release has not come, the devices are looked at.
    const LOOK_EVERY: u32 = 1 << 12;
    /// The same for the queue, where what is long waits for what was posted before it.
    const POLL_EVERY: u32 = 1 << 4;

    /// Attaches to the peer's slot `name`, for payloads of `payload` bytes.
    pub(super) async fn attach(
        channel: &Channel,
        name: &str,
        kind: Kind,
        metadata: Vec<u8>,
        payload: usize,
    ) -> Result<Self, ChannelError> {
        let name = super::super::device::checked(name)?;
        let (ours, reply) = channel.attach(&name, kind, metadata).await?;
        let place = place_of(&reply)?;
        let link = Arc::clone(channel.link());
        let layout = Layout::new(payload, reply.depth).filter(|layout| {
            let named = (layout.stride as u64, layout.tail as u64, layout.bytes() as u64);
            layout.depth > 0 && named == (reply.stride, reply.tail, place.length)
        });
        let Some(layout) = layout else {
            link.remove_end(&ours);
            return Err(ChannelError::local(format!("the peer's slot {name:?} has an impossible layout")));
        };
        let owner = super::super::channel::nobody();
        let end = Arc::new(ours.towards(reply.slot, owner));
        let port = channel.port();
        Ok(Self {
            name,
            link,
            end,
            ours,
            port,
            place,
            layout,
            next: reply.epoch,
            first: reply.epoch,
            misses: 0,
        })
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(super) fn port(&self) -> u32 {
        self.port
    }

    /// The epoch of what is sent next.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The epoch of what was sent first.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The epoch up to which all was released.
    pub(super) fn released(&self) -> u64 {
        self.link.load_count(self.end.pair())
    }

    /// What must have been released before the next one can go; 0 if nothing.
    fn due(&self) -> u64 {
        let depth = u64::from(self.layout.depth);
        if self.next - self.first < depth { 0 } else { self.next - depth }
    }

    /// Whether there is a buffer free.
    pub(super) fn is_ready(&mut self) -> Result<bool, ChannelError> {
        if self.released() < self.due() {
            self.missed()?;
        }
        self.link.check()?;
        Ok(self.released() >= self.due())
    }

    /// How many were sent and are not released yet.
    pub(super) fn pending(&mut self) -> Result<u64, ChannelError> {
        if self.unreleased() > 0 {
            self.missed()?;
        }
        self.link.check()?;
        Ok(self.unreleased())
    }

    /// The peer writes the count: it is not taken for more than was sent.
    fn unreleased(&self) -> u64 {
        let all = self.next - self.first;
        self.next.saturating_sub(1).saturating_sub(self.released()).min(all)
    }

    /// What is waited for is not there: does anybody live?
    fn missed(&mut self) -> Result<(), ChannelError> {
        self.misses = self.misses.wrapping_add(1);
        if self.link.notification() != Notification::Word || self.misses.is_multiple_of(Self::POLL_EVERY) {
            self.link.poll(self.port);
        }
        if self.misses.is_multiple_of(Self::LOOK_EVERY) {
            self.link.look()?;
        }
        Ok(())
    }

    /// Waits for one.
    pub(super) async fn ready(&mut self) -> Result<(), ChannelError> {
        // A peer that takes all at once must not keep this task's thread from others.
        consume_budget().await;
        while !self.is_ready()? {
            self.wait_for(self.due()).await?;
        }
        Ok(())
    }

    /// Waits until `epoch` was released.
    pub(super) async fn wait_for(&self, epoch: u64) -> Result<(), ChannelError> {
        if self.released() >= epoch {
            return Ok(());
        }
        let word = self.link.count(self.end.pair());
        Wait::until(&self.link, &self.end, self.port, word, epoch, false).await
    }

    /// Whether payloads go without a transfer.
    pub(super) fn is_small(&self) -> bool {
        self.layout.tail + 8 <= self.link.port(self.port).inline()
    }

    /// Sends a small payload, whose memory is free again when this returns. Only when ready.
    pub(super) fn send_small(&mut self, payload: &[u8]) -> Result<(), ChannelError> {
        debug_assert!(payload.len() == self.layout.payload && self.is_small());
        let (epoch, place) = (self.next, self.buffer());
        let word = epoch.to_ne_bytes();
        let port = self.link.port(self.port);
        match self.link.notification() {
            Notification::Word => {
                let padding = &[0; 8][..self.layout.tail - payload.len()];
                let slices = [IoSlice::new(payload), IoSlice::new(padding), IoSlice::new(&word)];
                port.write_small(&slices, place, None)?;
                self.next += 1;
                return self.link.ring_sleeper(&self.end, epoch, self.port);
            }
            Notification::Immediate => {
                port.write_small(&[IoSlice::new(payload)], place, Some(self.end.peer_pair()))?;
            }
            Notification::Message => {
                port.write_small(&[IoSlice::new(payload)], place, None)?;
                port.send_frame(&Frame::Placed { slot: self.end.peer_pair(), epoch })?;
            }
        }
        self.next += 1;
        Ok(())
    }

    /// Sends a copy of `payload`, whose memory is free again when this returns. Only when ready.
    pub(super) fn send_copied(&mut self, payload: &[u8]) -> Result<(), ChannelError> {
        if self.is_small() {
            return self.send_small(payload);
        }
        let landing = Arc::clone(self.link.landing());
        let mut copy = landing.take(payload.len() as u64)?;
        copy[..payload.len()].copy_from_slice(payload);
        let token = Token::call(move |outcome| {
            if let LocalMemory::Region(copy) = outcome.local {
                landing.put(copy);
            }
        });
        self.send(LocalMemory::Region(copy), 0, token)
    }

    /// Sends the payload that lies at `offset` of `local`. Only when ready.
    pub(super) fn send(&mut self, local: LocalMemory, offset: u64, token: Token) -> Result<(), ChannelError> {
        let (epoch, start) = (self.next, self.buffer());
        self.next += 1;
        let length = self.layout.payload as u64;
        let blocks = CopyRanges::One(CopyRange { local: offset, remote: 0, length });
        let token = token.ring(&self.link, &self.end, epoch, self.port);
        let place = RemotePlace { start, length };
        let transfer = Transfer::new(local, TransferKind::Write, blocks, place, token);
        let tail = start.address + self.layout.tail as u64;
        let word = || Some(RemoteSegment { address: tail, ..start });
        self.link.submit_noticed(transfer, length, &self.end, epoch, self.port, word)
    }

    /// Where the next payload goes.
    fn buffer(&self) -> RemoteSegment {
        let offset = self.layout.start(self.next) as u64;
        RemoteSegment { address: self.place.start.address + offset, ..self.place.start }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.link.remove_end(&self.ours);
    }
}
