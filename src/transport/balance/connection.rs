//! A connection to one endpoint, made by a channel of tonic's. The balancer waits for the first bytes from
//! the server and for the end of the connection, and counts its calls. Also the errors of dials to endpoints,
//! and of calls on a balanced channel.

use std::error::Error;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body::{Frame, SizeHint};
use hyper_util::rt::TokioIo;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use super::table::Connection;
use crate::endpoint::{EndpointStream, RdmaConnectInfo};
use crate::error::{RdmaError, RdmaErrorKind};

type BoxError = Box<dyn Error + Send + Sync>;

/// A connection to one endpoint.
#[derive(Debug)]
pub(crate) struct EndpointConnection {
    channel: Channel,
    watch: Arc<ConnectionWatch>,
    info: RdmaConnectInfo,
    /// Each call in flight has a clone.
    calls: Arc<()>,
}

impl EndpointConnection {
    /// The time that a server has to send its first bytes of HTTP/2.
    const SILENCE: Duration = Duration::from_secs(10);

    /// Connects by `dial`, and waits for the first bytes from the server.
    ///
    /// tonic's channel dials again if it gets a call after its connection stopped taking calls. One such dial is
    /// allowed, for the calls that were on their way when the server sent GOAWAY. This second dial marks the
    /// connection as ended, so the balancer gives the channel no new calls. All later dials are refused, because
    /// no back-off would limit them.
    pub(crate) async fn connect(
        endpoint: &Endpoint,
        mut dial: impl Service<Uri, Response = EndpointStream, Error = RdmaError, Future: Send> + Send + 'static,
    ) -> Result<Self, DialError> {
        let watch = Arc::new(ConnectionWatch::default());
        let (watched, mut dials) = (Arc::clone(&watch), 0_u32);
        let connector = tower::service_fn(move |uri| {
            dials += 1;
            if dials > 1 {
                watched.ended.cancel();
            }
            let dialled = (dials <= 2).then(|| dial.call(uri));
            let watch = Arc::clone(&watched);
            async move {
                let stream = dialled.ok_or("the connection ended")?.await?;
                watch.info.get_or_init(|| stream.info().clone());
                // hyper drops the byte stream when the connection has ended.
                let (ends, mut received) = (watch.ended.clone().drop_guard(), false);
                let watched = InspectReader::new(stream, move |bytes: &[u8]| {
                    let _until_the_end = &ends;
                    if !received && !bytes.is_empty() {
                        received = true;
                        watch.first_bytes.notify_one();
                    }
                });
                Ok::<_, BoxError>(TokioIo::new(watched))
            }
        });
        let channel = endpoint.connect_with_connector(connector).await?;
        let first_bytes = watch.ended.run_until_cancelled(watch.first_bytes.notified());
        if timeout(Self::SILENCE, first_bytes).await.is_err() {
            return Err(DialError::Silent(Self::SILENCE));
        }
        match watch.info.get().cloned() {
            Some(info) if !watch.ended.is_cancelled() => {
                Ok(Self { channel, watch, info, calls: Arc::default() })
            }
            _ => Err(DialError::Closed),
        }
    }
}

impl Connection for EndpointConnection {
    fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    fn is_usable(&self) -> bool {
        !self.watch.ended.is_cancelled()
    }

    fn load(&self) -> usize {
        Arc::strong_count(&self.calls) - 1
    }

    async fn ended(&self) {
        self.watch.ended.cancelled().await;
    }
}

/// The state of a connection, shared by its byte stream and the balancer.
#[derive(Debug, Default)]
struct ConnectionWatch {
    info: OnceLock<RdmaConnectInfo>,
    /// The server's first bytes have arrived.
    first_bytes: Notify,
    /// The connection has ended, or accepts no further calls.
    ended: CancellationToken,
}

/// A call in flight on a connection. Dropping it ends the count of this call.
#[derive(Debug)]
struct InFlight {
    connection: Arc<EndpointConnection>,
    _call: Arc<()>,
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
    /// tonic's channel failed although the connection has not ended.
    pub(crate) async fn of(
        connection: &Arc<EndpointConnection>,
    ) -> Result<Option<Self>, tonic::transport::Error> {
        // It counts from now on, so that other calls prefer other connections.
        let in_flight = InFlight { connection: Arc::clone(connection), _call: Arc::clone(&connection.calls) };
        let mut channel = in_flight.connection.channel.clone();
        let ready = poll_fn(|context| channel.poll_ready(context)).await;
        if !in_flight.connection.is_usable() {
            return Ok(None);
        }
        ready.map(|()| Some(Self { channel, in_flight }))
    }

    /// Returns whether the connection still takes the call.
    pub(crate) fn is_usable(&self) -> bool {
        self.in_flight.connection.is_usable()
    }

    /// Makes the call. It is in flight until the body of its response has ended or is dropped.
    ///
    /// # Errors
    /// The call failed below gRPC.
    pub(crate) async fn call(
        mut self,
        request: Request<Body>,
    ) -> Result<Response<Body>, tonic::transport::Error> {
        let response = self.channel.call(request).await.inspect_err(|error| {
            if was_not_sent(error) {
                self.in_flight.connection.watch.ended.cancel();
            }
        })?;
        // `Body::new` drops a body that has ended, and with it the count.
        Ok(response.map(|inner| Body::new(CountedBody { inner, in_flight: Some(self.in_flight) })))
    }
}

/// Returns true if hyper could not send the call because its connection accepts no new calls: the server sent
/// GOAWAY, and finishes older calls.
fn was_not_sent(error: &(dyn Error + 'static)) -> bool {
    match error.downcast_ref::<hyper::Error>() {
        Some(error) => error.is_canceled() || error.is_closed(),
        None => error.source().is_some_and(was_not_sent),
    }
}

/// The body of a response. Its call is in flight until the body has ended or is dropped.
#[derive(Debug)]
struct CountedBody {
    inner: Body,
    in_flight: Option<InFlight>,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.in_flight = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Returns the error of a call that found no endpoint up. Its source is the status, which has the reason of
/// the last failure.
pub(crate) fn no_endpoint_up(status: Status) -> RdmaError {
    RdmaError::because(RdmaErrorKind::Unreachable, status.message(), status.clone())
}

/// The reason why an endpoint is down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("the endpoint can't be connected to")]
    Connect(#[from] RdmaError),
    #[error("tonic's channel can't connect")]
    Channel(#[from] tonic::transport::Error),
    #[error("the server took the connection, and no HTTP/2 came within {0:?}")]
    Silent(Duration),
    #[error("the server took the connection and closed it")]
    Closed,
    #[error("the connection ended as soon as it was made")]
    EndedAtOnce,
    #[error("the channel's runtime ended while it connected")]
    Interrupted,
}

impl DialError {
    pub(crate) fn kind(&self) -> RdmaErrorKind {
        match self {
            Self::Connect(error) => error.kind(),
            Self::Channel(_) => RdmaErrorKind::Http2,
            Self::Silent(_) => RdmaErrorKind::Timeout,
            Self::Closed | Self::EndedAtOnce => RdmaErrorKind::Closed,
            Self::Interrupted => RdmaErrorKind::Internal,
        }
    }

    /// Returns the most specific message: of an error of ours within, or else of the last source, because
    /// tonic's errors around it are general.
    pub(super) fn reason(&self) -> String {
        fn of(error: &(dyn Error + 'static)) -> String {
            match error.source() {
                Some(source) if !error.is::<RdmaError>() => of(source),
                _ => error.to_string(),
            }
        }
        of(self)
    }
}

/// Returns the status of a call that found no endpoint up: UNAVAILABLE, with the last failure, of `count`
/// endpoints.
pub(super) fn unavailable(count: usize, last: Option<(&Uri, &Arc<DialError>)>) -> Status {
    let Some((uri, error)) = last else {
        return Status::unavailable("there is no endpoint to call");
    };
    let reason = error.reason();
    let message = match count {
        1 => format!("{uri}: {reason}"),
        _ => format!("all {count} endpoints are down, the last one to fail was {uri}: {reason}"),
    };
    let mut status = Status::unavailable(message);
    status.set_source(Arc::new(RdmaError::of_unsent(error.kind(), reason, Some(Arc::clone(error).into()))));
    status
}
