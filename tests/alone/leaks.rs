//! Servers and channels that ended leave no descriptors, mappings, tasks or threads.

use tokio::runtime::Handle;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tonic_rdma::{BalancedChannel, RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, Port, Runtime, ScriptedGreeter, config, descriptors_and_mappings, say, settled, until};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_server_that_shut_down_leaves_nothing() {
    super::alone(Runtime::Idle, async {
        let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
        let once = async || {
            let running = Over::Rdma.serve_on(&port, &greeter).await;
            let mut client = Over::Rdma.client(&running).await;
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            running.end().await;
        };
        once().await;
        let (before, tasks, running) = (descriptors_and_mappings(), tasks(), threads());
        for _ in 0..10 {
            once().await;
        }
        settled(before).await;
        until(|| self::tasks() <= tasks).await;
        // The number of threads in the runtime's blocking pool varies. A leak would add one thread each
        // round. Threads of the pool that have nothing to do end after some seconds.
        until(|| threads() < running + 8).await;
    });
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

#[test]
fn a_dropped_balanced_channel_leaves_nothing() {
    super::alone(Runtime::Idle, async {
        let greeter = ScriptedGreeter::new();
        let running = Over::Rdma.serve(&greeter, |server| server).await;
        let closed = Port::reserve();
        let once = async || {
            let channel =
                BalancedChannel::from_list([running.endpoint(), closed.endpoint()], Over::Rdma.connector());
            let mut client = GreeterClient::new(channel.clone());
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            // A call in flight must still finish after the drop of the channel.
            let calls = greeter.calls();
            let held = tokio::spawn(async move { say(&mut client, "hold").await });
            until(|| greeter.calls() > calls).await;
            drop(channel);
            greeter.release(1);
            assert_eq!(held.await.unwrap().unwrap(), "held");
        };
        once().await;
        until(|| tasks() <= 2).await;
        let (before, tasks) = (descriptors_and_mappings(), tasks());
        for _ in 0..10 {
            once().await;
        }
        settled(before).await;
        until(|| self::tasks() <= tasks).await;
    });
}

#[test]
fn removed_endpoints_leave_nothing() {
    super::alone(Runtime::Idle, async {
        let running = Over::Rdma.serve(&ScriptedGreeter::new(), |server| server).await;
        let (channel, changes) = BalancedChannel::from_changes(4, Over::Rdma.connector());
        let mut client = GreeterClient::new(channel);
        let mut once = async |key: u32| {
            changes.send(Change::Insert(key, running.endpoint())).await.unwrap();
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            changes.send(Change::Remove(key)).await.unwrap();
        };
        once(0).await;
        let before = descriptors_and_mappings();
        for key in 1..20 {
            once(key).await;
        }
        settled(before).await;
    });
}

#[test]
fn removed_endpoints_of_native_calls_leave_nothing() {
    super::alone(Runtime::Idle, async {
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
        let server = RdmaServer::new().add_service(GreeterServer::new(ScriptedGreeter::new()));
        tokio::spawn(server.serve_with_incoming(incoming));
        let (channel, changes) = RdmaChannel::balance([]).config(config()).balance_channel(4);
        let mut client = GreeterClient::new(channel.clone());
        let mut once = async |key: u32| {
            changes.send(Change::Insert(key, endpoint.clone())).await.unwrap();
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            changes.send(Change::Remove(key)).await.unwrap();
        };
        once(0).await;
        once(1).await;
        until(|| channel.endpoints().is_empty()).await;
        let (before, tasks) = (descriptors_and_mappings(), tasks());
        for key in 2..20 {
            once(key).await;
        }
        settled(before).await;
        until(|| self::tasks() <= tasks).await;
        assert!(channel.last_connection().unwrap().is_native());
    });
}
