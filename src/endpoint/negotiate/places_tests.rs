#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

fn source(last: u8) -> Source {
    Source::from(IpAddr::from([10, 0, 0, last]))
}

/// Takes a free place for a client that keeps this end waiting.
async fn waiting(places: &Arc<Places>, of: u8) -> Place {
    let place = places.take(source(of)).await.unwrap();
    place.waits();
    // The times of two waits differ.
    std::thread::sleep(Duration::from_millis(1));
    place
}

/// Begins to take a place, and returns once a client was told to leave, or none can be.
async fn taking(places: &Arc<Places>, of: u8) -> tokio::task::JoinHandle<Result<Place, TooManyWait>> {
    let places = Arc::clone(places);
    let taking = tokio::spawn(async move { places.take(source(of)).await });
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    taking
}

fn is_lost(place: &Place) -> bool {
    place.works() == Err(Lost)
}

#[tokio::test]
async fn a_new_client_takes_the_place_of_the_oldest_of_the_address_with_most() {
    let places = Places::new(4, Duration::ZERO, 2);
    let other = waiting(&places, 2).await;
    let first = waiting(&places, 1).await;
    let second = waiting(&places, 1).await;
    let third = waiting(&places, 1).await;
    let taking = taking(&places, 3).await;
    first.lost().await;
    assert!(!is_lost(&other) && !is_lost(&second) && !is_lost(&third));
    assert!(!taking.is_finished(), "the place is not free yet");
    drop(first);
    taking.await.unwrap().unwrap();
}

#[tokio::test]
async fn among_addresses_with_one_place_each_the_oldest_leaves() {
    let places = Places::new(2, Duration::ZERO, 2);
    let (first, second) = (waiting(&places, 1).await, waiting(&places, 2).await);
    let _taking = taking(&places, 3).await;
    assert!(is_lost(&first) && !is_lost(&second));
}

#[tokio::test]
async fn a_client_that_this_end_works_for_keeps_its_place() {
    let places = Places::new(2, Duration::ZERO, 2);
    let working = [waiting(&places, 1).await, waiting(&places, 1).await];
    working.iter().for_each(|place| place.works().unwrap());
    let taking = taking(&places, 2).await;
    assert!(!is_lost(&working[0]) && !is_lost(&working[1]));
    // Once this end waits for one of them again, that one leaves.
    working[1].waits();
    working[1].lost().await;
    drop(working);
    taking.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_has_some_time_before_it_loses_its_place() {
    let least = Duration::from_millis(20);
    let places = Places::new(1, least, 2);
    let since = Instant::now();
    let first = waiting(&places, 1).await;
    let taking = taking(&places, 2).await;
    first.lost().await;
    assert!(since.elapsed() >= least);
    drop(first);
    taking.await.unwrap().unwrap();
}

/// No more clients leave than places are wanted, although each change wakes each client that waits.
#[tokio::test]
async fn one_client_leaves_for_each_that_comes() {
    let places = Places::new(4, Duration::ZERO, 8);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(waiting(&places, 1).await);
    }
    let takers = [taking(&places, 2).await, taking(&places, 3).await];
    held.iter().for_each(Place::waits);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(held.iter().filter(|place| is_lost(place)).count(), 2);
    held.retain(|place| !is_lost(place));
    for taker in takers {
        taker.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn one_address_leaves_half_of_the_queue_to_others() {
    let places = Places::new(1, Duration::ZERO, 4);
    let _busy = places.take(source(1)).await.unwrap();
    let _waiting = [taking(&places, 1).await, taking(&places, 1).await];
    assert_eq!(places.take(source(1)).await.unwrap_err(), TooManyWait);
    let _others = [taking(&places, 2).await, taking(&places, 2).await];
    assert_eq!(places.take(source(3)).await.unwrap_err(), TooManyWait);
}

/// Takes as many places as a source gets.
fn fill(places: &Arc<Places>, source: Source) -> Vec<Place> {
    std::iter::from_fn(|| places.try_take(source)).collect()
}

#[test]
fn whoever_holds_most_leaves_places_to_others() {
    let places = Places::shared(60, Duration::ZERO, 2);
    // None of these clients keeps this end waiting, so each keeps its place.
    let mut held = Vec::new();
    for (of, count) in [(1, 40), (2, 10), (3, 5), (4, 3), (5, 1), (6, 1)] {
        let places = fill(&places, source(of));
        assert_eq!(places.len(), count, "of source {of}");
        held.push(places);
    }
    // Whatever is free goes to those who hold less.
    held[0].truncate(30);
    assert!(places.try_take(source(1)).is_none());
    assert_eq!(fill(&places, source(7)).len(), 5);
}

/// A user has many addresses within its host, and containers of one user number have an address each.
#[test]
fn the_addresses_and_the_containers_of_one_user_leave_places_to_other_users() {
    let places = Places::shared(60, Duration::ZERO, 2);
    let of = |last, user, stranger| source(last).with_owner(DeviceOwner::new(user, stranger));
    let mut held: Vec<_> = (1..=20).flat_map(|last| fill(&places, of(last, 1000, true))).collect();
    assert_eq!(held.len(), 50);
    held.extend(fill(&places, of(1, 1000, false)));
    assert_eq!(held.len(), 55, "this user is not the same as strangers of its number");
    assert!(places.try_take(of(1, 7, true)).is_some());
    let loopback = |last| Source::from(IpAddr::from([127, 0, 0, last])).with_owner(DeviceOwner::new(7, true));
    assert_eq!(loopback(1), loopback(2));
}

#[tokio::test]
async fn no_client_leaves_for_a_source_that_has_more() {
    let places = Places::new(3, Duration::ZERO, 4);
    let working = [waiting(&places, 1).await, waiting(&places, 1).await];
    working.iter().for_each(|place| place.works().unwrap());
    let other = waiting(&places, 2).await;
    let _taking = taking(&places, 1).await;
    assert!(!is_lost(&other));
}

#[test]
fn an_address_is_what_one_network_has_to_itself() {
    let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap());
    assert_eq!(of("10.0.0.1"), of("::ffff:10.0.0.1"));
    assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:1"));
    assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
}

#[tokio::test]
async fn a_client_keeps_its_place_for_the_time_that_its_device_has() {
    let places = Places::new(2, Duration::ZERO, 2);
    let first = places.take(source(1)).await.unwrap();
    first.waits_for(Duration::from_secs(600));
    let second = waiting(&places, 1).await;
    let _taking = taking(&places, 2).await;
    assert!(is_lost(&second) && !is_lost(&first));
}

/// The processes of one user start at the same time, on a machine that is busy: each answers late, but does answer.
#[tokio::test]
async fn a_burst_of_one_source_displaces_nobody_while_places_are_free() {
    let least = Duration::from_secs(2);
    let places = Places::shared(64, least, 320);
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..60 {
        let places = Arc::clone(&places);
        clients.spawn(async move {
            let place = places.take(source(1)).await.unwrap();
            place.waits();
            tokio::time::sleep(least * 3 / 2).await;
            !is_lost(&place)
        });
    }
    assert_eq!(clients.join_all().await.into_iter().filter(|answered| *answered).count(), 60);
}
