//! One channel over several endpoints, as tonic's `Channel::balance_list` is over TCP.
//!
//! This module chooses the endpoint for each call, and dials endpoints that are down. It sends a call once
//! only: the caller gets the answer, or the error, of the endpoint that the call went to.
//!
//! ```text
//!              ┌── dialled, first bytes ───▶ up ──┐
//!  connecting ─┤                                  │ the connection ended
//!      ▲       └── no connection ──▶ down ◀───────┤ sooner than the back-off allows the next dial
//!      │                              │           │
//!      └─────────── later ────────────┼───────────┘
//!                                     └── dialled again by back-off ──▶ up
//! ```
//!
//! Each endpoint has a task. The task dials the endpoint, waits for the server's first bytes, and puts the
//! connection into the table (`table.rs`). When the connection ends or accepts no further calls (GOAWAY), the
//! task takes it out of the table. A call picks two connections of the table at random, and takes the
//! connection with fewer calls in flight. No queue and no other task is between a call and its connection.
//!
//! A call waits while the first dial to an endpoint is under way, after the endpoint was added or after its
//! connection ended. Otherwise the call fails at once with UNAVAILABLE and the reason of the last failure.
//! The wait ends with the dial, which has its own limits. As on tonic's own channel, the wait is not a part
//! of a call's deadline.
//!
//! The table, the tasks and the changes of the endpoints (`members.rs`) are those of
//! [`RdmaChannel`](crate::RdmaChannel) as well, whose connections are of another type. A channel to one
//! endpoint has a table that dials on demand: when a call needs the endpoint.

pub(crate) mod connection;
pub(crate) mod members;
pub(crate) mod table;

use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use http::{Request, Response};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tower_service::Service;

use self::connection::{EndpointConnection, Reservation, no_endpoint_up};
use self::members::Members;
use self::table::{KeptEndpoint, Table};
use super::RdmaConnector;
use crate::error::{RdmaError, RdmaErrorKind};

pub use self::table::{EndpointState, EndpointStatus};

/// A channel over several endpoints, from [`from_list`](Self::from_list) or
/// [`from_changes`](Self::from_changes). Generated clients and tower's layers take it in place of tonic's
/// `Channel`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use tonic::transport::Endpoint;
/// use tonic_rdma::EndpointState;
/// use tonic_rdma::{BalancedChannel, RdmaConnector};
///
/// let endpoints = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(Endpoint::from_static);
/// let channel = BalancedChannel::from_list(endpoints, RdmaConnector::new());
/// for endpoint in channel.endpoints() {
///     match &endpoint.state {
///         EndpointState::Up(info) => println!("{}: up, over {}", endpoint.uri, info.verdict()),
///         EndpointState::Down(reason) => println!("{}: down: {reason}", endpoint.uri),
///         other => println!("{}: {other:?}", endpoint.uri),
///     }
/// }
/// # assert_eq!(channel.endpoints().len(), 2);
/// # }
/// ```
///
/// Clones are cheap and share the connections. The connections end when the last clone is dropped and the
/// calls in flight are over.
pub struct BalancedChannel {
    members: Arc<Members<EndpointConnection>>,
    next: NextConnection,
}

/// The connection for this clone's next call.
enum NextConnection {
    Unknown,
    Reserving(Pin<Box<dyn Future<Output = Result<Reservation, RdmaError>> + Send + Sync>>),
    /// `None` if no endpoint was up.
    Reserved(Option<Reservation>),
}

impl BalancedChannel {
    /// Makes a channel that spreads its calls over `endpoints`. `connector` connects each of them, over RDMA
    /// where both sides have it and over TCP elsewhere.
    ///
    /// An endpoint that is down gets no calls, is dialled again by back-off (at first after 100 ms, at last
    /// every 10 s), and gets calls again as soon as it is up. If no endpoint is up, calls fail with
    /// UNAVAILABLE and the reason of the last failure. As on tonic's own channel, a call that is in flight
    /// when its connection ends fails; it is not sent again.
    ///
    /// ```no_run
    /// # async fn example() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::{BalancedChannel, RdmaConnector};
    /// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
    ///
    /// let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
    /// let channel = BalancedChannel::from_list(endpoints, RdmaConnector::new());
    /// let client = GreeterClient::new(channel); // as with any other channel
    /// # drop(client);
    /// # }
    /// ```
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's `Channel::balance_list` does.
    pub fn from_list(endpoints: impl IntoIterator<Item = Endpoint>, connector: RdmaConnector) -> Self {
        let (table, keep) = (Table::new(false), keeper(connector));
        let kept = endpoints.into_iter().map(|endpoint| keep(&table, endpoint)).collect();
        Self::new(Members::new(table, kept))
    }

    /// Makes a channel as [`from_list`](Self::from_list) does, with endpoints that come and go. A change that
    /// was sent to the `Sender` holds for all later calls.
    ///
    /// An endpoint inserted under a key that is taken replaces the endpoint of that key. A removed endpoint
    /// gets no further calls; its calls in flight go on. `capacity` is the number of changes that may wait in
    /// the `Sender`. Dropping the `Sender` changes nothing.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic::transport::Endpoint;
    /// use tonic::transport::channel::Change;
    /// use tonic_rdma::{BalancedChannel, RdmaConnector};
    /// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
    ///
    /// let (channel, changes) = BalancedChannel::from_changes(16, RdmaConnector::new());
    /// let client = GreeterClient::new(channel);
    /// changes.send(Change::Insert("ps0", Endpoint::from_static("http://ps0:50051"))).await?;
    /// changes.send(Change::Remove("ps0")).await?;
    /// # drop(client);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// Outside a tokio runtime, and with a `capacity` of 0, as tonic's `Channel::balance_channel` does.
    pub fn from_changes<K>(
        capacity: usize,
        connector: RdmaConnector,
    ) -> (Self, mpsc::Sender<Change<K, Endpoint>>)
    where
        K: Hash + Eq + Send + 'static,
    {
        let (sender, changes) = mpsc::channel(capacity);
        let members = Members::new(Table::new(false), Vec::new());
        (Self::new(members.changing(changes, keeper(connector))), sender)
    }

    fn new(members: Members<EndpointConnection>) -> Self {
        Self { members: Arc::new(members), next: NextConnection::Unknown }
    }

    /// Returns the state of each endpoint, in the order in which they were added.
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        self.members.table().status()
    }
}

impl Clone for BalancedChannel {
    fn clone(&self) -> Self {
        Self { members: Arc::clone(&self.members), next: NextConnection::Unknown }
    }
}

impl fmt::Debug for BalancedChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalancedChannel").field("endpoints", &self.members).finish()
    }
}

impl Service<Request<Body>> for BalancedChannel {
    type Response = Response<Body>;
    type Error = RdmaError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, RdmaError>> + Send>>;

    /// Waits until a connection has room for a call, or until no endpoint is up. In the second case this
    /// method succeeds and the call fails, because a service whose readiness fails has failed for good.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RdmaError>> {
        if let NextConnection::Unknown = self.next {
            self.next = NextConnection::Reserving(Box::pin(reserve(Arc::clone(&self.members))));
        }
        if let NextConnection::Reserving(reserving) = &mut self.next {
            self.next = NextConnection::Reserved(ready!(reserving.as_mut().poll(context)).ok());
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let next = std::mem::replace(&mut self.next, NextConnection::Unknown);
        let members = Arc::clone(&self.members);
        Box::pin(async move {
            let reservation = match next {
                NextConnection::Reserved(Some(reservation)) if reservation.is_usable() => reservation,
                // The connection ended meanwhile, or no endpoint was up.
                _ => reserve(Arc::clone(&members)).await?,
            };
            // A call in flight does not keep the other connections open.
            drop(members);
            reservation.call(request).await.map_err(http2_failed)
        })
    }
}

/// Returns the error of tonic's transport, such as that of a call whose connection failed.
pub(crate) fn http2_failed(error: tonic::transport::Error) -> RdmaError {
    RdmaError::of(RdmaErrorKind::Http2, error)
}

/// Waits for a connection with room for a call, as long as an endpoint is being dialled.
async fn reserve(members: Arc<Members<EndpointConnection>>) -> Result<Reservation, RdmaError> {
    loop {
        let connection = members.connection(Instant::now()).await.map_err(no_endpoint_up)?;
        if let Some(reservation) = Reservation::of(&connection).await.map_err(http2_failed)? {
            return Ok(reservation);
        }
    }
}

/// Returns what adds an endpoint to a table, and keeps it connected.
fn keeper(
    connector: RdmaConnector,
) -> impl Fn(&Arc<Table<EndpointConnection>>, Endpoint) -> KeptEndpoint<EndpointConnection> + Send {
    let runtime = Handle::current();
    move |table, endpoint| {
        let connector = connector.clone();
        KeptEndpoint::new(table, &runtime, endpoint.uri().clone(), move || {
            let (endpoint, connector) = (endpoint.clone(), connector.clone());
            async move { EndpointConnection::connect(&endpoint, connector).await }
        })
    }
}
