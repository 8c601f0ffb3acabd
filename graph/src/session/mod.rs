//! The processes of a split graph: they find one another, compare what they run, distribute addresses (§3.4),
//! and watch one another.
//!
//! ```text
//!  Listener::bind ── one port: calls of the parts, tensor device
//!     │ connect(Peering)
//!     │    join      each part calls each other part; they compare graph, partition and modes
//!     │    watch     a call to each other part stays open, as a sign of life; it also says that a part has failed or left
//!     │    attach    each sender learns the addresses of the slots of its receivers, before the first step
//!     │    ready     all parts have done so
//!     ▼
//!  Session::transfers(mode) ── for an executor; one for each mode
//! ```
//!
//! How parts join and watch one another is the bootstrap of `tonic-rdma-tensor`, which groups of ranks use
//! too.
//!
//! A session has threads of its own, so its methods need no runtime. [`Listener::bind`],
//! [`Listener::connect`] and [`Session::leave`] wait, so a thread of a runtime must not call them.
//!
//! # How the modes with calls are set up
//!
//! These modes are to be as fast as a user of gRPC can make them, because the others are compared with them.
//! Each part has one connection to each receiver, with TCP_NODELAY, windows of 16 MiB for a call and 32 MiB
//! for a connection, and frames of 512 KiB, which carried most in measurements. As many calls of each
//! crossing tensor are in flight as the window has steps, and calls of different crossing tensors are in
//! flight together. The thread of the executor only hands a tensor over: other threads encode and send it. A
//! call ends when the receiver has room for the tensor. The codec is tonic's own.
//!
//! # Who may call
//!
//! A part gives a secret to each caller that runs the same graph, and all later calls carry it. So this
//! service is for networks in which all hosts are trusted, as is usual for training. A call that is
//! malformed, out of order or too long is refused by name, and harms nothing.

mod connect;
mod settings;
#[cfg(test)]
mod tests;
mod threads;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::settings::{CONNECTION_WINDOW, MAX_CALLS, MAX_FRAME, MESSAGE_MARGIN, STREAM_WINDOW, calls};
use self::threads::Threads;
use crate::dataflow::Value;
use crate::error::{GraphError, Problem};
use crate::placement::{MemoryUse, Part};
use crate::schedule::Transfers;
use crate::transfer::proto::Details;
use crate::transfer::proto::parts_server::PartsServer;
use crate::transfer::{
    CallEndpoints, CallTransfers, Service, SessionHandle, SessionState, SlotEndpoints, SlotTransfers,
    TransferMode,
};
use tonic_rdma::memory::Pool;
use tonic_rdma::{Policy, RdmaIncoming, RdmaServer};
use tonic_rdma_tensor::unstable::bootstrap::{self, BootstrapCell, OwnRuntime};
use tonic_rdma_tensor::unstable::preallocated_slots;
use tonic_rdma_tensor::{Channel, RdmaDevice};
use tonic_rdma_verbs::unstable::lock;

pub use self::settings::{Fingerprint, ListenerBuilder, Peering};

/// A part that is connected to all other parts. [`Listener::connect`] makes it. It ends when it and all its
/// transfers are dropped; the other parts then learn that this part has left.
///
/// ```
/// use std::sync::Arc;
///
/// use tonic_rdma_graph::dataflow::{Topology, Value};
/// use tonic_rdma_graph::placement::{Part, Placements};
/// use tonic_rdma_graph::schedule::Transfers;
/// use tonic_rdma_graph::session::{Listener, Peering, Session};
/// use tonic_rdma_graph::transfer::TransferMode;
/// use tonic_rdma_graph::GraphError;
///
/// /// Connects part 1 to part 0. Returns what its executor needs.
/// fn part_1<V: Value>(
///     graph: &Topology,
///     placements: &Arc<Placements>,
///     part_0: String,
/// ) -> Result<(Session, Transfers<V>), GraphError> {
///     let listener = Listener::bind("0.0.0.0:7000")?;
///     let own = listener.address().to_string();
///     let peering = Peering::new(Part(1), vec![part_0, own], graph, placements);
///     let session = listener.connect(peering.modes([TransferMode::RdmaZerocp]))?;
///     let addresses = session.addresses_distributed();
///     println!("{} addresses of slots are known, {} were given", addresses.learned, addresses.given);
///     let transfers = session.transfers(TransferMode::RdmaZerocp)?;
///     Ok((session, transfers))
/// }
/// ```
pub struct Session {
    core: Arc<Core>,
    modes: Vec<TransferMode>,
    ends: Mutex<HashMap<TransferMode, ModeEndpoints>>,
    addresses: Addresses,
    /// The most registered memory for copies.
    copies: u64,
}

/// The addresses of static slots that were distributed before the first step, in all modes with slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The addresses at other parts that this part has, to send there.
    pub learned: usize,
    /// The addresses of this part that the other parts have.
    pub given: usize,
}

/// What the transfers of one mode need.
#[derive(Debug)]
enum ModeEndpoints {
    Calls(CallEndpoints),
    Slots(SlotEndpoints),
}

/// What lives as long as the session or one of its transfers.
struct Core {
    state: Arc<SessionState>,
    /// Keeps the channels to the other parts open.
    _channels: Vec<Channel>,
    device: RdmaDevice,
    /// Dropped last.
    threads: Threads,
}

impl Session {
    /// Returns the part of this process.
    pub fn part(&self) -> Part {
        self.core.state.me
    }

    /// Returns the modes.
    pub fn modes(&self) -> &[TransferMode] {
        &self.modes
    }

    /// Returns how many addresses of static slots were distributed when the parts connected.
    pub fn addresses_distributed(&self) -> Addresses {
        self.addresses
    }

    /// Returns the registered memory of the slots of this part, in all modes with slots. It was allocated
    /// when the parts connected, as the analysis says
    /// ([`Footprint::slots`](crate::placement::Footprint::slots)).
    pub fn memory(&self) -> MemoryUse {
        let (preallocated, used) = preallocated_slots(&self.core.device);
        MemoryUse { preallocated, used, beyond: 0, refused: 0 }
    }

    /// Returns the transfers of a mode, for one executor. The transfers of several modes may be used in turn,
    /// and each of them counts for itself.
    ///
    /// # Errors
    /// The session was made without this mode, or its transfers were taken already.
    pub fn transfers<V: Value>(&self, mode: TransferMode) -> Result<Transfers<V>, GraphError> {
        if !self.modes.contains(&mode) {
            let names: Vec<String> = self.modes.iter().map(TransferMode::to_string).collect();
            return Err(GraphError::of_setting(
                "mode",
                format!("{mode}: this session was made for {}", names.join(" and ")),
            ));
        }
        let ends = lock(&self.ends).remove(&mode);
        let taken = || GraphError::of_setting("mode", format!("{mode}: its transfers were taken already"));
        let Core { state, threads, .. } = &*self.core;
        let session = SessionHandle {
            peers: Arc::clone(&state.peers),
            runtime: threads.handle.clone(),
            state: Arc::clone(state),
            _core: Arc::clone(&self.core) as Arc<dyn Send + Sync>,
        };
        Ok(Transfers(match ends.ok_or_else(taken)? {
            ModeEndpoints::Calls(ends) => Box::new(CallTransfers::new(session, ends)),
            ModeEndpoints::Slots(ends) => {
                let copies = (mode == TransferMode::RdmaCp).then(|| Pool::for_sending(self.copies));
                Box::new(SlotTransfers::new(session, self.core.device.clone(), mode, copies, ends))
            }
        }))
    }

    /// Returns an error if another part has failed or is lost.
    ///
    /// # Errors
    /// [`PeerLost`](crate::GraphErrorKind::PeerLost), [`PeerFailed`](crate::GraphErrorKind::PeerFailed).
    pub fn check(&self) -> Result<(), GraphError> {
        self.core.state.peers.check_all()
    }

    /// Tells the other parts that this part has failed, and why. Does not wait.
    pub fn abort(&self, reason: &str) {
        self.core.state.bootstrap.fail(reason);
    }

    /// Leaves the session, and waits until all other parts know, at most for `limit`. A process that ends at
    /// once calls this, so that the other parts don't take its end for a crash. Leave after the last run: for
    /// a part that still needs this one, this one is then gone.
    pub fn leave(self, limit: Duration) {
        threads::leave(&self.core.threads.cell, limit, || false);
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("part", &self.part())
            .field("modes", &self.modes)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

/// A process that listens for the other parts of a graph. They may call before this process knows its graph;
/// they wait until it [connects](Self::connect).
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    settings: ListenerBuilder,
    threads: Threads,
    cell: BootstrapCell<Details>,
    service: Service,
    device: RdmaDevice,
}

impl Listener {
    /// Listens on `address`, `host:port`. With port 0 the system chooses a free port. One port serves the
    /// calls of the parts, over TCP and RDMA, and the tensor device. The threads of the listener belong to
    /// it, so it needs no runtime, and a thread of a runtime must not call this.
    ///
    /// ```
    /// use tonic_rdma_graph::session::Listener;
    ///
    /// let listener = Listener::bind("127.0.0.1:0")?;
    /// assert_ne!(listener.address().port(), 0);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, or the system gives no threads.
    pub fn bind(address: &str) -> Result<Self, GraphError> {
        Self::builder().bind(address)
    }

    /// Returns a builder, for other settings than the defaults.
    pub fn builder() -> ListenerBuilder {
        ListenerBuilder::default()
    }

    fn listen(address: &str, settings: ListenerBuilder) -> Result<Self, GraphError> {
        let runtime = OwnRuntime::new("graph-session", settings.threads);
        let runtime = runtime
            .map_err(|error| GraphError::of_setting("threads", format!("the system gives none: {error}")))?;
        let (cell, service) = (BootstrapCell::default(), Service::default());
        let listening = listen(address.to_owned(), settings.clone(), Arc::clone(&cell), service.clone());
        // This process may still tell the parts of an earlier session why it has failed.
        threads::make_room(address);
        let (address, device) = threads::run(runtime.handle(), listening)?;
        let threads = Threads::new(runtime, Arc::clone(&cell), address.port());
        Ok(Self { address, settings, threads, cell, service, device })
    }

    /// Returns the address that other parts call.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all other parts: compares what they run, makes the slots of this part, learns the
    /// addresses of the slots of the other parts, and returns when all parts have done so (§3.4, "address
    /// distribution"). All parts call this; the order does not matter.
    ///
    /// # Errors
    /// - [`Mismatch`](crate::GraphErrorKind::Mismatch): a part runs something else.
    /// - [`Timeout`](crate::GraphErrorKind::Timeout): a part did not come in time.
    /// - [`NoDevice`](crate::GraphErrorKind::NoDevice): a mode needs RDMA, and there is none to a part.
    /// - [`PeerLost`](crate::GraphErrorKind::PeerLost), [`PeerFailed`](crate::GraphErrorKind::PeerFailed): a
    ///   part ended meanwhile.
    /// - [`InvalidSetting`](crate::GraphErrorKind::InvalidSetting): a number is out of range, or there is no
    ///   memory for the slots.
    pub fn connect(self, peering: Peering) -> Result<Session, GraphError> {
        connect::connect(self, peering)
    }
}

/// Starts the server of this process.
async fn listen(
    address: String,
    settings: ListenerBuilder,
    cell: BootstrapCell<Details>,
    service: Service,
) -> Result<(SocketAddr, RdmaDevice), GraphError> {
    // Calls need no RDMA. The modes that do refuse to be without.
    let config = settings.with_policy(Policy::Prefer);
    let device = RdmaDevice::builder()
        .config(config.clone())
        .max_tensor_bytes(settings.largest_tensor)
        // The names of slots contain secrets, so that only parts of the session can attach.
        .listed(false)
        .build()
        .map_err(|error| GraphError::of_setting("config", error.to_string()))?;
    let incoming = RdmaIncoming::builder()
        .config(config.clone())
        .bind(&*address)
        .await
        .map_err(|source| GraphError::from(Problem::Listen { address, source: Box::new(source) }))?;
    let local = incoming.local_addr();
    let largest = settings.largest_tensor.saturating_add(MESSAGE_MARGIN);
    let service =
        PartsServer::new(service).max_decoding_message_size(usize::try_from(largest).unwrap_or(usize::MAX));
    let http2 = bootstrap::server()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_concurrent_streams(MAX_CALLS);
    let server = RdmaServer::new().http2(http2).calls(calls(&settings)).add_service(device.service());
    let server =
        server.add_service(bootstrap::service(cell)).add_service(service).serve_with_incoming(incoming);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(error = %error, "the server of a part has ended");
        }
    });
    Ok((local, device))
}
