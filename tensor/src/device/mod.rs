//! The device: this process, as its peers see it.

pub(crate) mod builder;
mod exports;
mod offers;
pub(crate) mod own_polling;
mod receivers;
pub(crate) mod settings;
pub(crate) mod shared;
pub(crate) mod tls;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::net::ToSocketAddrs;
use tokio_stream::StreamExt as _;

use crate::channel::Channel;
use crate::control::open;
use crate::control::proto::tensor_device_server::{TensorDevice, TensorDeviceServer};
use crate::control::service::Service;
use crate::device::builder::DeviceBuilder;
use crate::device::settings::Settings;
use crate::device::shared::Shared;
use crate::error::ChannelError;
use crate::exchange::Offers;
use crate::memory::landing::Landing;
use tonic_rdma::RdmaIncoming;
use tonic_rdma::internal::Places;
use tonic_rdma_verbs::internal::lock;
use tonic_rdma_verbs::memory::{Budget, MemRegion};

/// This process as a device with memory: the paper's `RdmaDev` (table 1). A device listens for peers that want to reach its
/// memory, and opens channels to peers. All clones refer to one device. The links of the device end when the last clone is
/// dropped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
/// use tonic_rdma_tensor::{RdmaDevice, Rights};
///
/// let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
/// let parameters = server.export("parameters", server.allocate(1 << 20)?, Rights::READ_WRITE)?;
///
/// let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub(crate) shared: Arc<Shared>,
}

impl RdmaDevice {
    /// Returns a builder of a device, with the default settings. [`DeviceBuilder::bind`] has an example.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// Makes a device that listens on `local_endpoint`.
    pub(crate) async fn listening(
        settings: Settings,
        local_endpoint: impl ToSocketAddrs,
    ) -> Result<Self, ChannelError> {
        let incoming = RdmaIncoming::bind_with(local_endpoint, settings.config.clone())
            .await
            .map_err(|error| ChannelError::Listen(Arc::new(error)))?;
        let device = Self::make(settings, Some(incoming.local_addr()));
        let connections = incoming.filter_map(Result::ok).map(Ok::<_, std::io::Error>);
        let settings = &device.shared.settings;
        let mut server = settings.tls.server(settings.answer_timeout).map_err(ChannelError::local)?;
        let server = server.add_service(device.service()).serve_with_incoming(connections);
        let task = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "a tensor device does not listen any more");
            }
        });
        *lock(&device.shared.server) = Some(task.abort_handle());
        Ok(device)
    }

    /// Makes a device that does not listen.
    pub(crate) fn unbound(settings: Settings) -> Self {
        Self::make(settings, None)
    }

    fn make(settings: Settings, address: Option<SocketAddr>) -> Self {
        let limit = settings.config.pinned();
        let budget = Budget::for_process(false, Some(limit.unwrap_or(u64::MAX)));
        let landing = Landing::new(&budget);
        // One user or address gets two thirds of these.
        let links = settings.max_links.saturating_add(settings.max_links / 2);
        let shared = Arc::new(Shared {
            offers: Offers::new(&settings, &landing),
            landing,
            budget,
            settings,
            address,
            runtime: tokio::runtime::Handle::current(),
            accepted: Mutex::default(),
            group: Mutex::default(),
            places: Places::shared(links, Duration::ZERO, 0),
            asking: Places::new(Settings::ASKING, Duration::ZERO, Settings::ASKING),
            unconfirmed: Places::shared(Settings::UNCONFIRMED, Settings::LEAST_WAIT, Settings::WAITING),
            opened: tokio::sync::Mutex::default(),
            offered: Mutex::default(),
            reactors: Mutex::default(),
            server: Mutex::default(),
        });
        Self { shared }
    }

    /// Returns the gRPC service by which peers find the memory of this device, for a tonic server of your own.
    /// [`DeviceBuilder::without_listener`] has a whole example.
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

    /// Returns the address that the device listens on, as peers write it: `host:port`, or `https://host:port` with TLS.
    /// Returns an empty string if the device does not listen.
    pub fn endpoint(&self) -> String {
        self.shared.endpoint()
    }

    /// Returns the address that the device listens on, if it listens by itself.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.address
    }

    /// Allocates memory that the device can read and write (table 1: `AllocateMemRegion`): `size` bytes, zeroed, in a mapping
    /// of their own. Each link registers the memory when it uses the memory for the first time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # let device = tonic_rdma_tensor::RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
        self.shared.landing.allocate(size)
    }

    /// Opens a channel to the device that listens on `remote`: `host:port`, `http://host:port` or `https://host:port` (table 1:
    /// `GetChannel`). The channel uses queue pair `qp_index`, modulo their number. The first call for a peer connects, and
    /// later calls find the link.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
    pub async fn channel(&self, remote: &str, qp_index: u32) -> Result<Channel, ChannelError> {
        let remote: Arc<str> = remote.into();
        let cell = {
            let mut opened = self.shared.opened.lock().await;
            // Removes links that have ended, and attempts that have failed.
            opened.retain(|_, cell| cell.get().map_or(Arc::strong_count(cell) > 1, Channel::is_open));
            Arc::clone(opened.entry(Arc::clone(&remote)).or_default())
        };
        let open = async {
            let opened = open::open(Arc::clone(&self.shared), Arc::clone(&remote)).await?;
            Ok::<_, ChannelError>(Channel::new(opened.link, opened.requests, opened.service))
        };
        let channel = cell.get_or_try_init(|| open).await?;
        Ok(channel.on(qp_index))
    }

    /// Runs `future` to its end on this thread without ever sleeping: polls the future, and the queue of `channel`, in turn.
    /// Use it in a thread that has a core of its own and only moves tensors. On a current-thread runtime, the runtime's timers
    /// and other tasks do not run meanwhile.
    pub fn spin<F: Future>(&self, channel: &Channel, future: F) -> F::Output {
        let _runtime = self.shared.runtime.enter();
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            channel.poll();
            std::hint::spin_loop();
        }
    }
}

impl fmt::Debug for RdmaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaDevice").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}
