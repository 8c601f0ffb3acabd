//! "TLS": mutual TLS, and the information that a service has about its caller.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use super::running::{self, Outcome, ROUNDS, default_runtime};

#[test]
fn both_ends_check_the_certificate_of_the_other() {
    running::run(default_runtime(), async {
        let authority = authority()?;
        let trusted = Certificate::from_pem(authority.pem());
        let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
        let address = incoming.local_addr();
        let service = GreeterServer::new(Inspects);
        tokio::spawn(serve(issue(&authority, "server")?, trusted.clone(), service, incoming));

        let identity = issue(&authority, "worker")?;
        let tls = ClientTlsConfig::new().ca_certificate(trusted).domain_name("server").identity(identity);
        let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?;
        let mut client = GreeterClient::new(endpoint.connect_with_connector(RdmaConnector::new()).await?);
        for round in 0..ROUNDS {
            let reply = client.say_hello(HelloRequest { name: round.to_string() }).await?;
            assert_eq!(reply.into_inner().message, format!("{round}: 1 certificate, over rdma"));
        }
        Ok(())
    });
}

#[rustfmt::skip]
async fn serve(
    identity: Identity,
    authority: Certificate,
    service: GreeterServer<Inspects>,
    incoming: RdmaIncoming,
) -> Outcome {
    let tls = ServerTlsConfig::new().identity(identity).client_ca_root(authority).timeout(Duration::from_secs(10));
    Server::builder().tls_config(tls)?.add_service(service).serve_with_incoming(incoming).await?;
    Ok(())
}

/// A service that answers with the number of the caller's certificates, and the transport of the call.
#[derive(Debug)]
struct Inspects;

#[tonic::async_trait]
impl Greeter for Inspects {
    #[rustfmt::skip]
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        // in a service: whose certificate it is, and what carries the call
        use tonic_rdma::RdmaRequestExt as _;
        let certificates = request.peer_certificates();            // features tls-ring or tls-aws-lc
        let over = request.connection().map(|info| info.verdict());

        let (shown, over) = (certificates.map_or(0, |all| all.len()), over.unwrap());
        let message = format!("{}: {shown} certificate, over {over}", request.get_ref().name);
        Ok(Response::new(HelloReply { message }))
    }

    type ChatStream = tokio_stream::Empty<Result<HelloReply, Status>>;

    async fn chat(&self, _: Request<Streaming<HelloRequest>>) -> Result<Response<Self::ChatStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = CertificateParams::new([])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

fn issue(authority: &CertifiedIssuer<'static, KeyPair>, name: &str) -> Result<Identity, rcgen::Error> {
    let params = CertificateParams::new([name.to_owned()])?;
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, authority)?;
    Ok(Identity::from_pem(certificate.pem(), key.serialize_pem()))
}
