//! The state of a device, which its handles and its service share, and the group that the device belongs to.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use tokio::sync::{OnceCell, oneshot};
use tokio::task::AbortHandle;
use tonic::Status;

use crate::channel::Channel;
use crate::control::Attachable;
use crate::control::accept::Caller;
use crate::device::settings::Settings;
use crate::error::{TensorError, TensorErrorKind};
use crate::link::{Link, LinkId, PeerParameters, Prepared};
use crate::memory::RegionCache;
use crate::named_driver::{NamedProvider, NamedRequester, NamedTensors};
use tonic_rdma::Provider;
use tonic_rdma::unstable::{ClientSlots, Reactor};
use tonic_rdma_verbs::memory::Budget;
use tonic_rdma_verbs::unstable::lock;

/// The state of a device.
pub(crate) struct DeviceState {
    pub(crate) settings: Settings,
    pub(crate) budget: Arc<Budget>,
    pub(crate) address: Option<SocketAddr>,
    /// The links that peers opened.
    pub(crate) accepted: Mutex<HashMap<LinkId, AcceptedLink>>,
    /// The group that the device belongs to.
    pub(crate) group: Mutex<Group>,
    /// One place for each link that a peer has opened.
    pub(crate) places: Arc<ClientSlots>,
    /// One place for each peer whose device is being asked whether it answers.
    pub(crate) asking: Arc<ClientSlots>,
    /// One place for each link that a peer has opened and not confirmed. Such a link has queue pairs and
    /// memory, and its peer has proved nothing.
    pub(crate) unconfirmed: Arc<ClientSlots>,
    /// The links that were opened here, by endpoint.
    pub(crate) opened: tokio::sync::Mutex<HashMap<Arc<str>, Arc<OnceCell<Channel>>>>,
    pub(crate) attachables: Mutex<HashMap<Arc<str>, Weak<dyn Attachable>>>,
    pub(crate) offers: Arc<NamedProvider>,
    pub(crate) region_cache: Arc<RegionCache>,
    pub(crate) server: Mutex<Option<AbortHandle>>,
    /// The reactors that poll the queues of the links.
    pub(crate) reactors: Mutex<Vec<Weak<Reactor>>>,
}

/// The group of ranks that a device belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Group {
    /// The device belongs to no group, so any peer may open links.
    #[default]
    None,
    /// The group has no name yet, so no peer may open links.
    Joining,
    /// Peers that know this name, which are the ranks of the group, may open links.
    Named([u8; 16]),
}

impl Group {
    /// Returns the name as calls carry it.
    pub(crate) fn name(self) -> Bytes {
        match self {
            Self::None | Self::Joining => Bytes::new(),
            Self::Named(name) => name.to_vec().into(),
        }
    }

    /// Refuses a caller that named the group `theirs`, if it is no rank of this group.
    pub(crate) fn admit(self, theirs: &[u8]) -> Result<(), Status> {
        match self {
            Self::None => Ok(()),
            Self::Named(ours) if ours == theirs => Ok(()),
            Self::Named(_) => Err(Status::permission_denied(
                "this device belongs to a rank of a group, and the caller does not belong to the group",
            )),
            Self::Joining => {
                Err(Status::aborted("the ranks of this device's group have not met yet; try again later"))
            }
        }
    }
}

/// A link that a peer opened.
pub(crate) struct AcceptedLink {
    pub(crate) link: Weak<Link>,
    /// The caller that may use the link.
    pub(crate) opener: Caller,
    /// Ends the wait for the peer's confirmation. `None` once the peer has confirmed.
    pub(crate) unconfirmed: Option<oneshot::Sender<()>>,
}

impl DeviceState {
    /// Creates the queue pairs of a new link, on the device that `provider` opens. A thread that may block
    /// does this, because some calls of devices take milliseconds.
    pub(crate) fn prepare(&self, provider: Provider, queue_pairs: u32) -> Result<Prepared, TensorError> {
        let prepared =
            Prepared::new(provider, queue_pairs, &self.settings, &self.budget, &self.region_cache)?;
        let mut reactors = lock(&self.reactors);
        reactors.retain(|known| known.strong_count() > 0);
        let reactor = Arc::downgrade(&prepared.reactor);
        if !reactors.iter().any(|known| known.ptr_eq(&reactor)) {
            reactors.push(reactor);
        }
        Ok(prepared)
    }

    /// Offers something to peers under `name`.
    pub(crate) fn register(&self, name: Arc<str>, offered: Weak<dyn Attachable>) -> Result<(), TensorError> {
        let mut all = lock(&self.attachables);
        all.retain(|_, offered| offered.strong_count() > 0);
        match all.entry(name) {
            Entry::Occupied(taken) => {
                let text = format!("{:?} is in use already", taken.key());
                Err(TensorError::new(TensorErrorKind::NameTaken, text))
            }
            Entry::Vacant(free) => {
                free.insert(offered);
                Ok(())
            }
        }
    }

    /// Returns the regions and slots on offer, with their names.
    pub(crate) fn attachables(&self) -> Vec<(Arc<str>, Arc<dyn Attachable>)> {
        let all = lock(&self.attachables);
        all.iter().filter_map(|(name, offered)| Some((Arc::clone(name), offered.upgrade()?))).collect()
    }

    /// Makes the named tensors of a new link to `peer`.
    pub(crate) fn named_tensors(&self, peer: &PeerParameters) -> NamedTensors {
        let requester = NamedRequester::new(&self.settings, &self.region_cache, peer.named_queue_pairs());
        NamedTensors::new(Arc::clone(&self.offers), requester)
    }

    /// Returns the address that the device listens on, as peers write it.
    pub(crate) fn endpoint(&self) -> String {
        let prefix = self.settings.tls.server_prefix();
        self.address.map(|address| format!("{prefix}{address}")).unwrap_or_default()
    }

    /// Returns the links that peers opened and that have not ended.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        let accepted = lock(&self.accepted);
        let links = accepted.values().filter_map(|it| it.link.upgrade());
        links.filter(|link| link.fault().is_none()).collect()
    }
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        if let Some(server) = lock(&self.server).take() {
            server.abort();
        }
        for link in self.links() {
            link.fail(TensorError::closed(&link.peer));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter::from_fn;
    use std::net::{IpAddr, Ipv4Addr};

    use crate::device::RdmaDevice;
    use tonic_rdma::unstable::Source;
    use tonic_rdma_verbs::unstable::DeviceOwner;

    #[tokio::test]
    async fn one_peer_leaves_links_to_others() {
        let device = RdmaDevice::builder().max_links(20).build().unwrap();
        let links = &device.shared.places;
        let of =
            |user| Source::from(IpAddr::V4(Ipv4Addr::LOCALHOST)).with_owner(DeviceOwner::new(user, true));
        let held: Vec<_> = from_fn(|| links.try_take(of(1))).collect();
        assert_eq!(held.len(), 20);
        assert!(links.try_take(of(2)).is_some() && links.try_take(Source::UNKNOWN).is_some());
    }
}
