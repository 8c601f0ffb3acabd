//! The sink of a READ belongs to its user again when the READ has completed. From then on the peer can't
//! write to it, not even on a device whose peers write the answers of READs by the key of the sink (iWARP).

use std::sync::Arc;

use tonic_rdma_verbs::memory::{Budget, MemRegion};
use tonic_rdma_verbs::unstable::{
    CopyRange, CopyRanges, LocalMemory, LocalRegistrations, RemoteRange, Transfer, TransferKind,
};
use tonic_rdma_verbs::{CompletionOpcode, CompletionStatus, Lkey, RemoteSegment, Rkey};

use crate::fabric::{Fabric, Side, default_pair, pattern};

/// Bytes of the sink.
const LENGTH: usize = 8192;
/// The part of the sink that the READ fills.
const PART: CopyRange = CopyRange { local: 1000, remote: 0, length: 3000 };

/// READs from `b` into the part of a region, as transfers do. Returns the region, and the key that the
/// request named.
fn read(a: &Side, b: &Side, known: &LocalRegistrations, region: MemRegion) -> (MemRegion, Lkey) {
    let content = pattern(3, PART.length as usize);
    b.fill(0, &content);
    let place = RemoteRange { start: b.remote(0), length: b.region.memory().len() as u64 };
    let ranges = CopyRanges::One(PART);
    let mut transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Read, ranges, place, ());
    transfer.register(known).unwrap();
    let part = transfer.next_part(u64::MAX).unwrap();
    let sink = transfer.segment(&part).unwrap();
    a.read(1, sink, b.remote(0));
    a.expect(1, CompletionOpcode::Read);
    let LocalMemory::Region(region) = transfer.finish().local else { panic!("a region") };
    let (start, end) = (PART.local as usize, (PART.local + PART.length) as usize);
    assert!(region[start..end] == content);
    assert!(region[..start].iter().chain(&region[end..]).all(|byte| *byte == 0));
    (region, sink.lkey())
}

/// A peer that keeps the key of a sink can't write after the sink was handed back.
pub fn a_sink_is_closed_after_its_read(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let known = LocalRegistrations::new(Arc::clone(&a.domain), Budget::new(1 << 20));
    let region = MemRegion::allocate(LENGTH, &Budget::new(1 << 20)).unwrap();
    let (mut region, _) = read(&a, &b, &known, region);
    region.fill(0);
    let (mut region, key) = read(&a, &b, &known, region);
    region.fill(7);
    b.fill(0, &[0xbd; LENGTH]);
    let sink = RemoteSegment { address: region.as_ptr() as u64, rkey: Rkey(key.0) };
    b.write(2, b.segment(0, LENGTH), sink);
    b.expect_refusal(fabric, 2, CompletionStatus::RemoteAccess);
    assert!(region.iter().all(|byte| *byte == 7), "a peer wrote to memory that was handed back");
}
