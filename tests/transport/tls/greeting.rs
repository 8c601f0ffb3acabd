//! A service that answers with the client's name and the kind of connection, and clients of this service.

use std::net::SocketAddr;

use support::{config, within};
use tokio::task::AbortHandle;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use tonic_rdma::{RdmaConnector, RdmaIncoming, RdmaRequestExt as _};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

#[derive(Clone, Debug)]
struct Explaining;

#[tonic::async_trait]
impl Greeter for Explaining {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        // tonic's method must return nothing, because it works only with tonic's own listeners.
        if request.peer_certs().is_some() {
            return Err(Status::internal("tonic's peer_certs has certificates"));
        }
        let certificates = request.peer_certificates();
        let who = certificates.as_deref().and_then(|all| all.first()).map(|certificate| names(certificate));
        let info = request.connection().ok_or_else(|| Status::internal("no connection"))?;
        let tls = if info.is_tls() { "with TLS" } else { "without TLS" };
        let asked = request.remote_addr().map(|address| format!(", from {address}")).unwrap_or_default();
        let who = who.as_deref().unwrap_or("anonymous");
        let message = format!("{who} over {} {tls}{asked}", info.verdict());
        Ok(Response::new(HelloReply { message }))
    }
}

/// Returns the common name and the URIs of a certificate.
fn names(certificate: &[u8]) -> String {
    let (_, certificate) = X509Certificate::from_der(certificate).unwrap();
    let common = certificate.subject().iter_common_name().next().unwrap().as_str().unwrap();
    let alternative = certificate.subject_alternative_name().unwrap().unwrap();
    let uris = alternative.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    format!("{common} ({})", uris.collect::<Vec<_>>().join(", "))
}

/// A running server, stopped on drop.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves greetings. They contain the client's address, which `RemoteAddresses` passes to tonic.
pub(crate) async fn serve(tls: Option<ServerTlsConfig>) -> Running {
    let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let mut server = Server::builder();
    if let Some(tls) = tls {
        server = server.tls_config(tls).unwrap();
    }
    let router = server.layer(tonic_rdma::RemoteAddresses::new()).add_service(GreeterServer::new(Explaining));
    let task = tokio::spawn(router.serve_with_incoming(incoming)).abort_handle();
    Running { address, task }
}

pub(crate) fn endpoint(address: SocketAddr, tls: Option<ClientTlsConfig>) -> Endpoint {
    match tls {
        None => Endpoint::from_shared(format!("http://{address}")).unwrap(),
        Some(tls) => Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap(),
    }
}

/// Returns the answer to one of our clients.
pub(crate) async fn greet(address: SocketAddr, tls: Option<ClientTlsConfig>) -> Result<String, String> {
    let (endpoint, connector) = (endpoint(address, tls), RdmaConnector::new().config(config()));
    within(async {
        let channel = endpoint.connect_with_connector(connector).await.map_err(|error| chain(&error))?;
        ask(channel).await
    })
    .await
}

/// Returns the answer to a stock client.
pub(crate) async fn greet_stock(address: SocketAddr, tls: Option<ClientTlsConfig>) -> Result<String, String> {
    let endpoint = endpoint(address, tls);
    within(async { ask(endpoint.connect().await.map_err(|error| chain(&error))?).await }).await
}

pub(crate) async fn ask(channel: Channel) -> Result<String, String> {
    let request = HelloRequest { name: "client".into() };
    let reply = GreeterClient::new(channel).say_hello(request).await;
    reply
        .map(|reply| reply.into_inner().message)
        .map_err(|status| format!("{:?}: {}", status.code(), chain(&status)))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut causes = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        causes.push(error.to_string());
        cause = error.source();
    }
    causes.join(": ")
}
