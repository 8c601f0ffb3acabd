//! Large messages both ways without a copy: content, alignment, counters, streams.

use tokio_stream::StreamExt as _;
use tonic::transport::Endpoint;
use tonic_rdma::memory::Pool;
use tonic_rdma::{CallConfig, Config, RdmaChannel, gather};

use crate::gather_support::{Depot, Parcel, Receipt, both, connect, echo, get, next, put, serve, tasks};
use support::Runtime;

const LIMIT: usize = 256 << 20;

/// Lengths around the shortest message that lands, around the lengths of READs and of copied pieces, and long
/// ones.
const SIZES: [usize; 12] =
    [0, 1, 4000, 4095, 4096, 4097, 65_536, 100_003, 262_145, (1 << 20) + 7, (3 << 20) + 11, (20 << 20) + 1];

async fn depot() -> (Depot, RdmaChannel) {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    (depot, connect(address, CallConfig::default()).await)
}

#[test]
fn every_size_arrives_whole_both_ways_in_every_runtime() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (_depot, channel) = depot().await;
            let pool = Pool::for_sending(256 << 20);
            for (&length, seed) in SIZES.iter().zip(1..) {
                for memory in [None, Some(&pool)] {
                    let receipt =
                        put(both(&channel, LIMIT), Parcel::new(seed, length, &[], memory)).await.unwrap();
                    assert_eq!((receipt.seed, receipt.length), (seed, length as u64));
                }
                let parcel = get(both(&channel, LIMIT), seed, length).await.unwrap();
                assert_eq!((parcel.seed, parcel.first.len()), (seed, length));
                parcel.check();
            }
            assert_eq!(pool.statistics().leased_send, 0, "all was given back");
        });
    }
}

#[tokio::test]
async fn registered_fields_are_copied_at_neither_end_and_are_aligned() {
    let (_depot, channel) = depot().await;
    let pool = Pool::for_sending(64 << 20);
    let client = || channel.last_connection().unwrap().counters();
    for length in [4096, 5000, 70_000, (1 << 20) + 1, 8 << 20] {
        for seed in 0..3 {
            // The parcel's prefix and its small fields have different lengths, so the field lies in different
            // places of the message.
            let seed = 1_u64 << (seed * 20);
            let (before, bytes) = (client(), length as u64);
            let receipt =
                put(both(&channel, LIMIT), Parcel::new(seed, length, &[], Some(&pool))).await.unwrap();
            assert_eq!((receipt.length, receipt.misaligned), (bytes, 0));
            let after = client();
            assert_eq!(after.offered_in_place_bytes - before.offered_in_place_bytes, bytes, "{length}");
            assert_eq!((after.offered_copied_bytes, receipt.copied), (0, 0), "{length}");
            assert_eq!(receipt.in_place, after.offered_in_place_bytes + small_parts(after, receipt.in_place));

            let parcel = get(both(&channel, LIMIT), seed, length).await.unwrap();
            parcel.check();
            assert_eq!((parcel.receipt().length, parcel.receipt().misaligned), (bytes, 0));
            let last = client();
            assert!(last.decoded_in_place_bytes - after.decoded_in_place_bytes >= bytes, "{length}");
            assert_eq!(last.landed_copied_bytes, 0, "{length}");
        }
    }
    let last = put(both(&channel, LIMIT), Parcel::new(1, 0, &[], None)).await.unwrap();
    assert_eq!(last.offered_copied, 0, "the server copied nothing");
    assert!(last.offered > 3 * (8 << 20));
}

/// A handler that waits for its request's content is polled once more where the call was found, because a
/// poll of the queue brings the content.
#[test]
fn requests_that_land_at_once_become_no_tasks() {
    for runtime in [Runtime::CurrentThread, Runtime::Idle] {
        runtime.run(async {
            let depot = Depot::new(LIMIT);
            let pool = Pool::for_sending(64 << 20);
            let mut in_place = Vec::new();
            for polls in [true, false] {
                let config = CallConfig::default().poll_in_place(polls);
                let address = serve(&depot, Some(LIMIT), config).await;
                let channel = connect(address, CallConfig::default()).await;
                let put = |seed| put(both(&channel, LIMIT), Parcel::new(seed, 65_536, &[], Some(&pool)));
                put(0).await.unwrap();
                let mut count = 0;
                for seed in 1..100 {
                    let before = tasks();
                    let receipt = put(seed).await.unwrap();
                    assert_eq!((receipt.length, receipt.copied), (65_536, 0));
                    count += u64::from(receipt.tasks == before);
                }
                in_place.push(count);
            }
            // A machine that is busy may make the method slow, and then its calls become tasks.
            assert!(in_place[0] > 0 && in_place[1] == 0, "{in_place:?}");
        });
    }
}

/// Returns the bytes of `in_place` that are prefixes and small fields: a few for each message.
fn small_parts(client: tonic_rdma::CounterSnapshot, in_place: u64) -> u64 {
    let small = in_place - client.offered_in_place_bytes;
    assert!(small < 15 * 100, "{small} bytes");
    small
}

#[tokio::test]
async fn a_message_with_several_large_fields_lands_in_one_piece() {
    let (_depot, channel) = depot().await;
    let pool = Pool::for_sending(64 << 20);
    for (first, more) in [
        (10_000, vec![20_000, 5000]),
        (20_000, vec![10_000, 100, 4096, 0, 20_000]),
        (0, vec![5000; 40]),
        (100_000, vec![10; 100]),
    ] {
        for memory in [None, Some(&pool)] {
            let parcel = Parcel::new(77, first, &more, memory);
            let receipt = put(both(&channel, LIMIT), parcel).await.unwrap();
            assert_eq!((receipt.misaligned, receipt.together), (0, true), "{first} {more:?}");
        }
    }
}

#[test]
fn streams_keep_their_messages_apart_both_ways_in_every_runtime() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (_depot, channel) = depot().await;
            let pool = Pool::for_sending(512 << 20);
            let parcels = move |seed: u64| {
                let length = SIZES[seed as usize % SIZES.len()].min(1 << 20);
                Parcel::new(seed, length, &[17, length / 2], seed.is_multiple_of(2).then_some(&pool))
            };
            let sent = parcels.clone();
            let mut received =
                echo(both(&channel, LIMIT), tokio_stream::iter(0..60).map(sent)).await.unwrap();
            for seed in 0..60 {
                let parcel = next(&mut received).await.unwrap().unwrap();
                assert!(parcel == parcels(seed), "parcel {seed} differs");
            }
            assert!(next(&mut received).await.is_none());
        });
    }
}

#[tokio::test]
async fn calls_at_the_same_time_keep_their_messages_apart() {
    let (_depot, channel) = depot().await;
    let pool = Pool::for_sending(512 << 20);
    let calls = (0..64_u64).map(|seed| {
        let (channel, pool) = (channel.clone(), pool.clone());
        tokio::spawn(async move {
            let length = 3000 + 1777 * seed as usize;
            let receipt =
                put(both(&channel, LIMIT), Parcel::new(seed, length, &[], Some(&pool))).await.unwrap();
            assert_eq!((receipt.seed, receipt.length), (seed, length as u64));
            get(both(&channel, LIMIT), seed, length).await.unwrap().check();
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
}

/// Returns how often this thread has met a page that had no memory.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The fields after the name, which is in parentheses: state, parent, group, session, terminal, its group,
    // flags, minor faults.
    let after_name = stat.rsplit(')').next().unwrap();
    after_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[tokio::test]
async fn messages_after_the_first_land_in_memory_that_was_used_before() {
    const LENGTH: usize = 16 << 20;
    let (_depot, channel) = depot().await;
    let pool = Pool::for_sending(64 << 20);
    let parcel = Parcel::new(5, LENGTH, &[], Some(&pool));
    let mut before = 0;
    for round in 0..10 {
        if round == 2 {
            before = page_faults();
        }
        let receipt = put(both(&channel, LIMIT), parcel.clone()).await.unwrap();
        assert_eq!((receipt.length, receipt.misaligned), (LENGTH as u64, 0));
    }
    let faults = page_faults() - before;
    // New memory for each would be 32 768 pages of 4 KiB.
    assert!(faults < 1000, "{faults} page faults");
}

/// Landed messages may outlive their call, their channel and the server.
#[tokio::test]
async fn messages_stay_when_their_connection_ends() {
    let parcels = {
        let (_depot, channel) = depot().await;
        let mut parcels: Vec<Parcel> = Vec::new();
        for seed in 0..5 {
            parcels.push(get(both(&channel, LIMIT), seed, 100_000).await.unwrap());
        }
        parcels
    };
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    parcels.iter().for_each(Parcel::check);
}

/// Without a native connection the same wrappers decode as tonic does.
#[tokio::test]
async fn the_wrappers_work_over_http2() {
    let depot = Depot::new(LIMIT);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = tonic::transport::Server::builder().layer(gather::GatherBothLayer::new()).add_service(depot);
    tokio::spawn(server.serve_with_incoming(incoming));
    // The variables of a run over a device may require RDMA.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = RdmaChannel::builder(endpoint).config(Config::default()).connect().await.unwrap();
    assert!(!channel.last_connection().unwrap().is_native());
    for (&length, seed) in SIZES.iter().zip(1..) {
        // The default limit is that of messages that land.
        let receipt = put(gather::GatherBoth::new(channel.clone()), Parcel::new(seed, length, &[], None))
            .await
            .unwrap();
        assert_eq!(receipt, Receipt { misaligned: receipt.misaligned, ..receipt.clone() });
        assert_eq!((receipt.seed, receipt.length, receipt.in_place), (seed, length as u64, 0));
        get(gather::GatherBoth::new(channel.clone()), seed, length).await.unwrap().check();
    }
}

/// A channel that must not show its pool to the server copies the content.
#[tokio::test]
async fn content_of_a_pool_is_copied_if_the_channel_says_so() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default().send_in_place(false)).await;
    let pool = Pool::for_sending(1 << 24);
    put(gather::GatherBoth::new(channel.clone()), Parcel::new(1, 1 << 20, &[], Some(&pool))).await.unwrap();
    let counters = channel.last_connection().unwrap().counters();
    assert_eq!(counters.offered_in_place_bytes, 0);
    assert!(counters.offered_copied_bytes >= 1 << 20, "{counters:?}");
}
