//! The client's side of a negotiation.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;

use super::blocking::blocking;
use super::control_stream::ControlStream;
use super::established::{Established, PeerEnd};
use super::identity;
use super::prepared::Prepared;
use crate::endpoint::config::Config;
use crate::endpoint::connection::End;
use crate::endpoint::error::{NegotiationError, RdmaUnavailable};
use crate::endpoint::journal::Journal;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::provider;
use crate::endpoint::stream::EndpointStream;
use crate::wire::hello::{Answer, ClientHello, Message, NATIVE_CALLS};
use tonic_rdma_verbs::QueuePairAddress;

/// The result of a negotiation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A connection over RDMA: a byte stream, or messages if this end asked for native calls and the server takes them.
    Rdma(Negotiated),
    /// The TCP connection of the negotiation, and the reason why there is no RDMA.
    Tcp(EndpointStream, RdmaUnavailable),
    /// The server does not know our hello. Plain TCP needs a new connection.
    Stock(NegotiationError),
}

/// Sends the hello, and follows the server's answer. `native`: asks for native calls.
pub(super) async fn negotiate(
    tcp: TcpStream,
    config: &Config,
    journal: &Arc<Journal>,
    native: bool,
) -> Result<Outcome, NegotiationError> {
    let wanted = config.clone();
    let (local, peer) = (tcp.local_addr()?, tcp.peer_addr()?);
    let prepared = blocking(move || Prepared::new(provider::open(&wanted, local, peer)?, &wanted)).await;
    let mut control = ControlStream::new(tcp, config.handshake_timeout, journal);
    // Without a device the hello has no offer, but it identifies this end, and asks for TCP.
    let offers = prepared.iter().map(Prepared::offer).collect();
    let capabilities = if native { NATIVE_CALLS } else { 0 };
    let hello = ClientHello { identity: identity::local(), capabilities, offers };
    control.send(&Message::ClientHello(hello)).await?;
    let answer = match control.receive().await {
        Ok(Message::ServerHello(hello)) => hello.answer,
        Ok(other) => return Err(NegotiationError::OutOfTurn(other.name())),
        Err(error) => return Ok(Outcome::Stock(error)),
    };
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return fall_back(control, reason),
    };
    match answer {
        Answer::Decline { reason } => fall_back(control, RdmaUnavailable::Declined(reason)),
        Answer::Accept { offer: 0, queue_pair, receive_slots, slot_size, capabilities: taken } => {
            if taken & !capabilities != 0 {
                return Err(NegotiationError::OutOfTurn("an answer with a capability not asked for"));
            }
            let native = (taken & NATIVE_CALLS != 0).then_some(End::Client);
            let connected = match QueuePairAddress::new(queue_pair) {
                Some(address) => {
                    let peer = PeerEnd { address, receive_slots, slot_size };
                    blocking(move || prepared.connect(&peer, native)).await
                }
                None => Err(RdmaUnavailable::BadAddress),
            };
            finish(control, connected).await
        }
        Answer::Accept { .. } => Err(NegotiationError::OutOfTurn("an answer to an offer not made")),
    }
}

/// Sends the server the value that this end read in the server's memory, and checks the value that the server read here.
async fn finish(
    mut control: ControlStream,
    connected: Result<Established, RdmaUnavailable>,
) -> Result<Outcome, NegotiationError> {
    let reached = match connected {
        // With shared memory, the two values are proof enough.
        Ok(established) if established.queue_pair.probe().ours.is_some() => Ok(established),
        Ok(established) => established.check_reachable().await.map(|()| established),
        Err(reason) => Err(reason),
    };
    let established = match reached {
        Ok(established) => established,
        Err(reason) => {
            control.send(&Message::failed(&reason)).await?;
            return fall_back(control, reason);
        }
    };
    control.send(&established.confirm()).await?;
    let answer = control.receive_confirm(Duration::ZERO).await?;
    match established.check(&answer) {
        Ok(()) => control.into_rdma(established).map(Outcome::Rdma),
        Err(reason) => fall_back(control, reason),
    }
}

fn fall_back(control: ControlStream, reason: RdmaUnavailable) -> Result<Outcome, NegotiationError> {
    Ok(Outcome::Tcp(control.into_tcp(&reason)?, reason))
}
