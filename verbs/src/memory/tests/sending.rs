//! Pools for sending: every connection finds their buffers, and registers their slabs for its own device
//! only.

use super::*;
use crate::memory::machinery::{SlabRegistrations, find_sendable};

fn registrations(budget: u64) -> (SlabRegistrations, Arc<Domain>, Arc<Budget>) {
    let (domain, budget) = (Arc::new(Domain::default()), Budget::new(budget));
    (
        SlabRegistrations::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, Arc::clone(&budget)),
        domain,
        budget,
    )
}

#[test]
fn buffers_of_all_pools_for_sending_are_found() {
    let pools = [Pool::for_sending(1 << 20), Pool::for_sending(1 << 20)];
    let buffers = [&pools[0], &pools[1]].map(|pool| pool.allocate(5000).unwrap().freeze());
    for (pool, bytes) in pools.iter().zip(&buffers) {
        assert_eq!(find_sendable(&bytes[7..]).unwrap().as_ptr(), bytes[7..].as_ptr());
        assert_eq!(pool.statistics().frozen, 1);
    }
    assert!(find_sendable(&[0; 100]).is_none());
    let bound = pool(small(), 1 << 20).0.allocate(5000).unwrap().freeze();
    assert!(find_sendable(&bound).is_none(), "a pool with its own domain is not for all connections");
}

#[test]
fn a_slab_is_registered_once_for_local_reading() {
    let (mut registrations, domain, budget) = registrations(1 << 30);
    let pool = Pool::for_sending(64 << 20);
    let leases = [100, 5000, 300_000].map(|length| pool.allocate(length).unwrap().into_lease());
    for lease in &leases {
        let segment = registrations.segment(lease).unwrap();
        assert_eq!((segment.address(), segment.length()), (lease.as_ptr() as u64, lease.len() as u64));
        assert_eq!(segment.lkey(), Lkey(1000), "the domain's key, not the pool's");
    }
    assert_eq!((domain.live(), budget.used()), (1, 2 << 20));
    assert_eq!(domain.last_access(), Access::LOCAL_READ);
    let large = pool.allocate(5 << 20).unwrap().into_lease();
    assert_eq!(registrations.segment(&large).unwrap().lkey(), Lkey(1001));
    assert_eq!((domain.live(), budget.used()), (2, 7 << 20));
}

#[test]
fn slabs_that_the_pool_has_freed_are_deregistered() {
    let (mut registrations, domain, budget) = registrations(1 << 30);
    let pool = Pool::for_sending(64 << 20);
    let lease = pool.allocate(100).unwrap().into_lease();
    registrations.segment(&lease).unwrap();
    drop((lease, pool));
    assert_eq!(domain.live(), 1, "registered memory lives on");
    registrations.prune();
    assert_eq!((domain.live(), budget.used()), (0, 0));
}

#[test]
fn without_budget_nothing_is_registered_and_nothing_fails() {
    let (mut registrations, domain, budget) = registrations(1 << 20);
    let pool = Pool::for_sending(64 << 20);
    let lease = pool.allocate(100).unwrap().into_lease();
    assert!(registrations.segment(&lease).is_none());
    assert!(registrations.segment(&lease).is_none());
    assert_eq!((domain.live(), budget.used()), (0, 0));
}
