//! A connection to one endpoint, and the count of the calls on it.

use std::error::Error;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response, Uri};
use http_body::Body as _;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use super::body::CountedBody;
use super::error::DialError;
use super::watch::{ConnectionWatch, WatchedConnector};
use crate::endpoint::{EndpointStream, RdmaConnectInfo};

type BoxError = Box<dyn Error + Send + Sync>;

/// A connection to one endpoint.
#[derive(Debug)]
pub(crate) struct EndpointConnection {
    channel: Channel,
    watch: Arc<ConnectionWatch>,
    info: RdmaConnectInfo,
    in_flight: AtomicUsize,
}

impl EndpointConnection {
    /// The time that a server has to send its first bytes of HTTP/2.
    const SILENCE: Duration = Duration::from_secs(10);

    /// Connects, and waits for the first bytes from the server.
    pub(crate) async fn connect<C>(endpoint: &Endpoint, connector: C) -> Result<Self, DialError>
    where
        C: Service<Uri, Response = EndpointStream, Error: Into<BoxError>, Future: Send + 'static>,
        C: Send + 'static,
    {
        let watch = Arc::new(ConnectionWatch::default());
        let connector = WatchedConnector::new(connector, Arc::clone(&watch));
        let channel = endpoint.connect_with_connector(connector).await?;
        if timeout(Self::SILENCE, watch.first_bytes()).await.is_err() {
            return Err(DialError::Silent(Self::SILENCE));
        }
        match watch.info() {
            Some(info) if !watch.is_ended() => {
                Ok(Self { channel, watch, info, in_flight: AtomicUsize::new(0) })
            }
            _ => Err(DialError::Closed),
        }
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(crate) fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Returns true if the connection takes no further calls.
    pub(crate) fn is_ended(&self) -> bool {
        self.watch.is_ended()
    }

    /// Marks the connection as ended, so that it gets no further calls.
    pub(super) fn retire(&self) {
        self.watch.end();
    }

    /// Waits until the connection takes no further calls.
    pub(crate) async fn ended(&self) {
        self.watch.ended().await;
    }

    /// Returns the number of calls in flight.
    pub(crate) fn load(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// A call in flight on a connection. Dropping it ends the count of this call.
#[derive(Debug)]
pub(crate) struct InFlight {
    connection: Arc<EndpointConnection>,
}

impl InFlight {
    pub(crate) fn new(connection: Arc<EndpointConnection>) -> Self {
        connection.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { connection }
    }

    pub(super) fn connection(&self) -> &EndpointConnection {
        &self.connection
    }
}

/// A connection with room for one more call.
#[derive(Debug)]
pub(crate) struct Reservation {
    channel: Channel,
    in_flight: InFlight,
}

impl Reservation {
    /// Waits until the connection has room for a call. `None` if the connection has ended.
    ///
    /// # Errors
    /// The connection has room for no call any more, and has not ended.
    pub(crate) async fn of(in_flight: InFlight) -> Result<Option<Self>, tonic::transport::Error> {
        let mut channel = in_flight.connection().channel();
        let ready = poll_fn(|context| channel.poll_ready(context)).await;
        if in_flight.connection().is_ended() {
            return Ok(None);
        }
        ready.map(|()| Some(Self { channel, in_flight }))
    }

    /// Returns whether the connection still takes the call.
    pub(crate) fn is_usable(&self) -> bool {
        !self.in_flight.connection().is_ended()
    }

    /// Makes the call. It is in flight until the body of its response has ended or is dropped.
    ///
    /// # Errors
    /// The call failed below gRPC.
    pub(crate) async fn call(
        mut self,
        request: Request<Body>,
    ) -> Result<Response<Body>, tonic::transport::Error> {
        let connection = self.in_flight.connection();
        let response = self.channel.call(request).await.inspect_err(|error| {
            if was_not_sent(error) {
                connection.retire();
            }
        })?;
        let (head, body) = response.into_parts();
        if body.is_end_stream() {
            return Ok(Response::from_parts(head, body));
        }
        Ok(Response::from_parts(head, Body::new(CountedBody::new(body, self.in_flight))))
    }
}

/// Returns true if hyper could not send the call because its connection takes no new calls: the server sent GOAWAY, and finishes older
/// calls.
fn was_not_sent(error: &(dyn Error + 'static)) -> bool {
    match error.downcast_ref::<hyper::Error>() {
        Some(error) => error.is_canceled() || error.is_closed(),
        None => error.source().is_some_and(was_not_sent),
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.connection.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
