//! The server's side of a negotiation, which begins with the kind of the peer, by its first bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use super::control_stream::ControlStream;
use super::listen::{Guest, Listener};
use super::local_end::{Established, PeerEnd, Prepared, blocking};
use super::places::{Lost, Place, TooManyWait};
use super::reach::Devices;
use super::reach::{self, Reach};
use crate::endpoint::config::{Config, Policy, StockClients};
use crate::endpoint::connection::End;
use crate::endpoint::error::{NegotiationError, RdmaUnavailable};
use crate::endpoint::journal::Journal;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::provider::Provider;
use crate::wire::hello::{
    Answer, ClientHello, Confirm, HelloError, HostIdentity, MAGIC, Message, NATIVE_CALLS, Offer, ServerHello,
    VERSION,
};
use tonic_rdma_verbs::QueuePairAddress;

/// Finds the kind of the peer, and goes on over RDMA or TCP. `native`: whether this end takes native
/// calls, once that is known.
pub(super) async fn negotiate(
    tcp: TcpStream,
    config: &Config,
    journal: &Arc<Journal>,
    guest: Guest<'_>,
    native: &watch::Receiver<Option<bool>>,
) -> Result<Negotiated, NegotiationError> {
    tcp.set_nodelay(true)?;
    // One handshake timeout each for the client's first message, for this end's work, and for the client's answer.
    let whole = 3 * config.handshake_timeout + Established::CONNECTING;
    let control = ControlStream::new(tcp, config.handshake_timeout, journal);
    timeout(whole, Negotiation { config, guest, native }.run(control))
        .await
        .unwrap_or(Err(NegotiationError::Silent(whole)))
}

/// The first message of a client.
#[derive(Debug)]
enum First {
    Hello(ClientHello),
    /// A hello of another version.
    Version(u16),
    Stock(Peer),
}

/// A negotiation with one client.
#[derive(Clone, Copy, Debug)]
struct Negotiation<'a> {
    config: &'a Config,
    guest: Guest<'a>,
    /// Whether this end takes native calls, once that is known.
    native: &'a watch::Receiver<Option<bool>>,
}

impl Negotiation<'_> {
    async fn run(self, mut control: ControlStream) -> Result<Negotiated, NegotiationError> {
        let stock = match self.listen(&mut control).await? {
            First::Hello(hello) => {
                self.guest.place.works().map_err(|Lost| NegotiationError::Displaced)?;
                return self.answer(control, hello).await;
            }
            First::Version(seen) => {
                // The rest of a hello of another version is unknown, so this connection ends. The client makes a new connection.
                let reason = format!("the client speaks version {seen}, this end {VERSION}");
                decline(&mut control, &reason).await?;
                return Err(HelloError::Version { seen }.into());
            }
            First::Stock(peer) => peer,
        };
        let any = self.config.stock_clients == StockClients::Any;
        let stock = match stock {
            Peer::Http => "a stock client, without TLS",
            Peer::Tls => "a stock client, with TLS",
            Peer::Garbage if any => "a stock client",
            Peer::Unknown if any => "a stock client that waits, or has said all",
            Peer::Rdma | Peer::Garbage | Peer::Unknown => {
                let shown = control.received().len().min(16);
                return Err(NegotiationError::Garbage(control.received()[..shown].to_vec()));
            }
        };
        match self.config.policy {
            Policy::Require => Err(NegotiationError::RdmaRequired(RdmaUnavailable::StockClient(stock))),
            Policy::Prefer | Policy::TcpOnly => control.into_tcp(&stock).map(Negotiated::Stream),
        }
    }

    /// Waits for the client's first message, until its time is over or a new client needs the place.
    async fn listen(self, control: &mut ControlStream) -> Result<First, NegotiationError> {
        let patience = control.patience();
        self.guest.place.waits();
        let end = tokio::select! {
            biased;
            first = timeout(patience, first_message(control, self.config.stock_clients)) => match first {
                Ok(Err(NegotiationError::Closed | NegotiationError::Io(_))) if control.received().is_empty() => {
                    return Err(NegotiationError::Nothing);
                }
                Ok(first) => return first,
                Err(_) => NegotiationError::Silent(patience),
            },
            () = self.guest.place.lost() => NegotiationError::Displaced,
        };
        match (self.config.stock_clients, sniff(control.received())) {
            // A client of another protocol may wait for the server to speak first.
            (StockClients::Any, Peer::Unknown) => Ok(First::Stock(Peer::Unknown)),
            _ => Err(end),
        }
    }

    async fn answer(
        self,
        mut control: ControlStream,
        hello: ClientHello,
    ) -> Result<Negotiated, NegotiationError> {
        let accepted = tokio::select! {
            biased;
            accepted = self.accept(hello, control.patience()) => accepted,
            // The client gets an answer, because it would take a server that hangs up without one for a stock server.
            () = self.guest.place.lost() => Err(RdmaUnavailable::Crowded(self.guest.preparations.limit())),
            () = control.hung_up() => return Err(NegotiationError::Closed),
        };
        match accepted {
            Ok(accepted) => self.conclude(control, accepted).await,
            Err(reason) => {
                decline(&mut control, &reason.to_string()).await?;
                self.fall_back(control, reason)
            }
        }
    }

    /// Connects to the first offer that this end can accept, one after the other, within `patience`. The client waits no longer.
    async fn accept(self, hello: ClientHello, patience: Duration) -> Result<Accepted, RdmaUnavailable> {
        if self.config.policy == Policy::TcpOnly {
            return Err(RdmaUnavailable::TcpOnly);
        }
        if hello.offers.is_empty() {
            return Err(RdmaUnavailable::NothingOffered);
        }
        let until = Instant::now() + patience;
        let asked = hello.capabilities & NATIVE_CALLS != 0;
        let native = (asked && self.takes_native_calls(patience / 4).await).then_some(End::Server);
        let (mut devices, mut reasons) = (Devices::default(), Vec::new());
        let accepted = timeout_at(until.into(), async {
            for (offer, number) in hello.offers.iter().zip(0..) {
                match self.accept_offer(offer, &hello.identity, native, &mut devices, patience / 2).await {
                    Ok((established, place)) => return Ok(Accepted { established, offer: number, place }),
                    Err(reason @ RdmaUnavailable::Crowded(_)) => return Err(reason),
                    Err(reason) => reasons.push(reason),
                }
            }
            Err(RdmaUnavailable::NoOfferFits(reasons))
        });
        accepted.await.unwrap_or(Err(RdmaUnavailable::TooSlow(patience)))
    }

    /// Connects to one offer. Waits for a place for at most `patience`.
    async fn accept_offer(
        self,
        offer: &Offer,
        client: &HostIdentity,
        native: Option<End>,
        devices: &mut Devices,
        patience: Duration,
    ) -> Result<(Established, Place), RdmaUnavailable> {
        let provider = Provider::named(&offer.provider).filter(|provider| provider.is_wanted(self.config));
        let Some(provider) = provider else {
            return Err(RdmaUnavailable::ProviderNotUsed(offer.provider.clone()));
        };
        if provider == Provider::Soft {
            reach::check(&reach::local(), client, Reach::of_this_process())?;
        }
        let peer = PeerEnd {
            address: QueuePairAddress::new(offer.queue_pair.clone()).ok_or(RdmaUnavailable::BadAddress)?,
            receive_slots: offer.receive_slots,
            slot_size: offer.slot_size,
        };
        let Guest { source, place: negotiation, preparations } = self.guest;
        let crowded = || RdmaUnavailable::Crowded(preparations.limit());
        // This is the client's time, and costs neither a thread nor memory.
        negotiation.waits_for(Listener::PROOF);
        let owner = devices.ask(provider, &peer.address).await;
        negotiation.works().map_err(|Lost| crowded())?;
        let source = owner?.map_or(source, |owner| source.with_owner(owner));
        let place = timeout(patience, preparations.take(source)).await;
        let place = place.map_err(|_| crowded())?.map_err(|TooManyWait| crowded())?;
        let config = self.config.clone();
        blocking(move || {
            let connected = Prepared::new(provider.open(&config)?, &config)?.connect(&peer, native)?;
            // The place is held until here, because this work goes on if its negotiation ends.
            Ok((connected, place))
        })
        .await
    }

    /// Returns whether this end takes native calls. A program listens before it serves, so this waits a moment until it serves.
    async fn takes_native_calls(self, patience: Duration) -> bool {
        let mut known = self.native.clone();
        let known = timeout(patience, known.wait_for(Option::is_some)).await;
        known.is_ok_and(|known| known.is_ok_and(|native| *native == Some(true)))
    }

    async fn conclude(
        self,
        mut control: ControlStream,
        accepted: Accepted,
    ) -> Result<Negotiated, NegotiationError> {
        let Accepted { established, offer, place } = accepted;
        let answer = Answer::Accept {
            offer,
            queue_pair: established.queue_pair.local_address().as_bytes().to_vec(),
            receive_slots: established.slots,
            slot_size: established.config.slot_size,
            capabilities: if established.native { NATIVE_CALLS } else { 0 },
        };
        control.send(&Message::ServerHello(ServerHello { answer })).await?;
        place.waits();
        let read = tokio::select! {
            biased;
            read = control.receive_confirm(Established::CONNECTING) => read?,
            () = place.lost() => {
                // The offer is taken back, and the connection goes on over TCP once the client has answered the offer.
                drop((established, place));
                self.guest.place.waits();
                let read = tokio::select! {
                    biased;
                    read = control.receive_confirm(Established::CONNECTING) => read?,
                    () = self.guest.place.lost() => return Err(NegotiationError::Displaced),
                };
                let reason = RdmaUnavailable::Crowded(self.guest.preparations.limit());
                return self.give_up(control, &read, reason).await;
            }
        };
        match established.check(&read) {
            Ok(()) => {
                control.send(&established.confirm()).await?;
                control.into_rdma(established)
            }
            Err(reason) => self.give_up(control, &read, reason).await,
        }
    }

    /// Goes on over TCP because of `reason`, after the client has said `read`.
    async fn give_up(
        self,
        mut control: ControlStream,
        read: &Confirm,
        reason: RdmaUnavailable,
    ) -> Result<Negotiated, NegotiationError> {
        // A client that has given up RDMA goes on over TCP without an answer.
        if let Confirm::Connected { .. } = read {
            control.send(&Message::failed(&reason)).await?;
        }
        self.fall_back(control, reason)
    }

    fn fall_back(
        self,
        control: ControlStream,
        reason: RdmaUnavailable,
    ) -> Result<Negotiated, NegotiationError> {
        match self.config.policy {
            Policy::Require => Err(NegotiationError::RdmaRequired(reason)),
            Policy::Prefer | Policy::TcpOnly => control.into_tcp(&reason).map(Negotiated::Stream),
        }
    }
}

/// An offer of the client that this end has connected to.
#[derive(Debug)]
struct Accepted {
    established: Established,
    /// The number of the offer.
    offer: u8,
    /// The place for the queue pair and its memory, until the client has proved that it has connected too.
    place: Place,
}

/// Reads until the bytes show the kind of client, and the whole hello of a client of this crate.
async fn first_message(
    control: &mut ControlStream,
    clients: StockClients,
) -> Result<First, NegotiationError> {
    match first_bytes(control, clients).await? {
        Peer::Rdma => match control.receive().await {
            Ok(Message::ClientHello(hello)) => Ok(First::Hello(hello)),
            Ok(other) => Err(NegotiationError::OutOfTurn(other.name())),
            Err(NegotiationError::Hello(HelloError::Version { seen })) => Ok(First::Version(seen)),
            Err(error) => Err(error),
        },
        peer => Ok(First::Stock(peer)),
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

async fn decline(control: &mut ControlStream, reason: &str) -> Result<(), NegotiationError> {
    let answer = Answer::Decline { reason: reason.into() };
    control.send(&Message::ServerHello(ServerHello { answer })).await
}

/// The kind of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// Too few bytes so far.
    Unknown,
    /// A client of this crate.
    Rdma,
    /// A stock client: the HTTP/2 preface (RFC 9113, 3.4), or an HTTP/1 request. Both start with a method.
    Http,
    /// A stock client over TLS: a handshake record (RFC 8446, 5.1).
    Tls,
    /// None of these.
    Garbage,
}

/// Returns the kind of the peer that sent these first bytes.
pub(super) fn sniff(received: &[u8]) -> Peer {
    const TLS_HANDSHAKE: u8 = 22;
    const TLS_MAJOR: u8 = 3;
    match received {
        [] | [TLS_HANDSHAKE] => Peer::Unknown,
        [TLS_HANDSHAKE, TLS_MAJOR, ..] => Peer::Tls,
        _ if received.starts_with(&MAGIC) => Peer::Rdma,
        _ if MAGIC.starts_with(received) => Peer::Unknown,
        _ => method(received),
    }
}

/// Looks for an HTTP method and a space: `PRI ` of the HTTP/2 preface, `GET `, `OPTIONS `.
fn method(received: &[u8]) -> Peer {
    const LONGEST_METHOD: usize = 16;
    let letters = received.iter().take_while(|byte| byte.is_ascii_uppercase()).count();
    match received.get(letters) {
        _ if letters > LONGEST_METHOD => Peer::Garbage,
        None => Peer::Unknown,
        Some(b' ') if letters > 0 => Peer::Http,
        Some(_) => Peer::Garbage,
    }
}

#[cfg(test)]
mod sniff_tests {
    use super::*;

    #[test]
    fn the_kind_of_a_peer_does_not_depend_on_the_number_of_bytes_that_have_arrived() {
        let peers: [(&[u8], Peer); 8] = [
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Peer::Http),
            (b"GET / HTTP/1.1\r\n", Peer::Http),
            (&[22, 3, 1, 2, 0, 1], Peer::Tls),
            (&MAGIC, Peer::Rdma),
            (&[0; 16], Peer::Garbage),
            (b"SSH-2.0-OpenSSH\r\n", Peer::Garbage),
            (&[22, 9], Peer::Garbage),
            (&[b'A'; 64], Peer::Garbage),
        ];
        for (bytes, expected) in peers {
            let verdicts: Vec<Peer> = (0..=bytes.len()).map(|length| sniff(&bytes[..length])).collect();
            let decided: Vec<&Peer> = verdicts.iter().skip_while(|peer| **peer == Peer::Unknown).collect();
            assert!(
                !decided.is_empty() && decided.iter().all(|peer| **peer == expected),
                "{bytes:?}: {verdicts:?}"
            );
        }
    }
}
