//! The sending end of a slot, whatever it holds.

use std::io::IoSlice;
use std::sync::{Arc, Weak};

use tokio::task::consume_budget;

use crate::control::conversions::place_of;
use crate::control::peer_service::no_owner;
use crate::control::proto::AttachReply;
use crate::error::ChannelError;
use crate::link::Link;
use crate::link::notification::Notification;
use crate::link::token::{Bell, Token};
use crate::link::wait::Wait;
use crate::link::word_pair::WordPair;
use crate::slots::layout::Layout;
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::{BlockCopy, Blocks, Local, RemotePlace, Transfer, Way};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Sender {
    name: Arc<str>,
    link: Arc<Link>,
    pair: Arc<WordPair>,
    /// Nothing is kept at this end but the pair of words.
    ours: Arc<WordPair>,
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

    /// Makes the sender of a slot, for payloads of `payload` bytes, from the peer's reply.
    pub(crate) fn new(
        name: Arc<str>,
        link: &Arc<Link>,
        port: u32,
        ours: Arc<WordPair>,
        reply: &AttachReply,
        payload: usize,
    ) -> Result<Self, ChannelError> {
        let place = place_of(reply).map_err(ChannelError::local)?;
        let link = Arc::clone(link);
        let layout = Layout::new(payload, reply.depth).filter(|layout| {
            let named = (layout.stride as u64, layout.tail as u64, layout.bytes() as u64);
            layout.depth > 0 && named == (reply.stride, reply.tail, place.length)
        });
        let Some(layout) = layout else {
            link.remove_pair(&ours);
            return Err(ChannelError::local(format!("the peer's slot {name:?} has an impossible layout")));
        };
        let pair = Arc::new(ours.towards(reply.slot, no_owner()));
        Ok(Self {
            name,
            link,
            pair,
            ours,
            port,
            place,
            layout,
            next: reply.epoch,
            first: reply.epoch,
            misses: 0,
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// The epoch of what is sent next.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The epoch of what was sent first.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// The epoch up to which all was released.
    pub(crate) fn released(&self) -> u64 {
        self.link.load_count(self.pair.number())
    }

    /// What must have been released before the next one can go; 0 if nothing.
    fn due(&self) -> u64 {
        let depth = u64::from(self.layout.depth);
        if self.next - self.first < depth { 0 } else { self.next - depth }
    }

    /// Whether there is a buffer free.
    pub(crate) fn is_ready(&mut self) -> Result<bool, ChannelError> {
        if self.released() < self.due() {
            self.missed()?;
        }
        self.link.check()?;
        Ok(self.released() >= self.due())
    }

    /// How many were sent and are not released yet.
    pub(crate) fn pending(&mut self) -> Result<u64, ChannelError> {
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
    pub(crate) async fn ready(&mut self) -> Result<(), ChannelError> {
        // A peer that takes all at once must not keep this task's thread from others.
        consume_budget().await;
        while !self.is_ready()? {
            self.wait_for(self.due()).await?;
        }
        Ok(())
    }

    /// Waits until `epoch` was released.
    pub(crate) async fn wait_for(&self, epoch: u64) -> Result<(), ChannelError> {
        if self.released() >= epoch {
            return Ok(());
        }
        let word = self.link.count(self.pair.number());
        Wait::until(&self.link, &self.pair, self.port, word, epoch, false).await
    }

    /// Whether payloads go without a transfer.
    pub(crate) fn is_small(&self) -> bool {
        self.layout.tail + 8 <= self.link.port(self.port).inline()
    }

    /// Sends a small payload, whose memory is free again when this returns. Only when ready.
    pub(crate) fn send_small(&mut self, payload: &[u8]) -> Result<(), ChannelError> {
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
                return self.link.ring_sleeper(&self.pair, epoch, self.port);
            }
            Notification::Immediate => {
                port.write_small(&[IoSlice::new(payload)], place, Some(self.pair.peer_number()))?;
            }
            Notification::Message => {
                port.write_small(&[IoSlice::new(payload)], place, None)?;
                port.send_frame(&Frame::Placed { slot: self.pair.peer_number(), epoch })?;
            }
        }
        self.next += 1;
        Ok(())
    }

    /// Sends a copy of `payload`, whose memory is free again when this returns. Only when ready.
    pub(crate) fn send_copied(&mut self, payload: &[u8]) -> Result<(), ChannelError> {
        if self.is_small() {
            return self.send_small(payload);
        }
        let landing = Arc::clone(self.link.landing());
        let mut copy = landing.take(payload.len() as u64)?;
        copy[..payload.len()].copy_from_slice(payload);
        let token = Token::call(move |outcome| {
            if let Local::Region(copy) = outcome.local {
                landing.put(copy);
            }
        });
        self.send(Local::Region(copy), 0, token)
    }

    /// Sends the payload that lies at `offset` of `local`. Only when ready.
    pub(crate) fn send(&mut self, local: Local, offset: u64, token: Token) -> Result<(), ChannelError> {
        let (epoch, start) = (self.next, self.buffer());
        self.next += 1;
        let length = self.layout.payload as u64;
        let blocks = Blocks::One(BlockCopy { local: offset, remote: 0, length });
        let token = token.ring(self.bell(), &self.pair, epoch, self.port);
        let place = RemotePlace { start, length };
        let transfer = Transfer::new(local, Way::Write, blocks, place, token);
        let tail = start.address + self.layout.tail as u64;
        let word = || Some(RemoteSegment { address: tail, ..start });
        self.link.submit_noticed(transfer, length, &self.pair, epoch, self.port, word)
    }

    fn bell(&self) -> Weak<dyn Bell> {
        let link = Arc::downgrade(&self.link);
        link
    }

    /// Where the next payload goes.
    fn buffer(&self) -> RemoteSegment {
        let offset = self.layout.start(self.next) as u64;
        RemoteSegment { address: self.place.start.address + offset, ..self.place.start }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.link.remove_pair(&self.ours);
    }
}
