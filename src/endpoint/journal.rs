//! The log and the metrics of connections. A listener and a dialer each have a journal, so that a flood of lines
//! at one side does not hide the lines of the other.
//!
//! | level | events |
//! |---|---|
//! | debug | ends in good order, resets, connections that end without a byte |
//! | info | new connections and their transport; a peer that left without closing while no write was waiting |
//! | warn | transfers that were cut short, peers that do not answer or break the protocol, failed devices, refused clients |
//!
//! A peer decides how often these events happen, so the lines of info and warn are throttled, each message
//! separately. `suppressed` is the number of lines that were left out.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::error::{ConnectionFault, NegotiationError};
use super::info::{RdmaConnectInfo, Role, Verdict};
use super::meters::{self, OpenConnection};
use super::reason::RdmaUnavailable;
use tonic_rdma_verbs::unstable::Throttle;

/// Writes the log lines of one listener or dialer.
#[derive(Debug)]
pub(crate) struct Journal {
    role: Role,
    over_rdma: Throttle,
    over_tcp: Throttle,
    refused: Throttle,
    not_accepted: Throttle,
    left: Throttle,
    lost: Throttle,
}

/// The end of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionEnd {
    /// The reason, if the connection was not closed by both sides.
    pub(crate) fault: Option<ConnectionFault>,
    /// The peer had closed its writing direction.
    pub(crate) peer_finished: bool,
    /// A write was waiting here, or a rendezvous transfer was in progress.
    pub(crate) interrupted: bool,
}

impl Journal {
    /// Makes the journal of a dialer or a listener.
    pub(crate) fn new(role: Role) -> Self {
        meters::describe_once();
        let [over_rdma, over_tcp, refused, not_accepted, left, lost] =
            [const { Throttle::new(Throttle::BURST) }; 6];
        Self { role, over_rdma, over_tcp, refused, not_accepted, left, lost }
    }

    /// Counts a connection as open until the last clone of the result is dropped.
    pub(crate) fn opened(&self, verdict: Verdict, is_native: bool) -> Arc<OpenConnection> {
        OpenConnection::new(self.role, verdict, is_native)
    }

    /// Logs and counts a new connection, with its transport.
    pub(crate) fn connected(&self, peer: &str, info: &RdmaConnectInfo) {
        meters::negotiated(self.role, info.verdict(), info.reason_code(), 1);
        let throttle = match info.verdict() {
            Verdict::Rdma => &self.over_rdma,
            Verdict::Tcp => &self.over_tcp,
        };
        let Some(suppressed) = throttle.admit(Instant::now()) else { return };
        match info.verdict() {
            Verdict::Rdma => tracing::info!(peer, device = info.device(), suppressed, "connected over rdma"),
            Verdict::Tcp => tracing::info!(peer, reason = info.reason(), suppressed, "connected over tcp"),
        }
    }

    /// Counts a connection that this side gave up because it has to be RDMA.
    pub(crate) fn gave_up(&self, reason: &RdmaUnavailable) {
        meters::refused(self.role, reason.code);
    }

    /// Logs and counts a client that was refused.
    pub(crate) fn refused(&self, peer: SocketAddr, error: &NegotiationError) {
        if matches!(error, NegotiationError::Nothing) {
            tracing::debug!(%peer, "a client connected and left without a word, as health probes do");
            return;
        }
        meters::refused(self.role, error.code());
        if let Some(suppressed) = self.refused.admit(Instant::now()) {
            tracing::warn!(%peer, %error, suppressed, "connection refused");
        }
    }

    /// Logs that the system could not accept a connection.
    pub(crate) fn not_accepted(&self, error: &std::io::Error) {
        if let Some(suppressed) = self.not_accepted.admit(Instant::now()) {
            tracing::warn!(%error, suppressed, "accepting a connection failed");
        }
    }

    /// Logs and counts the end of a connection over RDMA.
    pub(crate) fn ended(&self, peer: SocketAddr, end: &ConnectionEnd) {
        let Some(fault) = &end.fault else {
            tracing::debug!(%peer, "rdma connection closed");
            return;
        };
        let is_silent = matches!(fault, ConnectionFault::NoAnswer(_));
        if (is_silent || matches!(fault, ConnectionFault::PeerLost(_))) && !end.peer_finished {
            meters::peer_lost(is_silent, 1);
        }
        match fault {
            ConnectionFault::PeerLost(_) | ConnectionFault::Closed if end.peer_finished => {
                tracing::debug!(%peer, "rdma connection closed by the peer");
            }
            ConnectionFault::Closed => {
                tracing::debug!(%peer, "rdma connection closed here while the peer was still sending");
            }
            ConnectionFault::Aborted(code) if code.is_reset() => {
                tracing::debug!(%peer, reason = %fault, "rdma connection reset by the peer");
            }
            ConnectionFault::PeerLost(_) if !end.interrupted => {
                if let Some(suppressed) = self.left.admit(Instant::now()) {
                    tracing::info!(%peer, reason = %fault, suppressed, "the peer left without closing; no write was waiting here");
                }
            }
            _ => {
                if let Some(suppressed) = self.lost.admit(Instant::now()) {
                    tracing::warn!(%peer, reason = %fault, suppressed, "rdma connection lost");
                }
            }
        }
    }
}
