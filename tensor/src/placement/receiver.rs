//! The receiving end of a slot, whatever it holds.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::task::consume_budget;

use super::super::device::Offered;
use super::super::link::Wait;
use super::super::proto::Kind;
use super::super::types::TensorSpec;
use super::super::{ChannelError, Notification, RdmaDevice};
use super::{Attached, Holder, Layout, MAX_DEPTH, Placement};
use crate::wire::tensor_frame::Frame;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Receiver {
    placement: Arc<Placement>,
    /// Who writes, as of the last time that it was looked up, and which sender of the slot's that was.
    attached: Option<Attached>,
    sender: u64,
    /// Times that nothing had come, so that now and then somebody looks whether the sender lives.
    misses: u32,
}

impl Receiver {
    /// Every so many times that nothing has come, the devices are looked at.
    const LOOK_EVERY: u32 = 1 << 12;

    pub(super) fn new(
        device: &RdmaDevice,
        name: &str,
        kind: Kind,
        spec: Option<TensorSpec>,
        payload: usize,
        depth: u32,
    ) -> Result<Self, ChannelError> {
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(ChannelError::local(format!(
                "a slot has from 1 to {MAX_DEPTH} buffers, not {depth}"
            )));
        }
        let layout = Layout::new(payload, depth).ok_or_else(|| {
            ChannelError::local(format!("{depth} buffers of {payload} bytes are too large"))
        })?;
        let memory = device.allocate(layout.bytes())?;
        let placement = Placement::new(super::super::device::checked(name)?, kind, spec, layout, memory);
        device.offer(name, Offered::Placement(Arc::downgrade(&placement)))?;
        Ok(Self { placement, attached: None, sender: 0, misses: 0 })
    }

    pub(super) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Whether the next one has come. What had come before the sender went is still to be had.
    pub(super) fn poll(&mut self) -> Result<bool, ChannelError> {
        if self.placement.is_arrived() {
            return Ok(true);
        }
        let missed = self.missed();
        // What came last before the sender went may have come since.
        if self.placement.is_arrived() {
            return Ok(true);
        }
        missed.map(|()| false)
    }

    /// Nothing has come: is anybody there?
    #[inline(never)]
    fn missed(&mut self) -> Result<(), ChannelError> {
        self.misses = self.misses.wrapping_add(1);
        if self.placement.lost.load(Ordering::Relaxed) {
            self.attached = None;
            return self.placement.attached().map(|_| ());
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
    pub(super) async fn wait(&mut self) -> Result<(), ChannelError> {
        // A peer that always has something must not keep this task's thread from others.
        consume_budget().await;
        while !self.poll()? {
            // A sender that comes begins with another epoch. Before the look: none that comes after it is missed.
            let mut changed = pin!(self.placement.changed.notified());
            let Some(attached) = self.placement.attached()? else {
                changed.await;
                continue;
            };
            let next = self.placement.next.load(Ordering::Relaxed);
            let tail = self.placement.layout.start(next) + self.placement.layout.tail;
            let word = (&self.placement.memory, tail);
            let mut come = Wait::until(&attached.link, &attached.end, attached.port, word, next, true);
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
    pub(super) fn take(&mut self) -> Result<Option<usize>, ChannelError> {
        if !self.poll()? || !self.placement.hold(Holder::Receiver) {
            return Ok(None);
        }
        // A new sender may have come in between, and what the last one sent is void.
        if !self.placement.is_arrived() {
            self.placement.let_go();
            return Ok(None);
        }
        self.placement.arrived.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.placement.layout.start(self.placement.next.load(Ordering::Relaxed))))
    }

    /// Takes [`take`](Self::take) back: it is there to be taken.
    pub(super) fn put_back(&mut self) {
        self.placement.let_go();
    }

    /// Learns who writes now.
    fn look_up(&mut self) -> Result<(), ChannelError> {
        let sender = self.placement.senders.load(Ordering::SeqCst);
        if self.attached.is_none() || self.sender != sender {
            self.attached = self.placement.attached()?;
            self.sender = sender;
        }
        Ok(())
    }

    /// Gives it back to the sender.
    pub(super) fn release(&mut self) {
        let epoch = self.placement.next.fetch_add(1, Ordering::SeqCst);
        // Before others may attach: the buffer is the sender's that filled it.
        if self.look_up().is_err() {
            self.attached = None;
        }
        self.placement.let_go();
        if let Some(Attached { link, end, port, .. }) = &self.attached {
            let frame = Frame::Released { slot: end.peer_pair(), epoch };
            // If that fails the link does, which the next call tells.
            let _ = link.tell(end, epoch, *port, &frame);
        }
    }

    /// The link by which it came.
    pub(super) fn attached(&mut self) -> Result<Attached, ChannelError> {
        self.look_up()?;
        self.attached.clone().ok_or_else(|| ChannelError::local("nobody is attached"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Ok(Some(Attached { link, end, .. })) = self.placement.attached() {
            link.remove_end(&end);
        }
    }
}
