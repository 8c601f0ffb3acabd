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
use tonic::Status;

use crate::control::conversions::place;
use crate::control::offered::{Offered, expect_kind, internal};
use crate::control::proto::{AttachReply, AttachRequest, Kind, Offered as OfferedReply};
use crate::error::ChannelError;
use crate::link::notification::Notification;
use crate::link::port::Port;
use crate::link::wait::Wait;
use crate::link::word_pair::{Arrivals, Owner, WordPair};
use crate::link::{Link, LinkId};
use crate::lock::lock;
use crate::regions::rights::Rights;
use tonic_rdma_verbs::internal::{Grant, RemotePlace};
use tonic_rdma_verbs::memory::MemRegion;
use tonic_rdma_verbs::memory::SharedRegion;

/// A region on offer to peers. Dropping it withdraws the offer and takes their rights away.
#[derive(Debug)]
pub struct ExportedRegion {
    export: Arc<Export>,
    memory: SharedRegion,
}

/// What is shared with the service, and with links that may end at any time: they may have it for a moment longer than
/// [`ExportedRegion`] lives, so it gives up the memory when that is dropped.
pub(crate) struct Export {
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
    pair: Arc<WordPair>,
    /// Notices of this peer's that were taken.
    taken: u64,
    place: RemotePlace,
    _grant: Grant,
}

impl ExportedRegion {
    /// Makes a region to be offered under `name`.
    pub(crate) fn new(name: Arc<str>, memory: SharedRegion, rights: Rights) -> Self {
        let export = Arc::new(Export {
            name,
            length: memory.len() as u64,
            memory: Mutex::new(Some(memory.clone())),
            rights,
            attached: Mutex::default(),
            lost: Mutex::default(),
            notices: AtomicU64::new(0),
            left: AtomicU64::new(0),
            changed: Notify::new(),
        });
        Self { export, memory }
    }

    /// Returns the part that the service of the device has.
    pub(crate) fn offered(&self) -> Weak<dyn Offered> {
        let export = Arc::downgrade(&self.export);
        export
    }

    /// Returns the name that it is offered under.
    pub fn name(&self) -> &str {
        &self.export.name
    }

    /// Returns the memory, which peers may change at any time.
    pub fn memory(&self) -> &SharedRegion {
        &self.memory
    }

    /// Takes a notice of a peer's ([`Channel::memcpy_batch`](crate::Channel::memcpy_batch)), and returns whether there was one.
    /// All that this peer wrote before it is there. Looking costs a load for each peer that is attached.
    pub fn try_notice(&self) -> bool {
        self.export.take_notice() || (self.export.poll() && self.export.take_notice())
    }

    /// Waits for a notice of a peer's ([`Channel::memcpy_batch`](crate::Channel::memcpy_batch)), and takes it. While no peer is
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
                link.remove_pair(&it.pair);
            }
        }
    }
}

impl Attached {
    fn count(&self) -> u64 {
        self.link.upgrade().map_or(0, |link| link.load_count(self.pair.number()))
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
                let count = link.count(it.pair.number());
                Some(Wait::until(&link, &it.pair, 0, count, it.taken + 1, false))
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
        let told = |link: &&Arc<Link>| link.notification() != Notification::Word;
        links.iter().filter(told).map(|link| link.poll_all()).count() > 0
    }

    /// Peers that are attached.
    fn peers(&self) -> Vec<String> {
        let attached = lock(&self.attached);
        attached.values().filter_map(|it| Some(it.link.upgrade()?.peer().to_string())).collect()
    }

    /// Gives the peer of `link` its right; once for each link, then the same again.
    fn attach_peer(
        self: &Arc<Self>,
        link: &Arc<Link>,
        peer_pair: u32,
    ) -> Result<(u32, RemotePlace), ChannelError> {
        let mut attached = lock(&self.attached);
        if let Some(it) = attached.get(link.id()) {
            return Ok((it.pair.number(), it.place));
        }
        let Some(memory) = lock(&self.memory).clone() else {
            return Err(ChannelError::local(format!("the region {:?} was withdrawn", self.name)));
        };
        let grant = link.grant(&memory, 0..memory.len(), self.rights.access())?;
        let owner: Weak<dyn Owner> = Arc::downgrade(&(Arc::clone(self) as Arc<dyn Owner>));
        let pair = link.add_pair(|number| WordPair::new(number, peer_pair, Arrivals::Count, owner))?;
        let (number, place) = (pair.number(), grant.place());
        let link_of = Arc::downgrade(link);
        *lock(&self.lost) = None;
        attached.insert(*link.id(), Attached { link: link_of, pair, taken: 0, place, _grant: grant });
        drop(attached);
        self.changed.notify_waiters();
        Ok((number, place))
    }
}

impl Offered for Export {
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status> {
        expect_kind(request, Kind::Region)?;
        let (slot, granted) = self.attach_peer(link, request.words).map_err(internal)?;
        let place = Some(place(&granted));
        let epoch = link.load_count(slot);
        let Rights { read: readable, write: writable } = self.rights;
        Ok(AttachReply { slot, place, readable, writable, epoch, ..AttachReply::default() })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RdmaDevice;

    /// As long as one of them has it, a link that ends or a call that attaches has the export too.
    #[tokio::test]
    async fn a_withdrawn_region_comes_back_though_the_service_has_its_export_for_a_moment_longer() {
        let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
        let region = device.allocate(4096).unwrap();
        let exported = device.export("region", region, Rights::READ_WRITE).unwrap();
        let elsewhere = Arc::clone(&exported.export);
        assert!(exported.withdraw().is_some(), "the region is still out");
        assert_eq!(elsewhere.length, 4096);
    }
}
