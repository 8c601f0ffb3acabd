//! Landings: alignment, the way back to the pool, registrations, memory that the device may still write.

use super::*;
use crate::memory::Quota;
use crate::unstable::Landing;

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
fn a_landing_on_a_device_that_opens_sinks_is_registered_alone_until_it_has_landed() {
    let domain = Arc::new(Domain { opens_sinks: true, ..Domain::default() });
    let pool = Pool::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, small(), Budget::new(1 << 20));
    let landing = Landing::lease(&pool, 100, 7).unwrap();
    assert_eq!((domain.live(), domain.last_access()), (2, Access::LOCAL_WRITE));
    assert!(domain.regions().iter().any(|region| region.len() == 100 && (region.start + 7) % 64 == 0));
    let landed = landing.finish().unwrap();
    assert_eq!(domain.live(), 1, "before the memory can be read");
    drop(landed);
    assert!(Landing::lease(&pool, 0, 0).is_ok(), "no registration of no bytes");
    assert_eq!(domain.live(), 1);
}
