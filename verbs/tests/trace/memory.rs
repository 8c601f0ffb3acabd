//! The memory that the allocator returns: content, alignment, growth, limits, leases.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};

use tonic_rdma_verbs::memory::Pool;
use tonic_rdma_verbs::memory::sites::SiteAllocator;
use tonic_rdma_verbs::unstable::find_traced;

use super::{execute, is_placed, shared, site, trace};

#[test]
fn a_vector_that_grows_keeps_its_content_and_its_site() {
    let trace = trace();
    for step in 1..=3 {
        let sent = execute(&trace, 0, || {
            let mut vector = Vec::new();
            for number in 0..50_000_u32 {
                vector.push(number as u8);
            }
            vector
        });
        let crossed = trace.crossed(&sent);
        assert_eq!((crossed.site, crossed.registered), (site(0, 0), step > 1));
        assert!(sent.iter().zip(0..).all(|(&byte, number)| byte == number as u8));
        drop(sent);
        assert_eq!(trace.report().pool.leased_send, 0);
    }
}

#[test]
fn a_vector_that_grows_and_shrinks_outside_of_executions_keeps_its_content() {
    let trace = trace();
    let kernel = || (0..40_000_u32).map(|number| number as u8).collect::<Vec<u8>>();
    trace.crossed(&execute(&trace, 0, kernel));
    let check = |bytes: &[u8]| assert!(bytes.iter().zip(0..).all(|(&byte, number)| byte == number as u8));
    let mut vector = execute(&trace, 0, kernel);
    assert!(is_placed(&vector));
    vector.extend((40_000..200_000_u32).map(|number| number as u8));
    check(&vector);
    assert_eq!(trace.crossed(&vector).site, site(0, 0), "moved, and of the same site");
    assert!(!is_placed(&vector), "only executions place memory");

    let mut vector = execute(&trace, 0, kernel);
    assert!(is_placed(&vector));
    for length in [39_000, 20_000, 5_000, 300, 1] {
        vector.truncate(length);
        vector.shrink_to_fit();
        check(&vector);
        assert!(is_placed(&vector) || length < 20_000, "an extent with room is kept, so nothing is copied");
        assert_eq!((vector.capacity(), trace.crossed(&vector).site), (length, site(0, 0)));
    }
    assert!(!is_placed(&vector), "an extent is not kept for a small part of it");
    drop(vector);
    assert_eq!(trace.report().pool.leased_send, 0);
}

#[test]
fn memory_that_was_allocated_before_the_execution_and_grows_in_it_belongs_to_the_node() {
    let trace = trace();
    for step in 1..=2 {
        let mut vector = vec![5_u8; 1000];
        execute(&trace, 0, || vector.resize(30_000, 5));
        let crossed = trace.crossed(&vector);
        assert_eq!((crossed.site, crossed.registered), (site(0, 0), step > 1));
        assert!(vector.iter().all(|&byte| byte == 5));
    }
}

#[test]
fn zeroed_memory_is_zeros_also_where_the_pool_has_old_content() {
    let trace = trace();
    for size in [10_usize, 4096, 100_000, 3 << 20] {
        let node = size as u32;
        trace.crossed(&execute(&trace, node, || vec![0xff_u8; size]));
        for _ in 0..3 {
            let old = execute(&trace, node, || vec![0xff_u8; size]);
            assert!(is_placed(&old));
            drop(old);
            let zeroed = execute(&trace, node, || vec![0_u8; size]);
            assert!(is_placed(&zeroed));
            assert!(zeroed.iter().all(|&byte| byte == 0), "{size} bytes");
        }
    }
}

#[test]
fn every_alignment_is_kept() {
    let trace = trace();
    for power in 0..=23 {
        for (node, size) in (power * 4..).zip([1_usize, 300, 5000, 2 << 20]) {
            let layout = Layout::from_size_align(size, 1 << power).unwrap();
            let zeroed = size == 300;
            for execution in 0..3_u8 {
                // SAFETY: the layout is not of size zero.
                let start = execute(&trace, node, || unsafe {
                    if zeroed { alloc_zeroed(layout) } else { alloc(layout) }
                });
                assert!(!start.is_null() && start.addr().is_multiple_of(layout.align()), "{layout:?}");
                // SAFETY: the memory has this size and one owner.
                unsafe { start.write_bytes(execution, size) };
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(start, size) };
                let crossed = trace.crossed(bytes);
                // Larger alignments than 2 MiB are not served from the pool.
                assert_eq!((crossed.site, crossed.registered), (site(node, 0), execution > 0 && power <= 21));
                // SAFETY: the layout is that of the allocation, and the new size is not zero.
                let grown = execute(&trace, node, || unsafe { realloc(start, layout, size * 3) });
                assert!(!grown.is_null() && grown.addr().is_multiple_of(layout.align()), "{layout:?}");
                // SAFETY: the memory has this size and one owner.
                let bytes = unsafe { std::slice::from_raw_parts(grown, size) };
                assert!(bytes.iter().all(|&byte| byte == execution));
                // SAFETY: this is the layout after the growth.
                unsafe { dealloc(grown, Layout::from_size_align(size * 3, layout.align()).unwrap()) };
            }
        }
    }
    assert_eq!(trace.report().pool.leased_send, 0);
}

#[test]
fn a_freed_address_is_not_mistaken_for_the_next_allocation_at_it() {
    let trace = trace();
    let mut reused = 0;
    for _ in 0..100 {
        let traced = execute(&trace, 0, || vec![1_u8; 1000]);
        let address = traced.as_ptr();
        drop(traced);
        let other = vec![2_u8; 1000];
        reused += u32::from(other.as_ptr() == address);
        assert_eq!(trace.crossed(&other).site, None);
    }
    // glibc gives out the memory that was freed last.
    let reuses = cfg!(all(target_env = "gnu", not(feature = "allocator")));
    assert!(reused > 0 || !reuses, "no address was used again");
}

#[test]
fn a_full_pool_leaves_the_memory_on_the_heap_and_counts_it() {
    let trace = SiteAllocator::tracing(1 << 20).unwrap();
    let kernel = || [1_u8, 2, 3].map(|byte| vec![byte; 400_000]);
    execute(&trace, 0, kernel)
        .iter()
        .for_each(|bytes| assert_eq!(trace.crossed(bytes).site.unwrap().node, 0));
    let tensors = execute(&trace, 0, kernel);
    let placed = tensors.each_ref().map(|bytes| is_placed(bytes));
    assert_eq!(placed, [true, true, false]);
    for (bytes, value) in tensors.iter().zip(1..) {
        assert!(bytes.iter().all(|&byte| byte == value));
    }
    let report = trace.report();
    assert_eq!((report.placed, report.refused, trace.pool().settings().send_quota), (2, 1, 1 << 20));
    assert!(
        report.refusal.as_ref().is_some_and(|refusal| refusal.contains("send quota exhausted")),
        "{report}"
    );
    drop(tensors);
    assert_eq!(execute(&trace, 0, kernel).each_ref().map(|bytes| is_placed(bytes)), [true, true, false]);

    let nothing = SiteAllocator::tracing(0).unwrap();
    for _ in 0..3 {
        let sent = execute(&nothing, 0, || vec![1_u8; 100]);
        assert_eq!((nothing.crossed(&sent).site, nothing.crossed(&sent).registered), (site(0, 0), false));
    }
}

#[test]
fn memory_outlives_its_trace() {
    let trace = trace();
    let kernel = || vec![8_u8; 2 << 20];
    trace.crossed(&execute(&trace, 0, kernel));
    let execution = trace.enter(0);
    let kept = kernel();
    drop(trace);
    let later = kernel();
    drop(execution);
    assert_eq!((is_placed(&kept), is_placed(&later)), (true, false));
    assert!(kept.iter().chain(&later).all(|&byte| byte == 8));
}

#[test]
fn a_lease_keeps_the_owner_and_names_exactly_the_bytes() {
    let trace = trace();
    let kernel = || (0..10_000_u32).map(|number| number as u8).collect::<Vec<u8>>();
    trace.crossed(&execute(&trace, 0, kernel));
    assert!(find_traced(&[1; 100], || shared(vec![1; 100])).is_none());
    let bytes = shared(execute(&trace, 0, kernel));
    let (address, extent) = (bytes.as_ptr(), trace.report().pool.leased_send);
    let lease = find_traced(&bytes[100..9000], || bytes.slice(100..9000)).unwrap();
    drop(bytes);
    assert_eq!((lease.as_ptr(), lease.len()), (address.wrapping_add(100), 8900));
    assert_eq!(lease.remote().address, lease.as_ptr() as u64);
    let part = lease.clone().part(50..60).unwrap();
    assert_eq!(&*part, &lease[50..60]);
    let lease = lease.try_into_buffer().unwrap_err();
    assert!(lease.segment_of(0..8901).is_err());
    drop(lease);
    assert_eq!((trace.report().pool.leased_send, part[0]), (extent, 150), "a part keeps the owner");
    drop(part);
    assert_eq!(trace.report().pool.leased_send, 0);
}

#[test]
fn buffers_of_pools_count_as_registered() {
    let buffer = Pool::for_sending(1 << 20).allocate(4096).unwrap().freeze();
    let crossed = trace().crossed(&buffer);
    assert_eq!((crossed.site, crossed.registered), (None, true));
}
