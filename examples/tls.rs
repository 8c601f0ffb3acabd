//! Mutual TLS over RDMA: server and client check the certificate of the other end.
//!
//! `cargo run --example tls` runs both sides in one process. The example makes the certificates itself; a
//! real program loads its own.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use tonic_rdma::{RdmaConnector, RdmaIncoming, RdmaRequestExt as _};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
use x509_parser::prelude::{FromDer as _, X509Certificate};

#[derive(Debug)]
struct MyGreeter;

#[tonic::async_trait]
impl Greeter for MyGreeter {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let certificates = request.peer_certificates();
        let certificate = certificates.as_deref().and_then(|all| all.first());
        let certificate = certificate.ok_or_else(|| Status::unauthenticated("no certificate"))?;
        let who = common_name(certificate).ok_or_else(|| Status::unauthenticated("no common name"))?;
        let over = request.connection().map(|info| info.verdict().to_string()).unwrap_or_default();
        Ok(Response::new(HelloReply { message: format!("Hello {who}, with TLS over {over}!") }))
    }
}

fn common_name(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let name = certificate.subject().iter_common_name().next()?.as_str().ok()?;
    Some(name.to_owned())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let authority = authority()?;
    let trusted = Certificate::from_pem(authority.pem());

    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    let tls = ServerTlsConfig::new()
        .identity(issue(&authority, "server")?)
        .client_ca_root(trusted.clone())
        // Without a timeout the server waits forever for a client that begins a handshake and stops.
        .timeout(Duration::from_secs(10));
    let server = Server::builder().tls_config(tls)?.add_service(GreeterServer::new(MyGreeter));
    tokio::spawn(server.serve_with_incoming(incoming));

    for name in ["worker-0", "worker-1"] {
        let tls = ClientTlsConfig::new().ca_certificate(trusted.clone()).domain_name("server");
        println!("{name}: {}", greet(address, tls.identity(issue(&authority, name)?)).await?);
    }
    let anonymous = ClientTlsConfig::new().ca_certificate(trusted).domain_name("server");
    match greet(address, anonymous).await {
        Ok(said) => return Err(format!("without a certificate: {said}").into()),
        Err(error) => println!("without a certificate: {}", innermost(&*error)),
    }
    Ok(())
}

async fn greet(address: std::net::SocketAddr, tls: ClientTlsConfig) -> Result<String, Box<dyn Error>> {
    let connector = RdmaConnector::new();
    let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?;
    let channel = endpoint.connect_with_connector(connector).await?;
    let request = HelloRequest { name: "a worker".into() };
    Ok(GreeterClient::new(channel).say_hello(request).await?.into_inner().message)
}

/// Makes the authority that signs all certificates.
fn authority() -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = CertificateParams::new([])?;
    params.distinguished_name.push(DnType::CommonName, "the example's authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

fn issue(authority: &CertifiedIssuer<'static, KeyPair>, name: &str) -> Result<Identity, rcgen::Error> {
    let mut params = CertificateParams::new([name.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, authority)?;
    Ok(Identity::from_pem(certificate.pem(), key.serialize_pem()))
}

fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    error.source().map_or(error, innermost)
}
