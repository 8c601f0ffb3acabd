//! The device: this process, as its peers see it.

pub(crate) mod settings;
pub(crate) mod state;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::net::ToSocketAddrs;
use tokio_stream::StreamExt as _;
#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};

use self::settings::Settings;
use self::state::DeviceState;
use crate::channel::Channel;
use crate::control::accept::Service;
use crate::control::proto::Kind;
use crate::control::proto::tensor_device_server::{TensorDevice, TensorDeviceServer};
use crate::control::{Attachable, open};
use crate::error::{TensorError, check_name};
use crate::link::words::Notification;
use crate::memory::RegionCache;
use crate::named::OfferCounts;
use crate::named_driver::{NamedOffer, NamedProvider};
use crate::regions::{ExportedRegion, PublishedRegion, Rights};
use crate::slots::dynamic_slot::{ANNOUNCEMENT, DynamicReceiver};
use crate::slots::slot::Receiver;
use crate::slots::static_slot::StaticReceiver;
use crate::types::TensorSpec;
use tonic_rdma::unstable::ClientSlots;
use tonic_rdma::{Config, RdmaIncoming};
use tonic_rdma_verbs::memory::{Budget, MemRegion, SharedRegion};
use tonic_rdma_verbs::unstable::lock;

/// This process as a device with memory: the paper's `RdmaDev` (table 1). A device listens for peers that
/// want to reach its memory, and opens channels to peers. All clones refer to one device. The links of the
/// device end when the last clone is dropped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
/// use tonic_rdma_tensor::{RdmaDevice, Rights};
///
/// let server = RdmaDevice::bind("127.0.0.1:0").await?;
/// let parameters = server.export("parameters", server.allocate(1 << 20)?, Rights::READ_WRITE)?;
///
/// let worker = RdmaDevice::bind("127.0.0.1:0").await?;
/// let channel = worker.channel(&server.endpoint(), 0).await?;
/// let remote = channel.region("parameters").await?;
/// let mut gradients = worker.allocate(4096)?;
/// gradients.fill(7);
/// let gradients = channel.write(&remote).at(8192).from(gradients, ..).await?;
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
    pub(crate) shared: Arc<DeviceState>,
}

impl RdmaDevice {
    /// Returns a builder of a device, with the default settings. [`DeviceBuilder::bind`] has an example.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// Makes a device with the default settings that listens on `local_endpoint`. With port 0 the system
    /// chooses a free port.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// let device = tonic_rdma_tensor::RdmaDevice::bind("127.0.0.1:0").await?;
    /// println!("peers reach it at {}", device.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`DeviceBuilder::bind`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn bind(local_endpoint: impl ToSocketAddrs) -> Result<Self, TensorError> {
        Self::builder().bind(local_endpoint).await
    }

    /// Makes a device that listens on `local_endpoint`.
    async fn listening(settings: Settings, local_endpoint: impl ToSocketAddrs) -> Result<Self, TensorError> {
        let incoming = RdmaIncoming::builder()
            .config(settings.config.clone())
            .bind(local_endpoint)
            .await
            .map_err(|error| TensorError::setting("can't listen for tensor peers: ", error))?;
        let device = Self::make(settings, Some(incoming.local_addr()));
        let connections = incoming.filter_map(Result::ok).map(Ok::<_, std::io::Error>);
        let settings = &device.shared.settings;
        let mut server =
            settings.tls.server(settings.answer_timeout).map_err(|error| TensorError::setting("", error))?;
        let server = server.add_service(device.service()).serve_with_incoming(connections);
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "a tensor device does not listen any more");
            }
        });
        *lock(&device.shared.server) = Some(task.abort_handle());
        Ok(device)
    }

    fn make(settings: Settings, address: Option<SocketAddr>) -> Self {
        let limit = settings.config.get_pinned_limit();
        let budget = Budget::for_process(false, Some(limit.unwrap_or(u64::MAX)));
        let region_cache = RegionCache::new(&budget);
        // One user or address gets two thirds of these.
        let links = settings.max_links.saturating_add(settings.max_links / 2);
        let shared = Arc::new(DeviceState {
            offers: NamedProvider::new(&settings, &region_cache),
            region_cache,
            budget,
            settings,
            address,
            accepted: Mutex::default(),
            group: Mutex::default(),
            places: ClientSlots::shared(links, Duration::ZERO, 0),
            asking: ClientSlots::new(Settings::ASKING, Duration::ZERO, Settings::ASKING),
            unconfirmed: ClientSlots::shared(Settings::UNCONFIRMED, Settings::LEAST_WAIT, Settings::WAITING),
            opened: tokio::sync::Mutex::default(),
            attachables: Mutex::default(),
            reactors: Mutex::default(),
            server: Mutex::default(),
        });
        Self { shared }
    }

    /// Returns the gRPC service by which peers find the memory of this device, for a tonic server of your
    /// own. [`DeviceBuilder::build`] has a whole example.
    ///
    /// ```no_run
    /// # async fn serve(device: tonic_rdma_tensor::RdmaDevice) -> Result<(), Box<dyn std::error::Error>> {
    /// let incoming = tonic_rdma::RdmaIncoming::bind("0.0.0.0:50051").await?;
    /// let server = tonic::transport::Server::builder().add_service(device.service());
    /// server.serve_with_incoming(incoming).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn service(&self) -> TensorDeviceServer<impl TensorDevice> {
        TensorDeviceServer::new(Service::new(&self.shared))
    }

    /// Returns the address that the device listens on, as peers write it: `host:port`, or `https://host:port`
    /// with TLS. Returns an empty string if the device does not listen.
    pub fn endpoint(&self) -> String {
        self.shared.endpoint()
    }

    /// Returns the address that the device listens on, if it listens by itself.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.address
    }

    /// Allocates memory that the device can read and write (table 1: `AllocateMemRegion`): `size` bytes,
    /// zeroed, at a multiple of 128 bytes. A region of up to 8 MiB lies in a slab with others: on the software
    /// device a peer of this user that may read one of them is able to read the whole slab. Each link registers
    /// a slab when it uses memory of the slab for the first time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// # let device = tonic_rdma_tensor::RdmaDevice::bind("127.0.0.1:0").await?;
    /// let mut region = device.allocate(1 << 20)?;
    /// region[..4].copy_from_slice(&1.5_f32.to_le_bytes()); // it is a `&mut [u8]`
    /// # assert_eq!(region.len(), 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `RDMA_PINNED_LIMIT` is used up, or the system has no memory.
    pub fn allocate(&self, size: usize) -> Result<MemRegion, TensorError> {
        self.shared.region_cache.allocate(size)
    }

    /// Opens a channel to the device that listens on `remote`: `host:port`, `http://host:port` or
    /// `https://host:port` (table 1: `GetChannel`). The channel uses queue pair `qp_index`, modulo their
    /// number. The first call for a peer connects, and later calls find the link.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// let worker = RdmaDevice::bind("127.0.0.1:0").await?;
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
    /// [`DeviceBuilder::plaintext_tensors`] does not allow that.
    pub async fn channel(&self, remote: &str, qp_index: u32) -> Result<Channel, TensorError> {
        let remote: Arc<str> = remote.into();
        let cell = {
            let mut opened = self.shared.opened.lock().await;
            // Removes links that have ended, and attempts that have failed.
            opened.retain(|_, cell| cell.get().map_or(Arc::strong_count(cell) > 1, Channel::is_open));
            Arc::clone(opened.entry(Arc::clone(&remote)).or_default())
        };
        let open = async {
            let opened = open::open(Arc::clone(&self.shared), Arc::clone(&remote)).await?;
            Ok::<_, TensorError>(Channel::new(opened.link, opened.requests, opened.service))
        };
        let channel = cell.get_or_try_init(|| open).await?;
        Ok(channel.over(qp_index))
    }

    /// Offers `region` to all peers of this device under `name`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::bind("127.0.0.1:0").await?;
    /// let mut parameters = device.allocate(1 << 20)?;
    /// parameters.fill(0);
    /// let exported = device.export("parameters", parameters, Rights::READ)?;
    /// // Peers read it now. Dropping `exported`, or this, revokes their rights:
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
    ) -> Result<ExportedRegion, TensorError> {
        self.export_shared(name, region.share(), rights)
    }

    /// Offers shared memory to all peers. One memory may be on offer under several names, with different
    /// rights.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let device = RdmaDevice::bind("127.0.0.1:0").await?;
    /// let memory = device.allocate(4096)?.share();
    /// let readers = device.export_shared("readers", memory.clone(), Rights::READ)?;
    /// let writer = device.export_shared("writer", memory, Rights::WRITE)?;
    /// # drop((readers, writer));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`export`](Self::export).
    pub fn export_shared(
        &self,
        name: &str,
        memory: SharedRegion,
        rights: Rights,
    ) -> Result<ExportedRegion, TensorError> {
        let exported = ExportedRegion::new(check_name(name)?, memory, rights);
        self.shared.register(check_name(name)?, Arc::downgrade(&exported.export) as Weak<dyn Attachable>)?;
        Ok(exported)
    }
    /// Offers `region` to all peers of this device under `name`, for reading only. The owner keeps the region
    /// as a slice: peers never write it. A peer attaches by [`Channel::region`](crate::Channel::region), and
    /// reads by [`Channel::read`](crate::Channel::read) or by a [view](crate::Channel::view).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::RdmaDevice;
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let mut gradients = server.publish("gradients", server.allocate(4096)?)?;
    /// gradients.fill(7); // it is a `&mut [u8]`
    ///
    /// let remote = channel.region("gradients").await?;
    /// let region = channel.read(&remote).into(worker.allocate(4096)?, ..).await?;
    /// assert!(region.iter().all(|&byte| byte == 7));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`export`](Self::export).
    pub fn publish(&self, name: &str, region: MemRegion) -> Result<PublishedRegion, TensorError> {
        let published = PublishedRegion::new(check_name(name)?, region);
        self.shared.register(check_name(name)?, Arc::downgrade(&published.export) as Weak<dyn Attachable>)?;
        Ok(published)
    }

    /// Offers tensor (`name`, `step`) to the first `readers` peers that ask for it with
    /// [`Channel::request`](crate::Channel::request), before or after this call. The offer stays until all
    /// readers have the tensor, or until
    /// [`DeviceBuilder::named_tensor_timeout`](crate::DeviceBuilder::named_tensor_timeout) is over.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, NamedOffer, RdmaDevice, Shape, Tensor, TensorSpec};
    /// # let device = RdmaDevice::bind("127.0.0.1:0").await?;
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4])?;
    /// device.put("loss", 17, NamedOffer::Tensor(tensor), 2)?; // two workers ask for it
    /// assert_eq!(device.offer_counts().bytes, 4);
    /// assert_eq!(device.withdraw("loss", 17), Some(2)); // neither has
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Name and step are on offer already, the limit on offers or on their bytes is reached, or the name is
    /// empty or too long.
    pub fn put(&self, name: &str, step: u64, offer: NamedOffer, readers: u32) -> Result<(), TensorError> {
        self.shared.offers.put(name, step, offer, readers)
    }

    /// Withdraws an offer. Returns the number of readers that had not asked yet, or `None` if there was no
    /// such offer. A reader that is being served still gets the tensor.
    pub fn withdraw(&self, name: &str, step: u64) -> Option<u32> {
        self.shared.offers.withdraw(name, step)
    }

    /// Returns the number of offers, the number of their bytes, and the number of requests that wait for an
    /// offer.
    pub fn offer_counts(&self) -> OfferCounts {
        self.shared.offers.held()
    }

    /// Makes a slot for tensors of type and shape `spec`, with `depth` buffers: the peer can send `depth`
    /// tensors before the receiver takes the first one. One peer at a time can attach to the slot by `name`,
    /// with [`Channel::static_sender`](crate::Channel::static_sender).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let spec = TensorSpec::new(Dtype::F32, Shape::new(&[256])?)?;
    /// let mut slot = server.static_receiver("loss", &spec, 2)?;
    ///
    /// # let mut sender = channel.static_sender("loss", &spec).await?;
    /// # sender.send_bytes(&[0; 1024]).await?;
    /// let arrived = slot.recv().await?;
    /// let mut bytes = [1; 1024];
    /// arrived.copy_to(&mut bytes)?;
    /// assert_eq!(bytes, [0; 1024]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty or too long, there is no memory, `depth` is 0 or more than 1024, or tensors
    /// of that type have no fixed length.
    pub fn static_receiver(
        &self,
        name: &str,
        spec: &TensorSpec,
        depth: u32,
    ) -> Result<StaticReceiver, TensorError> {
        let length = spec.bytes().ok_or_else(|| {
            TensorError::argument(format!(
                "tensors of {spec} have no fixed length: use a dynamic slot or offer them by name"
            ))
        })?;
        let length = usize::try_from(length).map_err(TensorError::local)?;
        let receiver = self.receiver(name, Kind::Static, Some(*spec), length, depth)?;
        Ok(StaticReceiver::new(receiver, *spec))
    }

    /// Makes a slot for tensors of any type and shape, of which `depth` can wait. One peer at a time can
    /// attach to the slot by `name`, with [`Channel::dynamic_sender`](crate::Channel::dynamic_sender). A
    /// tensor that arrives is in memory of this device, which is used again when the tensor is dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let mut slot = server.dynamic_receiver("tokens", 4)?;
    ///
    /// # let mut sender = channel.dynamic_sender("tokens").await?;
    /// # sender.send(&Tensor::from_strings(Shape::new(&[2])?, ["a", "b"])?).await?;
    /// let tensor = slot.recv().await?;
    /// println!("{}", tensor.spec());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name is in use, empty or too long, there is no memory, or `depth` is 0 or more than 1024.
    pub fn dynamic_receiver(&self, name: &str, depth: u32) -> Result<DynamicReceiver, TensorError> {
        let receiver = self.receiver(name, Kind::Dynamic, None, ANNOUNCEMENT, depth)?;
        let region_cache = Arc::clone(&self.shared.region_cache);
        Ok(DynamicReceiver::new(receiver, region_cache, self.shared.settings.max_tensor_bytes))
    }

    /// Makes a slot and offers it.
    fn receiver(
        &self,
        name: &str,
        kind: Kind,
        spec: Option<TensorSpec>,
        payload: usize,
        depth: u32,
    ) -> Result<Receiver, TensorError> {
        let name = check_name(name)?;
        let receiver = Receiver::new(Arc::clone(&name), kind, spec, payload, depth, |size| {
            self.shared.region_cache.allocate_sink(size)
        })?;
        let slot = Arc::downgrade(&receiver.slot);
        self.shared.register(name, slot as Weak<dyn Attachable>)?;
        Ok(receiver)
    }
}

impl fmt::Debug for RdmaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaDevice").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}

/// The settings of an [`RdmaDevice`], from [`RdmaDevice::builder`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
/// use std::time::Duration;
/// use tonic_rdma_tensor::RdmaDevice;
///
/// let device = RdmaDevice::builder()
///     .queue_pairs_per_peer(2)
///     .max_tensor_bytes(1 << 30)
///     .named_tensor_timeout(Duration::from_secs(10))
///     .bind("127.0.0.1:0")
///     .await?;
/// # drop(device);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a builder makes no device until `bind` or `build`"]
pub struct DeviceBuilder {
    settings: Settings,
    /// Whether `settings.config` was given. Otherwise the environment is read.
    has_config: bool,
    /// In place of the configuration's number.
    queue_pairs_per_peer: Option<u32>,
}

impl DeviceBuilder {
    /// Sets the RDMA device, its completion queues and queue pairs, the mode of polling, and the limit of pinned
    /// memory, by the configuration that connections of tonic-rdma also have. Default: [`Config::from_env`],
    /// which is read when the device is made.
    pub fn config(mut self, config: Config) -> Self {
        self.settings.config = config;
        self.has_config = true;
        self
    }

    /// Sets the number of queue pairs to each peer, from 1 to 64. Operations of one queue pair happen in
    /// order. Operations of different queue pairs happen side by side. A link has as many as the side that opens
    /// it has set. Default: [`Config::queue_pairs_per_peer`].
    pub fn queue_pairs_per_peer(mut self, pairs: u32) -> Self {
        self.queue_pairs_per_peer = Some(pairs);
        self
    }

    /// Demands this kind of notification for arrivals. Default: the best kind that both devices have.
    pub fn notification(mut self, notification: Notification) -> Self {
        self.settings.notification = Some(notification);
        self
    }

    /// Sets the length of the longest request in bytes, from 4 KiB to 2 GiB; longer operations are cut.
    /// Default: 64 MiB.
    pub fn max_request_bytes(mut self, bytes: u64) -> Self {
        self.settings.max_request_bytes = bytes;
        self
    }

    /// Sets how many bytes may be outstanding on a queue pair before the next request is posted; at least
    /// [`max_request_bytes`](Self::max_request_bytes). Default: 256 MiB.
    pub fn max_outstanding_bytes(mut self, bytes: u64) -> Self {
        self.settings.max_outstanding_bytes = bytes;
        self
    }

    /// Sets how long a peer may take to answer when a link or a slot is made, to confirm a link that the peer
    /// has opened, and to finish a TLS handshake. Default: 10 s.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.settings.answer_timeout = timeout;
        self
    }

    /// Sets how many links the peers of one address of one user may open. All peers together may open 1.5
    /// times as many, so that no user and no address keeps the others out. Default: 1024.
    pub fn max_links(mut self, links: usize) -> Self {
        self.settings.max_links = links;
        self
    }

    /// Sets the length in bytes of the longest tensor that this device makes room for when a peer announces
    /// it. Default: 64 GiB.
    pub fn max_tensor_bytes(mut self, bytes: u64) -> Self {
        self.settings.max_tensor_bytes = bytes;
        self
    }

    /// Sets whether each named tensor carries a checksum, which the receiver verifies. A checksum helps to
    /// find a fault, but both sides read each tensor one more time. Default: no.
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.settings.checksums = checksums;
        self
    }

    #[cfg(test)]
    pub(crate) fn versions(mut self, versions: tonic_rdma_verbs::unstable::Versions) -> Self {
        self.settings.versions = versions;
        self
    }

    /// Sets whether the device tells every caller the names of its regions and slots, in answer to the call
    /// `Describe`. If the names are secrets, only peers that know a name can attach what has it: then set
    /// this to no. The device refuses `Describe` with the status `PERMISSION_DENIED`. Default: yes.
    ///
    /// ```
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// // Slots have secret names.
    /// let builder = RdmaDevice::builder().listed(false);
    /// # drop(builder);
    /// ```
    pub fn listed(mut self, listed: bool) -> Self {
        self.settings.listed = listed;
        self
    }

    /// Sets how long an offered tensor waits for its readers, and how long a request waits for its tensor.
    /// Default: 60 s.
    pub fn named_tensor_timeout(mut self, timeout: Duration) -> Self {
        self.settings.named_tensor_timeout = timeout;
        self
    }

    /// Sets whether to make links over connections with TLS. By default each side refuses, on every RDMA
    /// device, because TLS encrypts calls and no device encrypts tensors. This overrides
    /// [`Config::plaintext_tensors`].
    ///
    /// ```
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// // The network is trusted: tensors may cross it unencrypted.
    /// let builder = RdmaDevice::builder().plaintext_tensors(true);
    /// # drop(builder);
    /// ```
    pub fn plaintext_tensors(mut self, allow: bool) -> Self {
        self.settings.plaintext_tensors = Some(allow);
        self
    }

    /// Sets how to reach peers over TLS: the trusted authority, and the certificate of this side. A peer's
    /// `host:port` then means `https://host:port`. Tensors stay unencrypted; see
    /// [`plaintext_tensors`](Self::plaintext_tensors).
    ///
    /// ```no_run
    /// # fn builder() -> std::io::Result<tonic_rdma_tensor::DeviceBuilder> {
    /// use tonic::transport::{Certificate, ClientTlsConfig, Identity};
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let authority = Certificate::from_pem(std::fs::read("ca.pem")?);
    /// let identity = Identity::from_pem(std::fs::read("worker.pem")?, std::fs::read("worker.key")?);
    /// let tls = ClientTlsConfig::new().ca_certificate(authority).identity(identity);
    /// let builder = RdmaDevice::builder().client_tls(tls).plaintext_tensors(true);
    /// # Ok(builder)
    /// # }
    /// ```
    #[cfg(feature = "_tls-any")]
    pub fn client_tls(mut self, config: ClientTlsConfig) -> Self {
        self.settings.tls.client = Some(Arc::new(config));
        self
    }

    /// Sets the TLS of the listener that [`bind`](Self::bind) makes. A handshake may take as long as
    /// [`answer_timeout`](Self::answer_timeout) says. Tensors stay unencrypted; see
    /// [`plaintext_tensors`](Self::plaintext_tensors).
    ///
    /// ```no_run
    /// # async fn device() -> Result<tonic_rdma_tensor::RdmaDevice, Box<dyn std::error::Error>> {
    /// use tonic::transport::{Certificate, Identity, ServerTlsConfig};
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let identity = Identity::from_pem(std::fs::read("server.pem")?, std::fs::read("server.key")?);
    /// let authority = Certificate::from_pem(std::fs::read("ca.pem")?);
    /// let tls = ServerTlsConfig::new().identity(identity).client_ca_root(authority);
    /// let builder = RdmaDevice::builder().server_tls(tls).plaintext_tensors(true);
    /// let device = builder.bind("0.0.0.0:50052").await?;
    /// # Ok(device)
    /// # }
    /// ```
    #[cfg(feature = "_tls-any")]
    pub fn server_tls(mut self, config: ServerTlsConfig) -> Self {
        self.settings.tls.server = Some(Arc::new(config));
        self
    }

    /// Makes a device that listens on `local_endpoint`. With port 0 the system chooses a free port.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// println!("peers reach it at {}", device.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`InvalidSetting`](crate::TensorErrorKind::InvalidSetting): a number is out of range.
    /// - [`InvalidSetting`](crate::TensorErrorKind::InvalidSetting): no [`config`](Self::config) was given,
    ///   and an environment variable has a bad value.
    /// - [`InvalidSetting`](crate::TensorErrorKind::InvalidSetting): the device can't listen on the address.
    /// - [`InvalidArgument`](crate::TensorErrorKind::InvalidArgument): the TLS settings can't be used.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn bind(self, local_endpoint: impl ToSocketAddrs) -> Result<RdmaDevice, TensorError> {
        RdmaDevice::listening(self.settings()?, local_endpoint).await
    }

    /// Makes a device that does not listen by itself. Add its [`service`](RdmaDevice::service) to a server of
    /// your own, whose port then serves your calls and tensors. A device that only opens channels needs no
    /// service.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Server;
    /// use tonic_rdma::RdmaIncoming;
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let device = RdmaDevice::builder().build()?;
    /// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    /// let address = incoming.local_addr();
    /// // Your services go beside it.
    /// tokio::spawn(Server::builder().add_service(device.service()).serve_with_incoming(incoming));
    ///
    /// let peer = RdmaDevice::builder().build()?;
    /// let channel = peer.channel(&address.to_string(), 0).await?;
    /// assert!(channel.is_open());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`InvalidSetting`](crate::TensorErrorKind::InvalidSetting): a number is out of range.
    /// - [`InvalidSetting`](crate::TensorErrorKind::InvalidSetting): no [`config`](Self::config) was given,
    ///   and an environment variable has a bad value.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn build(self) -> Result<RdmaDevice, TensorError> {
        Ok(RdmaDevice::make(self.settings()?, None))
    }

    fn settings(self) -> Result<Settings, TensorError> {
        let mut settings = self.settings;
        if !self.has_config {
            settings.config = Config::from_env().map_err(|error| TensorError::setting("", error))?;
        }
        if let Some(pairs) = self.queue_pairs_per_peer {
            settings.config = settings.config.queue_pairs_per_peer(pairs);
        }
        settings.check()?;
        Ok(settings)
    }
}
