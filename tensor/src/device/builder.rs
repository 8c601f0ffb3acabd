//! The builder of a device.

use std::time::Duration;

use tokio::net::ToSocketAddrs;
#[cfg(feature = "_tls-any")]
use tonic::transport::{ClientTlsConfig, ServerTlsConfig};

use crate::device::RdmaDevice;
use crate::device::settings::Settings;
use crate::error::ChannelError;
use crate::link::notification::Notification;
use tonic_rdma::Config;

/// The settings of an [`RdmaDevice`], from [`RdmaDevice::builder`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
/// use std::time::Duration;
/// use tonic_rdma_tensor::RdmaDevice;
///
/// let device = RdmaDevice::builder()
///     .queue_pairs_per_peer(2)
///     .max_tensor_bytes(1 << 30)
///     .rendezvous_timeout(Duration::from_secs(10))
///     .bind("127.0.0.1:0")
///     .await?;
/// # drop(device);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a builder makes no device until `bind` or `without_listener`"]
pub struct DeviceBuilder {
    settings: Settings,
    /// Whether `settings.config` was given. Otherwise the environment is read.
    has_config: bool,
}

impl DeviceBuilder {
    /// Sets the RDMA device, the mode of polling, and the limit of pinned memory, by the configuration that connections of
    /// tonic-rdma also have. Default: [`Config::from_env`], which is read when the device is made.
    pub fn config(mut self, config: Config) -> Self {
        self.settings.config = config;
        self.has_config = true;
        self
    }

    /// Sets the number of completion queues, from 1 to 64. The queue pairs of each link are spread over them in turn.
    /// Default: 1.
    pub fn completion_queues(mut self, queues: u32) -> Self {
        self.settings.completion_queues = queues;
        self
    }

    /// Sets the number of queue pairs to each peer, from 1 to 64. Operations of one queue pair happen in order. Operations of
    /// different queue pairs happen side by side. Default: 1.
    pub fn queue_pairs_per_peer(mut self, pairs: u32) -> Self {
        self.settings.queue_pairs_per_peer = pairs;
        self
    }

    /// Demands this kind of notification for arrivals. Default: the best kind that both devices have.
    pub fn notification(mut self, notification: Notification) -> Self {
        self.settings.notification = Some(notification);
        self
    }

    /// Sets the length of the longest request in bytes, from 4 KiB to 2 GiB; longer operations are cut. Default: 64 MiB.
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

    /// Sets how long a peer may take to answer when a link or a slot is made, to confirm a link that the peer has opened, and
    /// to finish a TLS handshake. Default: 10 s.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.settings.answer_timeout = timeout;
        self
    }

    /// Sets how many links the peers of one address of one user may open. All peers together may open 1.5 times as many, so
    /// that no user and no address keeps the others out. Default: 1024.
    pub fn max_links(mut self, links: usize) -> Self {
        self.settings.max_links = links;
        self
    }

    /// Sets the length in bytes of the longest tensor that this device makes room for when a peer announces it. Default:
    /// 64 GiB.
    pub fn max_tensor_bytes(mut self, bytes: u64) -> Self {
        self.settings.max_tensor_bytes = bytes;
        self
    }

    /// Sets whether each tensor of a rendezvous carries a checksum, which the receiver verifies. A checksum helps to find a
    /// fault, but both ends read each tensor one more time. Default: no.
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.settings.checksums = checksums;
        self
    }

    /// Sets whether the device tells every caller the names of its regions and slots, in answer to the call `Describe`. If the
    /// names are secrets, only peers that know a name can attach what has it: then set this to no. The device refuses
    /// `Describe` with the status `PERMISSION_DENIED`. Default: yes.
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

    /// Sets how long an offered tensor waits for its readers, and how long a request waits for its tensor. Default: 60 s.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.settings.rendezvous_timeout = timeout;
        self
    }

    /// Sets whether to make links over connections with TLS. By default each end refuses, on every RDMA device, because TLS
    /// encrypts calls and no device encrypts tensors. This overrides [`Config::plaintext_tensors`].
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

    /// Sets how to reach peers over TLS: the trusted authority, and the certificate of this end. A peer's `host:port` then
    /// means `https://host:port`. Tensors stay unencrypted; see [`plaintext_tensors`](Self::plaintext_tensors).
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
        self.settings.tls.set_client(config);
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
        self.settings.tls.set_server(config);
        self
    }

    /// Makes a device that listens on `local_endpoint`. With port 0 the system chooses a free port.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let device = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// println!("peers reach it at {}", device.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`BadSetting`](ChannelError::BadSetting): a number is out of range.
    /// - [`Config`](ChannelError::Config): no [`config`](Self::config) was given, and an environment variable has a bad value.
    /// - [`Listen`](ChannelError::Listen): the device can't listen on the address.
    /// - [`Local`](ChannelError::Local): the TLS settings can't be used.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn bind(self, local_endpoint: impl ToSocketAddrs) -> Result<RdmaDevice, ChannelError> {
        RdmaDevice::listening(self.settings()?, local_endpoint).await
    }

    /// Makes a device that does not listen by itself. Add its [`service`](RdmaDevice::service) to a server of your own, whose
    /// port then serves your calls and tensors. A device that only opens channels needs no service.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Server;
    /// use tonic_rdma::RdmaIncoming;
    /// use tonic_rdma_tensor::RdmaDevice;
    ///
    /// let device = RdmaDevice::builder().without_listener()?;
    /// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    /// let address = incoming.local_addr();
    /// // Your services go beside it.
    /// tokio::spawn(Server::builder().add_service(device.service()).serve_with_incoming(incoming));
    ///
    /// let peer = RdmaDevice::builder().without_listener()?;
    /// let channel = peer.channel(&address.to_string(), 0).await?;
    /// assert!(channel.is_open());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`BadSetting`](ChannelError::BadSetting): a number is out of range.
    /// - [`Config`](ChannelError::Config): no [`config`](Self::config) was given, and an environment variable has a bad value.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn without_listener(self) -> Result<RdmaDevice, ChannelError> {
        Ok(RdmaDevice::unbound(self.settings()?))
    }

    fn settings(self) -> Result<Settings, ChannelError> {
        let mut settings = self.settings;
        if !self.has_config {
            settings.config = Config::from_env()?;
        }
        settings.check()?;
        Ok(settings)
    }
}
