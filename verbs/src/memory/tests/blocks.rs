//! Blocks: content, bounds, segments, reuse.

use super::*;
use crate::VerbsError;
use crate::memory::Quota;

#[test]
fn a_pool_has_no_memory_before_the_first_lease() {
    let (pool, domain, budget) = pool(small(), 1 << 20);
    assert_eq!((domain.live(), budget.used(), pool.statistics().slabs), (0, 0, 0));
    let block = pool.lease(100, Quota::Send).unwrap();
    assert_eq!((block.len(), block.capacity()), (100, 256));
    assert_eq!((domain.live(), budget.used(), pool.statistics().slabs), (1, 64 << 10, 1));
}

#[test]
fn a_block_given_back_is_the_next_one_handed_out() {
    let (pool, ..) = pool(small(), 1 << 20);
    let first = pool.lease(1000, Quota::Send).unwrap();
    let second = pool.lease(1000, Quota::Send).unwrap();
    let (one, two) = (first.remote(0), second.remote(0));
    drop(second);
    drop(first);
    assert_eq!(
        pool.lease(900, Quota::Receive).unwrap().remote(0),
        one,
        "the block given back last is the warmest"
    );
    let first = pool.lease(1024, Quota::Send).unwrap();
    let second = pool.lease(1000, Quota::Send).unwrap();
    assert_eq!((first.remote(0), second.remote(0)), (one, two));
    let statistics = pool.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.slabs), (3, 2, 1));
}

#[test]
fn a_large_block_has_a_slab_of_its_own_that_is_kept() {
    let (pool, domain, _) = pool(small(), 1 << 20);
    let large = pool.lease(100_000, Quota::Send).unwrap();
    let place = large.remote(0);
    assert_eq!(large.capacity(), 102_400, "whole pages");
    drop(large);
    assert_eq!(domain.live(), 1);
    let (smaller, too_small) =
        (pool.lease(70_000, Quota::Send).unwrap(), pool.lease(40_000, Quota::Send).unwrap());
    assert_eq!(smaller.remote(0), place, "at most one and a half times the length");
    assert_ne!(too_small.remote(0), place);
    drop((smaller, too_small));
    let small = pool.lease(40_000, Quota::Send).unwrap();
    assert_ne!(small.remote(0), place, "the best fit, not the first");
    assert_eq!(domain.live(), 2);
}

#[test]
fn classes_share_a_slab_and_a_returned_extent_serves_another_class() {
    let (pool, domain, _) = pool(small(), 64 << 10);
    let small: Vec<_> = (0..256).map(|_| pool.lease(256, Quota::Send).unwrap()).collect();
    assert!(pool.lease(1, Quota::Send).is_err(), "64 KiB are in use");
    drop(small);
    let two = [(); 2].map(|()| pool.lease(32 << 10, Quota::Send).unwrap());
    assert_eq!(domain.live(), 1);
    drop(two);
    assert!(pool.lease(24 << 10, Quota::Send).is_ok());
}

#[test]
fn content_goes_in_and_out() {
    let (pool, ..) = pool(small(), 1 << 20);
    let mut block = pool.lease(16, Quota::Send).unwrap();
    block.copy_in(2, b"hello").unwrap();
    block.copy_in(7, b", world").unwrap();
    let mut out = [0; 16];
    block.copy_out(0, &mut out).unwrap();
    assert_eq!(&out, b"\0\0hello, world\0\0");

    let mut vector = vec![b'>'];
    assert_eq!(block.copy_out_to(2..14, &mut vector), Ok(12));
    assert_eq!(vector, b">hello, world");
    let mut short = [0_u8; 5];
    assert_eq!(block.copy_out_to(2..14, &mut &mut short[..]), Ok(5), "as far as there is room");
    assert_eq!(&short, b"hello");
}

#[test]
fn nothing_goes_beyond_the_capacity() {
    let (pool, ..) = pool(small(), 1 << 20);
    let mut block = pool.lease(200, Quota::Send).unwrap();
    let beyond = |offset, length| VerbsError::out_of_bounds(offset, length, 256);
    assert_eq!(block.copy_in(255, b"x"), Ok(()));
    assert_eq!(block.copy_in(256, b""), Ok(()));
    assert_eq!(block.copy_in(256, b"x"), Err(beyond(256, 1)));
    assert_eq!(block.copy_in(usize::MAX, b"x"), Err(beyond(usize::MAX, 1)));
    assert_eq!(block.copy_out(250, &mut [0; 7]), Err(beyond(250, 7)));
    assert_eq!(block.copy_out_to(250..257, &mut Vec::new()), Err(beyond(250, 7)));
    assert_eq!(block.segment(1..257), Err(beyond(1, 256)));
    assert_eq!(block.segment(257..257), Err(beyond(257, 0)));
    block.copy_in(0, &[7; 256]).unwrap();
    assert_eq!(block.copy_in(0, &[1; 257]), Err(beyond(0, 257)));
    let mut out = [0; 256];
    block.copy_out(0, &mut out).unwrap();
    assert_eq!(out, [7; 256], "all or nothing");
}

#[test]
fn segments_name_the_block_and_its_region() {
    let (pool, ..) = pool(small(), 1 << 20);
    let _first = pool.lease(256, Quota::Send).unwrap();
    let block = pool.lease(256, Quota::Send).unwrap();
    let segment = block.segment(10..30).unwrap();
    assert_eq!((segment.address(), segment.length()), (block.remote(10).address, 20));
    assert_eq!((segment.lkey(), block.remote(0).rkey), (Lkey(1000), Rkey(2000)));
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may pass such a range")]
    let backwards = block.segment(30..10).unwrap();
    assert_eq!(backwards.length(), 0);
}

#[test]
fn slabs_of_two_mebibytes_are_aligned() {
    let (pool, ..) = pool(PoolSettings::default(), 1 << 30);
    assert_eq!(pool.lease(1, Quota::Send).unwrap().remote(0).address % (2 << 20), 0);
    assert_eq!(pool.lease(5 << 20, Quota::Send).unwrap().remote(0).address % (2 << 20), 0);
}
