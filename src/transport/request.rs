//! The connection of a request, for services and layers.

#[cfg(feature = "_tls-any")]
use std::sync::Arc;

use http::{Extensions, Request};
use tonic::body::Body;
#[cfg(feature = "_tls-any")]
use tonic::transport::CertificateDer;
use tonic::transport::server::TcpConnectInfo;
#[cfg(feature = "_tls-any")]
use tonic::transport::server::TlsConnectInfo;
use tower::util::MapRequestLayer;

use crate::endpoint::RdmaConnectInfo;

/// Finds the connection of a request, and the certificates of the client. [`tonic::Request`], [`http::Request`] (the type that layers
/// see), and the extensions of both have these methods.
///
/// ```
/// use tonic::{Request, Response, Status};
/// use tonic_rdma::RdmaRequestExt as _;
/// # struct HelloRequest;
///
/// async fn say_hello(request: Request<HelloRequest>) -> Result<Response<String>, Status> {
///     let connection = request.connection().ok_or_else(|| Status::internal("another listener's request"))?;
///     let certificates = request.peer_certificates();
///     let caller = match certificates.as_deref().and_then(|all| all.first()) {
///         Some(certificate) => format!("client with a certificate of {} bytes", certificate.len()),
///         None => "client without a certificate".to_owned(),
///     };
///     Ok(Response::new(format!("Hello {caller} at {}, over {}!", connection.peer_addr(), connection.verdict())))
/// }
/// # tokio_test(say_hello(Request::new(HelloRequest)));
/// # fn tokio_test<T>(future: impl Future<Output = Result<T, Status>>) {
/// #     let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// #     assert!(runtime.block_on(future).is_err());
/// # }
/// ```
pub trait RdmaRequestExt {
    /// Returns what was negotiated for the connection, with or without TLS. `None` if the request came through another listener than
    /// [`RdmaIncoming`](super::RdmaIncoming).
    fn connection(&self) -> Option<&RdmaConnectInfo>;

    /// Returns the certificates that the client sent in the TLS handshake, in DER, its own first. They were verified against
    /// [`client_ca_root`](tonic::transport::ServerTlsConfig::client_ca_root). `None` without TLS, and if the client sent no certificate; a
    /// handshake without one fails unless [`client_auth_optional`](tonic::transport::ServerTlsConfig::client_auth_optional) is set.
    ///
    /// tonic's own `Request::peer_certs` works with tonic's own listeners only, and returns `None` here.
    #[cfg(feature = "_tls-any")]
    fn peer_certificates(&self) -> Option<Arc<Vec<CertificateDer<'static>>>>;
}

impl RdmaRequestExt for Extensions {
    fn connection(&self) -> Option<&RdmaConnectInfo> {
        self.get()
    }

    #[cfg(feature = "_tls-any")]
    fn peer_certificates(&self) -> Option<Arc<Vec<CertificateDer<'static>>>> {
        self.get::<TlsConnectInfo<RdmaConnectInfo>>()?.peer_certs()
    }
}

impl<T> RdmaRequestExt for tonic::Request<T> {
    fn connection(&self) -> Option<&RdmaConnectInfo> {
        self.extensions().connection()
    }

    #[cfg(feature = "_tls-any")]
    fn peer_certificates(&self) -> Option<Arc<Vec<CertificateDer<'static>>>> {
        self.extensions().peer_certificates()
    }
}

impl<T> RdmaRequestExt for Request<T> {
    fn connection(&self) -> Option<&RdmaConnectInfo> {
        self.extensions().connection()
    }

    #[cfg(feature = "_tls-any")]
    fn peer_certificates(&self) -> Option<Arc<Vec<CertificateDer<'static>>>> {
        self.extensions().peer_certificates()
    }
}

/// The layer that [`remote_addresses`] returns. The layer gives tonic the addresses of each request.
///
/// ```
/// use tonic_rdma::RemoteAddresses;
///
/// let layer: RemoteAddresses = tonic_rdma::remote_addresses();
/// # drop(layer);
/// ```
pub type RemoteAddresses = MapRequestLayer<fn(Request<Body>) -> Request<Body>>;

/// Returns a layer for [`Server::layer`](tonic::transport::Server::layer). With this layer, `remote_addr` and `local_addr` of a
/// [`tonic::Request`] return the addresses of the TCP connection that the negotiation used, as they do for tonic's own listeners.
///
/// ```
/// # use tonic::transport::Server;
/// let server = Server::builder().layer(tonic_rdma::remote_addresses());
/// # drop(server);
/// ```
pub fn remote_addresses() -> RemoteAddresses {
    MapRequestLayer::new(with_addresses as fn(Request<Body>) -> Request<Body>)
}

fn with_addresses(mut request: Request<Body>) -> Request<Body> {
    if let Some(info) = request.connection() {
        let (remote_addr, local_addr) = (Some(info.peer_addr()), Some(info.local_addr()));
        request.extensions_mut().insert(TcpConnectInfo { local_addr, remote_addr });
    }
    request
}
