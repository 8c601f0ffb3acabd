//! Connecting over TCP to a host that may have several addresses.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::endpoint::error::ConnectError;

/// Time after which the next address is tried while an earlier one has not answered yet: the Connection Attempt Delay of RFC 8305,
/// section 8, as long as in tonic's own connector.
const DELAY: Duration = Duration::from_millis(300);

/// The addresses that were tried, in this order, and the errors of those that failed.
type Tried = Vec<(SocketAddr, Option<io::Error>)>;

/// Connects to `host`:`port` within `limit`, without delay of small segments. The next address of the host is tried while earlier ones do
/// not answer (RFC 8305), because packets to one of them may vanish. The first connection wins, and the other attempts are dropped.
/// `known`: an address of the host that answered before, which is tried first.
///
/// # Errors
/// The name does not resolve, or no address answers in time. The error names each address that was tried.
pub async fn connect_tcp(
    host: &str,
    port: u16,
    limit: Duration,
    known: Option<SocketAddr>,
) -> Result<TcpStream, ConnectError> {
    let addresses = async { Ok(in_order(tokio::net::lookup_host((host, port)).await?, known)) };
    connect(format!("{host}:{port}"), addresses, limit, DELAY).await
}

async fn connect(
    authority: String,
    addresses: impl Future<Output = io::Result<Vec<SocketAddr>>>,
    limit: Duration,
    delay: Duration,
) -> Result<TcpStream, ConnectError> {
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
        Ok(Err(cause)) => return Err(ConnectError::Resolve { authority, cause }),
        Ok(Ok(Some(tcp))) => return Ok(tcp),
        Ok(Ok(None)) | Err(_) => {}
    }
    let no_answer = || io::Error::new(io::ErrorKind::TimedOut, "no answer");
    let failed = tried.into_iter().map(|(peer, error)| (peer, error.unwrap_or_else(no_answer))).collect();
    Err(if in_time {
        ConnectError::Tcp { failed }
    } else {
        ConnectError::Timeout { authority, timeout: limit, failed }
    })
}

/// Returns the addresses in the order in which they are tried: the families take turns (RFC 8305, section 4), and the family of the
/// resolver's first address begins.
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

/// Returns the first connection, or `None` when all addresses have failed. An address begins `delay` after the one before it, and at once
/// when an attempt fails.
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
mod tests {
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
    ) -> Result<SocketAddr, ConnectError> {
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
            let ConnectError::Tcp { failed } = &error else { panic!("{error}") };
            assert_eq!(
                failed.iter().map(|(peer, _)| *peer).collect::<Vec<_>>(),
                [one.address, other.address]
            );
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
