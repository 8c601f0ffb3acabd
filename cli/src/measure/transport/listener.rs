//! The TCP listener of server processes.

use std::io;
use std::net::Ipv4Addr;

use tonic::transport::server::TcpIncoming;
use tonic_rdma_commands::Failure;

pub(crate) fn listen_error(what: &str, error: io::Error) -> Failure {
    Failure::run(format!("can't listen on {what}")).because(error)
}

/// Listens on a free port of the loopback interface, with nodelay on every connection.
pub(crate) fn tcp_listener() -> Result<TcpIncoming, Failure> {
    let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into());
    Ok(incoming.map_err(|error| listen_error("127.0.0.1", error))?.with_nodelay(Some(true)))
}
