//! What carries a call.

use std::net::SocketAddr;

use pyo3::prelude::*;
use tonic_rdma::RdmaConnectInfo;

/// What carries a channel's calls, or a call at a server.
#[pyclass(frozen, get_all, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Connection {
    verdict: String,
    reason: String,
    native: bool,
    in_process: bool,
    device: Option<String>,
    provider: Option<&'static str>,
    tls: bool,
    peer: String,
    local: String,
}

impl Connection {
    pub(crate) fn new(info: &RdmaConnectInfo, tls: bool) -> Self {
        Self {
            verdict: info.verdict().to_string(),
            reason: info.reason().to_owned(),
            native: info.is_native(),
            in_process: info.is_in_process(),
            device: info.device().map(str::to_owned),
            provider: info.provider(),
            tls,
            peer: peer(info.peer_addr()),
            local: peer(info.local_addr()),
        }
    }
}

/// Returns an address as gRPC writes it.
pub(crate) fn peer(address: SocketAddr) -> String {
    match address {
        SocketAddr::V4(address) => format!("ipv4:{address}"),
        SocketAddr::V6(address) => match address.ip().to_ipv4_mapped() {
            Some(ip) => format!("ipv4:{ip}:{}", address.port()),
            None => format!("ipv6:{address}"),
        },
    }
}

#[pymethods]
impl Connection {
    fn __repr__(&self) -> String {
        format!("<Connection over {}, because {}>", self.verdict, self.reason)
    }
}
