//! Registrations of regions that READs fill, on devices that open sinks to peers and on others.

use std::sync::Arc;

use super::super::in_flight::{CopyRange, CopyRanges, LocalMemory, Transfer, TransferKind};
use super::super::region::{Grant, RemoteRange};
use super::super::registrations::LocalRegistrations;
use super::super::{Budget, MemRegion};
use super::Domain;
use crate::{Access, ProtectionDomain, RemoteSegment, Rkey};

/// The rights to memory that the peer writes.
const SINKS: fn() -> Access = || Access::LOCAL_WRITE | Access::REMOTE_WRITE;
const REMOTE: RemoteRange = RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(1) }, length: 8192 };

fn domain_of(opens_sinks: bool) -> (Arc<Domain>, LocalRegistrations) {
    let domain = Arc::new(Domain { opens_sinks, ..Domain::default() });
    let budget = Budget::new(64 << 20);
    (Arc::clone(&domain), LocalRegistrations::new(domain as Arc<dyn ProtectionDomain>, budget))
}

fn region() -> MemRegion {
    MemRegion::allocate(8192, &Budget::new(1 << 20)).unwrap()
}

fn registered(region: MemRegion, kind: TransferKind, known: &LocalRegistrations) -> Transfer<()> {
    let ranges = CopyRanges::Many(vec![
        CopyRange { local: 5000, remote: 0, length: 10 },
        CopyRange { local: 100, remote: 10, length: 20 },
    ]);
    let mut transfer = Transfer::new(LocalMemory::Region(region), kind, ranges, REMOTE, ());
    transfer.register(known).unwrap();
    transfer
}

#[test]
fn reads_into_open_sinks_register_once_and_are_copied() {
    let (domain, known) = domain_of(true);
    let mut region = region();
    region.fill(7);
    for content in 1..=20 {
        let mut transfer = registered(region, TransferKind::Read, &known);
        assert_eq!((domain.live(), domain.last_access()), (1, SINKS()));
        while let Some(part) = transfer.next_part(4096) {
            let sink = transfer.segment(&part).unwrap();
            let range = sink.address() as usize..sink.address() as usize + sink.length() as usize;
            let slab = &domain.regions()[0];
            assert!(slab.start <= range.start && range.end <= slab.end, "{slab:?} {range:?}");
            domain.write(range, content);
        }
        let LocalMemory::Region(read) = transfer.finish().local else { panic!("a region") };
        region = read;
        let changed = |at: usize| (100..120).contains(&at) || (5000..5010).contains(&at);
        assert!(region.iter().enumerate().all(|(at, byte)| *byte == if changed(at) { content } else { 7 }));
        assert_eq!(domain.made(), 1);
    }
    known.end_period();
    known.end_period();
    assert_eq!(domain.live(), 0, "an idle slab is freed");
}

#[test]
fn a_sink_without_memory_for_a_second_one_is_registered_alone() {
    let domain = Arc::new(Domain { opens_sinks: true, ..Domain::default() });
    let known = LocalRegistrations::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, Budget::new(0));
    let mut region = region();
    let rest = region.split_off(6000);
    let start = region.as_ptr() as usize;
    let transfer = registered(region, TransferKind::Read, &known);
    assert_eq!(domain.live(), 1);
    assert_eq!(domain.regions()[0], start + 100..start + 5010);
    assert_eq!(domain.last_access(), Access::LOCAL_WRITE);
    let finished = transfer.finish();
    assert_eq!(domain.live(), 0, "before the memory is handed back");
    drop((finished, rest));
}

#[test]
fn a_device_that_opens_sinks_writes_from_regions_without_opening_them() {
    let (domain, known) = domain_of(true);
    let transfer = registered(region(), TransferKind::Write, &known);
    assert_eq!((domain.live(), domain.last_access()), (1, Access::LOCAL_READ));
    drop(transfer.finish());
}

#[test]
fn a_region_is_registered_once_on_a_device_that_keeps_sinks_closed() {
    let (domain, known) = domain_of(false);
    let LocalMemory::Region(region) = registered(region(), TransferKind::Read, &known).finish().local else {
        panic!("a region")
    };
    let transfer = registered(region, TransferKind::Write, &known);
    assert_eq!((domain.live(), domain.last_access()), (1, Access::LOCAL_WRITE));
    drop(transfer.finish());
    known.prune();
    assert_eq!(domain.live(), 0);
}

#[test]
fn a_read_of_no_bytes_needs_no_sink() {
    let (domain, known) = domain_of(true);
    let ranges = CopyRanges::Many(Vec::new());
    let local = LocalMemory::Region(region());
    let mut transfer = Transfer::new(local, TransferKind::Read, ranges, REMOTE, ());
    transfer.register(&known).unwrap();
    assert_eq!(domain.live(), 0);
    let part = transfer.next_part(4096).unwrap();
    assert!(transfer.segment(&part).is_none() && part.last);
}

#[test]
fn a_grant_to_read_gives_the_device_no_right_to_write() {
    let (domain, _known) = domain_of(true);
    let shared = region().share();
    let grant = Grant::of_region(&*domain, &shared, Access::REMOTE_READ).unwrap();
    assert_eq!(domain.last_access(), Access::REMOTE_READ);
    drop(grant);
    let both = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let _grant = Grant::of_region(&*domain, &shared, both).unwrap();
    assert_eq!(domain.last_access(), both | Access::LOCAL_WRITE);
}

/// A peer whose device has no windows: what it gets rights to lies in slabs that hold nothing else.
#[test]
fn grants_without_windows_register_once_in_slabs_of_their_own() {
    let (domain, known) = domain_of(false);
    let others = domain_of(false).1;
    let (mut kept, mut addresses) = (Vec::new(), Vec::new());
    for round in 0..50_u8 {
        let copy = known.grant_copy(&[round; 3000]).unwrap();
        let (grant, sink) = known.grant_sink(3000).unwrap();
        assert_eq!((copy.range().length, grant.range().length), (3000, 3000));
        addresses.extend([copy.range().start.address, grant.range().start.address]);
        if round < 2 {
            kept.push((copy, grant, sink));
        }
    }
    assert_eq!((domain.made(), domain.live()), (2, 2), "one slab to read, one to write");
    let slabs = domain.regions();
    assert!(slabs[0].end <= slabs[1].start || slabs[1].end <= slabs[0].start);
    for pair in addresses.chunks(2) {
        let of = |address: u64| slabs.iter().position(|slab| slab.contains(&(address as usize))).unwrap();
        assert_ne!(of(pair[0]), of(pair[1]), "what it writes is not where it reads");
    }
    let foreign = others.grant_copy(&[1; 3000]).unwrap().range().start.address as usize;
    assert!(slabs.iter().all(|slab| !slab.contains(&foreign)), "another peer has slabs of its own");
    let mut bytes = [9; 3];
    let (_, grant, sink) = kept.pop().unwrap();
    let at = grant.range().start.address as usize;
    drop(grant);
    domain.write(at..at + 3, 5);
    sink.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 3]);
    assert!(sink.stays_open());
    assert!(sink.try_into_region().is_err(), "nobody gets a slice of what a peer may write");
    known.trim();
    assert_eq!(domain.live(), 2, "a grant lives");
    drop(kept);
    known.trim();
    assert_eq!(domain.live(), 0);
}

#[test]
fn a_grant_without_memory_says_so() {
    let (domain, _) = domain_of(false);
    let known = LocalRegistrations::new(Arc::clone(&domain) as Arc<dyn ProtectionDomain>, Budget::new(4096));
    assert!(known.grant_copy(&[1; 4096]).is_ok());
    known.trim();
    let errors = [known.grant_copy(&[1; 4097]).unwrap_err(), known.grant_sink(4097).unwrap_err()];
    for error in errors {
        assert_eq!(error.kind(), crate::VerbsErrorKind::NoMemory, "{error}");
    }
    assert_eq!(domain.live(), 0);
}
