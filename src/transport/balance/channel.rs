//! The channel that generated clients call.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use http_body::Body as _;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Channel;
use tower_service::Service;

use super::body::CountedBody;
use super::link::InFlight;
use super::members::{Membership, apply};
use super::table::{EndpointStatus, Pick, Shared};

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
/// Clones are cheap and share the connections; they end when the last clone is dropped and the calls in flight are over.
pub struct BalancedChannel {
    pool: Arc<Pool>,
    next: Next,
}

/// Why a call on a [`BalancedChannel`] got no response. Generated clients turn it into a [`Status`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// No endpoint is up; UNAVAILABLE, with the reason of the last failure.
    #[error("{}", .0.message())]
    Unavailable(#[source] Status),
    /// The call was given to an endpoint, and its connection failed.
    #[error(transparent)]
    Transport(#[from] tonic::transport::Error),
}

/// What all clones share. Holds the tasks, which don't hold it.
#[derive(Debug)]
struct Pool {
    shared: Arc<Shared>,
    members: Arc<dyn Membership>,
    applying: AbortHandle,
}

/// Where this clone's next call goes.
enum Next {
    Unknown,
    Reserving(Pin<Box<dyn Future<Output = Result<Reservation, BalanceError>> + Send + Sync>>),
    /// Nothing if no endpoint was up.
    Reserved(Option<Reservation>),
}

/// A connection with room for one more call.
#[derive(Debug)]
struct Reservation {
    channel: Channel,
    in_flight: InFlight,
}

impl BalancedChannel {
    pub(super) fn new(shared: Arc<Shared>, members: Arc<dyn Membership>) -> Self {
        let applying = tokio::spawn(apply(Arc::clone(&members))).abort_handle();
        Self { pool: Arc::new(Pool { shared, members, applying }), next: Next::Unknown }
    }

    /// Returns the state of each endpoint, in the order in which they were added.
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        self.pool.members.catch_up();
        self.pool.shared.status()
    }
}

impl Clone for BalancedChannel {
    fn clone(&self) -> Self {
        Self { pool: Arc::clone(&self.pool), next: Next::Unknown }
    }
}

impl fmt::Debug for BalancedChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalancedChannel").field("endpoints", &self.pool.shared.status()).finish()
    }
}

impl Service<Request<Body>> for BalancedChannel {
    type Response = Response<Body>;
    type Error = BalanceError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BalanceError>> + Send>>;

    /// Ready when a connection has room for a call, or when it is known that there is none: that is for the call to tell,
    /// since a service whose readiness fails has failed for good.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BalanceError>> {
        if let Next::Unknown = self.next {
            self.next = Next::Reserving(Box::pin(reserve(Arc::clone(&self.pool))));
        }
        if let Next::Reserving(reserving) = &mut self.next {
            self.next = Next::Reserved(ready!(reserving.as_mut().poll(context)).ok());
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let next = std::mem::replace(&mut self.next, Next::Unknown);
        let pool = Arc::clone(&self.pool);
        Box::pin(async move {
            let reservation = match next {
                Next::Reserved(Some(reservation)) if reservation.holds() => reservation,
                // Its connection ended since, or none was up: things may have changed.
                _ => reserve(Arc::clone(&pool)).await?,
            };
            // A call in flight does not keep the other connections.
            drop(pool);
            reservation.call(request).await
        })
    }
}

impl Reservation {
    fn holds(&self) -> bool {
        !self.in_flight.link().is_over()
    }

    async fn call(mut self, request: Request<Body>) -> Result<Response<Body>, BalanceError> {
        let link = self.in_flight.link();
        let response = self.channel.call(request).await.inspect_err(|error| {
            if was_not_sent(error) {
                link.retire();
            }
        })?;
        let (head, body) = response.into_parts();
        if body.is_end_stream() {
            return Ok(Response::from_parts(head, body));
        }
        Ok(Response::from_parts(head, Body::new(CountedBody::new(body, self.in_flight))))
    }
}

/// Waits for a connection with room for a call, as long as there may be one presently.
async fn reserve(pool: Arc<Pool>) -> Result<Reservation, BalanceError> {
    let unavailable = |reason| BalanceError::Unavailable(Status::unavailable(reason));
    let mut changes = pool.shared.changes();
    loop {
        pool.members.catch_up();
        changes.mark_unchanged();
        match pool.shared.pick() {
            Pick::Up(in_flight) => {
                let mut channel = in_flight.link().channel();
                let ready = poll_fn(|context| channel.poll_ready(context)).await;
                if !in_flight.link().is_over() {
                    ready?;
                    return Ok(Reservation { channel, in_flight });
                }
            }
            Pick::Wait => {
                // Ends only with the table, which `pool` holds.
                let _ = changes.changed().await;
            }
            Pick::Fail(reason) => return Err(unavailable(reason)),
        }
    }
}

/// Whether hyper had no connection to send it on any more: the server had said GOAWAY, and is waiting for older calls.
fn was_not_sent(error: &(dyn std::error::Error + 'static)) -> bool {
    match error.downcast_ref::<hyper::Error>() {
        Some(error) => error.is_canceled() || error.is_closed(),
        None => error.source().is_some_and(was_not_sent),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.applying.abort();
    }
}
