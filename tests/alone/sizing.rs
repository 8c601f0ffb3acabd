//! The formulas of the book's page "Sizing", beside a server with as many connections. Its budget has room for
//! these and for no byte more, and the refusal of the next one says how much is in use.

use std::time::Duration;

use tonic::transport::Endpoint;
use tonic_rdma::{RdmaChannel, RdmaConnectInfo, RdmaConnector, RdmaIncoming, RdmaServer, Verdict};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Child, Runtime, ScriptedGreeter, announce, config, say};

const PAGE: &str = include_str!("../../docs/book/src/sizing.md");
const CONNECTIONS: u64 = 40;

/// What decides how much a connection takes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    native: bool,
    slots: u64,
    /// In bytes.
    slot_size: u64,
}

impl Sizes {
    /// Returns the bytes of the budget that a connection takes from its beginning.
    fn registered(self) -> u64 {
        let slots = (self.slots * self.slot_size).next_multiple_of(4096);
        slots.max(64 << 10) + if self.native { 516 << 10 } else { 0 }
    }

    /// Returns the descriptors of the connections after the first, at a server with several workers. Each of its
    /// first 32 byte streams has a queue, and so have those of the client if that has several workers, too.
    fn descriptors(self, client: Runtime) -> i64 {
        let (connections, queues) = (CONNECTIONS as i64 - 1, 32 - 1);
        let of_client = if matches!(client, Runtime::MultiThread) { queues } else { 0 };
        2 * connections + if self.native { 0 } else { 3 * queues + of_client }
    }

    /// Returns the row of the page's table.
    fn row(self) -> String {
        let Self { native, slots, slot_size } = self;
        let kind = if native { "native" } else { "drop-in" };
        let (each, all) = (self.registered(), CONNECTIONS * self.registered());
        format!("| {kind} | {slots} | {slot_size} | {each} | {all} |")
    }
}

/// Plays the role of the server. Its settings are in its environment.
pub(crate) fn play() {
    Runtime::MultiThread.run_for_ever(async {
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        announce(incoming.local_addr());
        let service = GreeterServer::new(ScriptedGreeter::new());
        RdmaServer::new().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
}

/// A connection of a client that has made a call.
async fn connect(address: &str, native: bool) -> (RdmaConnectInfo, Box<dyn Send>) {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    if native {
        let channel = RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap();
        let mut client = GreeterClient::new(channel.clone());
        say(&mut client, "hello").await.unwrap();
        return (channel.last_connection().unwrap(), Box::new(channel));
    }
    let connector = RdmaConnector::new().config(config());
    let channel = endpoint.connect_with_connector(connector.clone()).await.unwrap();
    say(&mut GreeterClient::new(channel.clone()), "hello").await.unwrap();
    (connector.last_connection().unwrap(), Box::new(channel))
}

fn descriptors(server: &Child) -> i64 {
    std::fs::read_dir(format!("/proc/{}/fd", server.process.id())).unwrap().count() as i64
}

fn fills_its_budget(sizes: Sizes, client: Runtime) {
    let limit = CONNECTIONS * sizes.registered();
    let variables = [
        format!("RDMA_PINNED_LIMIT={limit}"),
        format!("RDMA_RECEIVE_SLOTS={}", sizes.slots),
        format!("RDMA_SLOT_SIZE={}", sizes.slot_size),
    ];
    let environment: Vec<&str> = ["env"].into_iter().chain(variables.iter().map(String::as_str)).collect();
    let server = Child::start(&environment, "sized");
    super::alone(client, async {
        let mut held = vec![connect(&server.word, sizes.native).await];
        let before = descriptors(&server);
        for number in 2..=CONNECTIONS {
            held.push(connect(&server.word, sizes.native).await);
            let (info, _) = &held[held.len() - 1];
            assert_eq!(info.verdict(), Verdict::Rdma, "connection {number}, {sizes:?}: {}", info.reason());
            assert_eq!(info.is_native(), sizes.native);
        }
        // The device's thread closes copies of descriptors a moment later.
        const FEW: i64 = 3;
        let (wanted, mut grown) = (sizes.descriptors(client), 0);
        for _ in 0..100 {
            grown = descriptors(&server) - before;
            if (grown - wanted).abs() <= FEW {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!((grown - wanted).abs() <= FEW, "{grown} descriptors, {wanted} by the formula: {sizes:?}");
        let (next, _) = connect(&server.word, sizes.native).await;
        assert_eq!(next.verdict(), Verdict::Tcp, "one more than the formula has room for, {sizes:?}");
        let reason = next.reason();
        assert!(reason.contains(&format!("{limit} of {limit} are in use")), "{sizes:?}: {reason}");
        println!("{} {grown} descriptors, {wanted} by the formula", sizes.row());
    });
    assert!(PAGE.contains(&sizes.row()), "docs/book/src/sizing.md lacks {}", sizes.row());
}

#[test]
fn a_connection_of_the_drop_in_takes_what_the_page_says() {
    fills_its_budget(Sizes { native: false, slots: 96, slot_size: 17 << 10 }, Runtime::Idle);
    fills_its_budget(Sizes { native: false, slots: 256, slot_size: 16 << 10 }, Runtime::MultiThread);
}

#[test]
fn a_connection_of_native_calls_takes_what_the_page_says() {
    fills_its_budget(Sizes { native: true, slots: 96, slot_size: 17 << 10 }, Runtime::Idle);
}

/// Receive buffers of less than half a slab do not take a whole one.
#[test]
fn fewer_and_shorter_receive_buffers_take_less() {
    fills_its_budget(Sizes { native: true, slots: 32, slot_size: 17 << 10 }, Runtime::Idle);
    fills_its_budget(Sizes { native: false, slots: 16, slot_size: 8 << 10 }, Runtime::Idle);
}
