//! Tests of the sites: learning, placement, and buffers, which work alike on the heap and in registered
//! memory.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{IoSlice, Write as _};
use std::thread;

use bytes::BufMut;

use super::handle::sent_slices;
use super::*;
use crate::memory::tests::{pool, small};
use crate::memory::{Pool, PoolSettings};

const LENGTH: usize = 10_000;

fn allocator(settings: SiteSettings) -> (SiteAllocator, Pool) {
    let (pool, ..) = pool(small(), 1 << 20);
    (SiteAllocator::new(pool.clone(), settings), pool)
}

/// Returns the status of the site that has `part` in its name.
fn status(sites: &SiteAllocator, part: &str) -> SiteStatus {
    let found: Vec<_> =
        sites.report().sites.into_iter().filter(|site| site.site.to_string().contains(part)).collect();
    assert_eq!(found.len(), 1, "{part}: {found:?}");
    found[0].clone()
}

/// Allocates a buffer under `name`, sends it if `is_sent`, and returns its placement.
fn step(sites: &SiteAllocator, name: &str, is_sent: bool) -> SitePlacement {
    let buffer = sites.allocate_named(name, LENGTH);
    let placement = buffer.placement();
    let bytes = buffer.freeze();
    if is_sent {
        sent(&bytes);
    }
    placement
}

#[test]
fn sending_sites_are_registered_from_the_next_iteration_on() {
    let (sites, pool) = allocator(SiteSettings::default());
    let mut placements = Vec::new();
    for _ in 0..3 {
        let (sends, computes) = (sites.allocate(LENGTH), sites.allocate(LENGTH));
        placements.push((sends.placement(), computes.placement()));
        let (sends, computes) = (sends.freeze(), computes.freeze());
        sent(&sends[5000..]);
        assert_eq!(pool.find(sends.as_ptr() as usize, LENGTH).is_some(), placements.len() > 1);
        assert!(pool.find(computes.as_ptr() as usize, LENGTH).is_none());
        sites.next_iteration();
    }
    use SitePlacement::{Heap, Registered};
    assert_eq!(placements, [(Heap, Heap), (Registered, Heap), (Registered, Heap)]);
    let report = sites.report();
    assert_eq!((report.iteration, report.untracked, report.sites.len()), (4, 0, 2));
    let sends = report.sites.iter().find(|site| site.sent > 0).unwrap();
    assert_eq!((sends.buffers, sends.bytes, sends.sent, sends.registered), (3, 30_000, 3, 2));
    assert_eq!(sends.why, PlacementReason::Sent { iteration: 3 });
    let computes = report.sites.iter().find(|site| site.sent == 0).unwrap();
    assert_eq!((computes.why, computes.placement, computes.registered), (PlacementReason::NotSent, Heap, 0));
    assert_eq!(pool.statistics().leased_send, 0);
}

#[test]
fn a_place_in_the_source_is_a_site_and_track_caller_passes_it_on() {
    #[track_caller]
    fn tracked(sites: &SiteAllocator) -> SiteBuf {
        sites.allocate(LENGTH)
    }
    fn untracked(sites: &SiteAllocator) -> SiteBuf {
        sites.allocate(LENGTH)
    }
    let (sites, _) = allocator(SiteSettings::default());
    drop((tracked(&sites), tracked(&sites)));
    assert_eq!(sites.report().sites.len(), 2, "two columns of one line");
    drop((untracked(&sites), untracked(&sites)));
    assert_eq!(sites.report().sites.len(), 3);
    for site in sites.report().sites {
        assert!(site.site.to_string().contains("sites/tests.rs:"), "{}", site.site);
    }
}

#[test]
fn under_a_name_every_allocation_of_an_iteration_is_a_site() {
    let (sites, _) = allocator(SiteSettings::default());
    for iteration in 1..=3 {
        for ordinal in 0..3 {
            let placement = step(&sites, "conv", ordinal == 1);
            let expected = iteration > 1 && ordinal == 1;
            assert_eq!(placement == SitePlacement::Registered, expected, "{iteration}, {ordinal}");
        }
        step(&sites, "relu", false);
        sites.next_iteration();
    }
    let names: Vec<_> = sites.report().sites.iter().map(|site| site.site.to_string()).collect();
    assert_eq!(names, ["conv#0", "conv#1", "conv#2", "relu#0"]);
    assert_eq!(status(&sites, "conv#1").sent, 3);
}

#[test]
fn a_site_that_sends_no_more_goes_back_to_the_heap_and_may_return() {
    let (sites, _) = allocator(SiteSettings { idle_iterations: 2, ..SiteSettings::default() });
    let iterate = |allocates: bool, is_sent: bool| {
        let placement = allocates.then(|| step(&sites, "a", is_sent));
        sites.next_iteration();
        placement
    };
    use SitePlacement::{Heap, Registered};
    assert_eq!(iterate(true, true), Some(Heap));
    assert_eq!(iterate(true, false), Some(Registered), "iteration 2: idle once");
    assert_eq!(iterate(true, true), Some(Registered), "sends again");
    assert_eq!(iterate(true, false), Some(Registered));
    for _ in 0..5 {
        iterate(false, false);
    }
    assert_eq!(
        iterate(true, false),
        Some(Registered),
        "iterations without a buffer of the site do not count"
    );
    assert_eq!(status(&sites, "a").why, PlacementReason::Idle { since: 10 });
    assert_eq!(iterate(true, false), Some(Heap));
    assert_eq!(iterate(true, true), Some(Heap));
    assert_eq!(iterate(true, true), Some(Registered));
}

#[test]
fn a_late_send_counts_in_its_iteration() {
    let (sites, _) = allocator(SiteSettings::default());
    let late = sites.allocate_named("a", LENGTH).freeze();
    sites.next_iteration();
    assert_eq!(status(&sites, "a").placement, SitePlacement::Heap);
    sent(&late);
    sites.next_iteration();
    let status = status(&sites, "a");
    assert_eq!(
        (status.placement, status.why),
        (SitePlacement::Registered, PlacementReason::Sent { iteration: 2 })
    );
}

#[test]
fn without_registered_memory_buffers_are_on_the_heap_and_counted() {
    let (pool, ..) = pool(PoolSettings { send_quota: 2 * 12_288, ..small() }, 1 << 20);
    let sites = SiteAllocator::new(pool.clone(), SiteSettings::default());
    step(&sites, "a", true);
    sites.next_iteration();
    let held: Vec<_> = (0..2).map(|_| pool.allocate(LENGTH).unwrap()).collect();
    assert_eq!(step(&sites, "a", true), SitePlacement::Heap);
    let refused = status(&sites, "a");
    assert_eq!((refused.placement, refused.registered, refused.refused), (SitePlacement::Registered, 0, 1));
    let report = sites.report();
    assert_eq!((report.placed, report.refused), (0, 1));
    assert!(report.refusal.as_ref().unwrap().contains("send quota exhausted"));
    let text = report.to_string();
    assert!(text.contains("; 1 on the heap for lack of memory\n"), "{text}");
    assert!(text.contains("\nlast lack of memory: send quota exhausted"), "{text}");
    drop(held);
    sites.next_iteration();
    assert_eq!(step(&sites, "a", true), SitePlacement::Registered, "as soon as the pool has memory");
}

#[test]
fn short_buffers_and_short_slices_are_not_traced() {
    let (sites, _) = allocator(SiteSettings { minimum: 0, ..SiteSettings::default() });
    let short = sites.allocate_named("short", SHORTEST - 1).freeze();
    sent(&short);
    let long = sites.allocate_named("long", SHORTEST).freeze();
    sent(&long[1..]);
    // The frozen content is shorter than the allocation.
    let mut cut = sites.allocate_named("cut", LENGTH);
    cut.truncate(SHORTEST - 1);
    sent(&cut.freeze());
    sent(&sites.allocate_named("empty", 0).freeze());
    sites.next_iteration();
    let report = sites.report();
    assert!(
        report.sites.iter().all(|site| site.sent == 0 && site.placement == SitePlacement::Heap),
        "{report}"
    );
    assert_eq!((status(&sites, "short").why, status(&sites, "short").short), (PlacementReason::Short, 1));
    assert_eq!(
        (status(&sites, "long").why, status(&sites, "empty").why),
        (PlacementReason::NotSent, PlacementReason::Short)
    );
    sent(&long);
    assert_eq!(status(&sites, "long").sent, 1);
}

#[test]
fn sites_beyond_the_limit_are_on_the_heap_and_counted() {
    let (sites, _) = allocator(SiteSettings { sites: 2, ..SiteSettings::default() });
    for _ in 0..2 {
        for name in ["a", "b", "c", "d"] {
            step(&sites, name, true);
        }
        sites.next_iteration();
    }
    let report = sites.report();
    assert_eq!((report.sites.len(), report.untracked), (2, 4));
    assert_eq!(step(&sites, "c", true), SitePlacement::Heap);
    assert_eq!(step(&sites, "b", true), SitePlacement::Registered);
    assert!(report.to_string().contains("4 buffers of further sites"));
}

#[test]
fn a_buffer_counts_once_and_not_for_a_later_buffer_at_its_address() {
    let (sites, pool) = allocator(SiteSettings::default());
    step(&sites, "a", true);
    sites.next_iteration();
    let bytes = sites.allocate_named("a", LENGTH).freeze();
    let address = bytes.as_ptr();
    let clone = bytes.clone();
    sent(&bytes[..SHORTEST]);
    drop(bytes);
    sent(&clone);
    drop(clone);
    assert_eq!(status(&sites, "a").sent, 2);
    sites.next_iteration();
    drop(sites.allocate_named("a", LENGTH).freeze());
    let other = pool.allocate(LENGTH).unwrap().freeze();
    assert_eq!(other.as_ptr(), address, "the pool hands out the extent that was given back last");
    sent(&other);
    assert_eq!(status(&sites, "a").sent, 2);
}

#[test]
fn only_the_accepted_part_of_a_write_is_sent() {
    let (sites, _) = allocator(SiteSettings::default());
    let buffers: Vec<_> = ["a", "b", "c"].map(|name| sites.allocate_named(name, LENGTH).freeze()).into();
    let header = [0; 9];
    let slices: Vec<_> =
        buffers.iter().flat_map(|buffer| [IoSlice::new(&header), IoSlice::new(buffer)]).collect();
    let sent = || ["a", "b", "c"].map(|name| status(&sites, name).sent);
    sent_slices(&slices, 9 + SHORTEST - 1);
    assert_eq!(sent(), [0, 0, 0]);
    sent_slices(&slices, 9 + LENGTH + 9);
    assert_eq!(sent(), [1, 0, 0]);
    sent_slices(&slices, 2 * (9 + LENGTH) + 9 + SHORTEST);
    assert_eq!(sent(), [1, 1, 1]);
}

#[test]
fn buffers_outlive_their_allocator_and_leak_nothing() {
    let (pool, domain, budget) = pool(small(), 1 << 20);
    let sites = SiteAllocator::new(pool, SiteSettings::default());
    step(&sites, "a", true);
    sites.next_iteration();
    let mut buffer = sites.allocate_named("a", LENGTH);
    buffer.fill(7);
    drop(sites);
    let bytes = buffer.freeze();
    sent(&bytes);
    assert!(bytes.iter().all(|&byte| byte == 7) && domain.live() == 1);
    drop(bytes);
    assert_eq!((domain.live(), budget.used()), (0, 0));
}

#[test]
fn threads_share_an_allocator() {
    let (sites, pool) = allocator(SiteSettings::default());
    const ROUNDS: u64 = 500;
    thread::scope(|scope| {
        for number in 0..4_u8 {
            let sites = sites.clone();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut buffer = sites.allocate(LENGTH);
                    buffer.fill(number);
                    let bytes = buffer.freeze();
                    sent(&bytes);
                    assert!(bytes.iter().all(|&byte| byte == number));
                    if round % 50 == 0 {
                        sites.next_iteration();
                    }
                }
            });
        }
    });
    let report = sites.report();
    assert_eq!(
        (report.sites.len(), report.sites[0].buffers, report.sites[0].sent),
        (1, 4 * ROUNDS, 4 * ROUNDS)
    );
    assert!(report.sites[0].registered > 0);
    assert_eq!(pool.statistics().leased_send, 0);
}

#[test]
fn the_report_is_a_table_with_the_largest_first() {
    let (sites, _) = allocator(SiteSettings::default());
    drop(sites.allocate_named("small", LENGTH));
    drop(sites.allocate_named("large", 3 << 19));
    let report = sites.report().to_string();
    let lines: Vec<_> = report.lines().collect();
    assert_eq!(lines[0], "in iteration 1, 2 sites");
    assert_eq!(
        lines[2],
        "heap               1    1536 KiB         0           0  large#0: recording since iteration 1"
    );
    assert!(lines[3].contains("10000 B"), "{}", lines[3]);
}

#[test]
fn a_buffer_is_filled_and_truncated_alike_in_both_places() {
    let (sites, _) = allocator(SiteSettings::default());
    for expected in [SitePlacement::Heap, SitePlacement::Registered] {
        let mut buffer = sites.allocate_named("a", LENGTH);
        assert_eq!((buffer.placement(), buffer.len()), (expected, LENGTH));
        let mut room = &mut buffer[..];
        room.put_u64_le(17);
        room.write_all(&[3; 5000]).unwrap();
        let filled = LENGTH - room.len();
        buffer.truncate(LENGTH + 1);
        buffer.truncate(filled);
        buffer.truncate(LENGTH);
        buffer[5007] = 4;
        let content = buffer.freeze();
        assert_eq!((content.len(), content[0], content[5006], content[5007]), (5008, 17, 3, 4));
        sent(&content);
        sites.next_iteration();
    }
}
