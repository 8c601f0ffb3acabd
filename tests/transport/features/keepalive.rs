//! HTTP/2's keepalive finds a peer that hangs, here a stopped process.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use support::{Child, Over, ScriptedGreeter, outcome, say, unchanged, until};

const OFTEN: Duration = Duration::from_millis(200);

fn stop(peer: &Child) {
    let process = Pid::from_raw(peer.process.id().try_into().unwrap()).unwrap();
    kill_process(process, Signal::STOP).unwrap();
}

async fn start(role: String) -> Child {
    tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap()
}

/// Makes calls until one is answered.
async fn until_ok(client: &mut GreeterClient<tonic::transport::Channel>) {
    while let Err(status) = say(client, "hello").await {
        assert!([Code::Unavailable, Code::Cancelled].contains(&status.code()), "{status}");
        tokio::time::sleep(OFTEN).await;
    }
}

#[test]
fn a_client_notices_a_server_that_hangs() {
    let outcome = unchanged(async |over: Over| {
        let server = start(format!("serve {over:?} 127.0.0.1:0")).await;
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", server.word)).unwrap();
        let endpoint = endpoint.http2_keep_alive_interval(OFTEN).keep_alive_timeout(5 * OFTEN);
        let mut client = GreeterClient::new(over.connect(endpoint).await.unwrap());
        // A busy machine may keep the server from an answer to a ping, and then the channel connects again.
        until_ok(&mut client).await;
        let call = tokio::spawn(async move { outcome(say(&mut client, "hold").await) });
        stop(&server);
        call.await.unwrap()
    });
    assert_eq!(outcome.unwrap_err().0, Code::Unavailable);
}

#[test]
fn a_server_notices_a_client_that_hangs() {
    let dropped = unchanged(async |over: Over| {
        let greeter = ScriptedGreeter::new();
        let running = over
            .serve(&greeter, |server| {
                server.http2_keepalive_interval(Some(OFTEN)).http2_keepalive_timeout(Some(5 * OFTEN))
            })
            .await;
        let client = start(format!("hold {over:?} {}", running.address)).await;
        until(|| greeter.held() == 1).await;
        stop(&client);
        until(|| greeter.held() == 0).await;
        // More than one if the client was once too slow for a ping, and then made another call.
        greeter.dropped() > 0
    });
    assert!(dropped);
}
