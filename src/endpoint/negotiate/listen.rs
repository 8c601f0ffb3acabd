//! Listening: one TCP port for RDMA peers and stock clients.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::Stream;

use super::places::{Place, Places, Source};
use super::server;
use crate::endpoint::config::Config;
use crate::endpoint::journal::Journal;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::stream::EndpointStream;
use tonic_rdma_verbs::memory::Budget;

/// A stream of connections after their negotiation. Negotiations run at the same time, so that a slow or silent peer delays no
/// other peer. If many clients say nothing, a new client takes the place of the client that has been silent for longest, of the
/// address with most places. Dropping the listener closes the port.
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
    /// Whether clients that ask for native calls get them; `None` until the listener's owner takes the first connection.
    native: watch::Sender<Option<bool>>,
    address: SocketAddr,
    task: AbortHandle,
}

impl Listener {
    /// Most negotiations at a time, and connections that wait for the stream. A new client takes the place of a silent one. If
    /// there is none, new clients wait in the port's backlog.
    const NEGOTIATIONS: usize = 1024;
    /// Most negotiations that hold a queue pair and receive memory at a time, before the client has proved that it has a device.
    const PREPARATIONS: u64 = 64;
    /// Time that a client has to answer over RDMA before another client may take its place.
    pub(super) const PROOF: Duration = Duration::from_millis(250);
    /// Most clients that wait for a place to prepare their connection over RDMA. One source has half of them.
    const WAITING_FOR_PREPARATION: usize = 320;
    /// Most connections that wait until the stream is polled.
    const WAITING: usize = 1024;

    /// Takes over a listening socket. [`Dialer::new`](crate::Dialer::new) has an example of both ends.
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
    /// The configuration has a value that can't be used ([`ConfigError`](crate::ConfigError), as the error's source), or the
    /// socket has no local address.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(listener: TcpListener, config: Config) -> io::Result<Self> {
        config.validate().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let address = listener.local_addr()?;
        let (sender, connections) = mpsc::channel(Self::WAITING);
        let (native, asked) = watch::channel(None);
        let task = tokio::spawn(accept(listener, config, asked, sender)).abort_handle();
        Ok(Self { connections, native, address, task })
    }

    /// Returns the address that the listener listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
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
                // Only a listener that takes native calls makes such connections, and its owner does not use this stream.
                Some(Negotiated::Messages(_)) => {}
                None => return Poll::Ready(None),
            }
        }
    }
}

impl Listener {
    /// Sets whether native calls are taken from now on, too: then connections whose client asks for them carry messages. Others, also those
    /// that were negotiated before this call, are byte streams. Clients that ask before the first connection is taken wait for this call a
    /// moment.
    pub(crate) fn take_native_calls(&self, native: bool) {
        self.native.send_replace(Some(native));
    }

    /// Returns the next connection, which may carry native calls.
    pub(crate) async fn next_negotiated(&mut self) -> Option<Negotiated> {
        self.connections.recv().await
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    config: Config,
    native: watch::Receiver<Option<bool>>,
    connections: mpsc::Sender<Negotiated>,
) {
    /// Pause after an error such as too many open files.
    const PAUSE: Duration = Duration::from_millis(50);
    let config = Arc::new(config);
    let journal = Arc::<Journal>::default();
    let negotiations = Places::new(Listener::NEGOTIATIONS, Duration::ZERO, 2);
    let preparations =
        Places::shared(preparations(&config), Listener::PROOF, Listener::WAITING_FOR_PREPARATION);
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
        let Ok(place) = negotiations.take(source).await else { continue };
        let (config, journal, connections) = (Arc::clone(&config), Arc::clone(&journal), connections.clone());
        let preparations = Arc::clone(&preparations);
        let native = native.clone();
        tokio::spawn(async move {
            let guest = Guest { source, place: &place, preparations: &preparations };
            let negotiated = tokio::select! {
                negotiated = server::negotiate(tcp, &config, &journal, guest, &native) => negotiated,
                () = connections.closed() => return,
            };
            match negotiated {
                Ok(negotiated) => {
                    journal.connected(&peer.to_string(), negotiated.info());
                    let _ = connections.send(negotiated).await;
                }
                Err(error) => journal.refused(peer, &error),
            }
            // Held until the connection was taken, because the places also bound the connections that wait.
            drop(place);
        });
    }
}

/// Returns how many negotiations may hold a queue pair and receive memory at a time: so few that a quarter of the process's
/// registered memory suffices.
fn preparations(config: &Config) -> usize {
    let each = u64::from(config.receive_slots) * u64::from(config.slot_size);
    let share = config.pinned_limit.unwrap_or(Budget::DEFAULT_LIMIT) / 4;
    (share / each.max(1)).clamp(1, Listener::PREPARATIONS) as usize
}

/// A client of a listener, and the places that it shares with other clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest<'a> {
    pub(super) source: Source,
    /// The place among all negotiations.
    pub(super) place: &'a Place,
    /// The places of negotiations that hold a queue pair and receive memory.
    pub(super) preparations: &'a Arc<Places>,
}
