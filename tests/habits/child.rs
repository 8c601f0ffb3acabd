//! What a second process does: serve, or call.

use tonic::transport::{Endpoint, Server};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use super::harness::Over;
use super::peer::{ROLE, say};
use super::service::{self, Habits};
use super::support::Runtime;

/// Nothing when run as a test; in a child, its role.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["serve", over, address] => Runtime::Idle.run_for_ever(serve(named(over), address)),
        ["hold", over, address] => Runtime::Idle.run_for_ever(hold(named(over), address)),
        _ => panic!("unknown role {role}"),
    }
}

fn named(over: &str) -> Over {
    let all = [Over::Stock, Over::Rdma, Over::Fallback];
    all.into_iter().find(|known| format!("{known:?}") == over).unwrap()
}

/// Serves until killed.
async fn serve(over: Over, address: &str) {
    let router = Server::builder().add_service(GreeterServer::new(Habits::new()));
    let running = over.serve_at(address, router).await;
    say(running.address);
    std::future::pending::<()>().await;
}

/// Makes a call that is not answered.
async fn hold(over: Over, address: &str) {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = GreeterClient::new(over.connect(endpoint).await.unwrap());
    say("connected");
    let _ = service::say(&mut client, "hold").await;
}
