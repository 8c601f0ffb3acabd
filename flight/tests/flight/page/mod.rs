//! The code of the book's page on Arrow Flight, compiled.
#![allow(dead_code, reason = "the code is compiled, and the example runs the same calls")]

use arrow_array::RecordBatch;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{FlightData, FlightDescriptor, PutResult, Ticket};
use arrow_schema::SchemaRef;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaChannel, RdmaServer};
use tonic_rdma_flight::{BatchEncoder, FlightClient, FlightServer};

type BoxError = Box<dyn std::error::Error>;

async fn server(service: impl FlightService) -> Result<(), BoxError> {
    // server: FlightServer in place of FlightServiceServer
    RdmaServer::new().add_service(FlightServer::new(service)).serve("0.0.0.0:50051").await?;
    Ok(())
}

async fn client() -> Result<usize, BoxError> {
    let mut rows = 0;
    // client: FlightClient of tonic_rdma_flight
    let mut client = FlightClient::new(RdmaChannel::connect("http://data0:50051").await?);
    let mut batches = client.do_get(Ticket::new("trips")).await?; // a stream of RecordBatch
    while let Some(batch) = batches.next().await {
        rows += batch?.num_rows();
    }
    Ok(rows)
}

#[allow(clippy::let_and_return, reason = "the page has this line")]
fn pool() -> Pool {
    // one pool for the program, with the bytes that are on their way at a time
    let pool = Pool::for_sending(1 << 30);
    pool
}

type Batches = tokio_stream::Iter<std::vec::IntoIter<Result<RecordBatch, FlightError>>>;

fn get(
    schema: SchemaRef,
    pool: Pool,
    batches: Batches,
) -> Result<impl Stream<Item = Result<FlightData, Status>>, FlightError> {
    // a service's do_get
    let encoder = BatchEncoder::new(&schema, &pool)?;
    let messages = encoder.stream(batches).map(|message| message.map_err(Status::from));
    Ok(messages)
}

async fn put(
    client: &mut FlightClient<RdmaChannel>,
    schema: SchemaRef,
    pool: Pool,
    batches: Batches,
) -> Result<Option<PutResult>, FlightError> {
    // a client's put, which names its flight
    let trips = FlightDescriptor::new_path(vec!["trips".to_owned()]);
    let encoder = BatchEncoder::new(&schema, &pool)?.descriptor(trips);
    let mut replies = client.do_put(encoder.stream(batches)).await?;
    replies.next().await.transpose()
}
