//! The sending side of a slot of either kind, and its counts.

use std::io::IoSlice;
use std::sync::Arc;

use tokio::task::consume_budget;

use crate::control::proto::AttachReply;
use crate::control::{OwnPair, granted_memory};
use crate::error::{TensorError, TensorErrorKind};
use crate::link::Link;
use crate::link::port::Token;
use crate::link::wait::Wait;
use crate::link::words::Notification;
use crate::slots::slot::Layout;
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::Lease;
use tonic_rdma_verbs::unstable::{Grant, LocalMemory, RemoteRange, Transfer, TransferKind};

/// The sending side of a slot.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(super) name: Arc<str>,
    pub(super) link: Arc<Link>,
    pair: OwnPair,
    pub(super) port: u32,
    place: RemoteRange,
    layout: Layout,
    /// The epoch of the next payload, and of the first one.
    pub(super) next: u64,
    pub(super) first: u64,
    misses: u32,
    /// The error of a send without a free buffer, made once, because callers send again and again.
    busy: TensorError,
}

impl Sender {
    /// The number of polls without a release, after which the queue is polled. A long transfer waits for the
    /// completions of earlier ones.
    const POLL_EVERY: u32 = 1 << 4;

    /// Makes the sender of a slot, for payloads of `payload` bytes, from the peer's reply.
    pub(crate) fn new(
        name: Arc<str>,
        link: &Arc<Link>,
        port: u32,
        pair: OwnPair,
        reply: &AttachReply,
        payload: usize,
    ) -> Result<Self, TensorError> {
        let place = granted_memory(reply)?;
        let link = Arc::clone(link);
        let layout = Layout::new(payload, reply.depth).filter(|layout| {
            let named = (layout.stride as u64, layout.tail as u64, layout.bytes() as u64);
            layout.depth > 0 && named == (reply.stride, reply.tail, place.length)
        });
        let Some(layout) = layout else {
            return Err(TensorError::other(format!("the peer's slot {name:?} has an impossible layout")));
        };
        let reason = format!("all buffers of the slot {name:?} are in use");
        Ok(Self {
            busy: TensorError::new(TensorErrorKind::Busy, reason),
            name,
            link,
            pair,
            port,
            place,
            layout,
            next: reply.epoch,
            first: reply.epoch,
            misses: 0,
        })
    }

    /// Returns the last epoch that the receiver has released.
    pub(crate) fn released(&self) -> u64 {
        self.link.load_count(self.pair.number)
    }

    /// Keeps rights of the receiver until it has ended its part of the slot.
    pub(super) fn keep(&self, grants: Vec<Grant>) {
        self.link.keep(&self.pair, grants);
    }

    /// Returns the epoch that the receiver must release before the next payload can go, or 0.
    fn due(&self) -> u64 {
        let depth = u64::from(self.layout.depth);
        if self.next - self.first < depth { 0 } else { self.next - depth }
    }

    /// Returns whether a buffer is free.
    pub(crate) fn is_ready(&mut self) -> Result<bool, TensorError> {
        if self.released() < self.due() {
            self.missed()?;
        }
        self.link.check()?;
        Ok(self.released() >= self.due())
    }

    /// Fails if no buffer is free.
    pub(crate) fn check_ready(&mut self) -> Result<(), TensorError> {
        if self.is_ready()? {
            return Ok(());
        }
        Err(self.busy.clone())
    }

    /// Returns how many payloads were sent and are not released yet.
    pub(crate) fn pending(&mut self) -> Result<u64, TensorError> {
        if self.unreleased() > 0 {
            self.missed()?;
        }
        self.link.check()?;
        Ok(self.unreleased())
    }

    /// Returns the number of payloads that are not released. The peer writes the count, so the result is
    /// limited to the number of payloads that were sent.
    fn unreleased(&self) -> u64 {
        let all = self.next - self.first;
        self.next.saturating_sub(1).saturating_sub(self.released()).min(all)
    }

    /// Helps a release to arrive that a poll has not found: carries out what the receiver has asked, takes
    /// completions, and checks that the receiver lives.
    fn missed(&mut self) -> Result<(), TensorError> {
        self.misses = self.misses.wrapping_add(1);
        self.link.missed(self.port, self.misses, Self::POLL_EVERY)
    }

    /// Waits until a buffer is free.
    pub(crate) async fn ready(&mut self) -> Result<(), TensorError> {
        // A peer that releases at once must not keep this task's thread from other tasks.
        consume_budget().await;
        while !self.is_ready()? {
            self.wait_for(self.due()).await?;
        }
        Ok(())
    }

    /// Waits until the receiver has released `epoch`.
    pub(crate) async fn wait_for(&self, epoch: u64) -> Result<(), TensorError> {
        if self.released() >= epoch {
            return Ok(());
        }
        let word = self.link.count(self.pair.number);
        Wait::until(&self.link, &self.pair, Some(self.port), word, epoch, false).await
    }

    /// Returns whether a payload is sent inline, without a transfer.
    pub(crate) fn is_small(&self) -> bool {
        self.layout.tail + 8 <= self.link.port(self.port).inline
    }

    /// Sends a small payload. The caller's memory is free when this returns. A buffer must be free.
    pub(crate) fn send_small(&mut self, payload: &[u8]) -> Result<(), TensorError> {
        debug_assert!(payload.len() == self.layout.payload && self.is_small());
        let (epoch, place) = (self.next, self.buffer());
        let word = epoch.to_ne_bytes();
        let port = self.link.port(self.port);
        match self.link.notification {
            Notification::Word => {
                let padding = &[0; 8][..self.layout.tail - payload.len()];
                let slices = [IoSlice::new(payload), IoSlice::new(padding), IoSlice::new(&word)];
                port.write_small(&slices, place, None)?;
                self.next += 1;
                return self.link.ring_sleeper(&self.pair, epoch, self.port);
            }
            Notification::Immediate => {
                port.write_small(&[IoSlice::new(payload)], place, Some(self.pair.peer_number))?;
            }
            Notification::Message => {
                port.write_small(&[IoSlice::new(payload)], place, None)?;
                port.send_frame(&Frame::Placed { slot: self.pair.peer_number, epoch })?;
            }
        }
        self.next += 1;
        Ok(())
    }

    /// Sends a copy of `payload`. The caller's memory is free when this returns. A buffer must be free.
    pub(crate) fn send_copied(&mut self, payload: &[u8]) -> Result<(), TensorError> {
        if self.is_small() {
            return self.send_small(payload);
        }
        let copy = self.link.region_cache.copy_of(payload)?;
        self.send(LocalMemory::Region(copy), 0, Token::unobserved())
    }

    /// Sends the payload at `offset` of `local`. A buffer must be free.
    pub(crate) fn send(&mut self, local: LocalMemory, offset: u64, token: Token) -> Result<(), TensorError> {
        let (epoch, start) = (self.next, self.buffer());
        let length = self.layout.payload as u64;
        let token = token.with_bell(Arc::downgrade(&self.link), &self.pair, epoch, self.port);
        let place = RemoteRange { start, length };
        let transfer = Transfer::of_range(local, offset, length, TransferKind::Write, place, token);
        let tail = start.address + self.layout.tail as u64;
        let word = || Some(RemoteSegment { address: tail, ..start });
        self.link.submit_noticed(transfer, &self.pair, epoch, self.port, word)?;
        // A refused payload takes no buffer: the receiver waits for this epoch.
        self.next += 1;
        Ok(())
    }

    /// Returns whether the device can read the bytes of `lease`. It can't if there is no budget to register
    /// their slab; then they have to be copied.
    pub(crate) fn registers(&self, lease: &Lease) -> bool {
        self.link.port(self.port).registers(lease)
    }

    /// Returns the segment for the next payload.
    fn buffer(&self) -> RemoteSegment {
        let offset = self.layout.start(self.next) as u64;
        RemoteSegment { address: self.place.start.address + offset, ..self.place.start }
    }
}

/// How many tensors a sender has sent: without a copy at this side, with one, and inline. A tensor that was
/// refused does not count.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};
/// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let channel = worker.channel(&server.endpoint(), 0).await?;
/// # let spec = TensorSpec::new(Dtype::U8, Shape::new(&[1 << 20])?)?;
/// # let _slot = server.static_receiver("activations", &spec, 1)?;
/// let mut sender = channel.static_sender("activations", &spec).await?;
/// sender.send(&Tensor::copy_from(spec, &vec![1; 1 << 20])?).await?; // on the heap
/// assert_eq!((sender.sent().copied.tensors, sender.sent().copied.bytes), (1, 1 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentCounts {
    /// Tensors that the device read from the memory in which the program has them, without a copy at this
    /// side.
    pub in_place: SentTensors,
    /// Tensors whose bytes were first copied to registered memory.
    pub copied: SentTensors,
    /// Small tensors whose bytes were put into the request itself.
    pub inline: SentTensors,
}

/// A number of tensors, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentTensors {
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of their elements.
    pub bytes: u64,
}

impl SentTensors {
    /// Counts a tensor of `bytes` bytes.
    pub(crate) fn add(&mut self, bytes: usize) {
        self.tensors += 1;
        self.bytes += bytes as u64;
    }
}
