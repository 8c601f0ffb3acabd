//! A route: an address to listen on, and the target of the connections that come there. Connects to the
//! target, and tries again while it does not answer.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{sleep, timeout};
use tonic_rdma::unstable::connect_tcp;
use tonic_rdma::{Config, Dialer, RdmaError};
use tonic_rdma_commands::payload::seeded::SplitMix64;
use tonic_rdma_verbs::unstable::{Throttle, lock};

use super::address::{Address, UnixName};
use super::meters::Meters;
use super::stream::Stream;

/// The parts that all connections of a route share.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) name: String,
    pub(crate) target: Address,
    pub(crate) config: Config,
    pub(crate) connect_timeout: Duration,
    pub(crate) meters: Meters,
    /// One permit for each client that the bridge may connect to an `rdma://` target at a time.
    pub(crate) dials: Semaphore,
    /// When the target was reached last.
    pub(crate) reached: Mutex<Option<Instant>>,
    /// Limits the log lines about targets that can't be connected to.
    pub(crate) unreachable: Throttle,
    /// Limits the log lines about connections that broke or could not be accepted.
    pub(crate) broken: Throttle,
    /// Logs the transport of the clients' connections.
    pub(crate) client: TransportLog,
    /// Logs the transport of the connections to the target.
    pub(crate) server: TransportLog,
}

/// Logs which transport the connections at one end of a route use, if it differs from the last line.
#[derive(Debug)]
pub(crate) struct TransportLog {
    /// What the line begins with.
    what: &'static str,
    /// The transport and reason in the last line.
    logged: Mutex<Option<String>>,
    throttle: Throttle,
}

impl Route {
    /// Clients that the bridge connects to an `rdma://` target at a time. A listener of this library prepares
    /// 64 connections at a time, of which 43 may come from one user and address, and declines some of the
    /// further ones. With 32, the listener has room for the clients of another bridge.
    pub(crate) const DIALS: usize = 32;

    /// Creates a route from `listen` to `target`.
    pub(crate) fn new(listen: &str, target: Address, config: Config, connect_timeout: Duration) -> Self {
        let name = format!("{listen} -> {target}");
        let transports = |what| TransportLog { what, logged: Mutex::default(), throttle: Throttle::new(1) };
        Self {
            meters: Meters::new(&name),
            name,
            target,
            config,
            connect_timeout,
            dials: Semaphore::new(Self::DIALS),
            reached: Mutex::default(),
            unreachable: Throttle::new(1),
            broken: Throttle::new(1),
            client: transports("clients come over"),
            server: transports("the target is reached over"),
        }
    }
}

impl TransportLog {
    pub(crate) fn log(&self, route: &str, stream: &Stream) {
        let Some(info) = stream.negotiated() else { return };
        let over = format!("{}: {}", info.verdict(), info.reason());
        let mut logged = lock(&self.logged);
        if logged.as_ref() != Some(&over)
            && let Some(suppressed) = self.throttle.admit(Instant::now())
        {
            tracing::info!(route, suppressed, "{} {over}", self.what);
            *logged = Some(over);
        }
    }
}

/// The error of a target that was not reached in time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreachable {
    /// No attempt succeeded.
    #[error("no connection within {within:?}, {attempts} attempts; the last: {last}")]
    Attempts { within: Duration, attempts: u32, last: AttemptError },
    /// Other clients of the route waited for the target all the time.
    #[error("not dialed within {within:?}, because the target did not answer the clients that came before")]
    NoPermit { within: Duration },
}

/// The reason why one attempt failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    /// The socket of the target.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// TCP, or the negotiation with the target.
    #[error(transparent)]
    Connect(#[from] RdmaError),
    /// The target's process takes no client from its Unix socket for now.
    #[error("the target does not accept connections: its queue is full")]
    Busy,
    /// The time ran out first.
    #[error("no answer")]
    NoAnswer,
}

/// The pause after the first failure. Each later pause is twice as long, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(25);
const LONGEST: Duration = Duration::from_secs(1);

/// Connects to the route's target within its connect timeout. Only clients of an `rdma://` target
/// need a permit. The time that a client waits for it does not count while the target answers others.
pub(crate) async fn dial(route: &Route, dialer: &Dialer, seed: u64) -> Result<Stream, Unreachable> {
    let (arrived, within) = (Instant::now(), route.connect_timeout);
    let mut attempts = 0;
    let (begun, _permit) = match &route.target {
        Address::Rdma(_) => match permit(route, arrived).await {
            Some((begun, permit)) => (begun, Some(permit)),
            None => return Err(Unreachable::NoPermit { within }),
        },
        Address::Tcp(_) | Address::Unix(_) => (arrived, None),
    };
    let mut pauses = pauses(seed);
    loop {
        attempts += 1;
        let left = within.saturating_sub(begun.elapsed());
        let last = match attempt(&route.target, dialer, left).await {
            Ok(stream) => {
                route.meters.dialled(arrived.elapsed());
                *reached(route) = Some(Instant::now());
                route.server.log(&route.name, &stream);
                return Ok(stream);
            }
            Err(error) => error,
        };
        route.meters.dial_failed();
        let pause = pauses.next().unwrap_or(LONGEST);
        if begun.elapsed() + pause >= within {
            return Err(Unreachable::Attempts { within, attempts, last });
        }
        sleep(pause).await;
        route.meters.dial_retried();
    }
}

/// Waits until a client that came at `arrived` may dial. If many clients dialed at once, they would slow one
/// another down, and a target that works would seem not to answer. Returns the permit, and the time from
/// which the connect timeout counts: the arrival, or the target's last answer to another client if that is
/// later. Returns `None` when the timeout has passed.
async fn permit(route: &Route, arrived: Instant) -> Option<(Instant, SemaphorePermit<'_>)> {
    let begun = || reached(route).map_or(arrived, |reached| reached.max(arrived));
    let mut permit = pin!(route.dials.acquire());
    loop {
        let left = route.connect_timeout.checked_sub(begun().elapsed()).filter(|left| !left.is_zero())?;
        if let Ok(permit) = timeout(left, permit.as_mut()).await {
            return Some((begun(), permit.ok()?));
        }
    }
}

fn reached(route: &Route) -> MutexGuard<'_, Option<Instant>> {
    lock(&route.reached)
}

/// Tries once to connect, for `limit` at most.
pub(crate) async fn attempt(
    target: &Address,
    dialer: &Dialer,
    limit: Duration,
) -> Result<Stream, AttemptError> {
    match target {
        Address::Tcp(at) => Ok(Stream::tcp(connect_tcp(&at.host, at.port, limit, None).await?)?),
        // Unix sockets connect at once, or not at all.
        Address::Unix(name) => unix(name).await,
        Address::Rdma(at) => match timeout(limit, dialer.dial(&at.host, at.port)).await {
            Ok(stream) => Ok(Stream::endpoint(stream?)?),
            Err(_) => Err(AttemptError::NoAnswer),
        },
    }
}

/// Connects to a Unix socket. A blocking call would wait until the target takes clients, and stop this thread
/// meanwhile.
async fn unix(name: &UnixName) -> Result<Stream, AttemptError> {
    let path = match name {
        UnixName::Path(path) => path.clone(),
        // As the system has it: a zero byte begins a name that is no path.
        UnixName::Abstract(name) => PathBuf::from(format!("\0{name}")),
    };
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(AttemptError::Busy),
        connected => Ok(Stream::unix(connected?)),
    }
}

/// Returns growing pauses with jitter. The jitter spreads the clients of a target that has come back.
fn pauses(seed: u64) -> impl Iterator<Item = Duration> {
    let mut draws = SplitMix64::new(seed);
    let doubled = |pause: &Duration| Some((*pause * 2).min(LONGEST));
    std::iter::successors(Some(SHORTEST), doubled).map(move |pause| {
        let share = draws.choice(1024) as u32;
        pause / 2 + pause / 2 * share / 1024
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_differ_from_client_to_client() {
        let some: Vec<_> = pauses(1).take(12).collect();
        let mut base = SHORTEST;
        for pause in &some {
            assert!(*pause >= base / 2 && *pause <= base, "{some:?}");
            base = (base * 2).min(LONGEST);
        }
        assert_ne!(some, pauses(2).take(12).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_client_waits_for_its_turn_while_the_target_answers_others() {
        const LIMIT: Duration = Duration::from_secs(3600);
        let target = "rdma://127.0.0.1:1".parse().unwrap();
        let route = Route::new("here", target, tonic_rdma::Config::default(), LIMIT);
        let now = Instant::now();
        let early = now.checked_sub(2 * LIMIT).unwrap();
        let others = route.dials.acquire_many(Route::DIALS as u32).await.unwrap();
        assert!(permit(&route, early).await.is_none(), "the target has reached nobody");
        *reached(&route) = Some(early);
        assert!(permit(&route, early).await.is_none(), "the target reached somebody too long ago");

        // The target was reached now, so a client that came long ago goes on waiting, and has its whole time
        // when it gets a permit.
        *reached(&route) = Some(now);
        let mut waiting = pin!(permit(&route, early));
        let waits = std::future::poll_fn(|context| {
            std::task::Poll::Ready(waiting.as_mut().poll(context).is_pending())
        });
        assert!(waits.await);
        drop(others);
        assert_eq!(waiting.await.map(|(begun, _)| begun), Some(now));
    }

    #[tokio::test]
    async fn only_targets_with_rdma_take_turns() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let route = |scheme: &str, limit| {
            let target = format!("{scheme}://{address}").parse().unwrap();
            Route::new("here", target, tonic_rdma::Config::default(), limit)
        };
        let dialer = Dialer::new(tonic_rdma::Config::default());
        for (scheme, limit) in [("tcp", Duration::from_secs(60)), ("rdma", Duration::from_millis(1))] {
            let route = route(scheme, limit);
            let _others = route.dials.acquire_many(Route::DIALS as u32).await.unwrap();
            let said = dial(&route, &dialer, 0).await.map_err(|error| error.to_string());
            match scheme {
                "tcp" => drop(said.unwrap()),
                _ => assert_eq!(
                    said.unwrap_err(),
                    "not dialed within 1ms, because the target did not answer the clients that came before"
                ),
            }
        }
    }
}
