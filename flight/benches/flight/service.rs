//! The Flight service of both paths: streams of batches, and a check of what is put.

use std::pin::Pin;

use arrow_flight::encode::{FlightDataEncoderBuilder, GRPC_TARGET_MAX_FLIGHT_SIZE_BYTES};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest, PollInfo, PutResult,
    SchemaResult, Ticket,
};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::memory::Pool;
use tonic_rdma_flight::{BatchEncoder, BatchStream, Placement};

use super::content::{Check, Content};
use super::options::Path;
use super::stubs::flight_stubs;

/// Encodes the stream of `content`.
pub(crate) fn encode(
    content: &Content,
    path: Path,
    pool: &Pool,
) -> Pin<Box<dyn Stream<Item = Result<FlightData, FlightError>> + Send>> {
    let batches = tokio_stream::iter(content.stream().map(Ok));
    let longest = match path {
        Path::Ours => {
            let encoder = BatchEncoder::new(&content.first().schema(), pool).unwrap();
            return Box::pin(encoder.stream(batches));
        }
        Path::Stock => usize::MAX,
        Path::StockSplit => GRPC_TARGET_MAX_FLIGHT_SIZE_BYTES,
    };
    Box::pin(FlightDataEncoderBuilder::new().with_max_flight_data_size(longest).build(batches))
}

/// Checks the batches of `messages`.
pub(crate) async fn check(mut messages: BatchStream, mut check: Check) -> Result<Placement, FlightError> {
    while let Some(batch) = messages.next().await {
        check.next(&batch?);
    }
    check.end();
    Ok(messages.placement())
}

/// Returns memory for the batches that are on their way.
pub(crate) fn pool() -> Pool {
    Pool::for_sending(1 << 30)
}

/// Whether the receiver compares all numbers, as the client says with each put.
pub(crate) const CHECK_ALL: &str = "check-all";

#[derive(Debug)]
pub(crate) struct Batches {
    pub(crate) path: Path,
    pub(crate) bytes: usize,
    pub(crate) content: Content,
    pub(crate) pool: Pool,
}

#[tonic::async_trait]
impl FlightService for Batches {
    flight_stubs! {
        handshake: Streaming<HandshakeRequest> => Self::HandshakeStream,
        list_flights: Criteria => Self::ListFlightsStream,
        get_flight_info: FlightDescriptor => FlightInfo,
        poll_flight_info: FlightDescriptor => PollInfo,
        get_schema: FlightDescriptor => SchemaResult,
        do_exchange: Streaming<FlightData> => Self::DoExchangeStream,
        do_action: Action => Self::DoActionStream,
        list_actions: Empty => Self::ListActionsStream,
    }

    async fn do_get(&self, _: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        let messages = encode(&self.content, self.path, &self.pool);
        Ok(Response::new(Box::pin(messages.map(|message| message.map_err(Status::from)))))
    }

    /// Replies with the six numbers of a [`Placement`].
    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        let all = request.metadata().contains_key(CHECK_ALL);
        let messages = BatchStream::new(request.into_inner());
        let placement = check(messages, Check::new(self.bytes, all)).await?;
        let numbers = serde_json::json!(to_numbers(placement));
        let reply = PutResult { app_metadata: numbers.to_string().into() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(reply)))))
    }
}

/// Returns the numbers of a placement, for a message.
pub(crate) fn to_numbers(placement: Placement) -> [u64; 6] {
    let Placement { batches, bodies, aligned, realigned_bytes, buffers, in_place } = placement;
    [batches, bodies, aligned, realigned_bytes, buffers, in_place]
}

/// Returns the placement of [`to_numbers`].
pub(crate) fn from_numbers(numbers: [u64; 6]) -> Placement {
    let [batches, bodies, aligned, realigned_bytes, buffers, in_place] = numbers;
    Placement { batches, bodies, aligned, realigned_bytes, buffers, in_place }
}
