//! The receiving side of a slot of either kind: its memory, the sender that is attached, and the receiver.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;

use tokio::sync::Notify;
use tokio::task::consume_budget;
use tonic::Status;

use crate::control::proto::{AttachReply, AttachRequest, Kind, Offered as OfferedReply};
use crate::control::{Attachable, expect_kind, internal, invalid, memory_range};
use crate::error::TensorError;
use crate::link::Link;
use crate::link::wait::Wait;
use crate::link::words::{Arrivals, PairOwner, Tails, WordPair};
use crate::types::{Metadata, TensorSpec};
use crate::wire::tensor_frame::Frame;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::Access;
use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};
use tonic_rdma_verbs::unstable::{Grant, RemoteRange, lock};

/// The largest number of buffers of a slot.
const MAX_DEPTH: u32 = 1024;

/// The receiving side of a slot.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) name: Arc<str>,
    kind: Kind,
    /// The tensors that a static slot accepts.
    spec: Option<TensorSpec>,
    pub(crate) layout: Layout,
    pub(crate) memory: SharedRegion,
    /// The epoch of the first tensor that is not released.
    pub(crate) next: AtomicU64,
    /// The [`Holder`] of the buffers.
    holder: AtomicU8,
    /// The number of senders that have ever attached.
    pub(crate) senders: AtomicU64,
    attachment: Mutex<Attachment>,
    /// Whether a sender was lost, so that the receiver finds out why.
    pub(crate) lost: AtomicBool,
    /// The number of tensors that have arrived.
    pub(crate) arrived: AtomicU64,
    /// Notified when a sender attaches or is lost.
    pub(crate) changed: Notify,
}

/// The sender of a slot.
#[derive(Debug)]
enum Attachment {
    /// No sender has attached yet.
    Vacant,
    Attached {
        by: AttachedSender,
        _grant: Grant,
    },
    /// The last sender is being removed: its right is being taken away.
    Leaving(TensorError),
    /// The last sender is lost.
    Lost(TensorError),
}

/// An attached sender: its link, its pair of words, and its queue pair.
#[derive(Clone, Debug)]
pub(crate) struct AttachedSender {
    pub(crate) link: Arc<Link>,
    pub(crate) pair: Arc<WordPair>,
    pub(crate) port: u32,
}

/// Who has the buffers of a slot alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Holder {
    /// Neither: a sender may write.
    Free,
    /// The receiver reads a tensor that has arrived, so a new sender must not write there.
    Receiver,
    /// A new sender is being attached, so the tensors of the last one are not taken any more.
    Attaching,
}

/// The distance from the epochs of one sender to those of the next one. The last sender may have written
/// tensors that the receiver never takes, so the distance is larger than the number of buffers.
const LEAP: u64 = 1 << 32;

impl Slot {
    pub(crate) fn new(
        name: Arc<str>,
        kind: Kind,
        spec: Option<TensorSpec>,
        layout: Layout,
        memory: MemRegion,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            kind,
            spec,
            layout,
            memory: memory.share(),
            next: AtomicU64::new(1),
            holder: AtomicU8::new(Holder::Free as u8),
            senders: AtomicU64::new(0),
            attachment: Mutex::new(Attachment::Vacant),
            lost: AtomicBool::new(false),
            arrived: AtomicU64::new(0),
            changed: Notify::new(),
        })
    }

    /// Returns the name of the peer that writes to the slot.
    pub(crate) fn peer(&self) -> Option<String> {
        match &*lock(&self.attachment) {
            Attachment::Attached { by, .. } => Some(by.link.peer.to_string()),
            Attachment::Vacant | Attachment::Leaving(_) | Attachment::Lost(_) => None,
        }
    }

    /// Attaches a sender of the peer of `link`. No other sender may write from then on. Returns the number of
    /// its pair, its memory, and its first epoch.
    ///
    /// # Errors
    /// Another peer is attached or is still being removed, or the last tensor is still in use.
    fn attach_sender(
        self: &Arc<Self>,
        link: &Arc<Link>,
        peer_pair: u32,
        port: u32,
    ) -> Result<(u32, RemoteRange, u64), Status> {
        let mut attachment = lock(&self.attachment);
        if let Attachment::Attached { by, .. } = &*attachment
            && !Arc::ptr_eq(&by.link, link)
        {
            return Err(Status::already_exists(format!("{:?} is attached to {}", self.name, by.link.peer)));
        }
        if matches!(&*attachment, Attachment::Leaving(_)) || !self.hold(Holder::Attaching) {
            return Err(Status::unavailable(format!(
                "what came last into {:?} is still in use; try again later",
                self.name
            )));
        }
        let mut last = None;
        let attached = self.attach_anew(&mut attachment, &mut last, link, peer_pair, port);
        self.let_go();
        drop(attachment);
        // Outside the lock, because the link may end here.
        if let Some(last) = last {
            last.link.leave_pair(&last.pair);
        }
        attached.map_err(internal)
    }

    /// Attaches a sender in place of the last one. The caller tells the peer that the pair of `last` has ended.
    fn attach_anew(
        self: &Arc<Self>,
        attachment: &mut Attachment,
        last: &mut Option<AttachedSender>,
        link: &Arc<Link>,
        peer_pair: u32,
        port: u32,
    ) -> Result<(u32, RemoteRange, u64), TensorError> {
        let grant = link.grant(&self.memory, Access::REMOTE_WRITE)?;
        let first = match attachment {
            Attachment::Vacant => self.next.load(Ordering::SeqCst),
            _ => self.next.fetch_add(LEAP, Ordering::SeqCst) + LEAP,
        };
        // The last sender of this peer loses its right, so a write that it still has in flight arrives too
        // late.
        if let Attachment::Attached { by, .. } = std::mem::replace(attachment, Attachment::Vacant) {
            *last = link.forget_pair(&by.pair).then_some(by);
        }
        let tails = Tails {
            memory: self.memory.clone(),
            depth: self.layout.depth,
            stride: self.layout.stride,
            tail: self.layout.tail,
            next: Arc::new(AtomicU64::new(first)),
        };
        let owner = Some(Arc::downgrade(self) as Weak<dyn PairOwner>);
        let pair = link.add_pair(|number| WordPair::new(number, peer_pair, Arrivals::Tails(tails), owner))?;
        let (number, place) = (pair.number, grant.range());
        let by = AttachedSender { link: Arc::clone(link), pair, port };
        *attachment = Attachment::Attached { by, _grant: grant };
        self.lost.store(false, Ordering::SeqCst);
        self.senders.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
        Ok((number, place, first))
    }

    /// Takes the buffers for `holder`. Returns false if they have a holder already.
    fn hold(&self, holder: Holder) -> bool {
        let free = Holder::Free as u8;
        self.holder.compare_exchange(free, holder as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn let_go(&self) {
        self.holder.store(Holder::Free as u8, Ordering::SeqCst);
    }

    /// Returns whether the tensor has arrived that is `ahead` places behind the next one. `ahead` is less than
    /// the number of buffers.
    pub(super) fn is_arrived(&self, ahead: u64) -> bool {
        let next = self.next.load(Ordering::Relaxed) + ahead;
        let tail = self.layout.start(next) + self.layout.tail;
        self.memory.load_u64(tail).is_ok_and(|epoch| epoch == next)
    }

    /// Returns the sender, if there is one, or an error if the last one is lost.
    pub(crate) fn attached(&self) -> Result<Option<AttachedSender>, TensorError> {
        match &*lock(&self.attachment) {
            Attachment::Vacant => Ok(None),
            Attachment::Attached { by, .. } => Ok(Some(by.clone())),
            Attachment::Leaving(fault) | Attachment::Lost(fault) => Err(fault.clone()),
        }
    }
}

impl Attachable for Slot {
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status> {
        expect_kind(request, self.kind)?;
        if let Some(spec) = &self.spec {
            let offered =
                WireMetadata::decode(&request.metadata).map_err(|error| invalid(&request.name, error))?;
            let offered = Metadata::try_from(offered).map_err(|error| invalid(&request.name, error))?;
            if offered.spec != *spec {
                let (name, offered) = (&request.name, offered.spec);
                return Err(Status::invalid_argument(format!("{name:?} takes {spec}, not {offered}")));
            }
        }
        if request.queue_pair as usize >= link.ports().count() {
            return Err(Status::invalid_argument(format!(
                "queue pair {} does not exist",
                request.queue_pair
            )));
        }
        let (pair, granted, epoch) = self.attach_sender(link, request.words, request.queue_pair)?;
        let Layout { stride, tail, depth, .. } = self.layout;
        Ok(AttachReply {
            slot: pair,
            memory: Some(memory_range(&granted)),
            readable: false,
            writable: true,
            depth,
            stride: stride as u64,
            tail: tail as u64,
            epoch,
        })
    }

    fn describe(&self, name: &str) -> OfferedReply {
        OfferedReply {
            name: name.to_owned(),
            kind: self.kind.into(),
            length: self.layout.payload as u64,
            depth: self.layout.depth,
            spec: self.spec.as_ref().map(ToString::to_string).unwrap_or_default(),
            arrived: self.arrived.load(Ordering::Relaxed),
            attached: self.peer().unwrap_or_default(),
        }
    }
}

impl PairOwner for Slot {
    fn link_ended(&self, fault: &TensorError) {
        let mut attachment = lock(&self.attachment);
        let ours = matches!(&*attachment, Attachment::Attached { by, .. } if by.link.fault().is_some());
        if !ours {
            return;
        }
        let before = std::mem::replace(&mut *attachment, Attachment::Leaving(fault.clone()));
        self.lost.store(true, Ordering::SeqCst);
        drop(attachment);
        // This ends the peer's right, before another sender gets one. It happens outside the lock, because it
        // may wait for the peer.
        drop(before);
        *lock(&self.attachment) = Attachment::Lost(fault.clone());
        self.changed.notify_waiters();
    }

    /// What the sender has sent is still received. The pair is given up when another sender attaches.
    fn ended_by_peer(&self, _: &WordPair) {}
}

/// The layout of a slot's buffers in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The bytes of a payload.
    pub(crate) payload: usize,
    /// The offset of the tail: the end of the payload, rounded up.
    pub(crate) tail: usize,
    pub(crate) stride: usize,
    pub(crate) depth: u32,
}

impl Layout {
    /// Buffers begin on cache lines of their own.
    const ALIGNMENT: usize = 64;

    pub(crate) fn new(payload: usize, depth: u32) -> Option<Self> {
        let tail = payload.checked_next_multiple_of(8)?;
        let stride = tail.checked_add(8)?.checked_next_multiple_of(Self::ALIGNMENT)?;
        stride.checked_mul(depth as usize)?;
        Some(Self { payload, tail, stride, depth })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.stride * self.depth as usize
    }

    /// Returns the offset of the buffer of `epoch`.
    pub(crate) fn start(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride
    }
}

/// The receiving side of a slot.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) slot: Arc<Slot>,
    /// The sender that was attached when the receiver last looked, and the number of that sender.
    attached: Option<AttachedSender>,
    sender: u64,
    /// The number of polls that found nothing. After many of them the receiver asks whether the sender lives.
    misses: u32,
    /// The number of tensors that were taken and are not released.
    taken: u64,
}

impl Receiver {
    /// The number of polls that find nothing, after which the queue is polled. A release that waits for room
    /// continues with a poll of the queue.
    const POLL_EVERY: u32 = 1 << 8;

    pub(crate) fn new(
        name: Arc<str>,
        kind: Kind,
        spec: Option<TensorSpec>,
        payload: usize,
        depth: u32,
        allocate: impl FnOnce(usize) -> Result<MemRegion, TensorError>,
    ) -> Result<Self, TensorError> {
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(TensorError::argument(format!(
                "a slot has from 1 to {MAX_DEPTH} buffers, not {depth}"
            )));
        }
        let layout = Layout::new(payload, depth).ok_or_else(|| {
            TensorError::argument(format!("{depth} buffers of {payload} bytes are too large"))
        })?;
        let memory = allocate(layout.bytes())?;
        let slot = Slot::new(name, kind, spec, layout, memory);
        Ok(Self { slot, attached: None, sender: 0, misses: 0, taken: 0 })
    }

    /// Returns whether the next tensor has arrived that was not taken. Tensors that arrived before the sender
    /// was lost are still received. A buffer must be left.
    pub(crate) fn poll(&mut self) -> Result<bool, TensorError> {
        if self.slot.is_arrived(self.taken) {
            return Ok(true);
        }
        let missed = self.missed();
        // The sender's last tensor may have arrived since, before the sender was lost.
        if self.slot.is_arrived(self.taken) {
            return Ok(true);
        }
        missed.map(|()| false)
    }

    /// Helps a tensor to arrive that a poll has not found: carries out what the sender has asked, takes
    /// completions, and checks that the sender lives.
    #[inline(never)]
    fn missed(&mut self) -> Result<(), TensorError> {
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

    /// Waits for the next tensor that was not taken. A buffer must be left. Other events may be waited for
    /// beside it if a tensor was taken: then this does not spin.
    pub(crate) async fn wait(&mut self) -> Result<(), TensorError> {
        // A peer that always has a tensor ready must not keep this task's thread from other tasks.
        consume_budget().await;
        while !self.poll()? {
            // A new sender begins with another epoch. The wait for a new sender begins before the check of
            // the slot, so that no sender is missed.
            let mut changed = pin!(self.slot.changed.notified());
            let Some(attached) = self.slot.attached()? else {
                changed.await;
                continue;
            };
            let next = self.slot.next.load(Ordering::Relaxed) + self.taken;
            let tail = self.slot.layout.start(next) + self.slot.layout.tail;
            let word = (&self.slot.memory, tail);
            let AttachedSender { link, pair, port } = &attached;
            let arrival = Wait::until(link, pair, Some(*port), word, next, true);
            let mut arrival = if self.taken == 0 { arrival } else { arrival.without_a_spin() };
            // `poll` reports an error of the link, after the tensors that arrived before it.
            poll_fn(|context| match Pin::new(&mut arrival).poll(context) {
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => changed.as_mut().poll(context),
            })
            .await;
        }
        Ok(())
    }

    /// Takes the next tensor if it has arrived, and keeps a new sender from the buffers until all tensors that
    /// were taken are released. Returns the buffer's offset in the memory. A buffer must be left.
    pub(crate) fn take(&mut self) -> Result<Option<usize>, TensorError> {
        if !self.poll()? || (self.taken == 0 && !self.slot.hold(Holder::Receiver)) {
            return Ok(None);
        }
        // A new sender may have attached in between, which voids the tensors of the last one.
        if !self.slot.is_arrived(self.taken) {
            self.let_go_if_unused();
            return Ok(None);
        }
        let epoch = self.slot.next.load(Ordering::Relaxed) + self.taken;
        self.taken += 1;
        self.slot.arrived.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.slot.layout.start(epoch)))
    }

    /// Leaves the last `count` tensors that were taken in the slot. They can be taken again.
    pub(crate) fn put_back(&mut self, count: u64) {
        self.taken -= count;
        self.slot.arrived.fetch_sub(count, Ordering::Relaxed);
        self.let_go_if_unused();
    }

    fn let_go_if_unused(&self) {
        if self.taken == 0 {
            self.slot.let_go();
        }
    }

    /// Looks up the sender, if a new one has attached.
    fn look_up(&mut self) -> Result<(), TensorError> {
        let sender = self.slot.senders.load(Ordering::SeqCst);
        if self.attached.is_none() || self.sender != sender {
            self.attached = self.slot.attached()?;
            self.sender = sender;
        }
        Ok(())
    }

    /// Gives the buffer of the first tensor that was taken back to the sender.
    pub(crate) fn release(&mut self) {
        let epoch = self.slot.next.fetch_add(1, Ordering::SeqCst);
        self.taken -= 1;
        // This happens before a new sender can attach, because the buffer belongs to the sender that filled
        // it.
        if self.look_up().is_err() {
            self.attached = None;
        }
        self.let_go_if_unused();
        if let Some(AttachedSender { link, pair, port, .. }) = &self.attached {
            let frame = Frame::Released { slot: pair.peer_number, epoch };
            // If the report fails, the link fails too, and the next call returns that error.
            let _ = link.report(pair, epoch, *port, &frame);
        }
    }

    /// Returns the link over which the tensor arrived.
    pub(crate) fn attached(&mut self) -> Result<AttachedSender, TensorError> {
        self.look_up()?;
        self.attached.clone().ok_or_else(|| TensorError::other("no sender is attached"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Ok(Some(AttachedSender { link, pair, .. })) = self.slot.attached() {
            link.remove_pair(&pair);
        }
    }
}
