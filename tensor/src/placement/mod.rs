//! Placement: slots, into which one peer puts tensors, one after the other.
//!
//! A slot has `depth` buffers, used in turn. Each is followed by its **tail**, which the sender writes last: the epoch of what
//! it has put there. Epochs count on for ever, over reconnections too, so that nothing old is ever taken for new: the receiver
//! looks for one value, and that value was never there before.
//!
//! ```text
//!   sender                                       receiver
//!   epoch 7 ── WRITE payload, tail = 7 ────────▶ [ payload │ tail 7 ]   try_recv: tail == 7? then it is whole
//!              count == 7: buffer is free  ◀──── release: writes 7 to the sender's count
//! ```
//!
//! In a **static** slot the payload is the tensor (§3.2 of the paper), of a type and shape that both ends know. In a
//! **dynamic** one it is the tensor's metadata and address, and the receiver reads the tensor itself (§3.3): the release then
//! says that the source is free.

mod dynamic_receiver;
mod dynamic_sender;
mod note;
mod receiver;
mod sender;
mod static_receiver;
mod static_sender;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;

pub use dynamic_receiver::DynamicReceiver;
pub use dynamic_sender::DynamicSender;
use receiver::Receiver;
use sender::Sender;
pub use static_receiver::{Arrived, StaticReceiver};
pub use static_sender::StaticSender;

use super::link::{Arrivals, End, Link, Owner, Tails};
use super::proto::Kind;
use super::types::TensorSpec;
use super::{ChannelError, SharedRegion, lock};
use tonic_rdma_verbs::Access;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::memory::MemRegion;

/// Buffers that a slot may have.
pub(super) const MAX_DEPTH: u32 = 1024;

/// A slot at its receiver.
pub(super) struct Placement {
    name: Arc<str>,
    kind: Kind,
    /// What a static slot takes.
    spec: Option<TensorSpec>,
    layout: Layout,
    memory: SharedRegion,
    /// The epoch that comes next.
    next: AtomicU64,
    /// Who has the buffers to itself at the moment, see [`Holder`].
    holder: AtomicU8,
    /// Counts senders.
    senders: AtomicU64,
    attachment: Mutex<Attachment>,
    /// Whether a sender was there and has gone, so that the receiver looks why.
    lost: AtomicBool,
    arrived: AtomicU64,
    /// Told when a sender comes or has gone.
    changed: Notify,
}

/// Who writes to a slot.
#[derive(Debug)]
enum Attachment {
    /// Nobody yet.
    Vacant,
    Attached {
        by: Attached,
        _grant: Grant,
    },
    /// The last one is going: its right is being taken away.
    Leaving(ChannelError),
    /// The last one is gone.
    Lost(ChannelError),
}

#[derive(Clone, Debug)]
struct Attached {
    link: Arc<Link>,
    end: Arc<End>,
    port: u32,
}

/// How a slot's buffers lie in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Bytes of what is placed.
    payload: usize,
    /// Offset of the tail: the payload's end, rounded up.
    tail: usize,
    stride: usize,
    depth: u32,
}

impl Layout {
    /// Buffers begin on cache lines of their own.
    const ALIGNMENT: usize = 64;

    fn new(payload: usize, depth: u32) -> Option<Self> {
        let tail = payload.checked_next_multiple_of(8)?;
        let stride = tail.checked_add(8)?.checked_next_multiple_of(Self::ALIGNMENT)?;
        stride.checked_mul(depth as usize)?;
        Some(Self { payload, tail, stride, depth })
    }

    fn bytes(&self) -> usize {
        self.stride * self.depth as usize
    }

    /// Where the buffer of `epoch` begins.
    fn start(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride
    }
}

/// Who keeps others from the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Holder {
    Nobody,
    /// It looks at what has arrived: a new sender must not write there.
    Receiver,
    /// A new sender is being attached: what the last one sent is not taken any more.
    Attaching,
}

/// How many epochs a new sender begins after the last one, however many the last one had not used.
const LEAP: u64 = 1 << 32;

impl Placement {
    fn new(
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
            holder: AtomicU8::new(Holder::Nobody as u8),
            senders: AtomicU64::new(0),
            attachment: Mutex::new(Attachment::Vacant),
            lost: AtomicBool::new(false),
            arrived: AtomicU64::new(0),
            changed: Notify::new(),
        })
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn spec(&self) -> Option<&TensorSpec> {
        self.spec.as_ref()
    }

    /// Bytes of a buffer.
    pub(super) fn payload(&self) -> u64 {
        self.layout.payload as u64
    }

    pub(super) fn depth(&self) -> u32 {
        self.layout.depth
    }

    /// Bytes from one buffer to the next, and to the tail in each.
    pub(super) fn shape(&self) -> (u64, u64) {
        (self.layout.stride as u64, self.layout.tail as u64)
    }

    /// Tensors that have come.
    pub(super) fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// The peer that writes to it.
    pub(super) fn peer(&self) -> Option<String> {
        match &*lock(&self.attachment) {
            Attachment::Attached { by, .. } => Some(by.link.peer().to_string()),
            Attachment::Vacant | Attachment::Leaving(_) | Attachment::Lost(_) => None,
        }
    }

    /// Lets a sender of the peer of `link` write, from now on alone. Yields its number, its memory, and the first epoch.
    ///
    /// # Errors
    /// Another peer is attached or has not quite gone, or what the last sender sent is still in use.
    pub(super) fn attach(
        self: &Arc<Self>,
        link: &Arc<Link>,
        peer_pair: u32,
        port: u32,
    ) -> Result<(u32, RemotePlace, u64), AttachError> {
        let mut attachment = lock(&self.attachment);
        if let Attachment::Attached { by, .. } = &*attachment
            && !Arc::ptr_eq(&by.link, link)
        {
            return Err(AttachError::Taken(by.link.peer().to_string()));
        }
        if matches!(&*attachment, Attachment::Leaving(_)) || !self.hold(Holder::Attaching) {
            return Err(AttachError::InUse);
        }
        let attached = self.attach_anew(&mut attachment, link, peer_pair, port);
        self.let_go();
        attached.map_err(AttachError::Failed)
    }

    fn attach_anew(
        self: &Arc<Self>,
        attachment: &mut Attachment,
        link: &Arc<Link>,
        peer_pair: u32,
        port: u32,
    ) -> Result<(u32, RemotePlace, u64), ChannelError> {
        let whole = 0..self.memory.len();
        let grant = link.grant(&self.memory, whole, Access::REMOTE_WRITE)?;
        let first = match attachment {
            Attachment::Vacant => self.next.load(Ordering::SeqCst),
            _ => self.next.fetch_add(LEAP, Ordering::SeqCst) + LEAP,
        };
        // The same peer's last sender loses its right: what it may still have on its way comes too late.
        if let Attachment::Attached { by, .. } = std::mem::replace(attachment, Attachment::Vacant) {
            link.remove_end(&by.end);
        }
        let tails = Tails {
            memory: self.memory.clone(),
            depth: self.layout.depth,
            stride: self.layout.stride,
            tail: self.layout.tail,
            next: Arc::new(AtomicU64::new(first)),
        };
        let owner: Weak<dyn Owner> = Arc::downgrade(&(Arc::clone(self) as Arc<dyn Owner>));
        let end = link.add_end(|pair| End::new(pair, peer_pair, Arrivals::Tails(tails), owner))?;
        let (pair, place) = (end.pair(), grant.place());
        let by = Attached { link: Arc::clone(link), end, port };
        *attachment = Attachment::Attached { by, _grant: grant };
        self.lost.store(false, Ordering::SeqCst);
        self.senders.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
        Ok((pair, place, first))
    }

    /// Keeps others from the buffers; false if somebody does already.
    fn hold(&self, holder: Holder) -> bool {
        let nobody = Holder::Nobody as u8;
        self.holder.compare_exchange(nobody, holder as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn let_go(&self) {
        self.holder.store(Holder::Nobody as u8, Ordering::SeqCst);
    }

    /// Whether what comes next is there.
    fn is_arrived(&self) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        let tail = self.layout.start(next) + self.layout.tail;
        self.memory.load_u64(tail).is_ok_and(|epoch| epoch == next)
    }

    /// Who writes, if anybody does; an error if the last one has gone.
    fn attached(&self) -> Result<Option<Attached>, ChannelError> {
        match &*lock(&self.attachment) {
            Attachment::Vacant => Ok(None),
            Attachment::Attached { by, .. } => Ok(Some(by.clone())),
            Attachment::Leaving(fault) | Attachment::Lost(fault) => Err(fault.clone()),
        }
    }
}

/// Why a peer can't attach.
#[derive(Debug)]
pub(super) enum AttachError {
    Taken(String),
    InUse,
    Failed(ChannelError),
}

impl Owner for Placement {
    fn link_ended(&self, fault: &ChannelError) {
        let mut attachment = lock(&self.attachment);
        let ours = matches!(&*attachment, Attachment::Attached { by, .. } if by.link.fault().is_some());
        if !ours {
            return;
        }
        let before = std::mem::replace(&mut *attachment, Attachment::Leaving(fault.clone()));
        self.lost.store(true, Ordering::SeqCst);
        drop(attachment);
        // The peer's right ends with this, before anybody else gets one: outside the lock, as it may wait for the peer.
        drop(before);
        *lock(&self.attachment) = Attachment::Lost(fault.clone());
        self.changed.notify_waiters();
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placement")
            .field("name", &self.name)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
