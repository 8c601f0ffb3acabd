//! Buffers: freezing, lookup, lifetime, and the soundness of references.

use super::*;
use crate::memory::{Lease, Quota};

fn find(pool: &Pool, slice: &[u8]) -> Option<Lease> {
    pool.find(slice.as_ptr() as usize, slice.len())
}

#[test]
fn frozen_buffers_are_found_exactly_within_their_bounds() {
    let (pool, ..) = pool(small(), 1 << 20);
    let mut buffer = pool.allocate(1000).unwrap();
    buffer.copy_from_slice(&[7; 1000]);
    assert!(find(&pool, &buffer).is_none(), "not before it is frozen");
    buffer.truncate(900);
    let (neighbour, bytes) = (pool.allocate(1000).unwrap().freeze(), buffer.freeze());
    let address = bytes.as_ptr() as usize;
    assert_eq!(find(&pool, &bytes).as_deref(), Some(&[7; 900][..]));
    assert_eq!(find(&pool, &bytes[899..]).unwrap().len(), 1);
    for (from, length) in
        [(address, 901), (address - 1, 2), (address + 899, 2), (address + 900, 1), (address, 0)]
    {
        assert!(pool.find(from, length).is_none(), "{} + {length}", from.wrapping_sub(address) as isize);
    }
    assert!(pool.find(usize::MAX, 2).is_none() && pool.find(address, usize::MAX).is_none());
    assert!(find(&pool, &[0; 10]).is_none());
    drop((neighbour, bytes));
    assert!(pool.find(address, 1).is_none(), "not found after the last drop");
    assert_eq!(pool.statistics().frozen, 0);
}

#[test]
fn a_pool_does_not_find_buffers_of_another_pool() {
    let ((one, ..), (two, ..)) = (pool(small(), 1 << 20), pool(small(), 1 << 20));
    let (ours, theirs) = (one.allocate(10).unwrap().freeze(), two.allocate(10).unwrap().freeze());
    assert!(find(&one, &ours).is_some() && find(&one, &theirs).is_none());
}

#[test]
fn a_slice_of_the_bytes_keeps_the_memory() {
    let (pool, ..) = pool(small(), 1 << 20);
    let mut buffer = pool.allocate(5).unwrap();
    buffer.copy_from_slice(b"hello");
    let address = buffer.as_ptr();
    let bytes = buffer.freeze();
    let slice = bytes.slice(1..3);
    drop(bytes);
    let other = pool.allocate(5).unwrap();
    assert_ne!(other.as_ptr(), address);
    assert_eq!(&slice[..], b"el");
    let lease = find(&pool, &slice).unwrap();
    drop(slice);
    assert_eq!((&lease[..], pool.statistics().leased_send), (&b"el"[..], 512));
    let again = lease.clone().into_bytes();
    drop(lease);
    assert_eq!(&again[..], b"el");
    drop(again);
    assert_eq!(pool.allocate(5).unwrap().as_ptr(), address, "warm again");
}

#[test]
fn the_last_lease_of_a_whole_buffer_can_be_made_writable() {
    let (pool, ..) = pool(small(), 1 << 20);
    let mut buffer = pool.allocate(100).unwrap();
    buffer.fill(3);
    let lease = buffer.into_lease();
    let address = lease.as_ptr() as usize;
    let part = pool.find(address, 50).unwrap();
    let lease = lease.try_into_buffer().expect_err("there is another reference");
    drop(lease);
    let part = part.try_into_buffer().expect_err("the lease covers a part");
    let whole = pool.find(address, 100).unwrap();
    drop(part);
    let mut buffer = whole.try_into_buffer().expect("the last reference");
    assert!(pool.find(address, 1).is_none(), "not found while it is written to");
    assert_eq!((buffer.len(), buffer[99], pool.statistics().frozen), (100, 3, 0));
    buffer[0] = 4;
    let bytes = buffer.freeze();
    assert_eq!(find(&pool, &bytes).unwrap()[0], 4);
    drop(bytes);
    assert_eq!((pool.statistics().leased_send, pool.statistics().frozen), (0, 0));
}

#[test]
fn leases_name_their_part() {
    let (pool, ..) = pool(small(), 1 << 20);
    let lease = pool.allocate(100).unwrap().into_lease();
    let part = pool.find(lease.as_ptr() as usize + 10, 20).unwrap();
    assert_eq!(part.segment().address(), lease.segment().address() + 10);
    assert_eq!(part.segment().length(), 20);
    assert_eq!(part.remote().address, lease.remote().address + 10);
    let extent = part.segment_of(5..20).unwrap();
    assert_eq!((extent.address(), extent.length()), (part.segment().address() + 5, 15));
    assert!(part.segment_of(5..21).is_err(), "not beyond the part, though the buffer goes on");
    assert!(part.segment_of(usize::MAX..usize::MAX).is_err());
}

#[test]
fn slabs_of_buffers_have_no_right_to_write() {
    let every = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let (pool, ..) = pool(PoolSettings { access: every, ..small() }, 1 << 20);
    let block = pool.lease(100, Quota::Send).unwrap();
    let lease = pool.allocate(100).unwrap().into_lease();
    assert_ne!(
        lease.segment().lkey(),
        block.segment(0..1).unwrap().lkey(),
        "blocks and buffers never share a slab"
    );
    let rights = |purpose| {
        let held = pool.obtain(100, Quota::Send, purpose).unwrap();
        held.access()
    };
    assert_eq!(rights(crate::memory::pool::Purpose::Block), every);
    assert_eq!(rights(crate::memory::pool::Purpose::Buffer), Access::REMOTE_READ);
}

#[test]
fn blocks_and_buffers_do_not_reuse_one_another() {
    let (pool, ..) = pool(small(), 128 << 10);
    let block = pool.lease(100, Quota::Send).unwrap();
    let address = block.remote(0).address;
    drop(block);
    let buffer = pool.allocate(100).unwrap();
    assert_ne!(buffer.as_ptr() as u64, address);
}

#[test]
fn memory_is_freed_with_the_last_reference_after_the_pool() {
    let (pool, domain, budget) = pool(small(), 1 << 20);
    let kept = pool.allocate(1000).unwrap().freeze();
    let mut block = pool.lease(50_000, Quota::Receive).unwrap();
    drop(pool.lease(60_000, Quota::Receive).unwrap());
    drop(pool.lease(100, Quota::Receive).unwrap());
    let clone = pool.clone();
    drop(pool);
    assert_eq!(domain.live(), 4, "the pool lives as long as a clone");
    drop(clone);
    assert_eq!(domain.live(), 2, "idle slabs are freed at once");
    assert_eq!(budget.used(), (64 << 10) + 53_248);
    block.copy_in(0, &kept).unwrap();
    let slice = kept.slice(999..);
    drop(block);
    assert_eq!((domain.live(), budget.used()), (1, 64 << 10));
    drop(kept);
    assert_eq!(slice[0], 0);
    drop(slice);
    assert_eq!((domain.live(), budget.used()), (0, 0));
}

#[test]
fn empty_buffers_work() {
    let (pool, ..) = pool(small(), 1 << 20);
    let bytes = pool.allocate(0).unwrap().freeze();
    assert!(bytes.is_empty() && find(&pool, &bytes).is_none());
    drop(bytes);
    assert_eq!(pool.statistics().leased_send, 0);
}
