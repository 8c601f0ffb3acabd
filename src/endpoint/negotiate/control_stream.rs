//! The TCP connection of a negotiation.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::local_side::Established;
use crate::endpoint::config::Config;
use crate::endpoint::error::NegotiationError;
use crate::endpoint::info::{ConnectionFacts, RdmaConnectInfo, Verdict};
use crate::endpoint::journal::Journal;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::reason::RdmaUnavailable;
use crate::endpoint::stream::EndpointStream;
use crate::wire::hello::{Confirm, Message, VERSIONS};

/// A TCP connection in negotiation, with the bytes that were received on it and not used yet.
#[derive(Debug)]
pub(super) struct ControlStream {
    tcp: TcpStream,
    pub(super) received: BytesMut,
    /// Longest time for a message of the peer.
    pub(super) answer_timeout: Duration,
    linger: Duration,
    journal: Arc<Journal>,
}

impl ControlStream {
    pub(super) fn new(tcp: TcpStream, config: &Config, journal: &Arc<Journal>) -> Self {
        let received = BytesMut::with_capacity(1024);
        let (answer_timeout, linger) = (config.handshake_timeout, config.linger);
        Self { tcp, received, answer_timeout, linger, journal: Arc::clone(journal) }
    }

    pub(super) async fn send(&mut self, message: &Message) -> Result<(), NegotiationError> {
        Ok(self.tcp.write_all(&message.encode()?).await?)
    }

    pub(super) async fn receive(&mut self) -> Result<Message, NegotiationError> {
        self.receive_after(Duration::ZERO).await
    }

    /// Receives the next message. Waits longer by `work`, the longest time of the work that the peer does
    /// first.
    pub(super) async fn receive_after(&mut self, work: Duration) -> Result<Message, NegotiationError> {
        let limit = self.answer_timeout + work;
        let complete = async {
            loop {
                match Message::decode(&self.received)? {
                    Some((message, length)) => {
                        let _ = self.received.split_to(length);
                        return Ok(message);
                    }
                    None => self.read_more().await?,
                }
            }
        };
        timeout(limit, complete).await.unwrap_or(Err(NegotiationError::Silent(limit)))
    }

    /// Receives the peer's `Confirm`. Waits longer by `work`, the longest time of the work that the peer does
    /// first.
    pub(super) async fn receive_confirm(&mut self, work: Duration) -> Result<Confirm, NegotiationError> {
        match self.receive_after(work).await? {
            Message::Confirm(confirm) => Ok(confirm),
            other => Err(NegotiationError::OutOfTurn(other.name())),
        }
    }

    /// Waits for more bytes from the peer.
    pub(super) async fn read_more(&mut self) -> Result<(), NegotiationError> {
        match self.tcp.read_buf(&mut self.received).await? {
            0 => Err(NegotiationError::Closed),
            _ => Ok(()),
        }
    }

    /// Waits until the peer has hung up. Never returns if the peer has sent more bytes, because the end is
    /// behind them.
    pub(super) async fn hung_up(&self) {
        if let Ok(1..) = self.tcp.peek(&mut [0]).await {
            std::future::pending().await
        }
    }

    /// Goes on as plain TCP, because of `reason`.
    pub(super) fn into_tcp(self, reason: &RdmaUnavailable) -> Result<EndpointStream, NegotiationError> {
        let info = RdmaConnectInfo::tcp(self.tcp.peer_addr()?, self.tcp.local_addr()?, reason);
        let opened = self.journal.opened(Verdict::Tcp, false);
        Ok(EndpointStream::tcp(self.tcp, self.received.freeze(), info, opened, self.linger))
    }

    /// Goes on over RDMA, with this version of the protocol. From now on a supervisor watches the TCP
    /// connection.
    pub(super) fn into_rdma(
        self,
        established: Established,
        version: u8,
    ) -> Result<Negotiated, NegotiationError> {
        let device = established.device();
        let native = established.is_native();
        let mut reason = match established.queue_pair.local() {
            // Long content needs no second copy if each side may read the other's memory.
            Some(local) if local.reads_by_copy() => {
                format!("both ends have {device}, and read one another's memory")
            }
            Some(_) => format!("both ends have {device}, and read only one another's rings"),
            None => format!("both ends have an RDMA device, this one {device}"),
        };
        if native {
            reason.push_str("; both ends take native calls");
        }
        if u32::from(version) < VERSIONS.newest {
            let _ =
                write!(reason, "; the peer speaks version {version} of the protocol, this end {VERSIONS}");
        }
        let info = RdmaConnectInfo::new(ConnectionFacts {
            verdict: Verdict::Rdma,
            provider: Some(established.context.attributes().provider),
            device: Some(established.device().into()),
            reason: reason.into(),
            reason_code: None,
            native,
            in_process: false,
            version: Some(version.into()),
            peer: self.tcp.peer_addr()?,
            local: self.tcp.local_addr()?,
            telemetry: Some(established.telemetry()),
            first_byte: Arc::default(),
        });
        let (negotiated, supervisor) = established.supervise(self.tcp, info, self.journal);
        let span = tracing::info_span!("rdma", device = negotiated.info().device());
        tokio::spawn(tracing::Instrument::instrument(supervisor.run(), span));
        Ok(negotiated)
    }
}
