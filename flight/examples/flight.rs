//! A Flight server that keeps tables of trips, and a client that puts a table, and gets it back.
//!
//! ```sh
//! cargo run -p tonic-rdma-flight --example flight
//! ```
//!
//! The client says how the batches arrived: where the connection is a native call, every body is aligned and
//! no byte was copied again.
#![allow(clippy::print_stdout, reason = "an example")]

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::types::Float64Type;
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray, cast::AsArray as _};
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest, PollInfo, PutResult,
    SchemaResult, Ticket,
};
use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_flight::{BatchEncoder, BatchStream, FlightClient, FlightServer};

use stubs::flight_stubs;

/// A macro for the calls that the service does not have.
#[path = "../tests/flight/stubs.rs"]
mod stubs;

/// Keeps tables by name. Their batches stay in the memory that they arrived in.
#[derive(Debug)]
struct Tables {
    tables: Mutex<HashMap<String, Vec<RecordBatch>>>,
    pool: Pool,
}

#[tonic::async_trait]
impl FlightService for Tables {
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

    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        let mut messages = request.into_inner();
        let first = messages.next().await.ok_or_else(|| Status::invalid_argument("no message"))??;
        let name = first.flight_descriptor.as_ref().and_then(|descriptor| descriptor.path.first().cloned());
        let name = name.ok_or_else(|| Status::invalid_argument("the first message names no table"))?;
        let mut arriving = BatchStream::new(tokio_stream::once(Ok(first)).chain(messages));
        let mut batches = Vec::new();
        while let Some(batch) = arriving.next().await {
            batches.push(batch?);
        }
        let text = format!("{} batches: {:?}", batches.len(), arriving.placement());
        self.tables.lock().unwrap_or_else(PoisonError::into_inner).insert(name, batches);
        let reply = PutResult { app_metadata: text.into() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(reply)))))
    }

    async fn do_get(&self, request: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        let name = String::from_utf8_lossy(&request.get_ref().ticket).into_owned();
        let tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = tables.get(&name).filter(|batches| !batches.is_empty());
        let batches = batches.cloned().ok_or_else(|| Status::not_found(format!("no table {name}")))?;
        let encoder = BatchEncoder::new(&batches[0].schema(), &self.pool)?;
        let messages = encoder.stream(tokio_stream::iter(batches.into_iter().map(Ok)));
        Ok(Response::new(Box::pin(messages.map(|message| message.map_err(Status::from)))))
    }
}

/// Makes a batch of trips: a city, and the length in kilometres.
fn trips(rows: usize, first: usize) -> Result<RecordBatch, Box<dyn Error>> {
    let cities = ["Lyon", "Kyoto", "Quito"];
    let city: StringArray = (first..first + rows).map(|trip| Some(cities[trip % cities.len()])).collect();
    let length: Float64Array =
        (first..first + rows).map(|trip| (trip % 7 != 0).then_some(trip as f64 / 10.0)).collect();
    let columns: [(&str, ArrayRef); 2] = [("city", Arc::new(city)), ("kilometres", Arc::new(length))];
    Ok(RecordBatch::try_from_iter(columns)?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The server.
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    let tables = Tables { tables: Mutex::default(), pool: Pool::for_sending(256 << 20) };
    let server = RdmaServer::new().add_service(FlightServer::new(tables));
    tokio::spawn(server.serve_with_incoming(incoming));

    // The client.
    let channel = RdmaChannel::connect(format!("http://{address}")).await?;
    let mut client = FlightClient::new(channel.clone());
    if let Some(connection) = channel.last_connection() {
        println!("connection: {} ({})", connection.verdict(), connection.reason());
    }

    let batches = [trips(400_000, 0)?, trips(300_000, 400_000)?];
    let sum: f64 = batches.iter().map(total).sum();
    let pool = Pool::for_sending(256 << 20);
    let encoder = BatchEncoder::new(&batches[0].schema(), &pool)?
        .descriptor(FlightDescriptor::new_path(vec!["trips".to_owned()]));
    let messages = encoder.stream(tokio_stream::iter(batches.into_iter().map(Ok)));
    let mut replies = client.do_put(messages).await?;
    while let Some(reply) = replies.next().await {
        println!("put: {}", String::from_utf8_lossy(&reply?.app_metadata));
    }

    let mut arriving = client.do_get(Ticket::new("trips")).await?;
    let mut found = 0.0;
    while let Some(batch) = arriving.next().await {
        found += total(&batch?);
    }
    println!("got: {:?}", arriving.placement());
    println!("kilometres: {found} of {sum}");
    if found != sum {
        return Err("the table came back changed".into());
    }
    Ok(())
}

fn total(batch: &RecordBatch) -> f64 {
    batch.column(1).as_primitive::<Float64Type>().iter().flatten().sum()
}
