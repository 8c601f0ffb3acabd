//! One pool, used by many threads.

use std::sync::mpsc;
use std::thread;

use bytes::Bytes;

use super::*;
use crate::memory::Quota;

/// Every thread fills its extents with its own number, and checks that the bytes stay.
#[test]
fn threads_never_share_a_extent() {
    let (pool, domain, budget) = pool(PoolSettings { send_quota: 64 << 20, ..small() }, 64 << 20);
    thread::scope(|scope| {
        for number in 1..=4_u8 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..400_usize {
                    let length = (round * 37 + usize::from(number) * 101) % 2000 + 1;
                    let mut block = pool.lease(length, Quota::Send).unwrap();
                    block.copy_in(0, &vec![number; length]).unwrap();
                    let mut buffer = pool.allocate(length).unwrap();
                    buffer.fill(number);
                    let bytes = buffer.freeze();
                    thread::yield_now();
                    let lease = pool.find(bytes.as_ptr() as usize, length).unwrap();
                    drop(bytes);
                    assert!(lease.iter().all(|&byte| byte == number));
                    let mut content = vec![0; length];
                    block.copy_out(0, &mut content).unwrap();
                    assert!(content.iter().all(|&byte| byte == number));
                }
            });
        }
    });
    let statistics = pool.statistics();
    assert_eq!((statistics.leased_send, statistics.frozen), (0, 0));
    assert_eq!(statistics.hits + statistics.misses, 4 * 400 * 2);
    drop(pool);
    assert_eq!((domain.live(), budget.used()), (0, 0));
}

/// One thread drops the last reference to a buffer while another looks up its address.
#[test]
fn a_look_up_races_with_the_last_drop() {
    let (pool, ..) = pool(small(), 1 << 20);
    let (send, receive) = mpsc::sync_channel::<Bytes>(1);
    thread::scope(|scope| {
        scope.spawn(move || receive.into_iter().for_each(drop));
        for round in 0..2000_u32 {
            let mut buffer = pool.allocate(64).unwrap();
            buffer.fill(round as u8);
            let bytes = buffer.freeze();
            let address = bytes.as_ptr() as usize;
            send.send(bytes).unwrap();
            if let Some(lease) = pool.find(address, 64) {
                assert_eq!(lease[..], [round as u8; 64]);
            }
        }
        drop(send);
    });
    assert_eq!(pool.statistics().leased_send, 0);
}
