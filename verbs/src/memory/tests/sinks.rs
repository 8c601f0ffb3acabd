//! Registrations of regions that READs fill, on devices that open sinks to peers and on others.

use std::sync::Arc;

use super::super::in_flight::{CopyRange, CopyRanges, LocalMemory, Transfer, TransferKind};
use super::super::region::{Grant, RemoteRange};
use super::super::registrations::LocalRegistrations;
use super::super::{Budget, MemRegion};
use super::Domain;
use crate::{Access, ProtectionDomain, RemoteSegment, Rkey};

const REMOTE: RemoteRange = RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(1) }, length: 8192 };

fn domain(opens_sinks: bool) -> (Arc<Domain>, LocalRegistrations) {
    let domain = Arc::new(Domain { opens_sinks, ..Domain::default() });
    let budget = Budget::new(1 << 20);
    (Arc::clone(&domain), LocalRegistrations::new(domain as Arc<dyn ProtectionDomain>, budget))
}

fn region() -> MemRegion {
    MemRegion::allocate(8192, &Budget::new(1 << 20)).unwrap()
}

fn registered(region: MemRegion, kind: TransferKind, known: &mut LocalRegistrations) -> Transfer<()> {
    let ranges = CopyRanges::Many(vec![
        CopyRange { local: 5000, remote: 0, length: 10 },
        CopyRange { local: 100, remote: 10, length: 20 },
    ]);
    let mut transfer = Transfer::new(LocalMemory::Region(region), kind, ranges, REMOTE, ());
    transfer.register(known).unwrap();
    transfer
}

#[test]
fn a_sink_that_is_open_is_registered_for_its_read_alone() {
    let (domain, mut known) = domain(true);
    let mut region = region();
    let rest = region.split_off(6000);
    let start = region.as_ptr() as usize;
    let transfer = registered(region, TransferKind::Read, &mut known);
    assert_eq!(domain.live(), 1);
    assert_eq!(domain.regions()[0], start + 100..start + 5010);
    assert_eq!(domain.last_access(), Access::LOCAL_WRITE);
    let finished = transfer.finish();
    assert_eq!(domain.live(), 0, "before the memory is handed back");
    drop((finished, rest));
}

#[test]
fn an_open_device_reads_from_regions_without_opening_them() {
    let (domain, mut known) = domain(true);
    let transfer = registered(region(), TransferKind::Write, &mut known);
    assert_eq!((domain.live(), domain.last_access()), (1, Access::LOCAL_READ));
    let LocalMemory::Region(region) = transfer.finish().local else { panic!("a region") };
    let transfer = registered(region, TransferKind::Read, &mut known);
    assert_eq!((domain.live(), domain.last_access()), (2, Access::LOCAL_WRITE));
    drop(transfer.finish());
    assert_eq!(domain.live(), 1);
}

#[test]
fn a_region_is_registered_once_on_a_device_that_keeps_sinks_closed() {
    let (domain, mut known) = domain(false);
    let LocalMemory::Region(region) = registered(region(), TransferKind::Read, &mut known).finish().local
    else {
        panic!("a region")
    };
    let transfer = registered(region, TransferKind::Write, &mut known);
    assert_eq!((domain.live(), domain.last_access()), (1, Access::LOCAL_WRITE));
    drop(transfer.finish());
    known.prune();
    assert_eq!(domain.live(), 0);
}

#[test]
fn a_read_of_no_bytes_needs_no_sink() {
    let (domain, mut known) = domain(true);
    let ranges = CopyRanges::Many(Vec::new());
    let local = LocalMemory::Region(region());
    let mut transfer = Transfer::new(local, TransferKind::Read, ranges, REMOTE, ());
    transfer.register(&mut known).unwrap();
    assert_eq!(domain.live(), 0);
    let part = transfer.next_part(4096).unwrap();
    assert!(transfer.segment(&part).is_none() && part.is_last());
}

#[test]
fn a_grant_to_read_gives_the_device_no_right_to_write() {
    let (domain, _known) = domain(true);
    let shared = region().share();
    let grant = Grant::of_region(&*domain, &shared, Access::REMOTE_READ).unwrap();
    assert_eq!(domain.last_access(), Access::REMOTE_READ);
    drop(grant);
    let both = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let _grant = Grant::of_region(&*domain, &shared, both).unwrap();
    assert_eq!(domain.last_access(), both | Access::LOCAL_WRITE);
}
