//! The device: this process, as peers see it.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use tokio::net::ToSocketAddrs;
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::AbortHandle;
use tokio_stream::StreamExt as _;

use super::accept::Accepted;
use super::exchange::{Exchange, Offers, Requests};
use super::landing::Landing;
use super::link::{Link, LinkId};
use super::placement::Placement;
use super::proto::tensor_device_server::TensorDeviceServer;
use super::region::Export;
use super::service::Service;
use super::{Channel, ChannelError, MemRegion, Settings, lock, open};
use crate::wire::tensor_frame::MAX_NAME;
use tonic_rdma::Config;
use tonic_rdma::RdmaIncoming;
use tonic_rdma_verbs::memory::Budget;

/// This process as a device with memory: the paper's `RdmaDev` (table 1). It listens for peers that want to reach its
/// memory, and opens channels to theirs. Clones are the same device; when the last one is dropped, its links end.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
/// use tonic_rdma_tensor::{Direction, RdmaDevice, Rights};
///
/// let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
/// let parameters = server.export("parameters", server.allocate(1 << 20)?, Rights::READ_WRITE)?;
///
/// let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
/// let channel = worker.channel(&server.endpoint(), 0).await?;
/// let remote = channel.region("parameters").await?;
/// let mut gradients = worker.allocate(4096)?;
/// gradients.fill(7);
/// let (gradients, result) = channel.memcpy(gradients, 0, &remote, 8192, 4096, Direction::LocalToRemote).await;
/// result?;
///
/// let mut first = [0; 4];
/// parameters.memory().copy_out(8192, &mut first).unwrap();
/// assert_eq!(first, [7; 4]);
/// # drop(gradients);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RdmaDevice {
    pub(super) shared: Arc<Shared>,
}

/// What the device's parts share.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) budget: Arc<Budget>,
    address: Option<SocketAddr>,
    pub(super) runtime: tokio::runtime::Handle,
    /// Links that peers opened, by what names them.
    pub(super) accepted: Mutex<HashMap<LinkId, Accepted>>,
    /// How many more may be opened by peers.
    pub(super) places: Arc<Semaphore>,
    /// Links that were opened here, by endpoint.
    pub(super) opened: tokio::sync::Mutex<HashMap<Arc<str>, Arc<OnceCell<Channel>>>>,
    pub(super) offered: Mutex<HashMap<Arc<str>, Offered>>,
    pub(super) offers: Arc<Offers>,
    pub(super) landing: Arc<Landing>,
    server: Mutex<Option<AbortHandle>>,
}

/// What peers can attach to, by its name.
#[derive(Clone, Debug)]
pub(super) enum Offered {
    Region(Weak<Export>),
    Placement(Weak<Placement>),
}

impl Offered {
    fn is_gone(&self) -> bool {
        match self {
            Self::Region(export) => export.strong_count() == 0,
            Self::Placement(placement) => placement.strong_count() == 0,
        }
    }
}

impl RdmaDevice {
    /// Makes a device with `cqs` completion queues and `qps_per_peer` queue pairs to each peer, spread over the queues in
    /// turn, that listens on `local_endpoint` (port 0 takes a free one). It reads the environment for which RDMA device to
    /// use ([`Config::from_env`](tonic_rdma::Config::from_env)).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let device = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// println!("peers reach it at {}", device.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, a variable has a bad value, or a number is 0 or above
    /// [`Settings::MAX_CQS`] or [`Settings::MAX_QPS`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn new(
        cqs: u32,
        qps_per_peer: u32,
        local_endpoint: impl ToSocketAddrs,
    ) -> Result<Self, ChannelError> {
        let config = Config::from_env().map_err(ChannelError::local)?;
        Self::bind(Settings::new(cqs, qps_per_peer).config(config), local_endpoint).await
    }

    /// Makes a device with these settings that listens on `local_endpoint` (port 0 takes a free one). It reads no variable
    /// but `RDMA_TUNE_CACHE`, and that one only if the settings ask for it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// use tonic_rdma_tensor::{RdmaDevice, Settings};
    ///
    /// let settings = Settings::new(1, 4).validate(true);
    /// let device = RdmaDevice::bind(settings, "127.0.0.1:0").await?;
    /// # assert!(device.local_addr().is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub async fn bind(settings: Settings, local_endpoint: impl ToSocketAddrs) -> Result<Self, ChannelError> {
        let incoming = RdmaIncoming::bind_with(local_endpoint, settings.config.clone())
            .await
            .map_err(|error| ChannelError::Local(format!("can't listen for tensor peers: {error}").into()))?;
        let device = Self::make(settings, Some(incoming.local_addr()))?;
        let connections = incoming.filter_map(Result::ok).map(Ok::<_, std::io::Error>);
        let mut server = device.shared.settings.tls.server(device.settings()).map_err(ChannelError::local)?;
        let server = server.add_service(device.service()).serve_with_incoming(connections);
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "a tensor device does not listen any more");
            }
        });
        *lock(&device.shared.server) = Some(task.abort_handle());
        Ok(device)
    }

    /// Makes a device that does not listen by itself. Add its [`service`](Self::service) to a server of your own, whose port
    /// then serves your calls and tensors; or leave it out, and only open channels.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Server;
    /// use tonic_rdma::RdmaIncoming;
    /// use tonic_rdma_tensor::{RdmaDevice, Settings};
    ///
    /// let device = RdmaDevice::without_listener(Settings::new(1, 2))?;
    /// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    /// let address = incoming.local_addr();
    /// // Your services go beside it.
    /// tokio::spawn(Server::builder().add_service(device.service()).serve_with_incoming(incoming));
    ///
    /// let peer = RdmaDevice::without_listener(Settings::new(1, 2))?;
    /// let channel = peer.channel(&address.to_string(), 0).await?;
    /// assert!(channel.is_open());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A number in the settings is 0 or too large.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn without_listener(settings: Settings) -> Result<Self, ChannelError> {
        Self::make(settings, None)
    }

    fn make(settings: Settings, address: Option<SocketAddr>) -> Result<Self, ChannelError> {
        let numbers = [
            ("cqs", settings.cqs, Settings::MAX_CQS),
            ("qps_per_peer", settings.qps_per_peer, Settings::MAX_QPS),
        ];
        for (name, given, most) in numbers {
            if !(1..=most).contains(&given) {
                return Err(ChannelError::Local(format!("{name}: {given} is not within 1 to {most}").into()));
            }
        }
        settings.config.validate().map_err(ChannelError::local)?;
        let limit = settings.config.pinned();
        let budget = Budget::for_process(false, Some(limit.unwrap_or(u64::MAX)));
        let landing = Landing::new(&budget);
        let places = settings.links.min(Semaphore::MAX_PERMITS);
        let shared = Arc::new(Shared {
            offers: Offers::new(&settings, &landing),
            landing,
            budget,
            settings,
            address,
            runtime: tokio::runtime::Handle::current(),
            accepted: Mutex::default(),
            places: Arc::new(Semaphore::new(places)),
            opened: tokio::sync::Mutex::default(),
            offered: Mutex::default(),
            server: Mutex::default(),
        });
        Ok(Self { shared })
    }

    /// Returns the gRPC service by which peers find this device's memory, for a tonic server of your own: see
    /// [`without_listener`](Self::without_listener) for a whole example.
    ///
    /// ```no_run
    /// # async fn serve(device: tonic_rdma_tensor::RdmaDevice) -> Result<(), Box<dyn std::error::Error>> {
    /// let incoming = tonic_rdma::RdmaIncoming::bind("0.0.0.0:50051").await?;
    /// let server = tonic::transport::Server::builder().add_service(device.service());
    /// server.serve_with_incoming(incoming).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn service(&self) -> TensorDeviceServer<impl super::proto::tensor_device_server::TensorDevice> {
        TensorDeviceServer::new(Service::new(&self.shared))
    }

    /// Returns where it listens, as peers name it: `host:port`, or `https://host:port` with TLS. Empty if it does not listen.
    pub fn endpoint(&self) -> String {
        self.shared.endpoint()
    }

    /// Returns the address that it listens on, if it listens by itself.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.address
    }

    /// Returns its settings.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Allocates memory that the device can read and write (table 1: `AllocateMemRegion`): `size` bytes, zeroed, in a mapping
    /// of its own. It is registered with each peer's queue pairs when it is first used with them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # let device = tonic_rdma_tensor::RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// let mut region = device.allocate(1 << 20)?;
    /// region[..4].copy_from_slice(&1.5_f32.to_le_bytes()); // it is a `&mut [u8]`
    /// # assert_eq!(region.len(), 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `RDMA_PINNED_LIMIT` is used up, or the system has no memory.
    pub fn allocate(&self, size: usize) -> Result<MemRegion, ChannelError> {
        MemRegion::allocate(size, &self.shared.budget).map_err(ChannelError::memory)
    }

    /// Opens a channel over queue pair `qp_index`, modulo their number, to the device that listens on `remote`, which is
    /// `host:port`, `http://host:port` or `https://host:port` (table 1: `GetChannel`). The first call for a peer connects;
    /// later ones find the link.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// // Two queue pairs, over which operations happen side by side.
    /// let small = worker.channel(&server.endpoint(), 0).await?;
    /// let large = worker.channel(&server.endpoint(), 1).await?;
    /// assert_eq!(small.device(), large.device());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer can't be reached or refuses, there is no RDMA between the two, or it is reached over TLS and
    /// [`Settings::plaintext_tensors`] does not allow that.
    pub async fn channel(&self, remote: &str, qp_index: u32) -> Result<Channel, ChannelError> {
        let remote: Arc<str> = remote.into();
        let cell = {
            let mut opened = self.shared.opened.lock().await;
            // What ended goes, and what was not opened in the end.
            opened.retain(|_, cell| cell.get().map_or(Arc::strong_count(cell) > 1, Channel::is_open));
            Arc::clone(opened.entry(Arc::clone(&remote)).or_default())
        };
        let open = open::open(Arc::clone(&self.shared), Arc::clone(&remote));
        let channel = cell.get_or_try_init(|| open).await?;
        Ok(channel.on(qp_index))
    }

    /// Puts something on offer under `name`.
    pub(super) fn offer(&self, name: &str, offered: Offered) -> Result<Arc<str>, ChannelError> {
        let name = checked(name)?;
        let mut all = lock(&self.shared.offered);
        all.retain(|_, offered| !offered.is_gone());
        match all.entry(Arc::clone(&name)) {
            std::collections::hash_map::Entry::Occupied(_) => return Err(ChannelError::NameTaken(name)),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(offered),
        };
        Ok(name)
    }
}

/// A name that may be used.
pub(super) fn checked(name: &str) -> Result<Arc<str>, ChannelError> {
    if (1..=MAX_NAME).contains(&name.len()) {
        Ok(name.into())
    } else {
        Err(ChannelError::BadName(name.len()))
    }
}

impl Shared {
    /// A new link's part in the rendezvous.
    pub(super) fn exchange(&self) -> Exchange {
        Exchange::new(Arc::clone(&self.offers), Requests::new(&self.settings, &self.landing))
    }

    /// Where it listens, as peers name it.
    pub(super) fn endpoint(&self) -> String {
        let prefix = self.settings.tls.server_prefix();
        self.address.map(|address| format!("{prefix}{address}")).unwrap_or_default()
    }

    /// Links that live, of either origin.
    pub(super) fn links(&self) -> Vec<Arc<Link>> {
        let accepted = lock(&self.accepted);
        let links = accepted.values().filter_map(|it| it.link.upgrade());
        links.filter(|link| link.fault().is_none()).collect()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(server) = lock(&self.server).take() {
            server.abort();
        }
        for link in self.links() {
            link.fail(ChannelError::Closed(Arc::clone(link.peer())));
        }
    }
}

impl fmt::Debug for RdmaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaDevice").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}
