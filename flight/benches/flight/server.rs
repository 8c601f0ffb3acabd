//! The server process, which serves until its standard input ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};

use arrow_flight::flight_service_server::FlightServiceServer;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{RdmaIncoming, RdmaServer};
use tonic_rdma_flight::FlightServer;

use super::content::Content;
use super::options::{Cell, Path};
use super::runtimes::Flavour;
use super::service::{Batches, pool};

/// First argument of the server process.
pub(crate) const ARGUMENT: &str = "server";

/// Windows and frames of HTTP/2 for stock Flight, in bytes: those of `compare --http2 tuned`.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 32 << 20;
pub(crate) const FRAME: u32 = 512 << 10;

/// A handle to the server process. Dropping it ends the server.
pub(crate) struct ServerProcess {
    process: Child,
    pub(crate) address: String,
}

impl ServerProcess {
    pub(crate) fn start(cell: Cell) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([ARGUMENT, cell.runtime.name(), cell.path.name(), &cell.bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        Self { process, address: line.trim().to_owned() }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Runs the server process.
pub(crate) fn run(arguments: &[String]) {
    let [runtime, path, bytes] = arguments else { panic!("server RUNTIME PATH BYTES, not {arguments:?}") };
    let (path, bytes) = (Path::from_name(path), bytes.parse().unwrap());
    let (sender, ended) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    Flavour::from_name(runtime).run(async {
        tokio::select! {
            () = serve(path, bytes) => {}
            _ = ended => {}
        }
    });
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
            let server = Server::builder()
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_frame_size(FRAME);
            let mut server = server;
            server.add_service(flight).serve_with_incoming(incoming).await.unwrap();
        }
    }
}
