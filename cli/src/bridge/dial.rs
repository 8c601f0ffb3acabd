//! Connecting to the target, again and again while it does not answer.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::time::{Duration, Instant};

use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};
use tonic_rdma::Dialer;

use super::address::{Address, UnixName};
use super::route::Route;
use super::stream::Stream;
use crate::seeded::Draws;

/// Why the target was not connected to in the time given.
#[derive(Debug, thiserror::Error)]
#[error("no connection within {within:?}, {attempts} attempts; the last: {last}")]
pub(crate) struct Unreachable {
    within: Duration,
    attempts: u32,
    last: String,
}

/// Pause after the first failure; each is twice as long as the one before, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(25);
const LONGEST: Duration = Duration::from_secs(1);

/// Connects to the route's target within its connect timeout.
pub(crate) async fn dial(route: &Route, dialer: &Dialer, seed: u64) -> Result<Stream, Unreachable> {
    let (begun, within) = (Instant::now(), route.connect_timeout);
    let mut pauses = pauses(seed);
    let mut attempts = 0;
    loop {
        attempts += 1;
        let left = within.saturating_sub(begun.elapsed());
        let last = match timeout(left, attempt(&route.target, dialer)).await {
            Ok(Ok(stream)) => {
                route.meters.dialled(begun.elapsed());
                stream.negotiated().into_iter().for_each(|info| route.target_reached(info));
                return Ok(stream);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        route.meters.dial_failed();
        let pause = pauses.next().unwrap_or(LONGEST);
        if begun.elapsed() + pause >= within {
            return Err(Unreachable { within, attempts, last });
        }
        sleep(pause).await;
        route.meters.dial_retried();
    }
}

/// One attempt.
pub(crate) async fn attempt(target: &Address, dialer: &Dialer) -> io::Result<Stream> {
    match target {
        Address::Tcp(place) => {
            let stream = TcpStream::connect((place.host.as_str(), place.port)).await?;
            Stream::tcp(stream)
        }
        Address::Unix(UnixName::Path(path)) => Ok(Stream::unix(UnixStream::connect(path).await?)),
        Address::Unix(UnixName::Abstract(name)) => {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            // Connects at once or fails: there is no file to look up and no network to cross.
            let stream = std::os::unix::net::UnixStream::connect_addr(&address)?;
            stream.set_nonblocking(true)?;
            Ok(Stream::unix(UnixStream::from_std(stream)?))
        }
        Address::Rdma(place) => {
            Stream::endpoint(dialer.dial(&place.host, place.port).await.map_err(io::Error::other)?)
        }
    }
}

/// Growing pauses with jitter, so that clients of a target that comes back don't come all at once.
fn pauses(seed: u64) -> impl Iterator<Item = Duration> {
    let mut draws = Draws::new(seed);
    let doubled = |pause: &Duration| Some((*pause * 2).min(LONGEST));
    std::iter::successors(Some(SHORTEST), doubled).map(move |pause| {
        let share = draws.choice(1024) as u32;
        pause / 2 + pause / 2 * share / 1024
    })
}

#[cfg(test)]
mod tests {
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
}
