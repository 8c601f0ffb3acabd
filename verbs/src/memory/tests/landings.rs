//! Landings: alignment, the way back to the pool, registrations, memory that the device may still write.

use super::*;
use crate::VerbsErrorKind;
use crate::memory::Quota;
use crate::unstable::{Landing, LandingPool};

#[test]
fn the_wanted_byte_is_aligned_and_the_memory_comes_back() {
    let (pool, ..) = pool(PoolSettings::default(), 64 << 20);
    for length in [1, 63, 64, 65, 4096, 100_000, (3 << 20) + 1] {
        for aligned_at in [0, 1, 5, 63, 64, 65, 4097] {
            let mut landing = Landing::lease(&pool, length, aligned_at).unwrap();
            landing.copy_in(length - 1, &[9]).unwrap();
            assert!(landing.copy_in(length, &[9]).is_err(), "beyond the end");
            let bytes = landing.finish().unwrap().into_bytes();
            assert_eq!((bytes.len(), bytes[length - 1]), (length, 9));
            assert_eq!((bytes.as_ptr() as usize + aligned_at) % Landing::ALIGNMENT, 0);
            let part = bytes.slice(length - 1..);
            drop(bytes);
            assert!(pool.statistics().leased_receive > 0, "a slice holds the memory");
            drop(part);
            assert_eq!(pool.statistics().leased_receive, 0);
        }
    }
}

#[test]
fn landings_share_no_slab_with_blocks() {
    let (pool, domain, _) = pool(small(), 1 << 20);
    let landing = Landing::lease(&pool, 100, 0).unwrap();
    assert_eq!((domain.live(), domain.last_access()), (1, Access::LOCAL_WRITE));
    let block = pool.lease(100, Quota::Receive).unwrap();
    assert_eq!(domain.live(), 2);
    drop((landing, block));
    let again = Landing::lease(&pool, 100, 0).unwrap();
    assert_eq!(domain.live(), 2, "the slab of the first landing");
    drop(again);
    pool.trim();
    assert_eq!(domain.live(), 0);
}

#[test]
fn a_landing_on_a_device_that_opens_sinks_is_copied_from_a_block() {
    let domain = Arc::new(Domain { opens_sinks: true, ..Domain::default() });
    let pool = Pool::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, small(), Budget::new(1 << 20));
    for round in 0..20 {
        let mut landing = Landing::lease(&pool, 100, 7).unwrap();
        landing.copy_in(90, &[round; 10]).unwrap();
        let sink = landing.segment(0..90).unwrap();
        assert_eq!((sink.address() + 7) % 64, 0);
        let sink = sink.address() as usize..(sink.address() + sink.length()) as usize;
        domain.write(sink.clone(), round);
        let landed = landing.finish().unwrap();
        domain.write(sink, !round);
        assert_eq!(landed[..], [round; 100], "the peer does not reach what has landed");
        assert_eq!((landed.as_ptr() as usize + 7) % 64, 0);
        assert_eq!((domain.live(), domain.made()), (2, 2), "a slab for blocks, and one for what has landed");
    }
}

#[test]
fn a_landing_without_room_for_a_block_is_registered_alone_until_it_has_landed() {
    let domain = Arc::new(Domain { opens_sinks: true, ..Domain::default() });
    let pool = Pool::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, small(), Budget::new(64 << 10));
    let landing = Landing::lease(&pool, 100, 7).unwrap();
    assert_eq!((domain.live(), domain.last_access()), (2, Access::LOCAL_WRITE));
    assert!(domain.regions().iter().any(|region| region.len() == 100 && (region.start + 7) % 64 == 0));
    let landed = landing.finish().unwrap();
    assert_eq!(domain.live(), 1, "before the memory can be read");
    drop(landed);
    assert!(Landing::lease(&pool, 0, 0).is_ok(), "no registration of no bytes");
    assert_eq!(domain.live(), 1);
}

/// A connection that others leave nothing to still has its reserve, which comes back to it, and which no other
/// can take.
#[test]
fn each_landing_pool_has_its_reserve_whatever_others_hold() {
    const RESERVE: usize = 512 << 10;
    let (budget, domain) = (Budget::new(64 << 20), Arc::new(Domain::default()) as Arc<dyn ProtectionDomain>);
    let connect = || LandingPool::new(Arc::clone(&domain), Arc::clone(&budget), RESERVE);
    let mut hostile = Vec::new();
    for _ in 0..12 {
        let pool = connect().unwrap();
        let held: Vec<_> = std::iter::from_fn(|| pool.lease(1 << 20, 0, true).ok()).collect();
        let mut rest: Vec<_> =
            std::iter::from_fn(|| pool.lease(RESERVE, 0, true).ok()?.finish().ok()).collect();
        assert!(rest.pop().unwrap().is_reserve());
        hostile.push((pool, held, rest));
    }
    assert!(hostile[0].1.len() >= 20, "the first has what it leaves free: {}", hostile[0].1.len());
    let reserves = 12 * RESERVE as u64;
    assert!(
        budget.available() >= budget.limit() / 8 - reserves,
        "an eighth is left to reserves and all else"
    );
    let next = connect().unwrap();
    for length in [1, RESERVE / 3, RESERVE] {
        assert_eq!(next.lease(length, 0, false).unwrap_err().kind(), VerbsErrorKind::NoMemory);
        let landed = next.lease(length, 0, true).unwrap().finish().unwrap();
        assert!(landed.is_reserve());
        let second = next.lease(1, 0, true).unwrap_err();
        assert_eq!(second.kind(), VerbsErrorKind::QuotaExhausted, "one at a time");
    }
    let too_long = next.lease(RESERVE, 1, true).unwrap_err();
    assert_eq!(too_long.kind(), VerbsErrorKind::TooLarge, "in parts, it fits");
    // What others give back is there at once.
    hostile.truncate(1);
    assert!(!next.lease(1 << 20, 0, false).unwrap().finish().unwrap().is_reserve());
    drop((hostile, next));
    assert_eq!(budget.used(), 0);
}

/// Idle slabs of a share that is larger than what it leaves free go back to the budget.
#[test]
fn a_share_keeps_no_idle_memory_that_others_need() {
    let (budget, domain) = (Budget::new(64 << 20), Arc::new(Domain::default()) as Arc<dyn ProtectionDomain>);
    let pool = LandingPool::new(domain, Arc::clone(&budget), 4096).unwrap();
    let held: Vec<_> = (0..10).map(|_| pool.lease(1 << 20, 0, true).unwrap()).collect();
    let before = budget.used();
    drop(held);
    assert_eq!(budget.used(), before, "nobody needs it");
    let held: Vec<_> = (0..10).map(|_| pool.lease(1 << 20, 0, true).unwrap()).collect();
    let others = budget.reserve(41 << 20).unwrap();
    drop(held);
    let kept = budget.used() - others.bytes;
    assert!(kept <= (6 << 20) + 4096, "{kept} bytes");
    let mut limited = LandingPool::new(Arc::new(Domain::default()), Arc::clone(&budget), 4096).unwrap();
    limited.limit(10_000);
    assert_eq!(limited.lease(10_001, 0, false).unwrap_err().kind(), VerbsErrorKind::TooLarge);
}
