//! Limits of landed messages: their length, and the memory of a connection.

use tonic::Code;
use tonic_rdma::memory::Pool;
use tonic_rdma::{CallConfig, gather};

use crate::gather_support::{Depot, Parcel, both, connect, echo, get, next, put, serve};
use support::within;

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
    let calls = CallConfig::default().landing_budget(1 << 20);
    let channel = connect(address, calls).await;
    let counters = || channel.last_connection().unwrap().counters();
    get(both(&channel, LIMIT), 1, 1_000_000).await.unwrap().check();
    assert_eq!(counters().landed_copied_bytes, 0);
    get(both(&channel, LIMIT), 2, 5 << 20).await.unwrap().check();
    assert!(counters().landed_copied_bytes > 5 << 20);
}

/// What the application keeps is not the connection's: its call goes on, and so do others.
#[tokio::test]
async fn a_reader_that_keeps_everything_stops_no_call() {
    const LENGTH: usize = 200_000;
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default().landing_budget(4 << 20)).await;
    let pool = Pool::for_sending(1 << 30);
    let parcels: Vec<_> = (0..40).map(|seed| Parcel::new(seed, LENGTH, &[], Some(&pool))).collect();
    let mut received = echo(both(&channel, LIMIT), tokio_stream::iter(parcels)).await.unwrap();
    let mut kept = Vec::new();
    for seed in 0..40 {
        let parcel = within(next(&mut received)).await.unwrap().unwrap();
        assert_eq!(parcel.seed, seed);
        kept.push(parcel);
        // Others, with their own memory and without.
        get(both(&channel, LIMIT), seed, LENGTH).await.unwrap().check();
        get(channel.clone(), seed, LENGTH).await.unwrap().check();
        put(both(&channel, LIMIT), Parcel::new(seed, LENGTH, &[], None)).await.unwrap();
    }
    kept.iter().for_each(Parcel::check);
}

/// The peer's memory is free again after calls whose messages were never read.
#[tokio::test]
async fn messages_of_dropped_calls_are_given_back() {
    let depot = Depot::new(LIMIT);
    let address = serve(&depot, Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default().landing_budget(2 << 20)).await;
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
