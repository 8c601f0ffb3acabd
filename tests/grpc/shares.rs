//! Connections share the registered memory of a process, and what the process may hold for peers: those that leave
//! content unread take no call's memory from others.

use std::net::SocketAddr;
use std::time::Duration;

use tonic::Code;
use tonic_rdma::gather::GatherCodec;
use tonic_rdma::memory::Pool;
use tonic_rdma::{CallConfig, RdmaChannel, Verdict};

use crate::gather_support::{Depot, Parcel, Receipt, both, connect, get, path, put, serve, stream_to};
use support::{Child, Runtime, announce, config, within};

/// The role of a server; `layered` follows if it takes messages where they land, `copying` if it copies what it
/// sends.
pub(crate) const ROLE: &str = "shares";
const LIMIT: usize = 64 << 20;
const HOSTILE: usize = 3;
const CALLS: usize = 512;
/// The limit on registered memory of most servers.
const PINNED: &str = "RDMA_PINNED_LIMIT=256MiB";
/// The honest peer's messages.
const LENGTH: usize = 4_000_000;

/// Plays the role of a server, whose limit is in its environment.
pub(crate) fn play(role: &str) {
    let landed = role.ends_with("layered").then_some(LIMIT);
    let calls = CallConfig::default().send_in_place(!role.ends_with("copying"));
    Runtime::MultiThread.run_for_ever(async {
        announce(serve(&Depot::new(LIMIT), landed, calls).await);
        std::future::pending::<()>().await;
    });
}

/// Starts a server with the variable `limit`.
async fn start(role: &str, limit: &str) -> (Child, SocketAddr) {
    let (role, limit) = (role.to_owned(), limit.to_owned());
    let server = tokio::task::spawn_blocking(move || Child::start(&["env", &limit], &role)).await.unwrap();
    let address = server.word.parse().unwrap();
    (server, address)
}

/// Waits until no more bytes land for the connection, and none are copied for it, which leaves its calls unread.
async fn settled(channel: &RdmaChannel) {
    let (mut before, mut same) = (0, 0);
    while same < 20 {
        let receipt = match put(channel.clone(), Parcel::new(1, 1, &[], None)).await {
            // The connection has all of its share.
            Err(status) if status.code() == Code::ResourceExhausted => return,
            receipt => receipt.unwrap(),
        };
        let now = receipt.landed + receipt.offered_copied;
        same = if now == before { same + 1 } else { 0 };
        before = now;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn honest_calls_go_on_beside_hostile_ones(role: &str, limit: &str) {
    let (server, address) = start(role, limit).await;
    let early = connect(address, CallConfig::default()).await;
    let pool = Pool::for_sending(64 << 20);
    let unread = Parcel::new(7, 2 << 20, &[], Some(&pool));
    let mut hostile = tokio::task::JoinSet::new();
    for _ in 0..HOSTILE {
        let channel = connect(address, CallConfig::default()).await;
        for _ in 0..CALLS {
            let (channel, parcels) = (both(&channel, LIMIT), tokio_stream::iter(vec![unread.clone(); 4]));
            hostile.spawn(async move {
                // Its calls may fail.
                let _replies = stream_to(path("Hold"), channel, parcels).await;
                std::future::pending::<()>().await;
            });
        }
        settled(&channel).await;
    }

    go_on(address, early).await;
    drop((hostile, server));
}

/// Makes calls on a connection that was there before, and on one that comes now.
async fn go_on(address: SocketAddr, early: RdmaChannel) {
    let pool = Pool::for_sending(64 << 20);
    for honest in [early, connect(address, CallConfig::default()).await] {
        for seed in 0..3 {
            let large = || Parcel::new(seed, LENGTH, &[], Some(&pool));
            put(both(&honest, LIMIT), large()).await.unwrap();
            put(honest.clone(), large()).await.unwrap();
            get(both(&honest, LIMIT), seed, LENGTH).await.unwrap().check();
        }
    }
}

/// What the server copies for connections that do not take it leaves memory to others, and to new connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_calls_go_on_beside_connections_that_take_no_replies() {
    let (server, address) = start("shares copying", PINNED).await;
    let early = connect(address, CallConfig::default()).await;
    let mut hostile = Vec::new();
    for _ in 0..40 {
        let channel = connect(address, CallConfig::default()).await;
        // Of each, the server copies 256 KiB.
        for seed in 0..40 {
            let mut client = tonic::client::Grpc::new(channel.clone());
            client.ready().await.unwrap();
            let wish = Receipt { seed, length: 300_000, ..Receipt::default() };
            let codec = GatherCodec::<Receipt, Parcel>::default();
            let reply = client.server_streaming(tonic::Request::new(wish), path("Get"), codec);
            hostile.push(within(reply).await.unwrap());
        }
        settled(&channel).await;
    }
    go_on(address, early).await;
    drop((hostile, server));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_calls_go_on_beside_connections_that_leave_messages_unread() {
    honest_calls_go_on_beside_hostile_ones("shares layered", PINNED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_calls_go_on_beside_connections_that_leave_parts_unread() {
    honest_calls_go_on_beside_hostile_ones("shares plain", PINNED).await;
}

/// The limit is on all that connections of native calls hold, and three hostile ones want far more of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_calls_go_on_when_the_process_holds_all_that_it_may() {
    for role in ["shares layered", "shares plain"] {
        honest_calls_go_on_beside_hostile_ones(role, "RDMA_HELD_LIMIT=8MiB").await;
    }
}

/// The limit has room for the receive buffers of one connection, and not for its reserve.
#[tokio::test]
async fn a_connection_without_a_reserve_goes_over_tcp_and_says_why() {
    let (_server, address) = start("shares plain", "RDMA_PINNED_LIMIT=2MiB").await;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap();
    let info = channel.last_connection().unwrap();
    assert_eq!(info.verdict(), Verdict::Tcp, "{}", info.reason());
    assert!(info.reason().contains("pinned memory: asked for 528384 bytes"), "{}", info.reason());
    put(channel, Parcel::new(1, LENGTH, &[], None)).await.unwrap();
}
