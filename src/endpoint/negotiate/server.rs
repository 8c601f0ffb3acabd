//! The server's side of a negotiation.

use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::blocking::blocking;
use super::control_stream::ControlStream;
use super::established::{Established, PeerEnd};
use super::identity::{self, Reach};
use super::prepared::Prepared;
use super::proof::{self, confirm};
use super::sniff::{Peer, sniff};
use crate::endpoint::config::{Config, Policy, StockClients};
use crate::endpoint::error::{NegotiationError, RdmaUnavailable};
use crate::endpoint::journal::Journal;
use crate::endpoint::provider::Provider;
use crate::endpoint::stream::EndpointStream;
use crate::wire::hello::{
    Answer, ClientHello, Confirm, HelloError, HostIdentity, Message, Offer, ServerHello, VERSION,
};
use tonic_rdma_verbs::QueuePairAddress;

/// Finds the kind of the peer, and goes on over RDMA or TCP.
pub(super) async fn negotiate(
    tcp: TcpStream,
    config: &Config,
    journal: &Arc<Journal>,
) -> Result<EndpointStream, NegotiationError> {
    let mut control = ControlStream::new(tcp, config.handshake_timeout, journal);
    let peer = timeout(control.patience(), first_bytes(&mut control, config.stock_clients)).await;
    let peer = match (peer, config.stock_clients) {
        (Ok(Err(NegotiationError::Closed | NegotiationError::Io(_))), _) if control.received().is_empty() => {
            return Err(NegotiationError::Nothing);
        }
        (Ok(peer), _) => peer?,
        (Err(_), StockClients::Any) => Peer::Unknown,
        (Err(_), StockClients::Grpc) => return Err(NegotiationError::Silent(control.patience())),
    };
    let stock = match peer {
        Peer::Rdma => return answer(control, config).await,
        Peer::Http => "a stock client, without TLS",
        Peer::Tls => "a stock client, with TLS",
        Peer::Garbage if config.stock_clients == StockClients::Any => "a stock client",
        Peer::Unknown if config.stock_clients == StockClients::Any => {
            "a stock client that waits, or has said all"
        }
        Peer::Garbage | Peer::Unknown => {
            let shown = control.received().len().min(16);
            return Err(NegotiationError::Garbage(control.received()[..shown].to_vec()));
        }
    };
    match config.policy {
        Policy::Require => Err(NegotiationError::RdmaRequired(RdmaUnavailable::StockClient(stock))),
        Policy::Prefer | Policy::TcpOnly => control.into_tcp(&stock),
    }
}

/// Waits until the first bytes show the kind of peer, or the peer sends no more.
async fn first_bytes(control: &mut ControlStream, clients: StockClients) -> Result<Peer, NegotiationError> {
    loop {
        match (sniff(control.received()), clients) {
            (Peer::Unknown, StockClients::Grpc) => control.read_more().await?,
            (Peer::Unknown, StockClients::Any) => match control.read_more().await {
                Err(NegotiationError::Closed) => return Ok(Peer::Unknown),
                more => more?,
            },
            (peer, _) => return Ok(peer),
        }
    }
}

async fn answer(mut control: ControlStream, config: &Config) -> Result<EndpointStream, NegotiationError> {
    let established = match control.receive().await {
        Ok(Message::ClientHello(hello)) => accept(hello, config).await,
        Ok(other) => return Err(NegotiationError::OutOfTurn(other.name())),
        Err(NegotiationError::Hello(HelloError::Version { seen })) => {
            // The rest of a hello of another version is unknown, so this connection ends. The client makes a new connection.
            let reason = format!("the client speaks version {seen}, this end {VERSION}");
            decline(&mut control, &reason).await?;
            return Err(HelloError::Version { seen }.into());
        }
        Err(error) => return Err(error),
    };
    match established {
        Ok((established, offer)) => conclude(control, established, offer, config).await,
        Err(reason) => {
            decline(&mut control, &reason.to_string()).await?;
            fall_back(control, reason, config)
        }
    }
}

/// Connects to the first offer that this end can accept. Returns the connection and the number of the offer.
async fn accept(hello: ClientHello, config: &Config) -> Result<(Established, u8), RdmaUnavailable> {
    if config.policy == Policy::TcpOnly {
        return Err(RdmaUnavailable::TcpOnly);
    }
    let mut reasons = Vec::new();
    for (offer, index) in hello.offers.iter().zip(0..) {
        match accept_offer(offer, &hello.identity, config).await {
            Ok(established) => return Ok((established, index)),
            Err(reason) => reasons.push(reason),
        }
    }
    if reasons.is_empty() {
        return Err(RdmaUnavailable::NothingOffered);
    }
    Err(RdmaUnavailable::NoOfferFits(reasons))
}

/// Connects to one offer.
async fn accept_offer(
    offer: &Offer,
    client: &HostIdentity,
    config: &Config,
) -> Result<Established, RdmaUnavailable> {
    let provider = Provider::named(&offer.provider).filter(|provider| provider.is_wanted(config));
    let Some(provider) = provider else {
        return Err(RdmaUnavailable::ProviderNotUsed(offer.provider.clone()));
    };
    if provider == Provider::Soft {
        identity::check(&identity::local(), client, Reach::of_this_process())?;
    }
    let peer = PeerEnd {
        address: QueuePairAddress::new(offer.queue_pair.clone()).ok_or(RdmaUnavailable::BadAddress)?,
        receive_slots: offer.receive_slots,
        slot_size: offer.slot_size,
    };
    let config = config.clone();
    let connect = move || Prepared::new(provider.open(&config)?, &config)?.connect(&peer);
    blocking(connect).await
}

async fn conclude(
    mut control: ControlStream,
    established: Established,
    offer: u8,
    config: &Config,
) -> Result<EndpointStream, NegotiationError> {
    let answer = Answer::Accept {
        offer,
        queue_pair: established.local_address(),
        receive_slots: established.receive_slots(),
        slot_size: established.slot_size(),
    };
    control.send(&Message::ServerHello(ServerHello { answer })).await?;
    let read = control.receive_confirm(Established::CONNECTING).await?;
    match (proof::check(established.probe(), &read), read) {
        (Ok(()), _) => {
            control.send(&confirm(established.probe())).await?;
            control.into_rdma(established)
        }
        // The client has given up RDMA, and goes on over TCP without an answer.
        (Err(reason), Confirm::Failed { .. }) => fall_back(control, reason, config),
        (Err(reason), Confirm::Connected { .. }) => {
            control.send(&Message::Confirm(Confirm::Failed { reason: reason.to_string() })).await?;
            fall_back(control, reason, config)
        }
    }
}

async fn decline(control: &mut ControlStream, reason: &str) -> Result<(), NegotiationError> {
    let answer = Answer::Decline { reason: reason.into() };
    control.send(&Message::ServerHello(ServerHello { answer })).await
}

fn fall_back(
    control: ControlStream,
    reason: RdmaUnavailable,
    config: &Config,
) -> Result<EndpointStream, NegotiationError> {
    match config.policy {
        Policy::Require => Err(NegotiationError::RdmaRequired(reason)),
        Policy::Prefer | Policy::TcpOnly => control.into_tcp(&reason),
    }
}
