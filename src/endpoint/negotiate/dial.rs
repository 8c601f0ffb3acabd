//! Connecting: TCP to a host that may have several addresses, then the client's side of a negotiation, then a
//! new TCP connection where the server is a stock one.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::control_stream::ControlStream;
use super::local_side::{Established, PeerQueuePair, Prepared, bad_address, blocking, other_version};
use super::reach;
use crate::endpoint::config::{Config, Policy};
use crate::endpoint::error::{NegotiationError, not_in_time, rdma_required, unreachable};
use crate::endpoint::info::{RdmaConnectInfo, Role, Verdict};
use crate::endpoint::journal::Journal;
use crate::endpoint::meeting::Meeting;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::provider;
use crate::endpoint::reason::{RdmaUnavailable, ReasonCode};
use crate::endpoint::stream::EndpointStream;
use crate::error::{RdmaError, RdmaErrorKind};
use crate::wire::hello::{
    Answer, ClientHello, HelloError, LACKS_DESCRIPTORS, LACKS_MEMORY, Message, NATIVE_CALLS, VERSIONS,
};
use tonic_rdma_verbs::QueuePairAddress;
use tonic_rdma_verbs::unstable::{Versions, lock};

/// Makes connections, and keeps a list of stock servers, which clones share. A dialer is for protocols of
/// your own over the byte stream; programs that use tonic have [`RdmaConnector`](crate::RdmaConnector)
/// instead.
///
/// ```
/// use tokio::io::AsyncWriteExt as _;
/// use tonic_rdma::{Config, Dialer};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let dialer = Dialer::new(Config::default());
/// let mut stream = dialer.dial("ps0", 7000).await?;
/// stream.write_all(b"hello").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Dialer {
    config: Config,
    /// The versions of the protocol that this side speaks.
    pub(super) speaks: Versions,
    /// The error of a variable, which every connect returns.
    refused: Option<RdmaError>,
    stock: Arc<Mutex<HashMap<String, Stock>>>,
    journal: Arc<Journal>,
}

/// A server without RDMA: how long it counts as one, and why.
type Stock = (Instant, RdmaUnavailable);

impl Dialer {
    /// Time before the next negotiation with a stock server.
    const REMEMBERED: Duration = Duration::from_secs(60);
    /// Most servers in the list of stock servers.
    const MEMORY: usize = 4096;

    /// Makes a dialer with this configuration. [`dial`](Self::dial) returns an error if the configuration has
    /// a value that can't be used; [`Config::validate`] finds that earlier.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    /// use tokio::net::TcpListener;
    /// use tokio_stream::StreamExt as _;
    /// use tonic_rdma::Config;
    /// use tonic_rdma::{Dialer, Listener};
    ///
    /// let mut listener = Listener::new(TcpListener::bind("127.0.0.1:0").await?, Config::default())?;
    /// let address = listener.local_addr();
    ///
    /// let dialer = Dialer::new(Config::default());
    /// let mut client = dialer.dial(&address.ip().to_string(), address.port()).await?;
    /// let mut server = listener.next().await.expect("a connection");
    /// client.write_all(b"any bytes").await?;
    /// client.flush().await?;
    /// let mut bytes = [0; 9];
    /// server.read_exact(&mut bytes).await?;
    /// assert_eq!(&bytes, b"any bytes");
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(config: Config) -> Self {
        let journal = Arc::new(Journal::new(Role::Client));
        Self { config, speaks: VERSIONS, refused: None, stock: Arc::default(), journal }
    }

    /// Makes a dialer with this configuration, or with that of the environment if there is none. If a
    /// variable has a bad value, [`dial`](Self::dial) returns the error.
    pub(crate) fn configured(config: Option<Config>) -> Self {
        match config.map_or_else(Config::from_env, Ok) {
            Ok(config) => Self::new(config),
            Err(error) => Self { refused: Some(error), ..Self::new(Config::default()) },
        }
    }

    /// Connects to `host`:`port`, by the rules of the configuration's policy.
    ///
    /// # Errors
    /// The configuration has a value that can't be used, the server can't be reached within the connect
    /// timeout, or the policy requires RDMA and there is none.
    pub async fn dial(&self, host: &str, port: u16) -> Result<EndpointStream, RdmaError> {
        match self.connect(host, port, false).await? {
            Negotiated::Stream(stream) => Ok(stream),
            // The negotiation refuses a capability that this side did not ask for.
            Negotiated::Messages(_) => {
                let reason = failed(&NegotiationError::OutOfTurn("native calls, which were not asked for"));
                Err(rdma_required(&format!("{host}:{port}"), &reason))
            }
        }
    }

    /// Connects to `host`:`port`. `native`: asks for native calls.
    async fn connect(&self, host: &str, port: u16, native: bool) -> Result<Negotiated, RdmaError> {
        self.refused.clone().map_or(Ok(()), Err)?;
        self.config.validate()?;
        let authority = format!("{host}:{port}");
        let tcp = self.tcp(host, port, None).await?;
        let (negotiated, reason) = if self.config.policy == Policy::TcpOnly {
            let reason = RdmaUnavailable::new(ReasonCode::Policy, "the policy is tcp-only");
            (Negotiated::Stream(self.plain(tcp, &reason)?), None)
        } else if let Some(reason) = self.known_as_stock(&authority) {
            (Negotiated::Stream(self.plain(tcp, &reason)?), Some(reason))
        } else {
            self.negotiate(tcp, host, port, &authority, native).await?
        };
        if self.config.policy == Policy::Require
            && let Some(reason) = reason
        {
            return Err(self.give_up(&authority, &reason));
        }
        self.journal.connected(&authority, negotiated.info());
        Ok(negotiated)
    }

    /// Connects to `host`:`port` as [`dial`](Self::dial) does, and asks the server for native calls.
    /// `without`: the reason why this connection must use HTTP/2 though, such as TLS; then the server is not
    /// asked. The reason of the connection says why there are no native calls. A byte stream costs no more
    /// round trips than with [`dial`](Self::dial).
    ///
    /// # Errors
    /// As for [`dial`](Self::dial).
    pub(crate) async fn dial_for_calls(
        &self,
        host: &str,
        port: u16,
        without: Option<&str>,
    ) -> Result<Negotiated, RdmaError> {
        let mut negotiated = self.connect(host, port, without.is_none()).await?;
        if let Negotiated::Stream(stream) = &mut negotiated
            && stream.info().verdict() == Verdict::Rdma
        {
            stream.info_mut().not_native(without.unwrap_or("the server takes no native calls"));
        }
        Ok(negotiated)
    }

    /// Negotiates over `tcp`. Returns the connection, and the reason if it is TCP.
    async fn negotiate(
        &self,
        tcp: TcpStream,
        host: &str,
        port: u16,
        authority: &str,
        native: bool,
    ) -> Result<(Negotiated, Option<RdmaUnavailable>), RdmaError> {
        let known = tcp.peer_addr().ok();
        let mut outcome = negotiate(tcp, &self.config, &self.journal, native, self.speaks).await;
        if let Ok(Outcome::Stock(NegotiationError::Closed | NegotiationError::Io(_))) = outcome {
            // Some stock servers close the connection because they do not understand the hello. A server of
            // this crate closes it when it shuts down, and must not be taken for a stock server: the second
            // attempt finds it gone, or started again.
            let tcp = self.tcp(host, port, known).await?;
            outcome = negotiate(tcp, &self.config, &self.journal, native, self.speaks).await;
        }
        let reason = match outcome {
            Ok(Outcome::Rdma(negotiated)) => return Ok((negotiated, None)),
            Ok(Outcome::Tcp(stream, reason)) => return Ok((Negotiated::Stream(stream), Some(reason))),
            Ok(Outcome::Stock(error)) => self.remember(authority, &error),
            Err(error) => failed(&error),
        };
        if self.config.policy == Policy::Require {
            return Err(self.give_up(authority, &reason));
        }
        let stream = self.plain(self.tcp(host, port, known).await?, &reason)?;
        Ok((Negotiated::Stream(stream), Some(reason)))
    }

    /// Makes a stream of plain TCP, because of `reason`.
    fn plain(&self, tcp: TcpStream, reason: &RdmaUnavailable) -> Result<EndpointStream, RdmaError> {
        let unspecified = || SocketAddr::from(([0, 0, 0, 0], 0));
        let addresses = tcp.peer_addr().and_then(|peer| Ok((peer, tcp.local_addr()?)));
        let (peer, local) = addresses.map_err(|error| unreachable(&[(unspecified(), error)]))?;
        let info = RdmaConnectInfo::tcp(peer, local, reason);
        let opened = self.journal.opened(Verdict::Tcp, false);
        Ok(EndpointStream::tcp(tcp, bytes::Bytes::new(), info, opened, self.config.linger))
    }

    /// Counts a connection that has to be RDMA and is not. Returns its error.
    fn give_up(&self, authority: &str, reason: &RdmaUnavailable) -> RdmaError {
        self.journal.gave_up(reason);
        rdma_required(authority, reason)
    }

    /// Notes that a server is a stock server, or silent.
    fn remember(&self, authority: &str, error: &NegotiationError) -> RdmaUnavailable {
        let code = match error {
            NegotiationError::Silent(_) => ReasonCode::Silent,
            NegotiationError::Hello(HelloError::Version { .. }) => ReasonCode::Version,
            _ => ReasonCode::StockServer,
        };
        let reason = match code {
            ReasonCode::Silent => format!("the server was silent ({error})"),
            _ => format!("the server does not understand our hello ({error})"),
        };
        let reason = RdmaUnavailable::new(code, reason);
        let mut stock = lock(&self.stock);
        if stock.len() >= Self::MEMORY {
            stock.clear();
        }
        // A silent server may be one of this crate that was stopped for a moment, so it is asked again soon. Until
        // then, other connections need not wait for it.
        let remembered =
            if code == ReasonCode::Silent { self.config.handshake_timeout } else { Self::REMEMBERED };
        stock.insert(authority.into(), (Instant::now() + remembered, reason.clone()));
        reason
    }

    /// Connects over TCP. `known`: the address that answered before, so that a server that was found is not
    /// looked for again.
    async fn tcp(&self, host: &str, port: u16, known: Option<SocketAddr>) -> Result<TcpStream, RdmaError> {
        connect_tcp(host, port, self.config.connect_timeout, known).await
    }

    /// Returns why the server counts as a stock server. A client that requires RDMA asks again, because it
    /// has no other way.
    fn known_as_stock(&self, authority: &str) -> Option<RdmaUnavailable> {
        if self.config.policy == Policy::Require {
            return None;
        }
        let stock = lock(&self.stock);
        let (until, reason) = stock.get(authority)?;
        (Instant::now() < *until).then(|| reason.clone())
    }
}

fn failed(error: &NegotiationError) -> RdmaUnavailable {
    RdmaUnavailable::new(error.code(), format!("the negotiation failed: {error}"))
}

/// The result of a negotiation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A connection over RDMA: a byte stream, or messages if this side asked for native calls and the server
    /// takes them.
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
    speaks: Versions,
) -> Result<Outcome, NegotiationError> {
    let wanted = config.clone();
    let (local, peer) = (tcp.local_addr()?, tcp.peer_addr()?);
    let prepared =
        blocking(move || Prepared::new(provider::open(&wanted, local, peer)?, &wanted, native, None)).await;
    let mut control = ControlStream::new(tcp, config, journal);
    // Without a device the hello has no offer, but it identifies this side, and asks for TCP.
    let offers = prepared.iter().map(Prepared::offer).collect();
    let lacks = match prepared.as_ref().map_err(|reason| reason.code) {
        Err(ReasonCode::MemoryBudget) => LACKS_MEMORY,
        Err(ReasonCode::Descriptors) => LACKS_DESCRIPTORS,
        _ => 0,
    };
    let capabilities = if native { NATIVE_CALLS } else { 0 };
    let newest = speaks.newest as u8;
    let hello = ClientHello { identity: reach::local(), newest, capabilities: capabilities | lacks, offers };
    control.send(&Message::ClientHello(hello)).await?;
    let answer = match control.receive().await {
        Ok(Message::ServerHello(answer)) => answer,
        Ok(other) => return Err(NegotiationError::OutOfTurn(other.name())),
        Err(error) => return Ok(Outcome::Stock(error)),
    };
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return fall_back(control, reason),
    };
    match answer {
        Answer::Decline { reason } => {
            fall_back(control, RdmaUnavailable::of_peer("the server declined", &reason))
        }
        Answer::Accept { version, .. } if version > newest => {
            Err(NegotiationError::OutOfTurn("an answer with a version not spoken here"))
        }
        Answer::Accept { offer: 0, queue_pair, receive_slots, slot_size, version, capabilities: taken } => {
            if taken & !capabilities != 0 {
                return Err(NegotiationError::OutOfTurn("an answer with a capability not asked for"));
            }
            let native = (taken & NATIVE_CALLS != 0).then_some(Role::Client);
            let connected = match QueuePairAddress::new(queue_pair) {
                _ if !speaks.speaks(version.into()) => Err(other_version(version, speaks)),
                Some(address) => {
                    let peer = PeerQueuePair { address, receive_slots, slot_size };
                    blocking(move || prepared.connect(&peer, native)).await
                }
                None => Err(bad_address()),
            };
            finish(control, connected, version).await
        }
        Answer::Accept { .. } => Err(NegotiationError::OutOfTurn("an answer to an offer not made")),
    }
}

/// Sends the server the value that this side read in the server's memory, and checks the value that the
/// server read here.
async fn finish(
    mut control: ControlStream,
    connected: Result<Established, RdmaUnavailable>,
    version: u8,
) -> Result<Outcome, NegotiationError> {
    let reached = match connected {
        // With shared memory, the two values are proof enough.
        Ok(established) if established.queue_pair.local().is_some() => Ok(established),
        Ok(established) => established.check_reachable().await.map(|()| established),
        Err(reason) => Err(reason),
    };
    let mut established = match reached {
        Ok(established) => established,
        Err(reason) => {
            control.send(&Message::failed(&reason.for_peer())).await?;
            return fall_back(control, reason);
        }
    };
    control.send(&established.confirm()).await?;
    let answer = control.receive_confirm(Duration::ZERO).await?;
    match established.check(&answer) {
        Ok(()) => {
            if established.config.allows_in_process() {
                let limit = established.config.handshake_timeout;
                established.meeting = Meeting::guest(established.probe(), limit);
            }
            control.into_rdma(established, version).map(Outcome::Rdma)
        }
        Err(reason) => fall_back(control, reason),
    }
}

fn fall_back(control: ControlStream, reason: RdmaUnavailable) -> Result<Outcome, NegotiationError> {
    Ok(Outcome::Tcp(control.into_tcp(&reason)?, reason))
}

/// Time after which the next address is tried while an earlier one has not answered yet: the Connection
/// Attempt Delay of RFC 8305, section 8, as long as in tonic's own connector.
const DELAY: Duration = Duration::from_millis(300);

/// The addresses that were tried, in this order, and the errors of those that failed.
type Tried = Vec<(SocketAddr, Option<io::Error>)>;

/// Connects to `host`:`port` within `limit`, without delay of small segments. The next address of the host is
/// tried while earlier ones do not answer (RFC 8305), because packets to one of them may vanish. The first
/// connection wins, and the other attempts are dropped. `known`: an address of the host that answered before,
/// which is tried first.
///
/// # Errors
/// The name does not resolve, or no address answers in time. The error names each address that was tried.
pub async fn connect_tcp(
    host: &str,
    port: u16,
    limit: Duration,
    known: Option<SocketAddr>,
) -> Result<TcpStream, RdmaError> {
    let addresses = async { Ok(in_order(tokio::net::lookup_host((host, port)).await?, known)) };
    connect(format!("{host}:{port}"), addresses, limit, DELAY).await
}

async fn connect(
    authority: String,
    addresses: impl Future<Output = io::Result<Vec<SocketAddr>>>,
    limit: Duration,
    delay: Duration,
) -> Result<TcpStream, RdmaError> {
    let mut tried = Tried::new();
    let connected = timeout(limit, async {
        let addresses = addresses.await?;
        if addresses.is_empty() {
            return Err(io::Error::other("the name has no address"));
        }
        let delay = shortened(delay, limit, addresses.len());
        Ok(first_to_answer(addresses, delay, &mut tried).await)
    })
    .await;
    let in_time = connected.is_ok();
    match connected {
        Ok(Err(cause)) => {
            return Err(RdmaError::new(RdmaErrorKind::Unreachable, format!("{authority}: {cause}")));
        }
        Ok(Ok(Some(tcp))) => return Ok(tcp),
        Ok(Ok(None)) | Err(_) => {}
    }
    let no_answer = || io::Error::new(io::ErrorKind::TimedOut, "no answer");
    let failed: Vec<_> =
        tried.into_iter().map(|(peer, error)| (peer, error.unwrap_or_else(no_answer))).collect();
    Err(if in_time { unreachable(&failed) } else { not_in_time(&authority, limit, &failed) })
}

/// Returns the addresses in the order in which they are tried: the families take turns (RFC 8305, section 4),
/// and the family of the resolver's first address begins.
fn in_order(addresses: impl Iterator<Item = SocketAddr>, known: Option<SocketAddr>) -> Vec<SocketAddr> {
    let addresses: Vec<_> = addresses.collect();
    let begins = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let mut turns = [0; 2];
    let mut ranked: Vec<_> = addresses
        .into_iter()
        .map(|address| {
            let turn = &mut turns[usize::from(address.is_ipv6() != begins)];
            *turn += 1;
            ((known != Some(address), *turn, address.is_ipv6() != begins), address)
        })
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, address)| address).collect()
}

/// Returns the delay with which the last of `count` addresses still gets its turn within `limit`.
fn shortened(delay: Duration, limit: Duration, count: usize) -> Duration {
    delay.min(limit / u32::try_from(count.max(1)).unwrap_or(u32::MAX))
}

/// Returns the first connection, or `None` when all addresses have failed. An address begins `delay` after
/// the one before it, and at once when an attempt fails.
async fn first_to_answer(
    addresses: Vec<SocketAddr>,
    delay: Duration,
    tried: &mut Tried,
) -> Option<TcpStream> {
    let mut waiting = addresses.into_iter();
    let mut attempts = JoinSet::new();
    loop {
        if let Some(peer) = waiting.next() {
            let number = tried.len();
            tried.push((peer, None));
            attempts.spawn(async move { (number, attempt(peer).await) });
        }
        let ended = attempts.join_next();
        let ended = match waiting.len() {
            0 => ended.await,
            _ => match timeout(delay, ended).await {
                Ok(ended) => ended,
                Err(_) => continue,
            },
        };
        match ended? {
            Ok((_, Ok(tcp))) => return Some(tcp),
            Ok((number, Err(error))) => tried[number].1 = Some(error),
            // The runtime ends.
            Err(_) => {}
        }
    }
}

async fn attempt(peer: SocketAddr) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(peer).await?;
    tcp.set_nodelay(true)?;
    Ok(tcp)
}

#[cfg(test)]
mod tcp_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use std::future::ready;

    use support::{BlackHole, Port, Runtime};
    use tokio::net::TcpListener;

    use super::*;

    /// Longer than any test may take.
    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(20);

    async fn dial(
        addresses: &[SocketAddr],
        limit: Duration,
        delay: Duration,
    ) -> Result<SocketAddr, RdmaError> {
        let addresses = ready(Ok(addresses.to_vec()));
        connect("ps0:1".to_owned(), addresses, limit, delay).await.map(|tcp| tcp.peer_addr().unwrap())
    }

    #[test]
    fn the_next_address_is_tried_while_earlier_ones_do_not_answer() {
        Runtime::CurrentThread.run(async {
            let holes = [BlackHole::new(), BlackHole::new()];
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let server = server.local_addr().unwrap();
            let addresses = [holes[0].address, holes[1].address, server];
            assert_eq!(dial(&addresses, LONG, SHORT).await.unwrap(), server);
        });
    }

    #[test]
    fn the_next_address_begins_at_once_when_one_refuses() {
        Runtime::CurrentThread.run(async {
            let (closed, hole) = (Port::reserve(), BlackHole::new());
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let server = server.local_addr().unwrap();
            assert_eq!(dial(&[closed.address, server], LONG, LONG / 4).await.unwrap(), server);
            // An address that answers is not kept waiting by one that does not.
            assert_eq!(dial(&[server, hole.address], LONG, LONG / 4).await.unwrap(), server);
        });
    }

    #[test]
    fn the_error_names_each_address() {
        Runtime::CurrentThread.run(async {
            let (one, other, hole) = (Port::reserve(), Port::reserve(), BlackHole::new());
            let error = dial(&[one.address, other.address], LONG, LONG).await.unwrap_err();
            assert_eq!(error.kind(), RdmaErrorKind::Unreachable);
            let refused = format!("connecting to {}: Connection refused", one.address);
            assert!(error.to_string().starts_with(&refused), "{error}");
            assert!(
                error.to_string().contains(&format!(", {}: Connection refused", other.address)),
                "{error}"
            );

            let error = dial(&[hole.address, one.address], SHORT, LONG).await.unwrap_err();
            let silent =
                format!("connecting to ps0:1: no answer within 20ms; tried {}: no answer", hole.address);
            assert!(error.to_string().starts_with(&silent), "{error}");
            assert_eq!(error.kind(), RdmaErrorKind::Timeout);

            let error = dial(&[], LONG, LONG).await.unwrap_err();
            assert_eq!(error.to_string(), "ps0:1: the name has no address");
        });
    }

    #[test]
    fn every_address_gets_a_turn_within_a_short_limit() {
        assert_eq!(shortened(DELAY, Duration::from_secs(10), 3), DELAY);
        assert_eq!(shortened(DELAY, Duration::from_millis(200), 4), Duration::from_millis(50));
        assert_eq!(shortened(DELAY, Duration::from_secs(10), 0), DELAY);
    }

    #[test]
    fn families_take_turns() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let [a4, b4, c4] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"].map(address);
        let [a6, b6] = ["[fd00::1]:1", "[fd00::2]:1"].map(address);
        for (found, known, order) in [
            (&[a6, b6, a4, b4, c4][..], None, &[a6, a4, b6, b4, c4][..]),
            (&[a4, a6, b6, b4], None, &[a4, a6, b4, b6]),
            (&[a4, b4], None, &[a4, b4]),
            (&[a6, b6, a4], Some(a4), &[a4, a6, b6]),
            (&[a6, a4], Some(c4), &[a6, a4]),
            (&[], None, &[]),
        ] {
            assert_eq!(in_order(found.iter().copied(), known), order, "{found:?} {known:?}");
        }
    }
}
