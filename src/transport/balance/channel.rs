//! The channel that generated clients call.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use tokio::task::AbortHandle;
use tonic::body::Body;
use tower_service::Service;

use super::connection::Reservation;
use super::error::BalanceError;
use super::members::{Membership, apply};
use super::table::{EndpointStatus, EndpointTable, Pick};

/// A channel over several endpoints, from [`balance_list`](super::balance_list) or
/// [`balance_channel`](super::balance_channel). Generated clients and tower's layers take it in place of tonic's `Channel`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use tonic::transport::Endpoint;
/// use tonic_rdma::EndpointState;
/// use tonic_rdma::{BalancedChannel, RdmaConnector, balance_list};
///
/// let endpoints = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(Endpoint::from_static);
/// let channel: BalancedChannel = balance_list(endpoints, RdmaConnector::new());
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
/// Clones are cheap and share the connections. The connections end when the last clone is dropped and the calls in flight are over.
pub struct BalancedChannel {
    core: Arc<Core>,
    next: Next,
}

/// The parts that all clones share. The tasks do not hold this value. Dropping it ends the tasks.
#[derive(Debug)]
struct Core {
    table: Arc<EndpointTable>,
    members: Arc<dyn Membership>,
    applying: AbortHandle,
}

/// The connection for this clone's next call.
enum Next {
    Unknown,
    Reserving(Pin<Box<dyn Future<Output = Result<Reservation, BalanceError>> + Send + Sync>>),
    /// `None` if no endpoint was up.
    Reserved(Option<Reservation>),
}

impl BalancedChannel {
    pub(super) fn new(table: Arc<EndpointTable>, members: Arc<dyn Membership>) -> Self {
        let applying = tokio::spawn(apply(Arc::clone(&members))).abort_handle();
        Self { core: Arc::new(Core { table, members, applying }), next: Next::Unknown }
    }

    /// Returns the state of each endpoint, in the order in which they were added.
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        self.core.members.catch_up();
        self.core.table.status()
    }
}

impl Clone for BalancedChannel {
    fn clone(&self) -> Self {
        Self { core: Arc::clone(&self.core), next: Next::Unknown }
    }
}

impl fmt::Debug for BalancedChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalancedChannel").field("endpoints", &self.core.table.status()).finish()
    }
}

impl Service<Request<Body>> for BalancedChannel {
    type Response = Response<Body>;
    type Error = BalanceError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BalanceError>> + Send>>;

    /// Waits until a connection has room for a call, or until no endpoint is up. In the second case this method succeeds and the call
    /// fails, because a service whose readiness fails has failed for good.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BalanceError>> {
        if let Next::Unknown = self.next {
            self.next = Next::Reserving(Box::pin(reserve(Arc::clone(&self.core))));
        }
        if let Next::Reserving(reserving) = &mut self.next {
            self.next = Next::Reserved(ready!(reserving.as_mut().poll(context)).ok());
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let next = std::mem::replace(&mut self.next, Next::Unknown);
        let core = Arc::clone(&self.core);
        Box::pin(async move {
            let reservation = match next {
                Next::Reserved(Some(reservation)) if reservation.is_usable() => reservation,
                // The connection ended meanwhile, or no endpoint was up.
                _ => reserve(Arc::clone(&core)).await?,
            };
            // A call in flight does not keep the other connections open.
            drop(core);
            Ok(reservation.call(request).await?)
        })
    }
}

/// Waits for a connection with room for a call, as long as an endpoint is being dialled.
async fn reserve(core: Arc<Core>) -> Result<Reservation, BalanceError> {
    let mut changes = core.table.changes();
    loop {
        core.members.catch_up();
        changes.mark_unchanged();
        match core.table.pick() {
            Pick::Up(in_flight) => {
                if let Some(reservation) = Reservation::of(in_flight).await? {
                    return Ok(reservation);
                }
            }
            Pick::Wait => {
                // This fails only if the table is gone, and `core` holds the table.
                let _ = changes.changed().await;
            }
            Pick::Fail(error) => return Err(error),
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.applying.abort();
    }
}
