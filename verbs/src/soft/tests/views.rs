//! Views of a peer's memory, and the charges of memory that views keep mapped.

use std::sync::Weak;

use super::*;
use crate::{RemoteView, VerbsErrorKind};

/// Returns the address of all of `region` for the peer.
fn whole(region: &Arc<dyn MemoryRegion>) -> RemoteSegment {
    RemoteSegment { address: region.memory().address(), rkey: region.rkey() }
}

/// Returns a view of `region`, which belongs to `owner`: reads it once, and waits until it is mapped.
fn view_of(reader: &Side, owner: &Side, region: &Arc<dyn MemoryRegion>) -> RemoteView {
    let (remote, length) = (whole(region), region.memory().len() as u64);
    assert_eq!(
        reader.pair.local().unwrap().view(remote, length).unwrap_err().kind(),
        VerbsErrorKind::NotMapped
    );
    let into = reader.part(0, 8);
    assert!(reader.post(Operation::Read { into: &into, remote }));
    let mut view = None;
    wait_for("the mapping", || {
        owner.drain();
        reader.drain();
        view = reader.pair.local().unwrap().view(remote, length).ok();
        view.is_some()
    });
    view.unwrap()
}

#[test]
fn a_view_shows_what_the_owner_stores_later() {
    let (owner, reader) = Side::connected();
    let region = owner.large(1 << 16, 3);
    let view = view_of(&reader, &owner, &region);
    let mut bytes = [0; 64];
    view.copy_out(1000, &mut bytes).unwrap();
    assert_eq!((bytes, view.len(), view.is_current()), ([3; 64], 1 << 16, true));
    region.memory().copy_in(1000, &[4; 64]).unwrap();
    region.memory().store_u64(2048, 77).unwrap();
    assert_eq!(view.load_u64(2048), Ok(77));
    view.copy_out(1000, &mut bytes).unwrap();
    assert_eq!(bytes, [4; 64]);
}

#[test]
fn a_view_of_a_part_ends_where_the_region_ends() {
    let (owner, reader) = Side::connected();
    let region = owner.large(1 << 16, 3);
    drop(view_of(&reader, &owner, &region));
    region.memory().copy_in(4096, &[5; 100]).unwrap();
    let part = RemoteSegment { address: region.memory().address() + 4096, ..whole(&region) };
    let view = reader.pair.local().unwrap().view(part, 100).unwrap();
    let mut bytes = [0; 100];
    view.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 100]);
    assert!(view.copy_out(1, &mut bytes).is_err());
    for (remote, length) in [(part, 1 << 16), (whole(&region), (1 << 16) + 1), (part, u64::MAX)] {
        assert_eq!(
            reader.pair.local().unwrap().view(remote, length).unwrap_err().kind(),
            VerbsErrorKind::Revoked
        );
    }
}

#[test]
fn a_view_of_memory_that_was_taken_back_stays_readable() {
    let (owner, reader) = Side::connected();
    let region = owner.large(1 << 16, 3);
    let memory = Arc::clone(region.memory());
    let view = view_of(&reader, &owner, &region);
    let remote = whole(&region);
    drop(region);
    assert!(!view.is_current());
    assert_eq!(
        reader.pair.local().unwrap().view(remote, 1 << 16).unwrap_err().kind(),
        VerbsErrorKind::Revoked
    );
    memory.store_u64(0, 9).unwrap();
    assert_eq!(view.load_u64(0), Ok(9), "the memory is still one");
    drop((memory, owner, reader));
    assert_eq!((view.load_u64(0), view.is_current()), (Ok(9), false));
}

#[test]
fn a_view_is_not_current_after_either_queue_pair_has_ended() {
    for owner_ends in [false, true] {
        let (owner, reader) = Side::connected();
        let region = owner.large(4096, 3);
        let view = view_of(&reader, &owner, &region);
        assert!(view.is_current());
        if owner_ends {
            owner.pair.to_error()
        } else {
            reader.pair.to_error()
        }
        assert!(!view.is_current());
        assert_eq!(view.load_u64(0), Ok(0x0303_0303_0303_0303));
    }
}

#[test]
fn memory_that_is_not_shared_and_peers_that_are_not_connected_have_no_view() {
    let alone = Side::new();
    assert_eq!(
        alone.pair.local().unwrap().view(alone.remote(0), 8).unwrap_err().kind(),
        VerbsErrorKind::Unsupported
    );
    let (owner, reader) = Side::connected();
    let private = owner.domain.register(Arc::new(HostMemory::from_vec(vec![1; 64])), all()).unwrap();
    assert_eq!(
        reader.pair.local().unwrap().view(whole(&private), 64).unwrap_err().kind(),
        VerbsErrorKind::Unsupported
    );
    let unreadable = owner.domain.register(Arc::clone(owner.region.memory()), Access::LOCAL_WRITE).unwrap();
    assert_eq!(
        reader.pair.local().unwrap().view(whole(&unreadable), 64).unwrap_err().kind(),
        VerbsErrorKind::Revoked
    );
}

/// A part of a budget that a test counts.
struct Charge;

/// Returns a region of a side, whose memory has a charge.
fn charged(owner: &Side) -> (Arc<dyn MemoryRegion>, Weak<Charge>) {
    let memory = Arc::new(HostMemory::shared(MEMORY, 4096).unwrap());
    let charge = Arc::new(Charge);
    let watched = Arc::downgrade(&charge);
    memory.set_charge(charge);
    (owner.domain.register(memory, all()).unwrap(), watched)
}

#[test]
fn memory_stays_charged_until_the_last_view_is_gone() {
    let (owner, reader) = Side::connected();
    let (region, watched) = charged(&owner);
    let id = region.memory().id();
    let view = view_of(&reader, &owner, &region);
    let other = reader.pair.local().unwrap().view(whole(&region), 8).unwrap();
    drop(region);
    let segments = Arc::clone(reader.core.segments().unwrap());
    wait_for("the news", || segments.find(id).is_none());
    let clone = view.clone();
    drop((view, other));
    // An exchange over the same socket comes after all earlier news.
    let (second, third) = Side::connected();
    assert_eq!(watched.strong_count(), 1, "a view is left");
    drop(clone);
    wait_for("the charge", || watched.strong_count() == 0);
    drop((second, third));
}

/// The last connection to a peer goes, while the peer has views of memory.
#[test]
fn views_that_outlive_the_connection_keep_the_charge() {
    // The device stays, because this side has it.
    let _other = Side::new();
    let (owner, reader) = Side::connected();
    let (region, watched) = charged(&owner);
    let id = region.memory().id();
    let view = view_of(&reader, &owner, &region);
    let segments = Arc::clone(reader.core.segments().unwrap());
    drop(region);
    wait_for("the news", || segments.find(id).is_none());
    drop((owner, reader));
    // Another connection comes after all earlier news, and may use the same socket.
    let connected = Side::connected();
    assert_eq!((watched.strong_count(), view.load_u64(0)), (1, Ok(0)));
    drop(view);
    wait_for("the charge", || watched.strong_count() == 0);
    drop(connected);
}
