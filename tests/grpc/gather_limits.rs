//! Limits of landed messages: their length, and the memory of a connection.

use tonic::Code;
use tonic_rdma::memory::Pool;
use tonic_rdma::{CallConfig, gather};

use crate::gather_support::{Depot, Parcel, both, connect, echo, get, next, put, serve};

const LIMIT: usize = 64 << 20;

#[tokio::test]
async fn a_message_that_is_too_long_fails_as_with_tonic_and_does_not_land() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(100_000), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    let counters = || channel.last_connection().unwrap().counters();
    let pool = Pool::for_sending(LIMIT as u64);

    let parcel = |length| Parcel::new(3, length, &[], Some(&pool));
    let status = put(both(&channel, LIMIT), parcel(100_000)).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    let words = "Error, decoded message length too large: found ";
    assert!(status.message().starts_with(words), "{}", status.message());
    assert!(status.message().ends_with(" bytes, the limit is: 100000 bytes"), "{}", status.message());
    let receipt = put(both(&channel, LIMIT), parcel(99_900)).await.unwrap();
    assert!((99_900..100_100).contains(&receipt.in_place), "{} bytes landed", receipt.in_place);

    let status = get(both(&channel, 50_000), 3, 50_000).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    assert!(status.message().starts_with(words), "{}", status.message());
    assert_eq!(counters().landed_bytes, 0);
    get(both(&channel, 50_000), 3, 49_900).await.unwrap().check();
    assert_eq!(pool.statistics().leased_send, 0, "all was given back");
}

#[tokio::test]
async fn the_default_limit_is_that_of_tonic() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    let client = || gather::GatherBoth::new(channel.clone());
    get(client(), 1, (4 << 20) - 100).await.unwrap().check();
    let status = get(client(), 1, 4 << 20).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    assert!(status.message().ends_with("the limit is: 4194304 bytes"), "{}", status.message());
}

/// A message that does not fit in one segment comes in parts, which tonic copies.
#[tokio::test]
async fn a_message_longer_than_the_budget_is_copied() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let calls = CallConfig::default().connection_limit(1 << 20);
    let channel = connect(address, calls).await;
    let counters = || channel.last_connection().unwrap().counters();
    get(both(&channel, LIMIT), 1, 1_000_000).await.unwrap().check();
    assert_eq!(counters().landed_copied_bytes, 0);
    get(both(&channel, LIMIT), 2, 5 << 20).await.unwrap().check();
    assert!(counters().landed_copied_bytes > 5 << 20);
}

/// A reader may keep all messages. Beyond the budget it gets copies, so its call goes on, and others do.
#[tokio::test]
async fn a_reader_that_keeps_everything_gets_copies_and_stops_no_call() {
    const LENGTH: usize = 200_000;
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default().connection_limit(4 << 20)).await;
    let counters = || channel.last_connection().unwrap().counters();
    let pool = Pool::for_sending(1 << 30);
    let parcels: Vec<_> = (0..100).map(|seed| Parcel::new(seed, LENGTH, &[], Some(&pool))).collect();
    let mut received = echo(both(&channel, LIMIT), tokio_stream::iter(parcels)).await.unwrap();
    let mut kept = Vec::new();
    for _ in 0..100 {
        let parcel = next(&mut received).await.unwrap().unwrap();
        assert_eq!(parcel.receipt().misaligned, 0);
        kept.push(parcel);
    }
    let after = counters();
    assert!(after.decoded_in_place_bytes >= 2 << 20, "{after:?}");
    assert!(after.landed_moved_bytes >= 100 * LENGTH as u64 - (8 << 20), "{after:?}");
    assert_eq!(after.decoded_in_place_bytes + after.landed_moved_bytes, after.landed_bytes);

    // Others, with their own memory and without.
    for seed in 0..30 {
        get(both(&channel, LIMIT), seed, LENGTH).await.unwrap().check();
        get(channel.clone(), seed, LENGTH).await.unwrap().check();
        put(both(&channel, LIMIT), Parcel::new(seed, LENGTH, &[], None)).await.unwrap();
    }

    kept.iter().for_each(Parcel::check);
    kept.clear();
    let before = counters();
    get(both(&channel, LIMIT), 9, LENGTH).await.unwrap().check();
    assert_eq!(counters().landed_moved_bytes, before.landed_moved_bytes, "there is memory again");
}

/// What a handler keeps for a response that nothing reads keeps no other request out.
#[tokio::test]
async fn what_the_server_keeps_leaves_memory_to_other_requests() {
    const LENGTH: usize = 200_000;
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default().connection_limit(1 << 20)).await;
    let channel = connect(address, CallConfig::default()).await;
    let pool = Pool::for_sending(1 << 30);
    let parcels: Vec<_> = (0..2).map(|seed| Parcel::new(seed, LENGTH, &[], Some(&pool))).collect();
    let received = echo(both(&channel, LIMIT), tokio_stream::iter(parcels)).await.unwrap();
    for length in [900_000, LENGTH, 900_000] {
        put(both(&channel, LIMIT), Parcel::new(5, length, &[], Some(&pool))).await.unwrap();
    }
    drop(received);
    support::until(|| pool.statistics().leased_send == 0).await;
}

/// The peer's memory is free again after calls whose messages were never read.
#[tokio::test]
async fn messages_of_dropped_calls_are_given_back() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default().connection_limit(2 << 20)).await;
    let pool = Pool::for_sending(1 << 30);
    for round in 0..20 {
        let parcels: Vec<_> = (0..10).map(|seed| Parcel::new(seed, 150_000, &[], Some(&pool))).collect();
        let mut received = echo(both(&channel, LIMIT), tokio_stream::iter(parcels)).await.unwrap();
        for _ in 0..round % 4 {
            next(&mut received).await.unwrap().unwrap().check();
        }
        drop(received);
    }
    // All of the budget is there.
    get(both(&channel, LIMIT), 1, 2_000_000).await.unwrap().check();
    support::until(|| pool.statistics().leased_send == 0).await;
}
