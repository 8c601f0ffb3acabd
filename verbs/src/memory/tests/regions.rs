//! Regions of a pool, which share slabs.

use super::*;
use crate::memory::MemRegion;
use crate::memory::in_flight::{CopyRange, CopyRanges, LocalMemory, Transfer, TransferKind};
use crate::memory::region::{RegionMapping, RegionPool, RemoteRange};
use crate::memory::registrations::LocalRegistrations;
use crate::{RemoteSegment, VerbsErrorKind};

fn regions() -> (RegionPool, Arc<Budget>) {
    let budget = Budget::new(u64::MAX);
    (RegionPool::new(Arc::clone(&budget)), budget)
}

/// Registers `region` for a WRITE from it, and returns it.
fn registered(region: MemRegion, known: &LocalRegistrations) -> MemRegion {
    let remote = RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(1) }, length: 8 };
    let ranges = CopyRanges::One(CopyRange { local: 0, remote: 0, length: 8 });
    let mut transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ());
    transfer.register(known).unwrap();
    let LocalMemory::Region(region) = transfer.finish().local else { panic!("a region") };
    region
}

#[test]
fn the_slabs_of_many_regions_are_few() {
    let (pool, budget) = regions();
    let kept: Vec<_> = (0..10_000).map(|_| pool.take(4096).unwrap()).collect();
    let statistics = pool.statistics();
    assert!(statistics.slabs <= 16, "{} slabs", statistics.slabs);
    assert!(budget.used() <= 10_000 * 4096 / 4 * 5 + (2 << 20), "{} bytes", budget.used());
    assert_eq!(budget.used(), statistics.registered);
    drop(kept);
    assert_eq!(pool.statistics().leased_receive, 0);
}

/// Takes, splits and drops regions of all lengths. Each has content of its own all the time.
#[test]
fn regions_never_overlap() {
    let (pool, _) = regions();
    let mut random = fastrand::Rng::with_seed(7);
    let mut held: Vec<(MemRegion, u8)> = Vec::new();
    for step in 0..4000_u32 {
        if held.len() > 60 || (!held.is_empty() && random.u8(..) < 100) {
            let (region, fill) = held.swap_remove(random.usize(..held.len()));
            assert!(region.iter().all(|byte| *byte == fill), "step {step}: {region:?}");
            continue;
        }
        let most = 2_usize << random.u32(0..16);
        let length = random.usize(..most);
        let zeroed = random.bool();
        let taken = if zeroed { pool.take_zeroed(length) } else { pool.take(length) };
        let mut region = taken.unwrap();
        assert_eq!((region.len(), region.as_ptr() as usize % 128), (length, 0));
        assert!(!zeroed || region.iter().all(|byte| *byte == 0), "step {step}: {region:?}");
        let back = region.split_off(random.usize(..=length));
        for (mut part, fill) in [(region, step as u8), (back, !step as u8)] {
            part.fill(fill);
            held.push((part, fill));
        }
        if step % 500 == 0 {
            pool.end_period();
        }
    }
}

#[test]
fn a_length_that_was_just_given_back_gets_the_same_memory() {
    let (pool, _) = regions();
    for length in [4096, 100_000, 5 << 20, 20 << 20] {
        let (first, second) = (pool.take(length).unwrap(), pool.take(length).unwrap());
        let address = second.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(pool.take(length).unwrap().as_ptr(), address, "{length}");
    }
}

#[test]
fn one_region_at_a_time_of_any_length_needs_memory_for_a_few() {
    let (pool, budget) = regions();
    for step in 0..400 {
        drop(pool.take((4 << 20) + step * 379 % 1024 * 4096).unwrap());
        assert!(budget.used() <= 32 << 20, "step {step}: {}", budget.used());
    }
    assert!(pool.statistics().slabs <= 4, "{:?}", pool.statistics());
}

/// None of these can use the slab of one before it, as the cache of keys and values of a model that writes one
/// word after the other.
#[test]
fn idle_slabs_of_long_regions_have_no_more_bytes_than_were_in_use() {
    let (pool, budget) = regions();
    let mut most = 0;
    for step in 0..300_u64 {
        let length = (20 << 20) + step * 4096;
        let region = pool.take(length as usize).unwrap();
        most = length;
        assert!(budget.used() <= 2 * most, "step {step}: {}", budget.used());
        drop(region);
        assert!(budget.used() <= most, "step {step}: {}", budget.used());
    }
    let kept = [(); 4].map(|()| pool.take(30 << 20).unwrap());
    drop(kept);
    assert_eq!(budget.used(), 120 << 20, "as many as there were at a time");
    for _ in 0..2 {
        drop(pool.take(most as usize).unwrap());
        pool.end_period();
    }
    drop(pool.take(most as usize).unwrap());
    assert!(budget.used() <= 30 << 20, "{} bytes long after the peak", budget.used());
}

#[test]
fn what_was_not_used_in_a_whole_period_is_freed() {
    let (pool, budget) = regions();
    let kept = pool.take(100).unwrap();
    let long = 9 << 20;
    drop((pool.take(long).unwrap(), pool.take(5 << 20).unwrap()));
    let all = budget.used();
    pool.end_period();
    assert_eq!(budget.used(), all, "used in the period that ended");
    drop(pool.take(long).unwrap());
    pool.end_period();
    assert_eq!(budget.used(), (2 << 20) + long as u64, "both that were used, and no other");
    pool.end_period();
    assert_eq!((budget.used(), pool.statistics().slabs), (2 << 20, 1), "the one in use");
    drop(kept);
    pool.end_period();
    pool.end_period();
    assert_eq!((budget.used(), pool.statistics().slabs), (0, 0));
}

#[test]
fn a_slab_is_registered_once_for_all_its_regions_until_it_is_gone() {
    let (pool, budget) = regions();
    let domain = Arc::new(Domain::default());
    let known = LocalRegistrations::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, Budget::new(0));
    let held: Vec<_> = (0..100).map(|_| registered(pool.take(4096).unwrap(), &known)).collect();
    assert_eq!((domain.live(), pool.statistics().slabs), (1, 1));
    drop(held);
    drop(registered(pool.take(4096).unwrap(), &known));
    known.prune();
    assert_eq!(domain.live(), 1, "the slab is idle, and not gone");
    pool.trim();
    known.prune();
    assert_eq!((domain.live(), budget.used()), (0, 0));
}

#[test]
fn a_small_budget_is_used_to_the_end() {
    let budget = Budget::new(100 << 10);
    let pool = RegionPool::new(Arc::clone(&budget));
    let held: Vec<_> = std::iter::from_fn(|| pool.take(4096).ok()).collect();
    assert_eq!(held.len(), 25);
    let error = pool.take(1).unwrap_err();
    assert_eq!(error.kind(), VerbsErrorKind::NoMemory, "{error}");
    drop(held);
    assert!(pool.take(96 << 10).is_ok(), "idle slabs make room for a longer one");
    for length in [usize::MAX, isize::MAX as usize] {
        assert!(pool.take(length).is_err() && pool.take_zeroed(length).is_err());
    }
}

/// A region, its parts and its mapping: the last of them gives the memory back.
#[test]
fn memory_is_not_leased_again_while_a_mapping_keeps_it() {
    let (pool, budget) = regions();
    let mut region = pool.take(4096).unwrap();
    region.fill(7);
    let mapping = RegionMapping::of(&region);
    assert_eq!((mapping.as_ptr(), mapping.len()), (region.as_ptr(), 4096));
    let back = RegionMapping::of(&region.split_off(4000));
    assert_eq!((back.as_ptr(), back.len()), (region.as_ptr().wrapping_add(4000), 96));
    drop((region, mapping));
    assert_ne!(pool.take(4096).unwrap().as_ptr(), back.as_ptr().wrapping_sub(4000), "a part is kept");
    let address = back.as_ptr().wrapping_sub(4000);
    drop(back);
    assert_eq!(pool.take(4096).unwrap().as_ptr(), address, "it came back");

    let long = pool.take_zeroed(RegionPool::LONGEST_SHARED + 1).unwrap();
    let (before, mapping) = (budget.used(), RegionMapping::of(&long));
    drop(long);
    assert_eq!(budget.used(), before, "the mapping keeps a mapping of its own");
    drop(mapping);
    assert!(budget.used() < before);
}
