//! The connections of gRPC modes to the server process.

use std::net::SocketAddr;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma_commands::Failure;

use crate::compare::modes::mode::Mode;
use crate::compare::server::start_report::Addresses;
use crate::measure::transport::calls::CallChannel;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};

/// Longest time to make a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects in `mode`, which must be a gRPC mode.
pub(crate) async fn connect(
    mode: Mode,
    addresses: &Addresses,
    http2: Http2,
    rdma: Option<&Rdma>,
) -> Result<(CallChannel, Option<RdmaConnection>), Failure> {
    let no_listener = || Failure::run("the server process does not listen for RDMA peers");
    let over_rdma = |address: Option<SocketAddr>| {
        let (rdma, address) = rdma.zip(address).ok_or_else(no_listener)?;
        Ok::<_, Failure>((rdma, endpoint(address, http2)?))
    };
    match mode {
        Mode::GrpcTcp | Mode::GrpcTcpBusy => Ok((tcp(addresses.tcp, http2).await?.into(), None)),
        Mode::GrpcTcpTuned => Ok((tcp(addresses.tcp_tuned, Http2::Tuned).await?.into(), None)),
        Mode::GrpcUds => Ok((uds(addresses, http2).await?.into(), None)),
        Mode::GrpcRdma | Mode::GrpcRdmaGather => {
            // For payloads from the server there is a listener that sends them by reference.
            let gathering = addresses.rdma_gather.filter(|_| mode == Mode::GrpcRdmaGather);
            let (rdma, endpoint) = over_rdma(gathering.or(addresses.rdma))?;
            let (channel, verdict) = rdma.connect(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNative => {
            let (rdma, endpoint) = over_rdma(addresses.native)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNativeGather => {
            let (rdma, endpoint) = over_rdma(addresses.native_gather)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((CallChannel::gathering(channel), Some(verdict)))
        }
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait | Mode::Memcpy => {
            Err(Failure::run(format!("{mode} is not a gRPC mode")))
        }
    }
}

/// Connects over TCP with nodelay.
pub(crate) async fn tcp(address: SocketAddr, http2: Http2) -> Result<Channel, Failure> {
    endpoint(address, http2)?.connect().await.map_err(|error| connect_error("TCP", error))
}

async fn uds(addresses: &Addresses, http2: Http2) -> Result<Channel, Failure> {
    // A zero byte begins an abstract name.
    let name = format!("\0{}", addresses.uds);
    let connector = tower::service_fn(move |_| {
        let name = name.clone();
        async move { UnixStream::connect(name).await.map(TokioIo::new) }
    });
    let endpoint = endpoint(addresses.tcp, http2)?;
    endpoint.connect_with_connector(connector).await.map_err(|error| connect_error("a Unix socket", error))
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Failure::run(format!("bad address {address}")).because(error))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}

fn connect_error(what: &str, error: tonic::transport::Error) -> Failure {
    Failure::run(format!("can't connect to the server process over {what}")).because(error)
}
