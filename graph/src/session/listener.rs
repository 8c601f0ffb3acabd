//! A process that waits for the other parts.

use std::net::SocketAddr;
use std::sync::Arc;

use tonic_rdma::{Policy, RdmaIncoming, RdmaServer};
use tonic_rdma_tensor::RdmaDevice;
use tonic_rdma_tensor::internal::meeting::{self, Hall, OwnRuntime};

use crate::error::GraphError;
use crate::session::connect;
use crate::session::connected::Session;
use crate::session::farewell;
use crate::session::peering::Peering;
use crate::session::service::Service;
use crate::session::settings::{
    CONNECTION_WINDOW, MAX_CALLS, MAX_FRAME, MESSAGE_MARGIN, STREAM_WINDOW, Settings, calls, setting,
};
use crate::session::threads::{self, Threads};
use crate::transfer::proto::Details;
use crate::transfer::proto::parts_server::PartsServer;

/// A process that listens for the other parts of a graph. They may call before this process knows its graph; they wait until it
/// [connects](Self::connect).
#[derive(Debug)]
pub struct Listener {
    pub(super) address: SocketAddr,
    pub(super) settings: Settings,
    pub(super) threads: Threads,
    pub(super) hall: Hall<Details>,
    pub(super) service: Service,
    pub(super) device: RdmaDevice,
}

impl Listener {
    /// Listens on `address`, `host:port`. With port 0 the system chooses a free port. One port serves the calls of the parts, over TCP and
    /// RDMA, and the tensor device. The threads of the listener belong to it, so it needs no runtime, and a thread of a runtime must not
    /// call this.
    ///
    /// ```
    /// use tonic_rdma_graph::session::{Listener, Settings};
    ///
    /// let listener = Listener::bind("127.0.0.1:0", Settings::from_env()?)?;
    /// assert_ne!(listener.address().port(), 0);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, a setting has a bad value, or the system gives no threads.
    pub fn bind(address: &str, settings: Settings) -> Result<Self, GraphError> {
        let runtime = OwnRuntime::new("graph-session", settings.threads);
        let runtime =
            runtime.map_err(|error| setting("threads", format!("the system gives none: {error}")))?;
        let (hall, service) = (Hall::default(), Service::default());
        let listening = listen(address.to_owned(), settings.clone(), Arc::clone(&hall), service.clone());
        // This process may still tell the parts of an earlier session why it has failed.
        farewell::make_room(address);
        let (address, device) = threads::run(runtime.handle(), listening)?;
        let threads = Threads::new(runtime, Arc::clone(&hall), address.port());
        Ok(Self { address, settings, threads, hall, service, device })
    }

    /// Returns the address that other parts call.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all other parts: compares what they run, makes the slots of this part, learns the addresses of the slots of the other
    /// parts, and returns when all parts have done so (§3.4, "address distribution"). All parts call this; the order does not matter.
    ///
    /// # Errors
    /// - [`Differs`](GraphError::Differs), [`Version`](GraphError::Version): a part runs something else.
    /// - [`Unreachable`](GraphError::Unreachable): a part did not come in time.
    /// - [`NoRdma`](GraphError::NoRdma): a mode needs RDMA, and there is none to a part.
    /// - [`PeerLost`](GraphError::PeerLost), [`PeerFailed`](GraphError::PeerFailed): a part ended meanwhile.
    /// - [`Setting`](GraphError::Setting): a number is out of range, or there is no memory for the slots.
    pub fn connect(self, peering: Peering) -> Result<Session, GraphError> {
        connect::connect(self, peering)
    }
}

/// Starts the server of this process.
async fn listen(
    address: String,
    settings: Settings,
    hall: Hall<Details>,
    service: Service,
) -> Result<(SocketAddr, RdmaDevice), GraphError> {
    // Calls need no RDMA. The modes that do refuse to be without.
    let config = settings.config.clone().policy(Policy::Prefer);
    let device = RdmaDevice::builder()
        .config(config.clone())
        .max_tensor_bytes(settings.largest_tensor)
        // The names of slots contain secrets, so that only parts of the session can attach.
        .listed(false)
        .without_listener()
        .map_err(|error| setting("config", error.to_string()))?;
    let incoming = RdmaIncoming::bind_with(&*address, config.clone())
        .await
        .map_err(|source| GraphError::Listen { address, source: Box::new(source) })?;
    let local = incoming.local_addr();
    let largest = settings.largest_tensor.saturating_add(MESSAGE_MARGIN);
    let service =
        PartsServer::new(service).max_decoding_message_size(usize::try_from(largest).unwrap_or(usize::MAX));
    let http2 = meeting::server()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_concurrent_streams(MAX_CALLS);
    let server = RdmaServer::new().http2(http2).calls(calls(&settings)).add_service(device.service());
    let server =
        server.add_service(meeting::service(hall)).add_service(service).serve_with_incoming(incoming);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(error = %error, "the server of a part has ended");
        }
    });
    Ok((local, device))
}
