//! Quotas and budget, also after a failure.

use super::*;
use crate::VerbsErrorKind;
use crate::memory::Quota;

#[test]
fn quotas_do_not_starve_one_another() {
    let (pool, ..) = pool(PoolSettings { send_quota: 1024, receive_quota: 512, ..small() }, 1 << 20);
    let sends = [(); 2].map(|()| pool.lease(512, Quota::Send).unwrap());
    let error = pool.lease(1, Quota::Send).unwrap_err();
    assert_eq!(error.kind(), VerbsErrorKind::QuotaExhausted);
    let reason = "send quota exhausted: asked for 256 bytes, 1024 of 1024 are leased";
    assert_eq!(error.reason(), reason);
    let kind = pool.allocate(1).unwrap_err().kind();
    assert_eq!(kind, VerbsErrorKind::QuotaExhausted, "buffers are sends");
    let receive = pool.lease(512, Quota::Receive).unwrap();
    let statistics = pool.statistics();
    assert_eq!((statistics.leased_send, statistics.leased_receive), (1024, 512));
    drop((sends, receive));
    let statistics = pool.statistics();
    assert_eq!((statistics.leased_send, statistics.leased_receive), (0, 0));
}

#[test]
fn a_request_beyond_the_quota_is_refused_as_too_large() {
    let (pool, ..) = pool(PoolSettings { receive_quota: 1000, ..small() }, 1 << 30);
    let error = pool.lease(1001, Quota::Receive).unwrap_err();
    assert_eq!(error.to_string(), "1001 bytes are more than the receive quota of 1000 bytes");
    for length in [usize::MAX, isize::MAX as usize, usize::MAX / 2 + 1] {
        let kind = pool.lease(length, Quota::Send).unwrap_err().kind();
        assert_eq!(kind, VerbsErrorKind::TooLarge, "{length}");
    }
}

#[test]
fn pools_share_the_budget_and_its_error_has_advice() {
    let (one, _, budget) = pool(small(), 128 << 10);
    let two = Pool::new(Arc::new(Domain::default()), small(), Arc::clone(&budget));
    let _kept = (one.lease(1, Quota::Send).unwrap(), two.lease(1, Quota::Send).unwrap());
    assert_eq!(budget.available(), 0);
    let error = one.allocate(1).unwrap_err();
    assert_eq!(error.kind(), VerbsErrorKind::NoMemory);
    let numbers = "pinned memory: asked for 4096 bytes, 131072 of 131072 are in use; ";
    assert!(error.reason().starts_with(numbers), "{error}");
    assert!(error.to_string().contains("RDMA_PINNED_LIMIT"), "{error}");
    assert_eq!(one.statistics().leased_send, 256, "a failed request counts against no quota");
}

#[test]
fn slabs_are_smaller_when_the_budget_runs_out() {
    let (pool, _, budget) = pool(small(), (64 << 10) + 24_576);
    let _first = pool.lease(32 << 10, Quota::Send).unwrap();
    let _second = pool.lease(32 << 10, Quota::Send).unwrap();
    let third = pool.lease(10_000, Quota::Send).unwrap();
    assert_eq!((budget.used(), third.capacity()), ((64 << 10) + 16_384, 12_288));
}

/// An extent that was given back lies beside a free range, and neither of the two is long enough.
#[test]
fn free_extents_are_joined_before_anything_is_refused() {
    let (pool, ..) = pool(small(), 64 << 10);
    let _kept = pool.lease(16 << 10, Quota::Send).unwrap();
    drop(pool.lease(24 << 10, Quota::Send).unwrap());
    let joined = pool.lease(32 << 10, Quota::Send).unwrap();
    assert_eq!((joined.capacity(), pool.statistics().slabs), (32 << 10, 1));
    assert_eq!(pool.lease(32 << 10, Quota::Send).unwrap_err().kind(), VerbsErrorKind::NoMemory);
    assert_eq!(pool.statistics().leased_send, 48 << 10);
}

/// If the free extents are too small for the request in total, the pool refuses without joining them, so a
/// refusal is quick.
#[test]
fn free_extents_that_are_too_few_are_not_joined() {
    let (pool, ..) = pool(small(), 64 << 10);
    let _kept = [32 << 10, 24 << 10].map(|length| pool.lease(length, Quota::Send).unwrap());
    drop(pool.lease(256, Quota::Send).unwrap());
    assert_eq!(pool.lease(32 << 10, Quota::Send).unwrap_err().kind(), VerbsErrorKind::NoMemory);
    let hits = pool.statistics().hits;
    let _again = pool.lease(256, Quota::Send).unwrap();
    assert_eq!(pool.statistics().hits, hits + 1, "taken from its stack");
}

#[test]
fn idle_slabs_are_freed_when_the_budget_is_short() {
    let (pool, domain, budget) = pool(small(), 128 << 10);
    drop(pool.lease(100 << 10, Quota::Send).unwrap());
    let block = pool.lease(120 << 10, Quota::Send).unwrap();
    assert_eq!((domain.live(), budget.used()), (1, 120 << 10));
    drop(block);
    pool.trim();
    assert_eq!((domain.live(), budget.used(), pool.statistics().registered), (0, 0, 0));
    assert!(pool.lease(100, Quota::Send).is_ok(), "usable after a trim");
}

#[test]
fn spare_slabs_are_kept_up_to_the_sum_of_the_quotas() {
    let settings = PoolSettings { send_quota: 100 << 10, receive_quota: 100 << 10, ..small() };
    let (pool, domain, budget) = pool(settings, 1 << 30);
    for pages in 9..=25 {
        // Every request is longer than all spare slabs, so none of them is reused.
        drop(pool.lease(pages * 4096, Quota::Send).unwrap());
        assert!(budget.used() <= (200 << 10) + (100 << 10), "{} bytes", budget.used());
    }
    assert!(domain.live() >= 1);
    assert_eq!(budget.used(), pool.statistics().registered);
}

#[test]
fn a_refused_registration_leaks_nothing() {
    let (domain, budget) = (Arc::new(Domain { refuse: true, ..Domain::default() }), Budget::new(1 << 20));
    let pool = Pool::new(domain, small(), Arc::clone(&budget));
    let error = pool.lease(1, Quota::Send).unwrap_err();
    assert!(error.to_string().contains("memory regions"), "{error}");
    assert_eq!((budget.used(), pool.statistics().leased_send, pool.statistics().registered), (0, 0, 0));
}

/// Memory that is preallocated serves exactly the lengths that it is for, in turn, and the pool grows
/// beyond it.
#[test]
fn preallocated_buffers_are_used_in_turn_and_by_their_length_alone() {
    let pool = Pool::for_sending(1 << 30);
    pool.preallocate([300_000, 300_000, 5_000]).unwrap();
    let all = 2 * Pool::preallocated_bytes(300_000) + Pool::preallocated_bytes(5_000);
    let first = pool.statistics();
    assert_eq!((first.slabs, first.preallocated, first.preallocated_used), (1, all, 0));
    assert!(first.registered - all < 4096, "whole pages: {first:?}");
    let address = |length: usize| pool.allocate(length).unwrap().as_ptr();
    let turns = [address(300_000), address(300_000), address(300_000), address(300_000)];
    assert!(turns[0] != turns[1] && turns[..2] == turns[2..], "{turns:?}");
    assert_eq!(pool.statistics().preallocated_used, 2 * Pool::preallocated_bytes(300_000));
    // Another length needs a slab of its own, and so does a third buffer at a time.
    drop(pool.allocate(299_000).unwrap());
    assert_eq!(pool.statistics().slabs, 2);
    let three = [(); 3].map(|()| pool.allocate(300_000).unwrap());
    let small = pool.allocate(5_000).unwrap();
    let last = pool.statistics();
    assert_eq!((last.preallocated_used, last.most_send > all), (all, true), "{last:?}");
    drop((three, small));
    pool.trim();
    let trimmed = pool.statistics();
    assert_eq!((trimmed.slabs, trimmed.registered), (1, first.registered), "what is preallocated stays");
}

#[test]
fn preallocated_memory_goes_with_the_pool_and_its_last_buffer() {
    let (pool, domain, budget) = pool(small(), 1 << 20);
    assert!(pool.preallocate([1 << 20, 1]).is_err(), "more than the budget");
    assert!(pool.preallocate([usize::MAX, 1]).is_err(), "more than there are addresses");
    pool.preallocate([100, 20_000, 100]).unwrap();
    let mut kept = [pool.allocate(100).unwrap(), pool.allocate(20_000).unwrap()];
    assert!(budget.used() > 20_000 && domain.live() == 1);
    drop(pool);
    kept[1].fill(7);
    let [one, two] = kept;
    drop(one);
    assert!(domain.live() == 1 && two.iter().all(|byte| *byte == 7));
    drop(two);
    assert_eq!((budget.used(), domain.live()), (0, 0));
}
