//! Which allocations belong to which execution.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tonic_rdma_verbs::memory::sites::{PlacementReason, Site, SitePlacement};

use super::{execute, is_placed, site, trace};

#[test]
fn the_first_execution_is_traced_and_later_ones_are_placed() {
    let trace = trace();
    for execution in 1..=5_u8 {
        let (before, sent, after) =
            execute(&trace, 3, || (vec![1_u8; 1000], vec![execution; 5000], vec![2_u8; 3000]));
        let crossed = trace.crossed(&sent);
        assert_eq!((crossed.site, crossed.registered), (site(3, 1), execution > 1));
        assert_eq!((is_placed(&before), is_placed(&after)), (false, false), "never sent");
        assert!(sent.iter().all(|&byte| byte == execution));
    }
    let report = trace.report();
    assert_eq!((report.placed, report.refused, report.pool.leased_send), (4, 0, 0));
    let [sent] = &report.sites[..] else { panic!("{report}") };
    assert_eq!(Some(&sent.site), site(3, 1).map(Site::Node).as_ref());
    assert_eq!((sent.buffers, sent.bytes, sent.sent, sent.registered), (5, 25_000, 5, 4));
    assert_eq!(
        (sent.placement, sent.why),
        (SitePlacement::Registered, PlacementReason::Sent { iteration: 1 })
    );
    let line =
        "registered         5     25000 B         5           4  allocation 1 of node 3: sent in iteration 1";
    assert!(report.to_string().contains(line), "{report}");
}

#[test]
fn the_same_node_number_is_another_site_in_another_trace() {
    let (one, other) = (trace(), trace());
    let kernel = || vec![7_u8; 4000];
    let sent = execute(&one, 3, kernel);
    assert_eq!(one.crossed(&sent).site, site(3, 0));
    assert_eq!(other.crossed(&sent).site, None, "not allocated by a node of this trace");
    assert!(!is_placed(&execute(&other, 3, kernel)));
    assert!(is_placed(&execute(&one, 3, kernel)));
}

#[test]
fn memory_that_no_node_allocated_has_no_site() {
    let trace = trace();
    let outside = vec![1_u8; 4000];
    let inside = execute(&trace, 0, || std::thread::spawn(|| vec![1_u8; 4000]).join().unwrap());
    for bytes in [&outside[..], &inside, &[], b"constant"] {
        assert_eq!(trace.crossed(bytes), Default::default());
    }
    assert!(trace.report().sites.is_empty());
}

#[test]
fn a_part_of_an_allocation_counts() {
    let trace = trace();
    let kernel = || vec![1_u8; 10_000];
    let sent = execute(&trace, 0, kernel);
    assert_eq!(trace.crossed(&sent[9_999..]).site, site(0, 0));
    let again = execute(&trace, 0, kernel);
    let crossed = trace.crossed(&again[100..200]);
    assert_eq!((crossed.site, crossed.registered), (site(0, 0), true));
    assert_eq!(trace.report().sites[0].bytes, 20_000, "of both allocations");
}

#[test]
fn memory_that_later_nodes_change_in_place_or_pass_on_keeps_its_site() {
    let trace = trace();
    for step in 1..=3 {
        let mut tensor = execute(&trace, 10, || vec![1_u8; 8192]);
        execute(&trace, 11, || tensor.iter_mut().for_each(|byte| *byte += 1));
        let view = execute(&trace, 12, || &tensor[4096..]);
        let crossed = trace.crossed(view);
        assert_eq!((crossed.site, crossed.registered), (site(10, 0), step > 1));
        assert!(tensor.iter().all(|&byte| byte == 2));
    }
}

#[test]
fn an_execution_within_an_execution_has_its_own_ordinals() {
    let trace = trace();
    let outer = trace.enter(1);
    let first = vec![1_u8; 100];
    let inner = trace.enter(2);
    let nested = vec![1_u8; 100];
    drop(inner);
    let second = vec![1_u8; 100];
    drop(outer);
    let after = vec![1_u8; 100];
    let sites = [&first, &nested, &second, &after].map(|bytes| trace.crossed(bytes).site);
    assert_eq!(sites, [site(1, 0), site(2, 0), site(1, 1), None]);
}

#[test]
fn calls_of_the_trace_itself_take_no_ordinal() {
    let trace = trace();
    let kernel = || vec![1_u8; 2000];
    trace.crossed(&execute(&trace, 5, kernel));
    let _execution = trace.enter(5);
    let report = trace.report();
    assert_eq!((report.sites.len(), trace.crossed(b"constant").site), (1, None));
    let another = super::trace();
    let sent = kernel();
    assert_eq!((trace.crossed(&sent).site, trace.crossed(&sent).registered), (site(5, 0), true));
    drop((report, another));
}

#[test]
fn a_panic_ends_the_execution() {
    let trace = trace();
    let caught = catch_unwind(AssertUnwindSafe(|| {
        execute(&trace, 1, || {
            let _released = vec![1_u8; 3000];
            panic!("a kernel that fails (this test expects it)");
        })
    }));
    assert!(caught.is_err());
    let after = vec![1_u8; 3000];
    assert_eq!(trace.crossed(&after).site, None);
    drop((caught, after));
}

#[test]
fn guards_that_are_forgotten_or_dropped_in_another_order_do_no_harm() {
    std::thread::spawn(|| {
        let (one, other) = (trace(), trace());
        let first = one.enter(1);
        let second = other.enter(2);
        let kept = vec![1_u8; 100_000];
        drop((first, one));
        drop((second, other));
        let third = trace().enter(3);
        let _ = std::mem::ManuallyDrop::new(third);
        // The trace of this execution is closed.
        let more: Vec<Vec<u8>> = (0..100).map(|byte| vec![byte; 1000]).collect();
        assert!(more.iter().zip(0..).all(|(bytes, byte)| bytes.iter().all(|&found| found == byte)));
        assert!(kept.iter().all(|&byte| byte == 1));
    })
    .join()
    .unwrap();
}

#[test]
fn allocations_of_a_known_layout_are_placed_although_their_ordinals_have_changed() {
    let trace = trace();
    let sent = execute(&trace, 1, || {
        let cache = vec![0_u8; 777];
        (vec![1_u8; 6000], cache)
    });
    assert_eq!(trace.crossed(&sent.0).site, site(1, 1));
    let later = execute(&trace, 1, || vec![1_u8; 6000]);
    let crossed = trace.crossed(&later);
    assert_eq!((crossed.site, crossed.registered), (site(1, 0), true));
}

#[test]
fn allocations_of_a_known_ordinal_are_placed_although_their_size_has_changed() {
    let trace = trace();
    for (step, size) in [100_usize, 5, 70_000, 3_000_000, 1].into_iter().enumerate() {
        let sent = execute(&trace, 1, || vec![9_u8; size]);
        let crossed = trace.crossed(&sent);
        assert_eq!((crossed.site, crossed.registered), (site(1, 0), step > 0), "{size} bytes");
        assert!(sent.iter().all(|&byte| byte == 9));
    }
}
