//! The receiving end of a slot, whatever it holds.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::task::consume_budget;

use crate::control::proto::Kind;
use crate::error::ChannelError;
use crate::link::notification::Notification;
use crate::link::wait::Wait;
use crate::slots::layout::Layout;
use crate::slots::slot::{Attached, Holder, MAX_DEPTH, Slot};
use crate::types::TensorSpec;
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::memory::MemRegion;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Receiver {
    slot: Arc<Slot>,
    /// Who writes, as of the last time that it was looked up, and which sender of the slot's that was.
    attached: Option<Attached>,
    sender: u64,
    /// Times that nothing had come, so that now and then somebody looks whether the sender lives.
    misses: u32,
}

impl Receiver {
    /// Every so many times that nothing has come, the devices are looked at.
    const LOOK_EVERY: u32 = 1 << 12;

    pub(crate) fn new(
        name: Arc<str>,
        kind: Kind,
        spec: Option<TensorSpec>,
        payload: usize,
        depth: u32,
        allocate: impl FnOnce(usize) -> Result<MemRegion, ChannelError>,
    ) -> Result<Self, ChannelError> {
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(ChannelError::local(format!(
                "a slot has from 1 to {MAX_DEPTH} buffers, not {depth}"
            )));
        }
        let layout = Layout::new(payload, depth).ok_or_else(|| {
            ChannelError::local(format!("{depth} buffers of {payload} bytes are too large"))
        })?;
        let memory = allocate(layout.bytes())?;
        let slot = Slot::new(name, kind, spec, layout, memory);
        Ok(Self { slot, attached: None, sender: 0, misses: 0 })
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    /// Whether the next one has come. What had come before the sender went is still to be had.
    pub(crate) fn poll(&mut self) -> Result<bool, ChannelError> {
        if self.slot.is_arrived() {
            return Ok(true);
        }
        let missed = self.missed();
        // What came last before the sender went may have come since.
        if self.slot.is_arrived() {
            return Ok(true);
        }
        missed.map(|()| false)
    }

    /// Nothing has come: is anybody there?
    #[inline(never)]
    fn missed(&mut self) -> Result<(), ChannelError> {
        self.misses = self.misses.wrapping_add(1);
        if self.slot.lost.load(Ordering::Relaxed) {
            self.attached = None;
            return self.slot.attached().map(|_| ());
        }
        self.look_up()?;
        let Some(attached) = &self.attached else { return Ok(()) };
        attached.link.check()?;
        if attached.link.notification() != Notification::Word {
            attached.link.poll(attached.port);
        } else if self.misses.is_multiple_of(Self::LOOK_EVERY) {
            attached.link.look()?;
        }
        Ok(())
    }

    /// Waits for the next one.
    pub(crate) async fn wait(&mut self) -> Result<(), ChannelError> {
        // A peer that always has something must not keep this task's thread from others.
        consume_budget().await;
        while !self.poll()? {
            // A sender that comes begins with another epoch. Before the look: none that comes after it is missed.
            let mut changed = pin!(self.slot.changed.notified());
            let Some(attached) = self.slot.attached()? else {
                changed.await;
                continue;
            };
            let next = self.slot.next.load(Ordering::Relaxed);
            let tail = self.slot.layout.start(next) + self.slot.layout.tail;
            let word = (&self.slot.memory, tail);
            let mut come = Wait::until(&attached.link, &attached.pair, attached.port, word, next, true);
            // An error of the link is told by `poll`, once what came before it was taken.
            poll_fn(|context| match Pin::new(&mut come).poll(context) {
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => changed.as_mut().poll(context),
            })
            .await;
        }
        Ok(())
    }

    /// Takes what has come, if it has: from now on nobody may write there. Its offset in the memory.
    pub(crate) fn take(&mut self) -> Result<Option<usize>, ChannelError> {
        if !self.poll()? || !self.slot.hold(Holder::Receiver) {
            return Ok(None);
        }
        // A new sender may have come in between, and what the last one sent is void.
        if !self.slot.is_arrived() {
            self.slot.let_go();
            return Ok(None);
        }
        self.slot.arrived.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.slot.layout.start(self.slot.next.load(Ordering::Relaxed))))
    }

    /// Takes [`take`](Self::take) back: it is there to be taken.
    pub(crate) fn put_back(&mut self) {
        self.slot.let_go();
    }

    /// Learns who writes now.
    fn look_up(&mut self) -> Result<(), ChannelError> {
        let sender = self.slot.senders.load(Ordering::SeqCst);
        if self.attached.is_none() || self.sender != sender {
            self.attached = self.slot.attached()?;
            self.sender = sender;
        }
        Ok(())
    }

    /// Gives it back to the sender.
    pub(crate) fn release(&mut self) {
        let epoch = self.slot.next.fetch_add(1, Ordering::SeqCst);
        // Before others may attach: the buffer is the sender's that filled it.
        if self.look_up().is_err() {
            self.attached = None;
        }
        self.slot.let_go();
        if let Some(Attached { link, pair, port, .. }) = &self.attached {
            let frame = Frame::Released { slot: pair.peer_number(), epoch };
            // If that fails the link does, which the next call tells.
            let _ = link.tell(pair, epoch, *port, &frame);
        }
    }

    /// The link by which it came.
    pub(crate) fn attached(&mut self) -> Result<Attached, ChannelError> {
        self.look_up()?;
        self.attached.clone().ok_or_else(|| ChannelError::local("nobody is attached"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Ok(Some(Attached { link, pair, .. })) = self.slot.attached() {
            link.remove_pair(&pair);
        }
    }
}
