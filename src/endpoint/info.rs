//! What was negotiated for a connection.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use super::counters::{CounterSnapshot, Counters, PollCounters};
use super::tuner::{Decision, Explained, Load};

/// What was negotiated for a connection, and why. At the root of the crate its name is
/// [`RdmaConnectInfo`](crate::RdmaConnectInfo). A server finds it in each request's extensions, a client in
/// [`RdmaConnector::last_connection`](crate::RdmaConnector::last_connection).
///
/// ```
/// use tonic_rdma::internal::tuner::Load;
/// use tonic_rdma::{RdmaConnectInfo, Verdict};
///
/// fn describe(info: &RdmaConnectInfo) -> String {
///     match info.verdict() {
///         Verdict::Tcp => format!("TCP to {}, because {}", info.peer_addr(), info.reason()),
///         Verdict::Rdma => {
///             let sent = info.counters().rendezvous_sent_bytes;
///             let why = info.why(64 << 10, Load::Light).map(|decision| decision.to_string());
///             format!("{:?}: {sent} bytes sent by rendezvous; {why:?}", info.device())
///         }
///     }
/// }
/// # let _ = describe;
/// ```
#[derive(Clone, Debug)]
pub struct RdmaConnectInfo {
    pub(crate) verdict: Verdict,
    pub(crate) provider: Option<&'static str>,
    pub(crate) device: Option<Arc<str>>,
    pub(crate) reason: Arc<str>,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) live: Option<Live>,
    /// Of this connection alone: it tells connections apart.
    pub(crate) beginning: Arc<Beginning>,
}

/// The first byte that the peer sent, once there is one.
#[derive(Debug, Default)]
pub(crate) struct Beginning(OnceLock<u8>);

/// What carries a connection.
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

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        })
    }
}

/// What a connection tells while it lives, and what is left of it.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) counters: Arc<Counters>,
    pub(crate) polling: Arc<PollCounters>,
    pub(crate) explained: Arc<Explained>,
}

impl RdmaConnectInfo {
    /// A connection that stays on TCP because of `reason`.
    pub(crate) fn tcp(peer: SocketAddr, local: SocketAddr, reason: impl Into<Arc<str>>) -> Self {
        let (provider, device, live) = (None, None, None);
        let (reason, beginning) = (reason.into(), Arc::default());
        Self { verdict: Verdict::Tcp, provider, device, reason, peer, local, live, beginning }
    }

    /// Returns what carries the connection.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Returns the provider of the RDMA device in use, such as `soft`. `None` on TCP.
    pub fn provider(&self) -> Option<&'static str> {
        self.provider
    }

    /// Returns the name of the RDMA device in use, such as `soft0`. `None` on TCP.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Returns the reason for the verdict, in words.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns the peer's address on the TCP connection that the negotiation went over.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Returns this end's address on that TCP connection.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns whether the peer speaks TLS on this connection, as its first byte shows. `false` before that byte has come; a
    /// request comes later. It does not tell whether a certificate was asked for, or what is in it.
    pub fn is_tls(&self) -> bool {
        self.beginning.is_tls() == Some(true)
    }

    /// Whether the peer has begun, and not with TLS.
    #[doc(hidden)]
    pub fn is_plaintext(&self) -> bool {
        self.beginning.is_tls() == Some(false)
    }

    /// Whether both are of the same connection.
    #[doc(hidden)]
    pub fn is_same_connection(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.beginning, &other.beginning)
    }

    /// Returns the counters of the connection; all are 0 on TCP. They stay readable after the connection has ended.
    pub fn counters(&self) -> CounterSnapshot {
        let Some(live) = &self.live else { return CounterSnapshot::default() };
        let (polls, sleeps) = live.polling.values();
        CounterSnapshot { polls, sleeps, ..live.counters.snapshot() }
    }

    /// Returns which way a write of `size` bytes would go now under this load, and why. `None` on TCP.
    ///
    /// ```text
    /// 64 KiB by rendezvous: threshold 32 KiB, set by calibration of rxe0
    /// ```
    pub fn why(&self, size: usize, load: Load) -> Option<Decision> {
        self.live.as_ref().map(|live| live.explained.why(size, load))
    }
}

impl Beginning {
    /// Notes it.
    pub(super) fn note(&self, first: u8) {
        let _ = self.0.set(first);
    }

    /// A peer that speaks TLS begins with a record (RFC 8446, 5.1), whose first byte is its type: a handshake's, or an alert's
    /// that is ahead of it. HTTP begins with a letter, and an HTTP/2 server with the length of a short frame: 0.
    fn is_tls(&self) -> Option<bool> {
        const FIRST_TYPE: u8 = 20;
        const LAST_TYPE: u8 = 24;
        self.0.get().map(|first| (FIRST_TYPE..=LAST_TYPE).contains(first))
    }
}
