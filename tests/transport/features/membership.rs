//! Endpoints that are added and removed while a channel is in use.

use tokio::sync::mpsc::Sender;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tonic_rdma::BalancedChannel;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use super::balance::is_up;
use support::{Over, Runtime, ScriptedGreeter, outcome, say, until};

type Changes = Sender<Change<&'static str, Endpoint>>;

async fn calls(client: &mut GreeterClient<BalancedChannel>, count: usize) {
    for _ in 0..count {
        assert_eq!(say(client, "hello").await.unwrap(), "hello");
    }
}

#[test]
fn a_change_is_in_force_for_the_next_call() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let over = Over::Rdma;
            let (one, other) = (ScriptedGreeter::new(), ScriptedGreeter::new());
            let (at_one, at_other) = (over.serve(&one, |s| s).await, over.serve(&other, |s| s).await);
            let (channel, changes): (_, Changes) = BalancedChannel::from_changes(4, over.connector());
            let mut client = GreeterClient::new(channel.clone());
            let (code, message) = outcome(say(&mut client, "hello").await).unwrap_err();
            assert_eq!((code, &*message), (Code::Unavailable, "there is no endpoint to call"));

            changes.send(Change::Insert("a", at_one.endpoint())).await.unwrap();
            calls(&mut client, 10).await;
            assert_eq!((one.calls(), other.calls()), (10, 0));

            changes.send(Change::Insert("b", at_other.endpoint())).await.unwrap();
            changes.send(Change::Remove("a")).await.unwrap();
            changes.send(Change::Remove("nobody")).await.unwrap();
            calls(&mut client, 10).await;
            assert_eq!((one.calls(), other.calls()), (10, 10));

            changes.send(Change::Insert("b", at_one.endpoint())).await.unwrap();
            calls(&mut client, 10).await;
            assert_eq!((one.calls(), other.calls()), (20, 10), "another endpoint under the same key");
            assert_eq!(channel.endpoints().len(), 1);

            drop(changes);
            calls(&mut client, 10).await;
        });
    }
}

#[test]
fn an_endpoint_is_connected_before_the_first_call() {
    Runtime::Idle.run(async {
        let running = Over::Rdma.serve(&ScriptedGreeter::new(), |server| server).await;
        let (channel, changes): (_, Changes) = BalancedChannel::from_changes(1, Over::Rdma.connector());
        changes.send(Change::Insert("a", running.endpoint())).await.unwrap();
        until(|| channel.endpoints().len() == 1 && is_up(&channel, 0)).await;
    });
}

#[test]
fn a_call_in_flight_outlives_its_endpoints_removal() {
    Runtime::Idle.run(async {
        let greeter = ScriptedGreeter::new();
        let running = Over::Rdma.serve(&greeter, |server| server).await;
        let (channel, changes): (_, Changes) = BalancedChannel::from_changes(4, Over::Rdma.connector());
        changes.send(Change::Insert("a", running.endpoint())).await.unwrap();
        let mut client = GreeterClient::new(channel.clone());
        let call = tokio::spawn({
            let mut client = client.clone();
            async move { say(&mut client, "hold").await }
        });
        until(|| greeter.held() == 1).await;
        changes.send(Change::Remove("a")).await.unwrap();
        assert_eq!(say(&mut client, "hello").await.unwrap_err().code(), Code::Unavailable);
        greeter.release(1);
        assert_eq!(call.await.unwrap().unwrap(), "held");
    });
}
