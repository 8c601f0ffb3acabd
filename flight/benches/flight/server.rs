//! The server process, which serves until its standard input ends.

use std::time::Duration;

use arrow_flight::flight_service_server::FlightServiceServer;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{RdmaIncoming, RdmaServer};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_flight::FlightServer;

use super::content::Content;
use super::options::{Cell, Path};
use super::service::{Batches, pool};

/// The longest time for a process to start, and for a stream.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Windows and frames of HTTP/2 for stock Flight, in bytes: those of `compare --http2 tuned`.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 32 << 20;
pub(crate) const FRAME: u32 = 512 << 10;

/// Starts the server process. Returns it, and its address. Dropping it ends it.
pub(crate) fn start(cell: Cell) -> (Child, String) {
    let mut command = process::again().unwrap();
    command.arg("server").args(cell.arguments());
    Child::ready("the server", command, LIMIT).unwrap()
}

/// Runs the server process.
pub(crate) fn run(cell: Cell) {
    process::end_with_stdin(|| {}).unwrap();
    cell.runtime.build().unwrap().block_on(serve(cell.path, cell.bytes));
}

async fn serve(path: Path, bytes: usize) {
    let service = Batches { path, bytes, content: Content::new(bytes), pool: pool() };
    match path {
        Path::Ours => {
            let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
            println!("{}", incoming.local_addr());
            let flight = FlightServer::new(service).max_message_size(usize::MAX);
            RdmaServer::new().add_service(flight).serve_with_incoming(incoming).await.unwrap();
        }
        Path::Stock | Path::StockSplit => {
            let incoming =
                TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
            println!("{}", incoming.local_addr().unwrap());
            let flight = FlightServiceServer::new(service).max_decoding_message_size(usize::MAX);
            let mut server = Server::builder()
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_frame_size(FRAME);
            server.add_service(flight).serve_with_incoming(incoming).await.unwrap();
        }
    }
}
