//! The receiving end of a slot of either kind.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::task::consume_budget;

use crate::control::proto::Kind;
use crate::error::ChannelError;
use crate::link::wait::Wait;
use crate::slots::layout::Layout;
use crate::slots::slot::{AttachedSender, Holder, MAX_DEPTH, Slot};
use crate::types::TensorSpec;
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::memory::MemRegion;

/// The receiving end of a slot.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) slot: Arc<Slot>,
    /// The sender that was attached when the receiver last looked, and the number of that sender.
    attached: Option<AttachedSender>,
    sender: u64,
    /// The number of looks that found nothing. After many of them the receiver asks whether the sender lives.
    misses: u32,
}

impl Receiver {
    /// The number of looks that find nothing, after which the queue is polled. A release that waits for room goes on with a poll.
    const POLL_EVERY: u32 = 1 << 8;

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

    /// Returns whether the next tensor has come. Tensors that came before the sender was lost are still received.
    pub(crate) fn poll(&mut self) -> Result<bool, ChannelError> {
        if self.slot.is_arrived() {
            return Ok(true);
        }
        let missed = self.missed();
        // The sender's last tensor may have come since, before the sender was lost.
        if self.slot.is_arrived() {
            return Ok(true);
        }
        missed.map(|()| false)
    }

    /// Looks for a reason why nothing has come: carries out what the sender has asked, takes completions, and checks that the
    /// sender lives.
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
        attached.link.missed(attached.port, self.misses, Self::POLL_EVERY)
    }

    /// Waits for the next tensor.
    pub(crate) async fn wait(&mut self) -> Result<(), ChannelError> {
        // A peer that always has a tensor ready must not keep this task's thread from other tasks.
        consume_budget().await;
        while !self.poll()? {
            // A new sender begins with another epoch. The wait for a new sender begins before the look at the slot, so that no
            // sender is missed.
            let mut changed = pin!(self.slot.changed.notified());
            let Some(attached) = self.slot.attached()? else {
                changed.await;
                continue;
            };
            let next = self.slot.next.load(Ordering::Relaxed);
            let tail = self.slot.layout.start(next) + self.slot.layout.tail;
            let word = (&self.slot.memory, tail);
            let AttachedSender { link, pair, port } = &attached;
            let mut come = Wait::until(link, pair, Some(*port), word, next, true);
            // `poll` reports an error of the link, after the tensors that came before it.
            poll_fn(|context| match Pin::new(&mut come).poll(context) {
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => changed.as_mut().poll(context),
            })
            .await;
        }
        Ok(())
    }

    /// Takes the next tensor if it has come, and keeps a new sender from its buffer. Returns the buffer's offset in the memory.
    pub(crate) fn take(&mut self) -> Result<Option<usize>, ChannelError> {
        if !self.poll()? || !self.slot.hold(Holder::Receiver) {
            return Ok(None);
        }
        // A new sender may have attached in between, which voids the tensors of the last one.
        if !self.slot.is_arrived() {
            self.slot.let_go();
            return Ok(None);
        }
        self.slot.arrived.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.slot.layout.start(self.slot.next.load(Ordering::Relaxed))))
    }

    /// Undoes [`take`](Self::take): the tensor can be taken again.
    pub(crate) fn put_back(&mut self) {
        self.slot.let_go();
    }

    /// Looks up the sender, if a new one has attached.
    fn look_up(&mut self) -> Result<(), ChannelError> {
        let sender = self.slot.senders.load(Ordering::SeqCst);
        if self.attached.is_none() || self.sender != sender {
            self.attached = self.slot.attached()?;
            self.sender = sender;
        }
        Ok(())
    }

    /// Gives the buffer back to the sender.
    pub(crate) fn release(&mut self) {
        let epoch = self.slot.next.fetch_add(1, Ordering::SeqCst);
        // This happens before a new sender can attach, because the buffer belongs to the sender that filled it.
        if self.look_up().is_err() {
            self.attached = None;
        }
        self.slot.let_go();
        if let Some(AttachedSender { link, pair, port, .. }) = &self.attached {
            let frame = Frame::Released { slot: pair.peer_number, epoch };
            // If the report fails, the link fails too, and the next call returns that error.
            let _ = link.report(pair, epoch, *port, &frame);
        }
    }

    /// Returns the link by which the tensor came.
    pub(crate) fn attached(&mut self) -> Result<AttachedSender, ChannelError> {
        self.look_up()?;
        self.attached.clone().ok_or_else(|| ChannelError::local("no sender is attached"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Ok(Some(AttachedSender { link, pair, .. })) = self.slot.attached() {
            link.remove_pair(&pair);
        }
    }
}
