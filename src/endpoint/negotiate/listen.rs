//! Listening: one TCP port for RDMA peers and stock clients, and the server's side of a negotiation, which
//! begins with the kind of the peer, by its first bytes.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{timeout, timeout_at};
use tokio_stream::Stream;

use super::client_slots::{ClientSlot, ClientSlots, SlotLost, Source};
use super::control_stream::ControlStream;
use super::local_side::{Established, PeerQueuePair, Prepared, bad_address, blocking, other_version};
use super::reach::{self, Devices, Reach};
use crate::endpoint::config::{Config, Policy, Provider, StockClients};
use crate::endpoint::deferred::OwnedTask;
use crate::endpoint::error::NegotiationError;
use crate::endpoint::info::Role;
use crate::endpoint::journal::Journal;
use crate::endpoint::meeting::Meeting;
use crate::endpoint::messages::{MessageMemory, Negotiated};
use crate::endpoint::provider;
use crate::endpoint::reason::{RdmaUnavailable, ReasonCode};
use crate::endpoint::stream::EndpointStream;
use crate::wire::hello::{
    Answer, ClientHello, Confirm, DeviceOffer, HelloError, HostIdentity, LACKS_DESCRIPTORS, LACKS_MEMORY,
    LAYOUT, MAGIC, Message, NATIVE_CALLS, VERSIONS,
};
use tonic_rdma_verbs::QueuePairAddress;
use tonic_rdma_verbs::memory::Budget;
use tonic_rdma_verbs::unstable::Versions;

/// A stream of connections after their negotiation. Negotiations run at the same time, so that a slow or
/// silent peer delays no other peer. If many clients say nothing, a new client takes the slot of the client
/// that has been silent for longest, of the address with most slots. Dropping the listener closes the port.
///
/// ```
/// use tokio::net::TcpListener;
/// use tokio_stream::StreamExt as _;
/// use tonic_rdma::{Config, Listener};
///
/// # async fn example() -> std::io::Result<()> {
/// let mut listener = Listener::new(TcpListener::bind("0.0.0.0:7000").await?, Config::default())?;
/// while let Some(stream) = listener.next().await {
///     println!("{} connected over {}", stream.info().peer_addr(), stream.info().verdict());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    connections: mpsc::Receiver<Negotiated>,
    /// Whether clients that ask for native calls get them; `None` until the listener's owner takes the first
    /// connection.
    native: watch::Sender<Option<bool>>,
    address: SocketAddr,
    /// It accepts connections.
    _task: OwnedTask,
}

impl Listener {
    /// Most negotiations at a time, and connections that wait for the stream. A new client takes the slot of
    /// a silent one. If there is none, new clients wait in the port's backlog.
    const NEGOTIATIONS: usize = 1024;
    /// Most negotiations that hold a queue pair and receive memory at a time, before the client has proved
    /// that it has a device.
    const PREPARATIONS: u64 = 64;
    /// Time that a client has to answer over RDMA before another client may take its slot.
    pub(super) const PROOF: Duration = Duration::from_millis(250);
    /// Most clients that wait for a slot to prepare their connection over RDMA. One source has half of them.
    const WAITING_FOR_PREPARATION: usize = 320;
    /// Most connections that wait until the stream is polled.
    const WAITING: usize = 1024;

    /// Takes over a listening socket. [`Dialer::new`](crate::Dialer::new) has an example of both sides.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// use tokio::net::TcpListener;
    /// use tonic_rdma::Config;
    /// use tonic_rdma::Listener;
    ///
    /// let listener = Listener::new(TcpListener::bind("127.0.0.1:0").await?, Config::default())?;
    /// println!("listening on {}", listener.local_addr());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The configuration has a value that can't be used ([`RdmaError`](crate::RdmaError), inside the error),
    /// or the socket has no local address.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(listener: TcpListener, config: Config) -> io::Result<Self> {
        Self::speaking(listener, config, VERSIONS)
    }

    /// Does as [`new`](Self::new), and speaks these versions of the protocol.
    pub(super) fn speaking(listener: TcpListener, config: Config, speaks: Versions) -> io::Result<Self> {
        config.validate().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let address = listener.local_addr()?;
        let (sender, connections) = mpsc::channel(Self::WAITING);
        let (native, asked) = watch::channel(None);
        let task = OwnedTask(tokio::spawn(accept(listener, config, speaks, asked, sender)).abort_handle());
        Ok(Self { connections, native, address, _task: task })
    }

    /// Returns the address that the listener listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Sets whether native calls are taken from now on, too: then connections whose client asks for them
    /// carry messages. Other connections, also those that were negotiated before this call, are byte streams.
    /// Clients that ask before the first connection is taken wait a moment for this call.
    pub(crate) fn take_native_calls(&self, native: bool) {
        self.native.send_replace(Some(native));
    }

    /// Returns the next connection, which may carry native calls.
    pub(crate) async fn next_negotiated(&mut self) -> Option<Negotiated> {
        self.connections.recv().await
    }
}

impl Stream for Listener {
    type Item = EndpointStream;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<EndpointStream>> {
        if self.native.borrow().is_none() {
            self.take_native_calls(false);
        }
        loop {
            match ready!(self.connections.poll_recv(context)) {
                Some(Negotiated::Stream(stream)) => return Poll::Ready(Some(stream)),
                // Only a listener that accepts native calls makes such connections, and its owner does not
                // use this stream.
                Some(Negotiated::Messages(_)) => {}
                None => return Poll::Ready(None),
            }
        }
    }
}

async fn accept(
    listener: TcpListener,
    config: Config,
    speaks: Versions,
    native: watch::Receiver<Option<bool>>,
    connections: mpsc::Sender<Negotiated>,
) {
    /// Pause after an error such as too many open files.
    const PAUSE: Duration = Duration::from_millis(50);
    let config = Arc::new(config);
    let journal = Arc::new(Journal::new(Role::Server));
    let negotiations = ClientSlots::new(Listener::NEGOTIATIONS, Duration::ZERO, 2);
    let preparations =
        ClientSlots::shared(preparations(&config), Listener::PROOF, Listener::WAITING_FOR_PREPARATION);
    loop {
        let (tcp, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                journal.not_accepted(&error);
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let source = Source::from(peer.ip());
        let Ok(slot) = negotiations.take(source).await else { continue };
        let (config, journal, connections) = (Arc::clone(&config), Arc::clone(&journal), connections.clone());
        let preparations = Arc::clone(&preparations);
        let native = native.clone();
        tokio::spawn(async move {
            let client = AdmittedClient { source, slot: &slot, preparations: &preparations };
            let negotiated = tokio::select! {
                negotiated = negotiate(tcp, &config, &journal, client, &native, speaks) => negotiated,
                () = connections.closed() => return,
            };
            match negotiated {
                Ok(negotiated) => {
                    journal.connected(&peer.to_string(), negotiated.info());
                    let _ = connections.send(negotiated).await;
                }
                Err(error) => journal.refused(peer, &error),
            }
            // Held until the connection was taken, because the slots also bound the connections that wait.
            drop(slot);
        });
    }
}

/// Returns how many negotiations may hold a queue pair and receive memory at a time: so few that a quarter of
/// the process's registered memory suffices.
fn preparations(config: &Config) -> usize {
    let each = u64::from(config.receive_slots) * u64::from(config.slot_size) + MessageMemory::RESERVE as u64;
    let share = config.pinned_limit.unwrap_or(Budget::DEFAULT_LIMIT) / 4;
    (share / each.max(1)).clamp(1, Listener::PREPARATIONS) as usize
}

/// A client of a listener, and the slots that it shares with other clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdmittedClient<'a> {
    pub(super) source: Source,
    /// The slot among all negotiations.
    pub(super) slot: &'a ClientSlot,
    /// The slots of negotiations that hold a queue pair and receive memory.
    pub(super) preparations: &'a Arc<ClientSlots>,
}

impl AdmittedClient<'_> {
    /// Returns the reason for a client that finds no slot, or has lost it.
    fn crowded(self) -> RdmaUnavailable {
        let limit = self.preparations.limit();
        let reason = format!("the server has {limit} unfinished negotiations over RDMA, which is the limit");
        RdmaUnavailable::new(ReasonCode::Busy, reason)
    }
}

/// Finds the kind of the peer, and continues over RDMA or TCP. `native`: whether this side accepts native
/// calls, once that is known.
pub(super) async fn negotiate(
    tcp: TcpStream,
    config: &Config,
    journal: &Arc<Journal>,
    client: AdmittedClient<'_>,
    native: &watch::Receiver<Option<bool>>,
    speaks: Versions,
) -> Result<Negotiated, NegotiationError> {
    tcp.set_nodelay(true)?;
    // One handshake timeout each for the client's first message, for this side's work, and for the client's
    // answer.
    let whole = 3 * config.handshake_timeout + Established::CONNECTING;
    let control = ControlStream::new(tcp, config, journal);
    timeout(whole, Negotiation { config, client, native, speaks }.run(control))
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
    client: AdmittedClient<'a>,
    /// Whether this side accepts native calls, once that is known.
    native: &'a watch::Receiver<Option<bool>>,
    /// The versions of the protocol that this side speaks.
    speaks: Versions,
}

impl Negotiation<'_> {
    async fn run(self, mut control: ControlStream) -> Result<Negotiated, NegotiationError> {
        let stock = match self.listen(&mut control).await? {
            First::Hello(hello) => {
                self.client.slot.works().map_err(|SlotLost| NegotiationError::Displaced)?;
                return self.answer(control, hello).await;
            }
            First::Version(seen) => {
                // The rest of a hello of another version is unknown, so this connection ends. The client
                // makes a new connection.
                let reason =
                    format!("the client sends a hello of layout {seen}, this end reads layout {LAYOUT}");
                decline(&mut control, &RdmaUnavailable::new(ReasonCode::Version, reason)).await?;
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
                let shown = control.received.len().min(16);
                return Err(NegotiationError::Garbage(control.received[..shown].to_vec()));
            }
        };
        let reason = |text| RdmaUnavailable::new(ReasonCode::StockClient, text);
        match self.config.policy {
            Policy::Require => Err(NegotiationError::RdmaRequired(reason(format!("this is {stock}")))),
            Policy::Prefer | Policy::TcpOnly => {
                control.into_tcp(&reason(stock.to_owned())).map(Negotiated::Stream)
            }
        }
    }

    /// Waits for the client's first message, until its time is over or a new client needs the slot.
    async fn listen(self, control: &mut ControlStream) -> Result<First, NegotiationError> {
        let limit = control.answer_timeout;
        self.client.slot.waits();
        let end = tokio::select! {
            biased;
            first = timeout(limit, first_message(control, self.config.stock_clients)) => match first {
                Ok(Err(NegotiationError::Closed | NegotiationError::Io(_))) if control.received.is_empty() => {
                    return Err(NegotiationError::Nothing);
                }
                Ok(first) => return first,
                Err(_) => NegotiationError::Silent(limit),
            },
            () = self.client.slot.lost() => NegotiationError::Displaced,
        };
        match (self.config.stock_clients, sniff(&control.received)) {
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
            accepted = self.accept(hello, control.answer_timeout) => accepted,
            // The client gets an answer, because without one it counts the server as a stock server.
            () = self.client.slot.lost() => Err(self.client.crowded()),
            () = control.hung_up() => return Err(NegotiationError::Closed),
        };
        match accepted {
            Ok(accepted) => self.conclude(control, accepted).await,
            Err(reason) => {
                decline(&mut control, &reason).await?;
                self.fall_back(control, reason)
            }
        }
    }

    /// Connects to the first offer that this side can accept, one after the other, within `limit`. The client
    /// waits no longer.
    async fn accept(self, hello: ClientHello, limit: Duration) -> Result<Accepted, RdmaUnavailable> {
        if self.config.policy == Policy::TcpOnly {
            return Err(RdmaUnavailable::new(ReasonCode::Policy, "the server's policy is tcp-only"));
        }
        if hello.offers.is_empty() {
            return Err(without_offers(hello.capabilities));
        }
        let version = hello.newest.min(self.speaks.newest as u8);
        if !self.speaks.speaks(version.into()) {
            return Err(other_version(version, self.speaks));
        }
        let until = Instant::now() + limit;
        let asked = hello.capabilities & NATIVE_CALLS != 0;
        let native = (asked && self.takes_native_calls(limit / 4).await).then_some(Role::Server);
        let (mut devices, mut reasons) = (Devices::default(), Vec::<RdmaUnavailable>::new());
        let accepted = timeout_at(until.into(), async {
            for (offer, number) in hello.offers.iter().zip(0..) {
                match self.accept_offer(offer, &hello.identity, native, &mut devices, limit / 2).await {
                    Ok(Some((mut established, slot))) => {
                        if established.is_native() && self.config.allows_in_process() {
                            established.meeting = Meeting::host(established.probe());
                        }
                        return Ok(Accepted { established, offer: number, version, slot });
                    }
                    // Another offer would wait for a slot again.
                    Ok(None) => return Err(self.client.crowded()),
                    Err(reason) => reasons.push(reason),
                }
            }
            // The first offer is the best one.
            let code = reasons.first().map_or(ReasonCode::NoDevice, |reason| reason.code);
            let texts: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            Err(RdmaUnavailable::new(code, texts.join("; ")))
        });
        let slow = || format!("the server's device did not prepare a connection within {limit:?}");
        accepted.await.unwrap_or_else(|_| Err(RdmaUnavailable::new(ReasonCode::Busy, slow())))
    }

    /// Connects to one offer. Waits for a slot for at most `limit`. `None` if the client finds no slot, or has
    /// lost its slot among the negotiations.
    async fn accept_offer(
        self,
        offer: &DeviceOffer,
        client: &HostIdentity,
        native: Option<Role>,
        devices: &mut Devices,
        limit: Duration,
    ) -> Result<Option<(Established, ClientSlot)>, RdmaUnavailable> {
        let provider = Provider::named(&offer.provider).filter(|provider| provider.is_wanted(self.config));
        let Some(provider) = provider else {
            let reason = format!("this end does not use the provider offered, {:?}", offer.provider);
            return Err(RdmaUnavailable::new(ReasonCode::NoCommonDevice, reason));
        };
        if provider == Provider::Soft {
            reach::check(&reach::local(), client, Reach::of_this_process())?;
        }
        let peer = PeerQueuePair {
            address: QueuePairAddress::new(offer.queue_pair.clone()).ok_or_else(bad_address)?,
            receive_slots: offer.receive_slots,
            slot_size: offer.slot_size,
        };
        let AdmittedClient { source, slot: negotiation, preparations } = self.client;
        // This is the client's time, and costs neither a thread nor memory.
        negotiation.waits_for(Listener::PROOF);
        let owner = devices.ask(provider, &peer.address).await;
        if let Err(SlotLost) = negotiation.works() {
            return Ok(None);
        }
        let source = owner?.map_or(source, |owner| source.with_owner(owner));
        let Ok(Ok(slot)) = timeout(limit, preparations.take(source)).await else { return Ok(None) };
        let config = self.config.clone();
        blocking(move || {
            let connected =
                Prepared::new(provider::open_device(provider, &config)?, &config, native.is_some(), None)?
                    .connect(&peer, native)?;
            // The slot is held until here, because this work continues if its negotiation ends.
            Ok(Some((connected, slot)))
        })
        .await
    }

    /// Returns whether this side accepts native calls. A program listens before it serves, so this waits a
    /// moment until it serves.
    async fn takes_native_calls(self, limit: Duration) -> bool {
        let mut known = self.native.clone();
        let known = timeout(limit, known.wait_for(Option::is_some)).await;
        known.is_ok_and(|known| known.is_ok_and(|native| *native == Some(true)))
    }

    async fn conclude(
        self,
        mut control: ControlStream,
        accepted: Accepted,
    ) -> Result<Negotiated, NegotiationError> {
        let Accepted { established, offer, version, slot } = accepted;
        let answer = Answer::Accept {
            offer,
            queue_pair: established.queue_pair.local_address().as_bytes().to_vec(),
            receive_slots: established.slots,
            slot_size: established.config.slot_size,
            version,
            capabilities: if established.is_native() { NATIVE_CALLS } else { 0 },
        };
        control.send(&Message::ServerHello(answer)).await?;
        slot.waits();
        let read = tokio::select! {
            biased;
            read = control.receive_confirm(Established::CONNECTING) => read?,
            never = established.member.attend() => match never {},
            () = slot.lost() => {
                // The answer is withdrawn, and the connection continues over TCP once the client has
                // confirmed it.
                drop((established, slot));
                self.client.slot.waits();
                let read = tokio::select! {
                    biased;
                    read = control.receive_confirm(Established::CONNECTING) => read?,
                    () = self.client.slot.lost() => return Err(NegotiationError::Displaced),
                };
                return self.give_up(control, &read, self.client.crowded()).await;
            }
        };
        match established.check(&read) {
            Ok(()) => {
                control.send(&established.confirm()).await?;
                control.into_rdma(established, version)
            }
            Err(reason) => self.give_up(control, &read, reason).await,
        }
    }

    /// Continues over TCP because of `reason`, after the client has sent `read`.
    async fn give_up(
        self,
        mut control: ControlStream,
        read: &Confirm,
        reason: RdmaUnavailable,
    ) -> Result<Negotiated, NegotiationError> {
        // A client that has given up RDMA continues over TCP without an answer.
        if let Confirm::Connected { .. } = read {
            control.send(&Message::failed(&reason.for_peer())).await?;
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

/// An offer of the client that this side has connected to.
#[derive(Debug)]
struct Accepted {
    established: Established,
    /// The number of the offer.
    offer: u8,
    /// The version that both ends speak.
    version: u8,
    /// The slot for the queue pair and its memory, until the client has proved that it has connected too.
    slot: ClientSlot,
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
        match (sniff(&control.received), clients) {
            (Peer::Unknown, StockClients::Grpc) => control.read_more().await?,
            (Peer::Unknown, StockClients::Any) => match control.read_more().await {
                Err(NegotiationError::Closed) => return Ok(Peer::Unknown),
                more => more?,
            },
            (peer, _) => return Ok(peer),
        }
    }
}

/// Returns the reason for a client that offers nothing.
fn without_offers(capabilities: u32) -> RdmaUnavailable {
    let (code, reason) = match capabilities {
        lacks if lacks & LACKS_MEMORY != 0 => {
            (ReasonCode::MemoryBudget, "the client has no memory for RDMA left: its memory budget is used up")
        }
        lacks if lacks & LACKS_DESCRIPTORS != 0 => {
            (ReasonCode::Descriptors, "the client has no file descriptors left")
        }
        _ => (ReasonCode::NoDevice, "the client has no RDMA device"),
    };
    RdmaUnavailable::new(code, reason)
}

async fn decline(control: &mut ControlStream, reason: &RdmaUnavailable) -> Result<(), NegotiationError> {
    control.send(&Message::ServerHello(Answer::Decline { reason: reason.for_peer() })).await
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod crowded_tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::super::reach::tests::queue_pair;
    use super::*;

    #[tokio::test]
    async fn without_a_slot_no_further_offer_is_tried() {
        let (source, long) = (Source::from(IpAddr::from(Ipv4Addr::LOCALHOST)), Duration::from_secs(600));
        // No connection may wait for the only slot.
        let (negotiations, preparations) = (ClientSlots::new(1, long, 0), ClientSlots::shared(1, long, 0));
        let slot = negotiations.take(source).await.unwrap();
        let _taken = preparations.take(source).await.unwrap();
        let client = AdmittedClient { source, slot: &slot, preparations: &preparations };
        let (config, pair) = (Config::default(), queue_pair());
        let offer = DeviceOffer {
            provider: Provider::Soft.name().into(),
            device: "soft0".into(),
            queue_pair: pair.local_address().as_bytes().to_vec(),
            receive_slots: 16,
            slot_size: 4096,
        };
        let hello = ClientHello {
            identity: reach::local(),
            newest: VERSIONS.newest as u8,
            capabilities: 0,
            offers: vec![offer; 3],
        };
        let native = &watch::channel(Some(false)).1;
        let negotiation = Negotiation { config: &config, client, native, speaks: VERSIONS };
        let refused = negotiation.accept(hello, long).await.unwrap_err();
        assert_eq!(refused.to_string(), client.crowded().to_string());
    }
}
