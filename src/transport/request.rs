//! The connection of a request, for services and layers, and fields of its headers.

use std::time::Duration;

use http::{Extensions, HeaderMap, HeaderValue, Request};
use tonic::body::Body;
use tonic::transport::server::TcpConnectInfo;
use tower::layer::Layer;
use tower::util::MapRequest;

use crate::endpoint::RdmaConnectInfo;

#[cfg(feature = "_tls-any")]
use std::sync::Arc;

#[cfg(feature = "_tls-any")]
use tonic::transport::CertificateDer;
#[cfg(feature = "_tls-any")]
use tonic::transport::server::TlsConnectInfo;

/// Finds the connection of a request, and the certificates of the client. [`tonic::Request`],
/// [`http::Request`] (the type that layers see), and the extensions of both have these methods.
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
    /// Returns what was negotiated for the connection, with or without TLS. `None` if the request came
    /// through another listener than [`RdmaIncoming`](super::RdmaIncoming).
    fn connection(&self) -> Option<&RdmaConnectInfo>;

    /// Returns the certificates that the client sent in the TLS handshake, in DER, its own first. They were
    /// verified against [`client_ca_root`](tonic::transport::ServerTlsConfig::client_ca_root). `None` without
    /// TLS, and if the client sent no certificate; a handshake without one fails unless
    /// [`client_auth_optional`](tonic::transport::ServerTlsConfig::client_auth_optional) is set.
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

/// A layer for [`Server::layer`](tonic::transport::Server::layer). With this layer, `remote_addr` and
/// `local_addr` of a [`tonic::Request`] return the addresses of the TCP connection that the negotiation used,
/// as they do for tonic's own listeners.
///
/// ```
/// # use tonic::transport::Server;
/// use tonic_rdma::RemoteAddresses;
///
/// let server = Server::builder().layer(RemoteAddresses::new());
/// # drop(server);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct RemoteAddresses;

impl RemoteAddresses {
    /// Makes the layer.
    ///
    /// ```
    /// let layer = tonic_rdma::RemoteAddresses::new();
    /// # drop(layer);
    /// ```
    pub fn new() -> Self {
        Self
    }
}

impl<S> Layer<S> for RemoteAddresses {
    type Service = MapRequest<S, fn(Request<Body>) -> Request<Body>>;

    fn layer(&self, service: S) -> Self::Service {
        MapRequest::new(service, with_addresses)
    }
}

fn with_addresses(mut request: Request<Body>) -> Request<Body> {
    if let Some(info) = request.connection() {
        let (remote_addr, local_addr) = (Some(info.peer_addr()), Some(info.local_addr()));
        request.extensions_mut().insert(TcpConnectInfo { local_addr, remote_addr });
    }
    request
}

/// Returns the field `name`, which is in lower case. The headers of a call have few fields, and comparing
/// their names costs less than the hash of one.
pub(crate) fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a HeaderValue> {
    /// Most fields that are compared.
    const FEW: usize = 8;
    if headers.len() > FEW {
        return headers.get(name);
    }
    headers.iter().find(|(other, _)| other.as_str() == name).map(|(_, value)| value)
}

/// Returns the time in the field `grpc-timeout`: at most 8 digits and a unit (gRPC over HTTP/2). `None` if
/// there is no such field, or if it has something else, which tonic ignores, too.
pub fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    /// Most digits.
    const DIGITS: usize = 8;
    let (unit, digits) = field(headers, "grpc-timeout")?.as_bytes().split_last()?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod fields_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn timeouts_are_read_as_the_specification_writes_them() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("42S"), Some(Duration::from_secs(42)));
        assert_eq!(read("13m"), Some(Duration::from_millis(13)));
        assert_eq!(read("250000u"), Some(Duration::from_millis(250)));
        assert_eq!(read("99999999n"), Some(Duration::from_nanos(99_999_999)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", "1 S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
    }

    #[test]
    fn a_field_is_found_among_few_and_among_many() {
        let mut headers = HeaderMap::new();
        for number in 0..20 {
            assert!(field(&headers, "grpc-timeout").is_none());
            headers.append("te", HeaderValue::from(number));
        }
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_static("1S"));
        for number in 0..20 {
            headers.append("grpc-timeout", HeaderValue::from(number));
            headers.append("te", HeaderValue::from(number));
            assert_eq!(field(&headers, "grpc-timeout").unwrap(), "1S", "the first value");
        }
    }
}
