//! The client.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{FlightData, PutResult, Ticket};
use http::uri::PathAndQuery;
use prost::Message;
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::{Service, StdError};
use tonic::{IntoRequest, IntoStreamingRequest, Request, Status, Streaming};
use tonic_rdma::gather::{GatherBoth, GatherCodec};

use crate::decode::{BatchStream, DEFAULT_LIMIT};

/// A client of a Flight service, over an [`RdmaChannel`](tonic_rdma::RdmaChannel) or any other channel of
/// tonic.
///
/// The calls that carry record batches use [`GatherCodec`]: a device sends bodies from where they are, and
/// native calls pass them to the program in the memory that they arrived in. The server may be any Flight
/// server. [`control`](Self::control) has the other calls.
///
/// ```no_run
/// use arrow_flight::Ticket;
/// use tokio_stream::StreamExt as _;
/// use tonic_rdma::RdmaChannel;
/// use tonic_rdma_flight::FlightClient;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut client = FlightClient::new(RdmaChannel::connect("http://data0:50051").await?);
/// let mut batches = client.do_get(Ticket::new("trips")).await?;
/// while let Some(batch) = batches.next().await {
///     println!("{} rows", batch?.num_rows());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlightClient<S> {
    channel: S,
    limit: usize,
}

impl<S> FlightClient<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Clone + Send + 'static,
    S::Error: Into<StdError>,
{
    /// Makes a client. It uses clones of `channel`.
    pub fn new(channel: S) -> Self {
        Self { channel, limit: DEFAULT_LIMIT }
    }

    /// Sets the longest message that the client accepts, in bytes. Default: 64 MiB. A longer one ends its
    /// call with OUT_OF_RANGE. The server has a limit of its own: for stock servers it is 4 MiB, unless they
    /// set another one.
    #[must_use]
    pub fn max_message_size(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Returns a client for the calls without record batches: `list_flights`, `get_flight_info`, `do_action`
    /// and others.
    pub fn control(&self) -> FlightServiceClient<S> {
        FlightServiceClient::new(self.channel.clone()).max_decoding_message_size(self.limit)
    }

    /// Gets the stream of `ticket`.
    ///
    /// # Errors
    /// The server refuses the call, or can't be reached.
    pub async fn do_get(&mut self, ticket: impl IntoRequest<Ticket>) -> Result<BatchStream, FlightError> {
        let mut grpc = self.ready().await?;
        let codec = GatherCodec::<Ticket, FlightData>::default();
        let path = PathAndQuery::from_static("/arrow.flight.protocol.FlightService/DoGet");
        let response = grpc.server_streaming(ticket.into_request(), path, codec).await?;
        Ok(BatchStream::new(response.into_inner()))
    }

    /// Puts a stream of messages, such as those of [`BatchEncoder::stream`](crate::BatchEncoder::stream). The
    /// first message names the flight ([`BatchEncoder::descriptor`](crate::BatchEncoder::descriptor)). An
    /// error in `messages` cancels the call, so that the server does not mistake the stream for a complete
    /// one; the error comes back here or from [`PutResults`].
    ///
    /// # Errors
    /// The server refuses the call, or can't be reached, or `messages` has an error.
    pub async fn do_put<M>(&mut self, messages: M) -> Result<PutResults, FlightError>
    where
        M: IntoStreamingRequest<Message = Result<FlightData, FlightError>>,
    {
        let path = PathAndQuery::from_static("/arrow.flight.protocol.FlightService/DoPut");
        Ok(PutResults { replies: self.both_ways(messages, path).await? })
    }

    /// Sends a stream of messages, and receives one at the same time. [`do_put`](Self::do_put) says what an
    /// error in `messages` does.
    ///
    /// # Errors
    /// As for [`do_put`](Self::do_put).
    pub async fn do_exchange<M>(&mut self, messages: M) -> Result<BatchStream, FlightError>
    where
        M: IntoStreamingRequest<Message = Result<FlightData, FlightError>>,
    {
        let path = PathAndQuery::from_static("/arrow.flight.protocol.FlightService/DoExchange");
        Ok(BatchStream::new(self.both_ways::<M, FlightData>(messages, path).await?))
    }

    async fn both_ways<M, T>(&self, messages: M, path: PathAndQuery) -> Result<Replies<T>, FlightError>
    where
        M: IntoStreamingRequest<Message = Result<FlightData, FlightError>>,
        T: Message + Default + Send + 'static,
    {
        let mut grpc = self.ready().await?;
        let (report, mut failure) = oneshot::channel();
        let request: Request<_> = messages
            .into_streaming_request()
            .map(|messages| MessagesUntilError { messages: Box::pin(messages), report: Some(report) });
        let codec = GatherCodec::<FlightData, T>::default();
        let response = {
            let mut call = std::pin::pin!(grpc.streaming(request, path, codec));
            // A failure of the messages comes first. Dropping the call cancels it.
            std::future::poll_fn(|context| {
                if let Poll::Ready(error) = poll_failure(&mut failure, context) {
                    return Poll::Ready(Err(error));
                }
                call.as_mut().poll(context).map_err(FlightError::from)
            })
            .await?
        };
        Ok(Replies { replies: Some(response.into_inner()), failure })
    }

    /// Waits until the channel accepts a call.
    async fn ready(&self) -> Result<Grpc<GatherBoth<S>>, FlightError> {
        let channel = GatherBoth::new(self.channel.clone());
        // The body is the last field. Metadata of the application may be longer.
        let channel = channel.max_decoding_message_size(self.limit).align_last_field();
        let mut grpc = Grpc::new(channel).max_decoding_message_size(self.limit);
        grpc.ready().await.map_err(|error| {
            let error: StdError = error.into();
            FlightError::from(Status::unavailable(format!("the channel takes no calls: {error}")))
        })?;
        Ok(grpc)
    }
}

/// The replies to a put, from [`FlightClient::do_put`]. Dropping them cancels the call, so a program that
/// wants to know that the server has everything reads them to their end.
pub struct PutResults {
    replies: Replies<PutResult>,
}

impl Stream for PutResults {
    type Item = Result<PutResult, FlightError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.replies).poll_next(context)
    }
}

impl fmt::Debug for PutResults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PutResults").finish_non_exhaustive()
    }
}

/// The messages of a request until the first error, which goes to the call. After an error the stream neither
/// ends nor yields anything, because its end would look like success to the server.
struct MessagesUntilError<M> {
    messages: Pin<Box<M>>,
    report: Option<oneshot::Sender<FlightError>>,
}

impl<M: Stream<Item = Result<FlightData, FlightError>>> Stream for MessagesUntilError<M> {
    type Item = FlightData;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FlightData>> {
        if self.report.is_none() {
            return Poll::Pending;
        }
        match std::task::ready!(self.messages.as_mut().poll_next(context)) {
            Some(Ok(message)) => Poll::Ready(Some(message)),
            Some(Err(error)) => {
                // It fails only if the call is gone.
                let _ = self.report.take().map(|report| report.send(error));
                Poll::Pending
            }
            None => Poll::Ready(None),
        }
    }
}

/// The replies of a call, until the messages of its request fail.
struct Replies<T> {
    /// `None` after a failure.
    replies: Option<Streaming<T>>,
    failure: oneshot::Receiver<FlightError>,
}

impl<T> Stream for Replies<T> {
    type Item = Result<T, FlightError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.replies.is_none() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(error) = poll_failure(&mut self.failure, context) {
            // Cancels the call.
            self.replies = None;
            return Poll::Ready(Some(Err(error)));
        }
        let Some(replies) = &mut self.replies else { return Poll::Ready(None) };
        Pin::new(replies).poll_next(context).map_err(FlightError::from)
    }
}

/// Returns the error of the request's messages if there is one.
fn poll_failure(
    failure: &mut oneshot::Receiver<FlightError>,
    context: &mut Context<'_>,
) -> Poll<FlightError> {
    if failure.is_terminated() {
        return Poll::Pending;
    }
    match std::task::ready!(Pin::new(failure).poll(context)) {
        Ok(error) => Poll::Ready(error),
        // The messages ended without an error.
        Err(_) => Poll::Pending,
    }
}
