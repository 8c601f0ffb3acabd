//! Regions over a part of a memory: their limits, exact to the byte.

use std::ops::Range;
use std::sync::Arc;

use tonic_rdma_verbs::memory::{Budget, Pool};
use tonic_rdma_verbs::unstable::{Grant, SlabRegistrations};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, HostMemory, MemoryRegion, QueuePairState, RemoteSegment,
    VerbsErrorKind,
};

use crate::fabric::{
    ALL, Fabric, Side, content, default_pair, grant, pattern, remote, segment, until_placed,
};

/// A range without any alignment, in memory of `MEMORY` bytes.
const RANGE: Range<usize> = 5003..9106;
const MEMORY: usize = 16 << 10;

/// Makes a memory that peers can map, and a memory that they can't map. Both are filled with `pattern(1)`.
fn memories() -> [Arc<HostMemory>; 2] {
    let shared = HostMemory::shared(MEMORY, 4096).unwrap();
    let private = HostMemory::from_vec(vec![0; MEMORY]);
    [shared, private].map(|memory| {
        memory.copy_in(0, &pattern(1, MEMORY)).unwrap();
        Arc::new(memory)
    })
}

fn register(
    side: &Side,
    memory: &Arc<HostMemory>,
    range: Range<usize>,
    access: Access,
) -> Arc<dyn MemoryRegion> {
    side.domain.register_range(Arc::clone(memory), range, access).unwrap()
}

fn expect_refused(fabric: &dyn Fabric, a: &Side) {
    a.expect_refusal(fabric, 1, CompletionStatus::RemoteAccess);
    a.expect_end();
}

pub fn range_to_the_byte(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    for memory in memories() {
        let region = register(&b, &memory, RANGE, ALL);
        assert_eq!((region.range(), region.memory().len()), (RANGE, MEMORY));
        let written = pattern(2, RANGE.len());
        a.fill(1, &written);
        a.write(1, a.segment(1, RANGE.len()), remote(&region, RANGE.start));
        a.expect(1, CompletionOpcode::Write);
        until_placed(fabric, &a, &b);
        let mut expected = pattern(1, MEMORY);
        expected[RANGE].copy_from_slice(&written);
        assert_eq!(content(&region, 0, MEMORY), expected);
        for byte in [RANGE.start, RANGE.end - 1] {
            a.read(2, a.segment(0, 1), remote(&region, byte));
            a.expect(2, CompletionOpcode::Read);
            assert_eq!(a.content(0, 1), expected[byte..=byte]);
        }
        a.read(3, a.segment(7, RANGE.len()), remote(&region, RANGE.start));
        a.expect(3, CompletionOpcode::Read);
        assert_eq!(a.content(7, RANGE.len()), written);
    }
}

pub fn beyond_a_range(fabric: &dyn Fabric) {
    let ends = [RANGE.start - 1..RANGE.start, RANGE.start - 1..RANGE.end, RANGE.end..RANGE.end + 1];
    for beyond in [ends, [RANGE.start..RANGE.end + 1, 0..1, MEMORY - 1..MEMORY]].into_iter().flatten() {
        for which in [0, 1] {
            for reads in [false, true] {
                let (a, b) = default_pair(fabric);
                let memory = &memories()[which];
                let region = register(&b, memory, RANGE, ALL);
                let place = remote(&region, beyond.start);
                let ours = a.segment(0, beyond.len());
                if reads {
                    a.read(1, ours, place)
                } else {
                    a.write(1, ours, place)
                }
                expect_refused(fabric, &a);
                assert_eq!(content(&region, 0, MEMORY), pattern(1, MEMORY), "{beyond:?} may not be touched");
                assert_eq!(a.content(0, beyond.len()), vec![0; beyond.len()], "{beyond:?} may not be read");
            }
        }
    }
}

/// A grant of a payload shows the peer that payload, no byte beside it, and nothing after its end.
pub fn a_granted_payload_to_the_byte(fabric: &dyn Fabric) {
    let mut buffer = Pool::for_sending(1 << 20).allocate(MEMORY).unwrap();
    buffer.copy_from_slice(&pattern(1, MEMORY));
    let payload = buffer.into_lease().part(RANGE).unwrap();
    let pair = || {
        let (a, b) = default_pair(fabric);
        let mut slabs = SlabRegistrations::new(Arc::clone(&b.domain), Budget::new(64 << 20));
        let grant = grant(&b, &mut slabs, &payload);
        assert_eq!(grant.range().length, RANGE.len() as u64);
        (a, b, grant)
    };
    let at = |grant: &Grant, offset: i64| {
        let start = grant.range().start;
        RemoteSegment { address: start.address.wrapping_add_signed(offset), ..start }
    };
    let (a, _b, grant) = pair();
    a.read(2, a.segment(0, RANGE.len()), at(&grant, 0));
    a.expect(2, CompletionOpcode::Read);
    assert_eq!(a.content(0, RANGE.len()), pattern(1, MEMORY)[RANGE]);
    let first = at(&grant, 0);
    drop(grant);
    a.read(1, a.segment(0, 1), first);
    expect_refused(fabric, &a);
    let end = RANGE.len() as i64;
    for (offset, length) in [(-1, 1), (-1, RANGE.len()), (1, RANGE.len()), (end, 1), (end - 1, 2)] {
        let (a, _b, grant) = pair();
        a.read(1, a.segment(0, length), at(&grant, offset));
        expect_refused(fabric, &a);
        assert_eq!(a.content(0, length), vec![0; length], "{length} bytes at {offset} may not be read");
    }
}

/// The range also limits the requests of its owner.
pub fn local_segment_beyond_a_range(fabric: &dyn Fabric) {
    for range in [RANGE.start - 1..RANGE.end, RANGE.start..RANGE.end + 1] {
        for memory in memories() {
            let (a, b) = default_pair(fabric);
            let region = register(&a, &memory, RANGE, ALL);
            a.write(1, segment(&region, RANGE.start, RANGE.len()), b.remote(0));
            a.expect(1, CompletionOpcode::Write);
            until_placed(fabric, &a, &b);
            assert_eq!(b.content(0, RANGE.len()), pattern(1, MEMORY)[RANGE]);
            a.write(2, segment(&region, range.start, range.len()), b.remote(0));
            let status = fabric.reports("local_range_out_of_bounds", CompletionStatus::LocalProtection);
            a.expect_failure(2, status);
            assert_eq!(a.pair.state(), QueuePairState::Error);
        }
    }
}

/// Two adjacent parts of one memory have different rights, and neither key opens the other part.
pub fn ranges_have_rights_of_their_own(fabric: &dyn Fabric) {
    let readable = match fabric.sinks_are_open() {
        false => Access::LOCAL_WRITE | Access::REMOTE_READ,
        true => Access::REMOTE_READ,
    };
    for memory in memories() {
        let two = |b: &Side| {
            let read = register(b, &memory, RANGE, readable);
            let write = register(b, &memory, RANGE.end..MEMORY, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
            (read, write)
        };
        let (a, b) = default_pair(fabric);
        let (read, write) = two(&b);
        a.read(1, a.segment(0, 64), remote(&read, RANGE.end - 64));
        a.expect(1, CompletionOpcode::Read);
        a.write(2, a.segment(0, 64), remote(&write, RANGE.end));
        a.expect(2, CompletionOpcode::Write);
        until_placed(fabric, &a, &b);
        assert_eq!(content(&write, RANGE.end, 64), pattern(1, MEMORY)[RANGE.end - 64..RANGE.end]);
        a.write(1, a.segment(0, 64), remote(&read, RANGE.end - 64));
        expect_refused(fabric, &a);

        let (a, b) = default_pair(fabric);
        let (read, write) = two(&b);
        // The address of one part with the key of the other.
        let place = RemoteSegment { rkey: write.rkey(), ..remote(&read, RANGE.start) };
        a.write(1, a.segment(0, 64), place);
        expect_refused(fabric, &a);
    }
}

/// A key without the right to READ does not open memory for reading, although another key does. Only for
/// devices that check this right.
pub fn ranges_not_to_be_read(fabric: &dyn Fabric) {
    for memory in memories() {
        let (a, b) = default_pair(fabric);
        let _readable = register(&b, &memory, 0..RANGE.end, Access::REMOTE_READ);
        let region = register(&b, &memory, RANGE, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        a.read(1, a.segment(0, 64), remote(&region, RANGE.start));
        expect_refused(fabric, &a);
    }
}

/// Regions of one memory are registered and deregistered. Each region works exactly as long as it is
/// registered.
pub fn ranges_go_one_by_one(fabric: &dyn Fabric) {
    for memory in memories() {
        let (a, b) = default_pair(fabric);
        let stays = register(&b, &memory, 100..200, ALL);
        for round in 0..20 {
            let message = pattern(round, 100);
            a.fill(0, &message);
            let goes = register(&b, &memory, RANGE, ALL);
            a.write(1, a.segment(0, 100), remote(&goes, RANGE.end - 100));
            a.expect(1, CompletionOpcode::Write);
            until_placed(fabric, &a, &b);
            assert_eq!(content(&goes, RANGE.end - 100, 100), message);
            drop(goes);
            a.write(2, a.segment(0, 100), remote(&stays, 100));
            a.expect(2, CompletionOpcode::Write);
            until_placed(fabric, &a, &b);
            assert_eq!(content(&stays, 100, 100), message);
        }
        let gone = remote(&register(&b, &memory, RANGE, ALL), RANGE.start);
        a.write(1, a.segment(0, 100), gone);
        expect_refused(fabric, &a);
    }
}

pub fn invalid_ranges_are_refused(fabric: &dyn Fabric) {
    let (a, _b) = default_pair(fabric);
    #[expect(clippy::reversed_empty_ranges, reason = "it is to be refused")]
    for range in [0..0, MEMORY..MEMORY, 9..8, 0..MEMORY + 1, MEMORY..MEMORY + 1, 1..usize::MAX] {
        for memory in memories() {
            let error = a.domain.register_range(memory, range.clone(), ALL).unwrap_err();
            assert_eq!(error.kind(), VerbsErrorKind::Unusable, "{error:?}");
            let text = format!(
                "bytes {} to {} of a memory of {MEMORY} bytes can't be registered",
                range.start, range.end
            );
            assert_eq!(error.to_string(), text);
        }
    }
}
