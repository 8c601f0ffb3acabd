//! The result of a negotiation, the state of the connection since, and its counters, with their totals for
//! the `metrics` facade.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::histogram::Histograms;
use super::reason::{RdmaUnavailable, ReasonCode};
use super::tuner::{Chooser, TransferDecision};

/// The result of a negotiation, and its reason. A server finds it in each request's extensions, a client in
/// [`RdmaConnector::last_connection`](crate::RdmaConnector::last_connection).
///
/// ```
/// use tonic_rdma::{RdmaConnectInfo, Verdict};
///
/// fn describe(info: &RdmaConnectInfo) -> String {
///     match info.verdict() {
///         Verdict::Tcp => format!("TCP to {}, because {}", info.peer_addr(), info.reason()),
///         Verdict::Rdma => {
///             let sent = info.counters().rendezvous_sent_bytes;
///             let why = info.why(64 << 10).map(|decision| decision.to_string());
///             format!("{:?}: {sent} bytes sent by rendezvous; {why:?}", info.device())
///         }
///     }
/// }
/// # let _ = describe;
/// ```
#[derive(Clone, Debug)]
pub struct RdmaConnectInfo(
    /// Each request has a clone.
    Arc<ConnectionFacts>,
);

/// The facts of a connection, which all its requests share.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionFacts {
    pub(crate) verdict: Verdict,
    pub(crate) provider: Option<&'static str>,
    pub(crate) device: Option<Arc<str>>,
    pub(crate) reason: Arc<str>,
    /// The reason for TCP.
    pub(crate) reason_code: Option<ReasonCode>,
    /// The connection carries native calls.
    pub(crate) native: bool,
    /// Calls stay in this process.
    pub(crate) in_process: bool,
    /// The version of the protocol, over RDMA.
    pub(crate) version: Option<u32>,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) telemetry: Option<Telemetry>,
    /// The first byte of this connection. Each connection has its own `Arc`, so the `Arc` also identifies the
    /// connection.
    pub(crate) first_byte: Arc<FirstByte>,
}

/// The first byte that the peer sent, once it has arrived.
#[derive(Debug, Default)]
pub(crate) struct FirstByte(OnceLock<u8>);

/// The transport of a connection.
///
/// ```
/// use tonic_rdma::Verdict;
///
/// assert_eq!([Verdict::Rdma, Verdict::Tcp].map(|verdict| verdict.to_string()), ["rdma", "tcp"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// RDMA.
    Rdma,
    /// Plain TCP.
    Tcp,
}

impl Verdict {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The role of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The side that connected, which makes the calls.
    Client,
    /// The side that accepted, which serves the calls.
    Server,
}

impl Role {
    /// Returns the label `side` of metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// Counters and decisions of a connection; readable after its end, too.
#[derive(Clone, Debug)]
pub(crate) struct Telemetry {
    pub(crate) counters: Arc<Counters>,
    pub(crate) polling: Arc<PollCounters>,
    pub(crate) chooser: Chooser,
}

impl RdmaConnectInfo {
    /// Makes the result for a connection that stays on TCP because of `reason`.
    pub(crate) fn tcp(peer: SocketAddr, local: SocketAddr, reason: &RdmaUnavailable) -> Self {
        Self::new(ConnectionFacts {
            verdict: Verdict::Tcp,
            provider: None,
            device: None,
            reason: reason.to_string().into(),
            reason_code: Some(reason.code),
            native: false,
            in_process: false,
            version: None,
            peer,
            local,
            telemetry: None,
            first_byte: Arc::default(),
        })
    }

    pub(crate) fn new(facts: ConnectionFacts) -> Self {
        Self(Arc::new(facts))
    }

    /// Returns the transport of the connection.
    pub fn verdict(&self) -> Verdict {
        self.0.verdict
    }

    /// Returns the provider of the RDMA device in use, such as `soft`. `None` on TCP.
    pub fn provider(&self) -> Option<&'static str> {
        self.0.provider
    }

    /// Returns the name of the RDMA device in use, such as `soft0`. `None` on TCP.
    pub fn device(&self) -> Option<&str> {
        self.0.device.as_deref()
    }

    /// Returns whether calls go over this connection without HTTP/2, as messages of RDMA. If not,
    /// [`reason`](Self::reason) says why not, if this side asked for it.
    pub fn is_native(&self) -> bool {
        self.0.native
    }

    /// Returns the version of the protocol that both ends use on this connection. `None` on TCP. It is the
    /// newest version that both speak, so after an upgrade of one end it is the version of the older one.
    pub fn version(&self) -> Option<u32> {
        self.0.version
    }

    /// Returns whether calls stay in this process, because both ends of the connection are in it. The
    /// connection is there as over RDMA: its verdict and device are what was negotiated, its end ends the
    /// calls, and its counters count what went over it, which is next to nothing.
    ///
    /// ```
    /// use tonic_rdma::RdmaConnectInfo;
    ///
    /// fn path(info: &RdmaConnectInfo) -> &'static str {
    ///     match (info.is_in_process(), info.is_native()) {
    ///         (true, _) => "same process",
    ///         (_, true) => "RDMA without HTTP/2",
    ///         _ => "HTTP/2",
    ///     }
    /// }
    /// # let _ = path;
    /// ```
    pub fn is_in_process(&self) -> bool {
        self.0.in_process
    }

    /// Returns the same connection as one whose calls stay in this process.
    pub(crate) fn in_process(&self) -> Self {
        let mut facts = ConnectionFacts::clone(&self.0);
        facts.reason = format!("{}; both ends are in this process, in which calls stay", facts.reason).into();
        facts.in_process = true;
        Self::new(facts)
    }

    /// Adds the reason why there are no native calls to the reason of the verdict.
    pub(crate) fn not_native(&mut self, because: &str) {
        let facts = Arc::make_mut(&mut self.0);
        facts.reason = format!("{}; calls use HTTP/2, because {because}", facts.reason).into();
    }

    /// Returns the reason for the verdict, in words.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Returns the cause for TCP as a code, for programs that decide by it. `None` over RDMA.
    pub fn reason_code(&self) -> Option<ReasonCode> {
        self.0.reason_code
    }

    /// Returns the peer's address on the TCP connection that the negotiation went over.
    pub fn peer_addr(&self) -> SocketAddr {
        self.0.peer
    }

    /// Returns this side's address on that TCP connection.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    /// Returns what keeps the first byte of the peer.
    pub(super) fn first_byte(&self) -> &FirstByte {
        &self.0.first_byte
    }

    /// Returns whether the peer uses TLS on this connection, as its first byte shows. Returns `false` before
    /// that byte has arrived; a request arrives later. This does not show whether the peer has a certificate.
    pub fn is_tls(&self) -> bool {
        self.0.first_byte.is_tls() == Some(true)
    }

    /// Returns whether the peer has sent a first byte, and the byte is not of TLS.
    pub fn is_plaintext(&self) -> bool {
        self.0.first_byte.is_tls() == Some(false)
    }

    /// Returns whether both values describe one connection.
    pub fn is_same_connection(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.first_byte, &other.0.first_byte)
    }

    /// Returns the counters of the connection; all are 0 on TCP. They stay readable after the connection has
    /// ended.
    pub fn counters(&self) -> CounterSnapshot {
        let Some(telemetry) = &self.0.telemetry else { return CounterSnapshot::default() };
        let (polls, sleeps) = (telemetry.polling.polls.value(), telemetry.polling.sleeps.value());
        CounterSnapshot { polls, sleeps, ..telemetry.counters.snapshot() }
    }

    /// Returns how a write of `size` bytes would be transferred now, and why. `None` on TCP.
    ///
    /// ```text
    /// 64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0
    /// ```
    pub fn why(&self, size: usize) -> Option<TransferDecision> {
        self.0.telemetry.as_ref().map(|telemetry| telemetry.chooser.why(size))
    }
}

impl FirstByte {
    /// Sets the byte. Later calls have no effect.
    pub(super) fn set(&self, first: u8) {
        let _ = self.0.set(first);
    }

    /// Returns whether the byte is of TLS; `None` before the byte has arrived. The first byte of TLS is the
    /// type of a record (RFC 8446, 5.1): a handshake, or an alert before the handshake. A client of HTTP
    /// starts with a letter. A server of HTTP/2 starts with the highest byte of a frame's length, which is 0
    /// because its first frame is short.
    fn is_tls(&self) -> Option<bool> {
        const FIRST_TYPE: u8 = 20;
        const LAST_TYPE: u8 = 24;
        self.0.get().map(|first| (FIRST_TYPE..=LAST_TYPE).contains(first))
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident => $metric:literal;)+) => {
        /// Live counters of one connection.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
            pub(crate) histograms: Arc<Histograms>,
        }

        /// The counters of a connection at one moment, from
        /// [`RdmaConnectInfo::counters`](crate::RdmaConnectInfo::counters). They count from the start of the
        /// connection.
        ///
        /// ```
        /// use tonic_rdma::{CounterSnapshot, RdmaConnectInfo};
        ///
        /// fn sent(info: &RdmaConnectInfo, before: &CounterSnapshot) -> u64 {
        ///     let now = info.counters();
        ///     now.eager_sent_bytes + now.rendezvous_sent_bytes - before.eager_sent_bytes - before.rendezvous_sent_bytes
        /// }
        /// # let _ = sent;
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct CounterSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Times the completion queue was polled. The queue also serves other connections.
            pub polls: u64,
            /// Times the completion queue was armed so that its poller could sleep.
            pub sleeps: u64,
        }

        /// The metrics of the counters, each with what it means.
        pub(super) const COUNTERS: &[(&str, &str)] = &[$(($metric, concat!($($doc),+)),)+];

        impl Counters {
            /// Returns the values at this moment.
            pub(crate) fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.value(),)+ polls: 0, sleeps: 0 }
            }

            /// Adds the increments since the last call to the process's metrics.
            pub(crate) fn publish(&self) {
                $(
                    let fresh = self.$name.unpublished();
                    if fresh > 0 {
                        metrics::counter!($metric).increment(fresh);
                    }
                )+
                self.histograms.publish();
            }
        }
    };
}

counters! {
    /// Messages sent eagerly: copied into a receive buffer of the peer.
    eager_sent => "tonic_rdma_eager_messages_sent_total";
    /// Bytes sent eagerly.
    eager_sent_bytes => "tonic_rdma_eager_bytes_sent_total";
    /// Messages received eagerly.
    eager_received => "tonic_rdma_eager_messages_received_total";
    /// Bytes received eagerly.
    eager_received_bytes => "tonic_rdma_eager_bytes_received_total";
    /// Offers by rendezvous: messages that name chunks for the peer to read. A long write has several.
    rendezvous_sent => "tonic_rdma_rendezvous_messages_sent_total";
    /// Bytes offered by rendezvous.
    rendezvous_sent_bytes => "tonic_rdma_rendezvous_bytes_sent_total";
    /// Chunks fetched by RDMA READ.
    reads => "tonic_rdma_reads_total";
    /// Bytes fetched by RDMA READ.
    rendezvous_received_bytes => "tonic_rdma_rendezvous_bytes_received_total";
    /// Bytes that went straight from the writer's memory to the peer, eagerly or by READ, without a copy into a
    /// send buffer.
    copies_avoided_bytes => "tonic_rdma_copies_avoided_bytes_total";
    /// Bytes of native calls that the peer fetches from where the application wrote them.
    offered_in_place_bytes => "tonic_rdma_offered_in_place_bytes_total";
    /// Bytes of native calls that were copied into memory from which the peer fetches them.
    offered_copied_bytes => "tonic_rdma_offered_copied_bytes_total";
    /// Bytes of native calls that were fetched from the peer into registered memory.
    landed_bytes => "tonic_rdma_landed_bytes_total";
    /// Bytes of messages of native calls that reached their decoder in the memory that they landed in.
    decoded_in_place_bytes => "tonic_rdma_decoded_in_place_bytes_total";
    /// Bytes of native calls that landed, and that tonic copies before it decodes them.
    landed_copied_bytes => "tonic_rdma_landed_copied_bytes_total";
    /// Bytes of native calls that landed, and that were copied into ordinary memory for the application, because
    /// the connection's registered memory was short.
    landed_moved_bytes => "tonic_rdma_landed_moved_bytes_total";
    /// Small writes that were copied and gathered, to be sent together as one message.
    coalesced_writes => "tonic_rdma_coalesced_writes_total";
    /// Times a writer had to wait because the peer had no receive buffer free.
    credit_stalls => "tonic_rdma_credit_stalls_total";
    /// Times a writer had to wait for its own send queue or send memory.
    send_stalls => "tonic_rdma_send_stalls_total";
    /// Control messages sent: acknowledgements with credits, pings and their answers, returned credits, the
    /// end of the stream, and aborts.
    acks_sent => "tonic_rdma_acks_sent_total";
    /// Work requests posted to the send queue.
    work_requests => "tonic_rdma_work_requests_total";
}

/// A counter. Additions need a lock; reading needs no lock.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    value: AtomicU64,
    published: AtomicU64,
}

impl Counter {
    /// Adds `count`. All additions to one counter are made under one lock, such as that of its connection,
    /// session or queue, so a plain load and store suffice.
    pub(crate) fn add(&self, count: u64) {
        self.value.store(self.value.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Returns the count.
    pub(crate) fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Returns the increment since the last call.
    fn unpublished(&self) -> u64 {
        let value = self.value();
        value.wrapping_sub(self.published.swap(value, Ordering::Relaxed))
    }
}

/// Counters of the polls of a completion queue.
#[derive(Debug, Default)]
pub(crate) struct PollCounters {
    pub(crate) polls: Counter,
    pub(crate) sleeps: Counter,
}
