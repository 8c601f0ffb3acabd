#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

fn source(last: u8) -> Source {
    Source::from(IpAddr::from([10, 0, 0, last]))
}

/// Takes a free slot for a client that keeps this side waiting.
async fn waiting(slots: &Arc<ClientSlots>, of: u8) -> ClientSlot {
    let slot = slots.take(source(of)).await.unwrap();
    slot.waits();
    // The times of two waits differ.
    std::thread::sleep(Duration::from_millis(1));
    slot
}

/// Begins to take a slot, and returns once a client was told to leave, or none can be.
async fn taking(
    slots: &Arc<ClientSlots>,
    of: u8,
) -> tokio::task::JoinHandle<Result<ClientSlot, TooManyWaiters>> {
    let slots = Arc::clone(slots);
    let taking = tokio::spawn(async move { slots.take(source(of)).await });
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    taking
}

fn is_lost(slot: &ClientSlot) -> bool {
    slot.works() == Err(SlotLost)
}

#[tokio::test]
async fn a_new_client_takes_the_slot_of_the_oldest_of_the_address_with_most() {
    let slots = ClientSlots::new(4, Duration::ZERO, 2);
    let other = waiting(&slots, 2).await;
    let first = waiting(&slots, 1).await;
    let second = waiting(&slots, 1).await;
    let third = waiting(&slots, 1).await;
    let taking = taking(&slots, 3).await;
    first.lost().await;
    assert!(!is_lost(&other) && !is_lost(&second) && !is_lost(&third));
    assert!(!taking.is_finished(), "the slot is not free yet");
    drop(first);
    taking.await.unwrap().unwrap();
}

#[tokio::test]
async fn among_addresses_with_one_slot_each_the_oldest_leaves() {
    let slots = ClientSlots::new(2, Duration::ZERO, 2);
    let (first, second) = (waiting(&slots, 1).await, waiting(&slots, 2).await);
    let _taking = taking(&slots, 3).await;
    assert!(is_lost(&first) && !is_lost(&second));
}

#[tokio::test]
async fn a_client_that_this_end_works_for_keeps_its_slot() {
    let slots = ClientSlots::new(2, Duration::ZERO, 2);
    let working = [waiting(&slots, 1).await, waiting(&slots, 1).await];
    working.iter().for_each(|slot| slot.works().unwrap());
    let taking = taking(&slots, 2).await;
    assert!(!is_lost(&working[0]) && !is_lost(&working[1]));
    // Once this side waits for one of them again, that one leaves.
    working[1].waits();
    working[1].lost().await;
    drop(working);
    taking.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_has_some_time_before_it_loses_its_slot() {
    let least = Duration::from_millis(20);
    let slots = ClientSlots::new(1, least, 2);
    let since = Instant::now();
    let first = waiting(&slots, 1).await;
    let taking = taking(&slots, 2).await;
    first.lost().await;
    assert!(since.elapsed() >= least);
    drop(first);
    taking.await.unwrap().unwrap();
}

/// No more clients leave than slots are wanted, although each change wakes each client that waits.
#[tokio::test]
async fn one_client_leaves_for_each_that_comes() {
    let slots = ClientSlots::new(4, Duration::ZERO, 8);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(waiting(&slots, 1).await);
    }
    let waiters = [taking(&slots, 2).await, taking(&slots, 3).await];
    held.iter().for_each(ClientSlot::waits);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(held.iter().filter(|slot| is_lost(slot)).count(), 2);
    held.retain(|slot| !is_lost(slot));
    for taker in waiters {
        taker.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn one_address_leaves_half_of_the_queue_to_others() {
    let slots = ClientSlots::new(1, Duration::ZERO, 4);
    let _busy = slots.take(source(1)).await.unwrap();
    let _waiting = [taking(&slots, 1).await, taking(&slots, 1).await];
    assert_eq!(slots.take(source(1)).await.unwrap_err(), TooManyWaiters);
    let _others = [taking(&slots, 2).await, taking(&slots, 2).await];
    assert_eq!(slots.take(source(3)).await.unwrap_err(), TooManyWaiters);
}

/// Takes as many slots as a source gets.
fn fill(slots: &Arc<ClientSlots>, source: Source) -> Vec<ClientSlot> {
    std::iter::from_fn(|| slots.try_take(source)).collect()
}

#[test]
fn whoever_holds_most_leaves_slots_to_others() {
    let slots = ClientSlots::shared(60, Duration::ZERO, 2);
    // None of these clients keeps this side waiting, so each keeps its slot.
    let mut held = Vec::new();
    for (of, count) in [(1, 40), (2, 10), (3, 5), (4, 3), (5, 1), (6, 1)] {
        let slots = fill(&slots, source(of));
        assert_eq!(slots.len(), count, "of source {of}");
        held.push(slots);
    }
    // Whatever is free goes to those who hold less.
    held[0].truncate(30);
    assert!(slots.try_take(source(1)).is_none());
    assert_eq!(fill(&slots, source(7)).len(), 5);
}

/// A user has many addresses within its host, and containers of one user number have an address each.
#[test]
fn the_addresses_and_the_containers_of_one_user_leave_slots_to_other_users() {
    let slots = ClientSlots::shared(60, Duration::ZERO, 2);
    let of = |last, user, untrusted| source(last).with_owner(DeviceOwner::new(user, untrusted));
    let mut held: Vec<_> = (1..=20).flat_map(|last| fill(&slots, of(last, 1000, true))).collect();
    assert_eq!(held.len(), 50);
    held.extend(fill(&slots, of(1, 1000, false)));
    assert_eq!(held.len(), 55, "this user is not the same as an untrusted user of its number");
    assert!(slots.try_take(of(1, 7, true)).is_some());
    let loopback = |last| Source::from(IpAddr::from([127, 0, 0, last])).with_owner(DeviceOwner::new(7, true));
    assert_eq!(loopback(1), loopback(2));
}

#[tokio::test]
async fn no_client_leaves_for_a_source_that_has_more() {
    let slots = ClientSlots::new(3, Duration::ZERO, 4);
    let working = [waiting(&slots, 1).await, waiting(&slots, 1).await];
    working.iter().for_each(|slot| slot.works().unwrap());
    let other = waiting(&slots, 2).await;
    let _taking = taking(&slots, 1).await;
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
async fn a_client_keeps_its_slot_for_the_time_that_its_device_has() {
    let slots = ClientSlots::new(2, Duration::ZERO, 2);
    let first = slots.take(source(1)).await.unwrap();
    first.waits_for(Duration::from_secs(600));
    let second = waiting(&slots, 1).await;
    let _taking = taking(&slots, 2).await;
    assert!(is_lost(&second) && !is_lost(&first));
}

/// The processes of one user start at the same time, on a machine that is busy: each answers late, but does
/// answer.
#[tokio::test]
async fn a_burst_of_one_source_displaces_nobody_while_slots_are_free() {
    let least = Duration::from_secs(2);
    let slots = ClientSlots::shared(64, least, 320);
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..60 {
        let slots = Arc::clone(&slots);
        clients.spawn(async move {
            let slot = slots.take(source(1)).await.unwrap();
            slot.waits();
            tokio::time::sleep(least * 3 / 2).await;
            !is_lost(&slot)
        });
    }
    assert_eq!(clients.join_all().await.into_iter().filter(|answered| *answered).count(), 60);
}
