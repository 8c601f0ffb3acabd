//! Regions that peers may read or write at any place.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;

use tokio::sync::Notify;
use tokio::task::consume_budget;

use super::device::Offered;
use super::link::{Arrivals, End, Link, LinkId, Owner, Port, Wait};
use super::{ChannelError, MemRegion, RdmaDevice, SharedRegion, lock};
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::{Access, RemoteSegment};

/// What peers may do with a region.
///
/// ```
/// use tonic_rdma_tensor::Rights;
///
/// assert_eq!(Rights::READ_WRITE, Rights { read: true, write: true });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// They may read it.
    pub read: bool,
    /// They may write it.
    pub write: bool,
}

impl Rights {
    /// Reading alone.
    pub const READ: Self = Self { read: true, write: false };
    /// Writing alone.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Both.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    fn access(self) -> Access {
        let read = if self.read { Access::REMOTE_READ } else { Access::LOCAL_READ };
        let write = if self.write { Access::REMOTE_WRITE } else { Access::LOCAL_READ };
        read | write
    }
}

/// A region on offer to peers. Dropping it withdraws the offer and takes their rights away.
#[derive(Debug)]
pub struct ExportedRegion {
    export: Arc<Export>,
    memory: SharedRegion,
}

/// What is shared with the service, and with links that may end at any time: they may have it for a moment longer than
/// [`ExportedRegion`] lives, so it gives up the memory when that is dropped.
pub(super) struct Export {
    name: Arc<str>,
    /// None once it is withdrawn.
    memory: Mutex<Option<SharedRegion>>,
    length: u64,
    rights: Rights,
    /// Peers that attached, and their rights; gone with their link.
    attached: Mutex<HashMap<LinkId, Attached>>,
    /// Why the last one went, until another comes.
    lost: Mutex<Option<ChannelError>>,
    notices: AtomicU64,
    /// Notices of peers that have gone, which were not taken yet.
    left: AtomicU64,
    /// Told when a peer comes or has gone.
    changed: Notify,
}

struct Attached {
    link: Weak<Link>,
    end: Arc<End>,
    /// Notices of this peer's that were taken.
    taken: u64,
    place: RemotePlace,
    _grant: Grant,
}

impl RdmaDevice {
    /// Offers `region` to all peers of this device under `name`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let mut parameters = device.allocate(1 << 20)?;
    /// parameters.fill(0);
    /// let exported = device.export("parameters", parameters, Rights::READ)?;
    /// // Peers read it now. Dropping `exported`, or this, takes their rights away:
    /// let parameters = exported.withdraw().expect("nothing else has it");
    /// # drop(parameters);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty, or too long.
    pub fn export(
        &self,
        name: &str,
        region: MemRegion,
        rights: Rights,
    ) -> Result<ExportedRegion, ChannelError> {
        self.export_shared(name, region.share(), rights)
    }

    /// Offers memory that is shared already. It may be on offer under several names, with different rights.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let memory = device.allocate(4096)?.share();
    /// let readers = device.export_shared("readers", memory.clone(), Rights::READ)?;
    /// let writer = device.export_shared("writer", memory, Rights::WRITE)?;
    /// # drop((readers, writer));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`export`](Self::export).
    pub fn export_shared(
        &self,
        name: &str,
        memory: SharedRegion,
        rights: Rights,
    ) -> Result<ExportedRegion, ChannelError> {
        let export = Arc::new(Export {
            name: super::device::checked(name)?,
            length: memory.len() as u64,
            memory: Mutex::new(Some(memory.clone())),
            rights,
            attached: Mutex::default(),
            lost: Mutex::default(),
            notices: AtomicU64::new(0),
            left: AtomicU64::new(0),
            changed: Notify::new(),
        });
        self.offer(name, Offered::Region(Arc::downgrade(&export)))?;
        Ok(ExportedRegion { export, memory })
    }
}

impl ExportedRegion {
    /// Returns the name that it is offered under.
    pub fn name(&self) -> &str {
        &self.export.name
    }

    /// Returns the memory, which peers may change at any time.
    pub fn memory(&self) -> &SharedRegion {
        &self.memory
    }

    /// Takes a notice of a peer's ([`Channel::memcpy_batch`](super::Channel::memcpy_batch)), and returns whether there was one.
    /// All that this peer wrote before it is there. Looking costs a load for each peer that is attached.
    pub fn try_notice(&self) -> bool {
        self.export.take_notice() || (self.export.poll() && self.export.take_notice())
    }

    /// Waits for a notice of a peer's ([`Channel::memcpy_batch`](super::Channel::memcpy_batch)), and takes it. While no peer is
    /// attached yet, it waits for one.
    ///
    /// # Errors
    /// The last peer that was attached has gone, and no other has come since.
    pub async fn notice(&self) -> Result<(), ChannelError> {
        consume_budget().await;
        loop {
            // A peer may attach while we wait. Before the look: none that comes after it is missed.
            let mut changed = pin!(self.export.changed.notified());
            if self.try_notice() {
                return Ok(());
            }
            let mut waits = match self.export.waits() {
                Ok(waits) => waits,
                // What the last peer told of before it went may have come since.
                Err(_) if self.try_notice() => return Ok(()),
                Err(gone) => return Err(gone),
            };
            poll_fn(|context| {
                let told = waits.iter_mut().any(|wait| Pin::new(wait).poll(context).is_ready());
                if told { Poll::Ready(()) } else { changed.as_mut().poll(context) }
            })
            .await;
        }
    }

    /// Withdraws the offer, and gives the region back unless something else still holds the memory.
    pub fn withdraw(self) -> Option<MemRegion> {
        let memory = self.memory.clone();
        drop(self);
        memory.try_into_region().ok()
    }
}

impl Drop for ExportedRegion {
    fn drop(&mut self) {
        let (memory, attached) = {
            let mut attached = lock(&self.export.attached);
            // Under the lock that `attach` holds when it looks: from here on no peer can attach.
            (lock(&self.export.memory).take(), std::mem::take(&mut *attached))
        };
        drop(memory);
        for it in attached.into_values() {
            if let Some(link) = it.link.upgrade() {
                link.remove_end(&it.end);
            }
        }
    }
}

impl Attached {
    fn count(&self) -> u64 {
        self.link.upgrade().map_or(0, |link| link.load_count(self.end.pair()))
    }
}

impl Export {
    /// The next notice of each peer.
    ///
    /// # Errors
    /// The last one has gone, and no other has come since.
    fn waits(&self) -> Result<Vec<Wait>, ChannelError> {
        let attached = lock(&self.attached);
        let waits: Vec<_> = attached
            .values()
            .filter_map(|it| {
                let link = it.link.upgrade().filter(|link| link.fault().is_none())?;
                let count = link.count(it.end.pair());
                Some(Wait::until(&link, &it.end, 0, count, it.taken + 1, false))
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

    /// Takes a notice of some peer's.
    fn take_notice(&self) -> bool {
        let mut attached = lock(&self.attached);
        if let Some(it) = attached.values_mut().find(|it| it.count() > it.taken) {
            it.taken += 1;
        } else {
            // Under the lock, as all changes to it are.
            let Some(left) = self.left.load(Ordering::Relaxed).checked_sub(1) else { return false };
            self.left.store(left, Ordering::Relaxed);
        }
        self.notices.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Takes completions that may bring notices; false if notices come without. Not under the lock: a link may end.
    fn poll(&self) -> bool {
        let links: Vec<_> = lock(&self.attached).values().filter_map(|it| it.link.upgrade()).collect();
        let told = |link: &&Arc<Link>| link.notification() != super::Notification::Word;
        links.iter().filter(told).map(|link| link.poll_all()).count() > 0
    }

    pub(super) fn rights(&self) -> Rights {
        self.rights
    }

    pub(super) fn len(&self) -> u64 {
        self.length
    }

    pub(super) fn notices(&self) -> u64 {
        self.notices.load(Ordering::Relaxed)
    }

    /// Peers that are attached.
    pub(super) fn peers(&self) -> Vec<String> {
        let attached = lock(&self.attached);
        attached.values().filter_map(|it| Some(it.link.upgrade()?.peer().to_string())).collect()
    }

    /// Gives the peer of `link` its right; once for each link, then the same again.
    pub(super) fn attach(
        self: &Arc<Self>,
        link: &Arc<Link>,
        peer_pair: u32,
    ) -> Result<(u32, RemotePlace), ChannelError> {
        let mut attached = lock(&self.attached);
        if let Some(it) = attached.get(link.id()) {
            return Ok((it.end.pair(), it.place));
        }
        let Some(memory) = lock(&self.memory).clone() else {
            return Err(ChannelError::local(format!("the region {:?} was withdrawn", self.name)));
        };
        let grant = link.grant(&memory, 0..memory.len(), self.rights.access())?;
        let owner: Weak<dyn Owner> = Arc::downgrade(&(Arc::clone(self) as Arc<dyn Owner>));
        let end = link.add_end(|pair| End::new(pair, peer_pair, Arrivals::Count, owner))?;
        let (pair, place) = (end.pair(), grant.place());
        let link_of = Arc::downgrade(link);
        *lock(&self.lost) = None;
        attached.insert(*link.id(), Attached { link: link_of, end, taken: 0, place, _grant: grant });
        drop(attached);
        self.changed.notify_waiters();
        Ok((pair, place))
    }
}

impl Owner for Export {
    fn link_ended(&self, fault: &ChannelError) {
        let ended = |it: &Attached| it.link.upgrade().is_none_or(|link| link.fault().is_some());
        let mut attached = lock(&self.attached);
        let gone: Vec<_> = attached.extract_if(|_, it| ended(it)).collect();
        // The peer writes its count: it may be anything, and is not to be taken for more than a peer can have on its way.
        let left = gone.iter().map(|(_, it)| it.count().saturating_sub(it.taken).min(Port::WAITING as u64));
        let left = left.fold(self.left.load(Ordering::Relaxed), u64::saturating_add);
        self.left.store(left, Ordering::Relaxed);
        drop(attached);
        // Their rights end with this: outside the lock, as it may wait for a peer. Before the end is told: then the region can be
        // had back.
        drop(gone);
        *lock(&self.lost) = Some(fault.clone());
        self.changed.notify_waiters();
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// A peer's region, as far as the peer lets us use it. Clones are the same.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(super) shared: Arc<RemoteShared>,
}

#[derive(Debug)]
pub(super) struct RemoteShared {
    pub(super) name: Arc<str>,
    pub(super) link: Arc<Link>,
    pub(super) place: RemotePlace,
    pub(super) rights: Rights,
    /// Its words here, and at the peer.
    pub(super) end: Arc<End>,
    /// Changes that the peer was told of.
    pub(super) told: Mutex<u64>,
}

impl RemoteRegion {
    /// Returns the name that it was offered under.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.shared.place.length
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns what this end may do with it.
    pub fn rights(&self) -> Rights {
        self.shared.rights
    }

    /// The place of `length` bytes at `offset`.
    pub(super) fn at(&self, offset: u64, length: u64) -> Result<RemoteSegment, ChannelError> {
        let available = self.len();
        let out = ChannelError::OutOfRange { which: "remote", offset, length, available };
        self.shared.place.at(offset, length).ok_or(out)
    }
}

impl Drop for RemoteShared {
    fn drop(&mut self) {
        self.link.remove_end(&self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As long as one of them has it, a link that ends or a call that attaches has the export too.
    #[tokio::test]
    async fn a_withdrawn_region_comes_back_though_the_service_has_its_export_for_a_moment_longer() {
        let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
        let region = device.allocate(4096).unwrap();
        let exported = device.export("region", region, Rights::READ_WRITE).unwrap();
        let elsewhere = Arc::clone(&exported.export);
        assert!(exported.withdraw().is_some(), "the region is still out");
        assert_eq!(elsewhere.len(), 4096);
    }
}
