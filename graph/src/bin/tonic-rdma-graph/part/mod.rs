//! A process that runs a part of a model: for the command that started it, or for a command on another host.

mod checks;
mod running;
mod service;
mod tally;

use std::io;

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use crate::control::proto::part_server::PartServer;
use crate::options::ServeOptions;
use service::PartService;
use tonic_rdma_commands::{Failure, process};

/// The first words of the line in which a part says where it listens.
pub(crate) const LISTENING: &str = "listening on ";
/// The largest message of a coordinator: a piece of a model, or the digests of all crossing tensors.
const LARGEST: usize = 64 << 20;

/// Serves coordinators, one at a time, until the process is ended.
pub(crate) fn serve(options: &ServeOptions) -> Result<(), Failure> {
    if let Some(parent) = options.parent {
        process::end_with(parent)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::run("can't start threads").because(error))?;
    runtime.block_on(listen(options))
}

async fn listen(options: &ServeOptions) -> Result<(), Failure> {
    let address = options.listen;
    let refused = |error: &io::Error| {
        Failure::usage(format!(
            "--listen {address}: {error}; choose an address of this machine and a free port"
        ))
    };
    let listener = TcpListener::bind(address).await.map_err(|error| refused(&error))?;
    let address = listener.local_addr().map_err(|error| refused(&error))?;
    process::report_line(format!("{LISTENING}{address}"))?;
    let service = PartServer::new(PartService::new(address.ip())).max_decoding_message_size(LARGEST);
    Server::builder()
        .tcp_nodelay(true)
        .add_service(service)
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .map_err(|error| Failure::run(format!("can't serve at {address}")).because(error))
}
