//! The client's side of a negotiation.

use std::sync::Arc;

use tokio::net::TcpStream;

use super::control_stream::ControlStream;
use super::identity;
use super::proof::{self, confirm};
use super::session::{Established, PeerEnd, Prepared};
use crate::endpoint::config::Config;
use crate::endpoint::error::NegotiationError;
use crate::endpoint::journal::Journal;
use crate::endpoint::provider;
use crate::endpoint::stream::EndpointStream;
use crate::wire::hello::{Answer, ClientHello, Confirm, Message};
use tonic_rdma_verbs::QueuePairAddress;

/// What a negotiation came to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A connection, over RDMA or over the same TCP connection.
    Connected(EndpointStream),
    /// The server does not know our hello: TCP has to be dialled anew.
    Stock(NegotiationError),
}

/// Says hello and goes on from there.
pub(super) async fn negotiate(
    tcp: TcpStream,
    config: &Config,
    journal: &Arc<Journal>,
) -> Result<Outcome, NegotiationError> {
    let wanted = config.clone();
    let (local, peer) = (tcp.local_addr()?, tcp.peer_addr()?);
    let prepare =
        move || provider::open(&wanted, local, peer).and_then(|(_, context)| Prepared::new(context, &wanted));
    let prepared = blocking(prepare).await;
    let mut control = ControlStream::new(tcp, config.handshake_timeout, journal);
    // Without a device there is nothing to offer, but the hello tells the server who we are, and that TCP will do.
    let offers = prepared.iter().map(Prepared::offer).collect();
    let hello = ClientHello { identity: identity::local(), offers };
    control.send(&Message::ClientHello(hello)).await?;
    let answer = match control.receive().await {
        Ok(Message::ServerHello(hello)) => hello.answer,
        Ok(other) => return Err(NegotiationError::OutOfTurn(other.name())),
        Err(error) => return Ok(Outcome::Stock(error)),
    };
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return Ok(Outcome::Connected(control.into_tcp(reason)?)),
    };
    let stream = match answer {
        Answer::Decline { reason } => control.into_tcp(format!("the server declined: {reason}"))?,
        Answer::Accept { offer: 0, queue_pair, receive_slots, slot_size } => {
            let peer = QueuePairAddress::new(queue_pair)
                .map(|address| PeerEnd { address, receive_slots, slot_size })
                .ok_or_else(|| "the server's queue pair address is too long".to_owned());
            let connected = match peer {
                Ok(peer) => blocking(move || prepared.connect(&peer)).await,
                Err(reason) => Err(reason),
            };
            finish(control, connected).await?
        }
        Answer::Accept { .. } => return Err(NegotiationError::OutOfTurn("an answer to an offer not made")),
    };
    Ok(Outcome::Connected(stream))
}

/// Tells the server what we read in its memory, and hears what it read in ours.
async fn finish(
    mut control: ControlStream,
    connected: Result<Established, String>,
) -> Result<EndpointStream, NegotiationError> {
    let reached = match connected {
        // Memory that is seen needs no other proof.
        Ok(established) if established.probe().ours.is_some() => Ok(established),
        Ok(established) => established.reach().await.map(|()| established),
        Err(reason) => Err(reason),
    };
    let established = match reached {
        Ok(established) => established,
        Err(reason) => {
            control.send(&Message::Confirm(Confirm::Failed { reason: reason.clone() })).await?;
            return control.into_tcp(reason);
        }
    };
    control.send(&confirm(established.probe())).await?;
    match control.receive().await? {
        Message::Confirm(answer) => match proof::check(established.probe(), &answer) {
            Ok(()) => control.into_rdma(established),
            Err(reason) => control.into_tcp(reason),
        },
        other => Err(NegotiationError::OutOfTurn(other.name())),
    }
}

/// Runs what may block for a moment (it talks to devices) where it holds up nobody else.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(error.to_string()))
}
