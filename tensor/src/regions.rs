//! Regions: memory that peers may read or write at any offset.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future as _, poll_fn};
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Poll;

use tokio::sync::Notify;
use tokio::task::consume_budget;
use tonic::Status;

use crate::control::proto::{AttachReply, AttachRequest, Kind, Offered as OfferedReply};
use crate::control::{Attachable, OwnPair, expect_kind, internal, memory_range};
use crate::error::TensorError;
use crate::link::port::Port;
use crate::link::wait::Wait;
use crate::link::words::{Arrivals, Notification, PairOwner, WordPair};
use crate::link::{Link, LinkId};
use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};
use tonic_rdma_verbs::unstable::{Grant, LentRegion, RegionLoan, RemoteRange, lock};
use tonic_rdma_verbs::{Access, RemoteSegment};

/// A region on offer to peers. Dropping it withdraws the offer, and revokes the rights of all peers.
#[derive(Debug)]
pub struct ExportedRegion {
    /// The part that the service of the device has.
    pub(crate) export: Arc<Export>,
    memory: SharedRegion,
}

/// The part of an exported region that the service and the links have. They may hold it for a moment longer
/// than [`ExportedRegion`] lives, so it gives up the memory when [`ExportedRegion`] is dropped.
#[derive(Debug)]
pub(crate) struct Export {
    name: Arc<str>,
    /// `None` once the region is withdrawn.
    memory: Mutex<Option<ExportedMemory>>,
    length: u64,
    rights: Rights,
    attached: Mutex<AttachedPeers>,
    /// The reason why the last peer was lost. `None` once another peer has attached.
    lost: Mutex<Option<TensorError>>,
    notices: AtomicU64,
    /// The notices of lost peers that were not taken yet.
    untaken_notices: AtomicU64,
    /// Notified when a peer attaches or is lost.
    changed: Notify,
}

/// The memory of an exported region.
#[derive(Clone, Debug)]
pub(crate) enum ExportedMemory {
    /// Memory that peers may write, or that several parts of this process use.
    Shared(SharedRegion),
    /// Memory that peers only read.
    Lent(RegionLoan),
}

/// The peers that attached, and their rights. An entry is removed when its link ends.
#[derive(Debug, Default)]
struct AttachedPeers {
    /// The right of each link. It stays when the peer has let the region go, because a write of the peer may
    /// still be on its way.
    rights: HashMap<LinkId, (Weak<Link>, Grant)>,
    /// One for each time that a peer attached, until the peer lets the region go. The last one of a link stays,
    /// because the end of the link is reported to its owner.
    pairs: Vec<AttachedPeer>,
}

#[derive(Debug)]
struct AttachedPeer {
    link: Weak<Link>,
    pair: Arc<WordPair>,
    /// The number of notices for this pair that were taken.
    taken: u64,
    /// Whether the peer has let the region go.
    is_ended: bool,
}

impl ExportedRegion {
    /// Makes a region to be offered under `name`.
    pub(crate) fn new(name: Arc<str>, memory: SharedRegion, rights: Rights) -> Self {
        let length = memory.len() as u64;
        let export = Export::new(name, ExportedMemory::Shared(memory.clone()), length, rights);
        Self { export, memory }
    }

    /// Returns the name of the region.
    pub fn name(&self) -> &str {
        &self.export.name
    }

    /// Returns the memory, which peers may change at any time.
    pub fn memory(&self) -> &SharedRegion {
        &self.memory
    }

    /// Takes one notice of a peer ([`RegionWrite::notify`](crate::RegionWrite::notify)), and returns whether
    /// there was one. All bytes that this peer wrote before the notice are there. This costs one load for
    /// each attached peer.
    pub fn try_notice(&self) -> bool {
        self.export.take_notice() || (self.export.poll() && self.export.take_notice())
    }

    /// Waits for a notice of a peer ([`RegionWrite::notify`](crate::RegionWrite::notify)), and takes it.
    /// While no peer is attached, it waits for one.
    ///
    /// # Errors
    /// The last attached peer is lost, and no other peer has attached since.
    pub async fn notice(&self) -> Result<(), TensorError> {
        self.wait_for(|| self.try_notice()).await
    }

    /// Waits for a notice, and takes none.
    pub(crate) async fn noticed(&self) -> Result<(), TensorError> {
        self.wait_for(|| self.export.has_notice() || (self.export.poll() && self.export.has_notice())).await
    }

    async fn wait_for(&self, mut noticed: impl FnMut() -> bool) -> Result<(), TensorError> {
        consume_budget().await;
        loop {
            // A peer may attach during the wait. The wait for a new peer begins before the check of the
            // notices, so that no peer is missed.
            let mut changed = pin!(self.export.changed.notified());
            if noticed() {
                return Ok(());
            }
            let mut waits = match self.export.waits() {
                Ok(waits) => waits,
                // A notice that the last peer sent before it was lost may have arrived since.
                Err(_) if noticed() => return Ok(()),
                Err(gone) => return Err(gone),
            };
            poll_fn(|context| {
                let arrived = waits.iter_mut().any(|wait| Pin::new(wait).poll(context).is_ready());
                if arrived { Poll::Ready(()) } else { changed.as_mut().poll(context) }
            })
            .await;
        }
    }

    /// Withdraws the offer. Returns the region, unless something else still holds the memory.
    pub fn withdraw(self) -> Option<MemRegion> {
        let memory = self.memory.clone();
        drop(self);
        memory.try_into_region().ok()
    }
}

impl Drop for ExportedRegion {
    fn drop(&mut self) {
        self.export.withdraw();
    }
}

impl AttachedPeers {
    /// Removes the pairs that the peer of `link` has given up, except the last pair of the link.
    fn take_ended(&mut self, link: &Weak<Link>) -> Vec<AttachedPeer> {
        let mut left = self.pairs.iter().filter(|it| it.link.ptr_eq(link)).count();
        let is_gone = |it: &mut AttachedPeer| {
            let is_gone = it.is_ended && left > 1 && it.link.ptr_eq(link);
            left -= usize::from(is_gone);
            is_gone
        };
        self.pairs.extract_if(.., is_gone).collect()
    }
}

impl AttachedPeer {
    fn count(&self) -> u64 {
        self.link.upgrade().map_or(0, |link| link.load_count(self.pair.number))
    }

    /// Removes the pair from its link.
    fn remove(&self) {
        if let Some(link) = self.link.upgrade() {
            link.remove_pair(&self.pair);
        }
    }
}

impl Export {
    /// Makes the export of a region of `length` bytes.
    pub(crate) fn new(name: Arc<str>, memory: ExportedMemory, length: u64, rights: Rights) -> Arc<Self> {
        Arc::new(Self {
            name,
            length,
            memory: Mutex::new(Some(memory)),
            rights,
            attached: Mutex::default(),
            lost: Mutex::default(),
            notices: AtomicU64::new(0),
            untaken_notices: AtomicU64::new(0),
            changed: Notify::new(),
        })
    }

    /// Gives up the memory, and revokes the rights of all peers.
    pub(crate) fn withdraw(&self) {
        let (memory, attached) = {
            let mut attached = lock(&self.attached);
            // `attach` reads the memory under this lock, so from here on no peer can attach.
            (lock(&self.memory).take(), std::mem::take(&mut *attached))
        };
        drop(memory);
        attached.pairs.iter().for_each(AttachedPeer::remove);
        drop(attached.rights);
    }

    /// Returns a wait for the next notice of each peer.
    ///
    /// # Errors
    /// The last peer is lost, and no other peer has attached since.
    fn waits(&self) -> Result<Vec<Wait>, TensorError> {
        let attached = lock(&self.attached);
        let waits: Vec<_> = attached
            .pairs
            .iter()
            .filter_map(|it| {
                let link = it.link.upgrade().filter(|link| link.fault().is_none())?;
                let count = link.count(it.pair.number);
                Some(Wait::until(&link, &it.pair, None, count, it.taken + 1, false))
            })
            .collect();
        drop(attached);
        let one = waits.len() == 1;
        let waits: Vec<_> =
            waits.into_iter().map(|wait| if one { wait } else { wait.without_a_spin() }).collect();
        match lock(&self.lost).clone() {
            Some(fault) if waits.is_empty() => Err(fault),
            _ => Ok(waits),
        }
    }

    /// Returns whether there is a notice of any peer.
    fn has_notice(&self) -> bool {
        let attached = lock(&self.attached);
        attached.pairs.iter().any(|it| it.count() > it.taken)
            || self.untaken_notices.load(Ordering::Relaxed) > 0
    }

    /// Takes a notice of any peer. Returns whether there was one.
    fn take_notice(&self) -> bool {
        let mut attached = lock(&self.attached);
        if let Some(it) = attached.pairs.iter_mut().find(|it| it.count() > it.taken) {
            it.taken += 1;
        } else {
            // All changes of this number happen under the lock of `attached`.
            let Some(rest) = self.untaken_notices.load(Ordering::Relaxed).checked_sub(1) else {
                return false;
            };
            self.untaken_notices.store(rest, Ordering::Relaxed);
        }
        self.notices.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Carries out what the peers have asked, and takes completions that may bring notices. Returns false if
    /// no peer is attached. Works outside the lock, because a link may end.
    fn poll(&self) -> bool {
        let links: Vec<_> =
            lock(&self.attached).rights.values().filter_map(|(link, _)| link.upgrade()).collect();
        for link in &links {
            match link.notification {
                Notification::Word => link.progress_all(),
                Notification::Immediate | Notification::Message => link.poll_all(),
            }
        }
        !links.is_empty()
    }

    /// Returns the names of the attached peers.
    fn peers(&self) -> Vec<String> {
        let attached = lock(&self.attached);
        let is_attached =
            |link: &Weak<Link>| attached.pairs.iter().any(|it| !it.is_ended && it.link.ptr_eq(link));
        let links = attached.rights.values().map(|(link, _)| link).filter(|link| is_attached(link));
        links.filter_map(|link| Some(link.upgrade()?.peer.to_string())).collect()
    }

    /// Gives the peer of `link` its right, and a pair of words. A second call for a link returns the right of
    /// the first one.
    fn attach_peer(
        self: &Arc<Self>,
        link: &Arc<Link>,
        peer_pair: u32,
    ) -> Result<(u32, RemoteRange), TensorError> {
        let mut attached = lock(&self.attached);
        let place = match attached.rights.get(&link.id) {
            Some((_, grant)) => grant.range(),
            None => {
                let grant = self.grant(link)?;
                let place = grant.range();
                attached.rights.insert(link.id, (Arc::downgrade(link), grant));
                place
            }
        };
        let owner = Some(Arc::downgrade(self) as Weak<dyn PairOwner>);
        let weak = Arc::downgrade(link);
        let pair = match link.add_pair(|number| WordPair::new(number, peer_pair, Arrivals::Count, owner)) {
            Ok(pair) => pair,
            Err(error) => {
                // Without a pair the end of the link is not reported here, so no right may stay.
                let is_first = !attached.pairs.iter().any(|it| it.link.ptr_eq(&weak));
                let right = attached.rights.extract_if(|id, _| is_first && *id == link.id).next();
                drop(attached);
                drop(right);
                return Err(error);
            }
        };
        let number = pair.number;
        *lock(&self.lost) = None;
        attached.pairs.push(AttachedPeer { link: Weak::clone(&weak), pair, taken: 0, is_ended: false });
        let gone = attached.take_ended(&weak);
        self.give_up(attached, gone);
        self.changed.notify_waiters();
        Ok((number, place))
    }

    fn grant(&self, link: &Link) -> Result<Grant, TensorError> {
        let Some(memory) = lock(&self.memory).clone() else {
            return Err(TensorError::other(format!("the region {:?} was withdrawn", self.name)));
        };
        match &memory {
            ExportedMemory::Shared(memory) => link.grant(memory, self.rights.access()),
            ExportedMemory::Lent(loan) => link.grant_loan(loan),
        }
    }

    /// Gives pairs up that were removed from `attached`.
    fn give_up(&self, attached: MutexGuard<'_, AttachedPeers>, gone: Vec<AttachedPeer>) {
        self.keep_notices(&gone);
        // Outside the lock, because the link may end here.
        drop(attached);
        gone.iter().for_each(AttachedPeer::remove);
    }

    /// Keeps the notices of pairs that are removed. The caller holds the lock of `attached`.
    fn keep_notices(&self, gone: &[AttachedPeer]) {
        // The peer writes its count, so the count may be anything. It is limited to the number of operations
        // that a peer can have in flight.
        let left = gone.iter().map(|it| it.count().saturating_sub(it.taken).min(Port::WAITING as u64));
        let left = left.fold(self.untaken_notices.load(Ordering::Relaxed), u64::saturating_add);
        self.untaken_notices.store(left, Ordering::Relaxed);
    }
}

impl Attachable for Export {
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status> {
        expect_kind(request, Kind::Region)?;
        let (slot, granted) = self.attach_peer(link, request.words).map_err(internal)?;
        let memory = Some(memory_range(&granted));
        let epoch = link.load_count(slot);
        let Rights { read: readable, write: writable } = self.rights;
        Ok(AttachReply { slot, memory, readable, writable, epoch, ..AttachReply::default() })
    }

    fn describe(&self, name: &str) -> OfferedReply {
        OfferedReply {
            name: name.to_owned(),
            kind: Kind::Region.into(),
            length: self.length,
            depth: 1,
            spec: String::new(),
            arrived: self.notices.load(Ordering::Relaxed),
            attached: self.peers().join(", "),
        }
    }
}

impl PairOwner for Export {
    fn link_ended(&self, fault: &TensorError) {
        let ended = |link: &Weak<Link>| link.upgrade().is_none_or(|link| link.fault().is_some());
        let mut attached = lock(&self.attached);
        let gone: Vec<_> = attached.pairs.extract_if(.., |it| ended(&it.link)).collect();
        let rights: Vec<_> = attached.rights.extract_if(|_, (link, _)| ended(link)).collect();
        self.keep_notices(&gone);
        drop(attached);
        // This ends the rights of the lost peers. It happens outside the lock, because it may wait for a
        // peer, and before the end is reported, so that the owner can then get the region back.
        drop((gone, rights));
        *lock(&self.lost) = Some(fault.clone());
        self.changed.notify_waiters();
    }

    fn ended_by_peer(&self, pair: &WordPair) {
        let mut attached = lock(&self.attached);
        let Some(it) = attached.pairs.iter_mut().find(|it| std::ptr::eq(&*it.pair, pair)) else { return };
        it.is_ended = true;
        let link = Weak::clone(&it.link);
        let gone = attached.take_ended(&link);
        self.give_up(attached, gone);
        self.changed.notify_waiters();
    }
}

/// A region that peers may read, and that only its owner writes
/// ([`RdmaDevice::publish`](crate::RdmaDevice::publish)). The owner uses it as a slice. A peer that reads
/// while the owner writes may get old and new bytes. Dropping the region revokes the rights of all peers.
pub struct PublishedRegion {
    /// The part that the service of the device has.
    pub(crate) export: Arc<Export>,
    /// `None` only while the region is withdrawn.
    memory: Option<LentRegion>,
}

impl PublishedRegion {
    /// Makes a region to be offered under `name`.
    pub(crate) fn new(name: Arc<str>, region: MemRegion) -> Self {
        let memory = LentRegion::new(region);
        let length = memory.len() as u64;
        let export = Export::new(name, ExportedMemory::Lent(memory.loan()), length, Rights::READ);
        Self { export, memory: Some(memory) }
    }

    /// Returns the name of the region.
    pub fn name(&self) -> &str {
        &self.export.name
    }

    /// Withdraws the offer, and revokes the rights of all peers. Returns the region, unless something else
    /// still holds the memory.
    pub fn withdraw(mut self) -> Option<MemRegion> {
        self.export.withdraw();
        self.memory.take()?.try_into_region().ok()
    }
}

impl Deref for PublishedRegion {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PublishedRegion {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for PublishedRegion {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PublishedRegion {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for PublishedRegion {
    fn drop(&mut self) {
        self.export.withdraw();
    }
}

impl fmt::Debug for PublishedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishedRegion")
            .field("name", &self.name())
            .field("length", &self.len())
            .finish_non_exhaustive()
    }
}

/// A region of a peer, with the rights that the peer gave. All clones refer to one region.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(crate) shared: Arc<RemoteRegionState>,
}

#[derive(Debug)]
pub(crate) struct RemoteRegionState {
    pub(crate) name: Arc<str>,
    pub(crate) link: Arc<Link>,
    pub(crate) place: RemoteRange,
    pub(crate) rights: Rights,
    /// The pair of words of the region, here and at the peer.
    pub(crate) pair: OwnPair,
    /// The number of notices that this side has sent to the peer.
    pub(crate) notices: Mutex<u64>,
}

impl RemoteRegion {
    /// Returns the name of the region.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.shared.place.length
    }

    /// Returns whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rights of this side.
    pub fn rights(&self) -> Rights {
        self.shared.rights
    }

    /// Returns the segment of `length` bytes at `offset`.
    pub(crate) fn at(&self, offset: u64, length: u64) -> Result<RemoteSegment, TensorError> {
        let segment = self.shared.place.at(offset, length);
        segment.ok_or_else(|| TensorError::out_of_range("remote", offset, length, self.len()))
    }
}

/// The rights of peers to a region.
///
/// ```
/// use tonic_rdma_tensor::Rights;
///
/// assert_eq!(Rights::READ_WRITE, Rights { read: true, write: true });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Whether peers may read the region.
    pub read: bool,
    /// Whether peers may write the region.
    pub write: bool,
}

impl Rights {
    /// The right to read.
    pub const READ: Self = Self { read: true, write: false };
    /// The right to write.
    pub const WRITE: Self = Self { read: false, write: true };
    /// The rights to read and to write.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    pub(crate) fn access(self) -> Access {
        let read = if self.read { Access::REMOTE_READ } else { Access::LOCAL_READ };
        let write = if self.write { Access::REMOTE_WRITE } else { Access::LOCAL_READ };
        read | write
    }
}

#[cfg(test)]
mod exported_tests {
    use super::*;
    use crate::device::RdmaDevice;

    /// A link that ends, or a call that attaches, holds the export for a moment longer.
    #[tokio::test]
    async fn a_withdrawn_region_comes_back_while_the_service_still_holds_its_export() {
        let device = RdmaDevice::bind("127.0.0.1:0").await.unwrap();
        let region = device.allocate(4096).unwrap();
        let exported = device.export("region", region, Rights::READ_WRITE).unwrap();
        let elsewhere = Arc::clone(&exported.export);
        assert!(exported.withdraw().is_some(), "the region is still out");
        assert_eq!(elsewhere.length, 4096);
    }
}
