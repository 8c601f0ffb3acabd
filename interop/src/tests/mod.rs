//! All cases over all pairings of transports, faulty servers, and hostile clients.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

// The matrix, which is another program, uses this file too.
#[path = "../matrix/certificates.rs"]
mod certificates;
mod hostile;
mod pairings;
mod tls;
mod wrong_servers;

use tonic::service::Routes;
use tonic::transport::ServerTlsConfig;

use crate::client::tests::run_case;
use crate::client::{CaseError, find};
use crate::server::routes;
use crate::transport::{Listener, Target, Transport};

/// Starts a server in this process, which runs until the runtime ends.
async fn serve(transport: Transport, routes: Routes) -> u16 {
    serve_with(transport, None, routes).await
}

async fn serve_with(transport: Transport, tls: Option<ServerTlsConfig>, routes: Routes) -> u16 {
    let listener = Listener::bind(transport, "127.0.0.1", 0).await.unwrap();
    let port = listener.port();
    tokio::spawn(listener.serve(tls, routes, std::future::pending()));
    port
}

/// Starts the real server.
async fn serve_ours(transport: Transport) -> u16 {
    serve(transport, routes().await.unwrap()).await
}

fn target(port: u16, transport: Transport, require: Transport) -> Target {
    Target {
        host: "127.0.0.1".to_owned(),
        port,
        transport,
        require: Some(require),
        require_device: None,
        host_override: None,
        tls: None,
    }
}

/// Runs a case by name, and returns the reason if it failed.
async fn failure(name: &str, target: &Target) -> Option<String> {
    let case = find(name).unwrap().unwrap();
    match run_case(case, target).await {
        Ok(()) => None,
        Err(CaseError::Failed(reason)) => Some(reason),
        Err(CaseError::Skipped(reason)) => panic!("{name} skipped: {reason}"),
    }
}
