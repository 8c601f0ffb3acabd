//! The end of a connection: in good order, by an abort, and by the death of the peer.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::side::{TIMEOUT, pair, patient, pattern, settings, side};
use crate::endpoint::config::Config;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::negotiate::{Dialer, Listener};
use crate::protocol::AbortCode;
use tokio::net::TcpListener;

/// All that was queued before the close still arrives, though there are far fewer receive buffers.
#[tokio::test]
async fn a_close_sends_what_is_queued() {
    let config = Config::default().receive_slots(16).slot_size(4096);
    let (client, server) = pair(&config, &settings()).await;
    for index in 0..1000_u32 {
        client.queue(&index.to_le_bytes());
    }
    client.endpoint.close();
    server.until("the peer finished", |it| it.finished).await;
    server.with(|it| assert_eq!(it.messages.len(), 1000));
    // The other direction is still open.
    server.send(b"answer");
    client.until("the answer came", |it| it.messages.len() == 1).await;
    server.endpoint.close();
    client.until("the peer finished", |it| it.finished).await;
    for end in [client, server] {
        let handler = std::sync::Arc::downgrade(&end.changed);
        end.with(|it| assert_eq!(it.fault, None));
        drop(end);
        let freed = async {
            while handler.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, freed).await.expect("the connection keeps its handler");
    }
}

/// The thread that polls for all connections survives, and so do the other connections.
#[tokio::test]
async fn a_handler_that_panics_ends_its_connection_only() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    let (other, others) = pair(&Config::default(), &settings()).await;
    client.send_panic();
    for end in [&client, &server] {
        tokio::time::timeout(TIMEOUT, async {
            while end.endpoint.fault().is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("the connection goes on");
    }
    let fault = server.endpoint.fault().unwrap().to_string();
    assert!(fault.contains("code panicked"), "{fault}");
    other.send(b"after");
    others.until("it came", |it| it.messages.len() == 1).await;
}

#[tokio::test]
async fn an_abort_ends_both_ends_with_a_reason() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    client.send(b"before");
    server.until("it came", |it| it.messages.len() == 1).await;
    client.endpoint.abort(AbortCode::RESET);
    for (end, reason) in [(&client, "closed here"), (&server, "reset the connection")] {
        end.until("it ended", |it| it.fault.is_some()).await;
        let fault = end.with(|it| it.fault.clone().unwrap());
        assert!(fault.contains(reason), "{fault}");
        assert!(end.endpoint.fault().is_some());
    }
    // Nothing fails or waits afterwards.
    client.send(b"after");
    client.endpoint.close();
}

/// A peer that never closes is given up after the linger time.
#[tokio::test]
async fn a_close_does_not_wait_for_the_peer_for_ever() {
    let config = Config::default().linger(Duration::from_millis(100));
    let (client, server) = pair(&config, &settings()).await;
    client.endpoint.close();
    client.until("it ended", |it| it.fault.is_some()).await;
    server.until("it ended", |it| it.fault.is_some()).await;
}

const ROLE: &str = "TONIC_RDMA_MESSAGES_TEST_PORT";

/// The child of the next test: offers content to the parent, and stops.
#[test]
fn role_of_a_child() {
    let Ok(port) = std::env::var(ROLE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dialed = Dialer::new(patient()).dial_for_calls("127.0.0.1", port.parse().unwrap(), None).await;
        let Negotiated::Messages(endpoint) = dialed.unwrap() else { panic!("no messages") };
        let side = side(endpoint);
        for id in 0..20 {
            side.offer(id, &[], pattern(4 << 20, id).into(), 0);
        }
        println!("offered");
        std::future::pending::<()>().await;
    });
}

/// The peer is killed while its memory is being read: the connection ends with a reason, and the memory of
/// the fetches goes back.
#[tokio::test]
async fn the_death_of_the_peer_ends_fetches() {
    let mut listener = Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), patient()).unwrap();
    listener.take_native_calls(true);
    let port = listener.local_addr().port().to_string();
    let mut command = tokio_command(&port);
    let mut child = command.spawn().unwrap();
    let Some(Negotiated::Messages(endpoint)) = listener.next_negotiated().await else {
        panic!("no messages")
    };
    let server = side(endpoint);
    server.until("a fetch landed", |it| !it.landed.is_empty()).await;
    child.kill().unwrap();
    child.wait().unwrap();
    server.until("it ended", |it| it.fault.is_some()).await;
    server.with(|it| {
        for (id, content) in &it.landed {
            assert!(*content.as_ref().unwrap() == pattern(4 << 20, *id), "fetch {id}");
        }
        let fault = it.fault.as_ref().unwrap();
        assert!(fault.contains("the peer left"), "{fault}");
    });
}

fn tokio_command(port: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = "endpoint::messages::tests::ends::role_of_a_child";
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ROLE, port);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}
