//! Negotiation: who the peer is, and what both ends share. See [`wire::hello`](crate::wire::hello) for the messages.

mod client;
mod server;
mod sniff;

pub(super) use client::{Outcome, negotiate as negotiate_as_client};
pub(super) use server::negotiate as negotiate_as_server;

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connection::Connection;
use super::error::NegotiationError;
use super::info::{RdmaConnectInfo, Verdict};
use super::journal::Journal;
use super::session::Established;
use super::stream::EndpointStream;
use crate::wire::hello::{Confirm, Decoded, Message};
use tonic_rdma_verbs::Probe;

/// A TCP connection in negotiation, with what was received on it and not used yet.
#[derive(Debug)]
struct Talk {
    tcp: TcpStream,
    received: BytesMut,
    /// How long the peer may take for a message.
    patience: Duration,
    journal: Arc<Journal>,
}

impl Talk {
    fn new(tcp: TcpStream, patience: Duration, journal: &Arc<Journal>) -> Self {
        let received = BytesMut::with_capacity(1024);
        Self { tcp, received, patience, journal: Arc::clone(journal) }
    }

    async fn send(&mut self, message: &Message) -> Result<(), NegotiationError> {
        Ok(self.tcp.write_all(&message.encode()?).await?)
    }

    async fn receive(&mut self) -> Result<Message, NegotiationError> {
        self.receive_after(Duration::ZERO).await
    }

    /// The next message, before which the peer has something to do that may take as long as `work`.
    async fn receive_after(&mut self, work: Duration) -> Result<Message, NegotiationError> {
        let patience = self.patience + work;
        let complete = async {
            loop {
                match Message::decode(&self.received)? {
                    Decoded::Message { message, length } => {
                        let _ = self.received.split_to(length);
                        return Ok(message);
                    }
                    Decoded::Incomplete { .. } => self.more().await?,
                }
            }
        };
        timeout(patience, complete).await.unwrap_or(Err(NegotiationError::Silent(patience)))
    }

    /// Waits for more bytes from the peer.
    async fn more(&mut self) -> Result<(), NegotiationError> {
        match self.tcp.read_buf(&mut self.received).await? {
            0 => Err(NegotiationError::Closed),
            _ => Ok(()),
        }
    }

    /// The connection goes on as plain TCP.
    fn into_stream(self, reason: impl Into<Arc<str>>) -> Result<EndpointStream, NegotiationError> {
        let info = RdmaConnectInfo::tcp(self.tcp.peer_addr()?, self.tcp.local_addr()?, reason);
        Ok(EndpointStream::tcp(self.tcp, self.received.freeze(), info))
    }

    /// The connection goes on over RDMA; TCP is watched from now on.
    fn into_rdma(self, established: Established) -> Result<EndpointStream, NegotiationError> {
        let device = established.device();
        let reason = match established.probe().ours {
            Some(_) => format!("both ends have {device}, and read one another's memory"),
            None => format!("both ends have an RDMA device, this one {device}"),
        };
        let info = RdmaConnectInfo {
            verdict: Verdict::Rdma,
            provider: Some(established.provider()),
            device: Some(established.device().into()),
            reason: reason.into(),
            peer: self.tcp.peer_addr()?,
            local: self.tcp.local_addr()?,
            live: Some(established.live()),
            beginning: Arc::default(),
        };
        let (connection, supervisor): (Arc<Connection>, _) =
            established.supervise(self.tcp, info.peer, self.journal);
        let span = tracing::info_span!("rdma", device = info.device());
        tokio::spawn(tracing::Instrument::instrument(supervisor.run(), span));
        Ok(EndpointStream::rdma(connection, info))
    }
}

/// What we tell the peer about its memory.
fn confirm(probe: Probe) -> Message {
    Message::Confirm(Confirm::Connected { nonce: probe.peers })
}

/// Whether what the peer read is what we wrote.
fn proven(probe: Probe, peer: &Confirm) -> Result<(), String> {
    match peer {
        Confirm::Failed { reason } => Err(format!("the peer can't: {reason}")),
        Confirm::Connected { nonce } if *nonce == probe.ours => Ok(()),
        Confirm::Connected { .. } => {
            Err("the peer read something else than was written here: memory is not shared".into())
        }
    }
}
