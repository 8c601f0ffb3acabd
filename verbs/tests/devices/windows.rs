//! Windows: rights of the peer of one queue pair to a part of a registered region, without a registration.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Waker};

use tonic_rdma_verbs::memory::{Budget, Pool};
use tonic_rdma_verbs::unstable::SlabRegistrations;
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, HostMemory, MemoryRegion, MemoryWindow, QueuePair,
    RemoteSegment, VerbsErrorKind, WorkCompletion,
};

use crate::fabric::{
    Fabric, Options, Side, connect_pairs, content, default_pair, grant, pattern, until_placed, wait_until,
};

/// A range without any alignment, in a region of `LENGTH` bytes.
const RANGE: Range<usize> = 5003..9106;
const LENGTH: usize = 16 << 10;
const BOTH: Access = Access::from_bits_truncate(Access::REMOTE_READ.bits() | Access::REMOTE_WRITE.bits());

/// Registers memory with `pattern(1)`, without a right of peers.
fn region(side: &Side, access: Access) -> Arc<dyn MemoryRegion> {
    let memory = HostMemory::shared(LENGTH, 4096).unwrap();
    memory.copy_in(0, &pattern(1, LENGTH)).unwrap();
    side.domain.register(Arc::new(memory), access).unwrap()
}

fn open(
    pair: &Arc<dyn QueuePair>,
    region: &Arc<dyn MemoryRegion>,
    range: Range<usize>,
    access: Access,
) -> Arc<dyn MemoryWindow> {
    pair.open_window(region, range, access).unwrap().expect("the device has windows")
}

/// Returns the address of the byte at `offset` of the region's memory, by the key of a window.
fn at(region: &Arc<dyn MemoryRegion>, window: &Arc<dyn MemoryWindow>, offset: usize) -> RemoteSegment {
    RemoteSegment { address: region.memory().address() + offset as u64, rkey: window.rkey() }
}

/// Tells when it is dropped.
struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Drops a window, and waits until the right has ended.
fn close(side: &Side, window: Arc<dyn MemoryWindow>) {
    let ended = Arc::new(AtomicBool::new(false));
    window.keep(Box::new(Owner(Arc::clone(&ended))));
    assert!(!ended.load(SeqCst));
    drop(window);
    until_ended(side, &ended);
}

fn until_ended(side: &Side, ended: &AtomicBool) {
    wait_until("the end of the right", || {
        let mut completions = [WorkCompletion::EMPTY; 1];
        let count = side.queue.poll(&mut completions);
        assert_eq!(count, 0, "windows make no completions: {:?}", completions[0]);
        ended.load(SeqCst)
    });
}

fn read(a: &Side, wr_id: u64, length: usize, from: RemoteSegment) -> Vec<u8> {
    a.read(wr_id, a.segment(0, length), from);
    a.expect(wr_id, CompletionOpcode::Read);
    a.content(0, length)
}

/// The window opens its range. Its key is worth nothing after the window is closed: a peer that uses it ends
/// its own connection, and no other.
pub fn a_window_is_open_until_it_is_dropped(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let (other_a, other_b) = (a.another_pair(&Options::default()), b.another_pair(&Options::default()));
    connect_pairs(&other_a, &other_b, &a.settings);
    let region = region(&b, Access::LOCAL_WRITE);
    let window = open(&b.pair, &region, RANGE, BOTH);
    assert_eq!(read(&a, 1, RANGE.len(), at(&region, &window, RANGE.start)), pattern(1, LENGTH)[RANGE]);
    let written = pattern(2, RANGE.len());
    a.fill(0, &written);
    a.write(2, a.segment(0, RANGE.len()), at(&region, &window, RANGE.start));
    a.expect(2, CompletionOpcode::Write);
    until_placed(fabric, &a, &b);
    let mut expected = pattern(1, LENGTH);
    expected[RANGE].copy_from_slice(&written);
    assert_eq!(content(&region, 0, LENGTH), expected);

    let stale = at(&region, &window, RANGE.start);
    close(&b, window);
    a.fill(0, &[7; 64]);
    a.write(3, a.segment(0, 64), stale);
    a.expect_refusal(fabric, 3, CompletionStatus::RemoteAccess);
    a.expect_end();
    assert_eq!(content(&region, 0, LENGTH), expected, "a closed window was written");

    let window = open(&other_b, &region, RANGE, Access::REMOTE_READ);
    let a = Side { pair: other_a, ..a };
    assert_eq!(read(&a, 4, 64, at(&region, &window, RANGE.start)), written[..64]);
}

/// A key that was valid once is refused for READs, too.
pub fn a_closed_window_is_not_read(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let region = region(&b, Access::LOCAL_READ);
    let window = open(&b.pair, &region, RANGE, Access::REMOTE_READ);
    let stale = at(&region, &window, RANGE.start);
    assert_eq!(read(&a, 1, 64, stale), pattern(1, LENGTH)[RANGE][..64]);
    close(&b, window);
    a.fill(0, &[0; 64]);
    a.read(2, a.segment(0, 64), stale);
    a.expect_refusal(fabric, 2, CompletionStatus::RemoteAccess);
    a.expect_end();
    assert_eq!(a.content(0, 64), [0; 64]);
}

pub fn beyond_a_window(fabric: &dyn Fabric) {
    for beyond in [RANGE.start - 1..RANGE.start, RANGE.start - 1..RANGE.end, RANGE.start..RANGE.end + 1, 0..1]
    {
        for reads in [false, true] {
            let (a, b) = default_pair(fabric);
            let region = region(&b, Access::LOCAL_WRITE);
            let window = open(&b.pair, &region, RANGE, BOTH);
            let (ours, place) = (a.segment(0, beyond.len()), at(&region, &window, beyond.start));
            if reads {
                a.read(1, ours, place);
            } else {
                a.write(1, ours, place);
            }
            a.expect_refusal(fabric, 1, CompletionStatus::RemoteAccess);
            a.expect_end();
            assert_eq!(content(&region, 0, LENGTH), pattern(1, LENGTH), "{beyond:?} may not be touched");
            assert_eq!(a.content(0, beyond.len()), vec![0; beyond.len()], "{beyond:?} may not be read");
        }
    }
}

/// A window gives no right but its own.
pub fn a_window_for_one_right(fabric: &dyn Fabric) {
    for access in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
        let (a, b) = default_pair(fabric);
        let region = region(&b, Access::LOCAL_WRITE);
        let window = open(&b.pair, &region, RANGE, access);
        let (ours, place) = (a.segment(0, 64), at(&region, &window, RANGE.start));
        if access == Access::REMOTE_READ {
            a.write(1, ours, place);
        } else {
            a.read(1, ours, place);
        }
        a.expect_refusal(fabric, 1, CompletionStatus::RemoteAccess);
        a.expect_end();
        assert_eq!(content(&region, 0, LENGTH), pattern(1, LENGTH));
    }
}

/// The peer of another queue pair can't use the key, although both queue pairs are of one domain.
pub fn a_window_is_for_one_queue_pair(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let (other_a, other_b) = (a.another_pair(&Options::default()), b.another_pair(&Options::default()));
    connect_pairs(&other_a, &other_b, &a.settings);
    let region = region(&b, Access::LOCAL_READ);
    let window = open(&b.pair, &region, RANGE, Access::REMOTE_READ);
    let place = at(&region, &window, RANGE.start);
    let first = Arc::clone(&a.pair);
    let a = Side { pair: other_a, ..a };
    a.read(1, a.segment(0, 64), place);
    a.expect_refusal(fabric, 1, CompletionStatus::RemoteAccess);
    a.expect_end();
    assert_eq!(a.content(0, 64), [0; 64]);
    let a = Side { pair: first, ..a };
    assert_eq!(read(&a, 2, 64, place), pattern(1, LENGTH)[RANGE][..64]);
}

/// Windows are opened and closed without an end, also more of them at a time than there are requests for.
pub fn windows_are_opened_again_and_again(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let region = region(&b, Access::LOCAL_READ);
    let expected = pattern(1, LENGTH);
    for round in 0..600 {
        let start = round * 13;
        let window = open(&b.pair, &region, start..start + 100, Access::REMOTE_READ);
        assert_eq!(read(&a, 1, 100, at(&region, &window, start)), expected[start..start + 100], "{round}");
        close(&b, window);
    }
    for _ in 0..2 {
        // A device that has no room for more says so.
        let opened = (0..2000).map_while(|start| {
            let opened = b.pair.open_window(&region, start..start + 10, Access::REMOTE_READ).unwrap();
            opened.map(|window| (start, window))
        });
        let opened: Vec<_> = opened.collect();
        assert!(opened.len() >= 16, "{}", opened.len());
        for (start, window) in &opened {
            assert_eq!(read(&a, 1, 10, at(&region, window, *start)), expected[*start..start + 10]);
        }
        for (_, window) in opened {
            close(&b, window);
        }
    }
}

/// The windows of a queue pair end with it, and the region can be deregistered.
pub fn windows_end_with_their_queue_pair(fabric: &dyn Fabric) {
    for fails_first in [false, true] {
        let (a, b) = default_pair(fabric);
        let region = region(&b, Access::LOCAL_READ);
        let windows = [0, 100].map(|start| open(&b.pair, &region, start..start + 100, Access::REMOTE_READ));
        assert_eq!(read(&a, 1, 100, at(&region, &windows[0], 0)), pattern(1, LENGTH)[..100]);
        let ended = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        for (window, ended) in windows.iter().zip(&ended) {
            window.keep(Box::new(Owner(Arc::clone(ended))));
        }
        let [first, second] = windows;
        if fails_first {
            b.pair.to_error();
        }
        // Its end is under way when the queue pair goes.
        drop(first);
        let Side { pair, .. } = b;
        drop(pair);
        drop(second);
        assert!(ended.iter().all(|ended| ended.load(SeqCst)));
        let memory = Arc::downgrade(region.memory());
        drop(region);
        assert!(memory.upgrade().is_none(), "memory whose deregistration fails is never freed");
    }
}

pub fn impossible_windows_are_refused(fabric: &dyn Fabric) {
    let (_a, b) = default_pair(fabric);
    let whole = region(&b, Access::LOCAL_READ);
    let part = b.domain.register_range(Arc::clone(whole.memory()), RANGE, Access::LOCAL_WRITE).unwrap();
    let error = |region: &Arc<dyn MemoryRegion>, range, access| {
        b.pair.open_window(region, range, access).unwrap_err().kind()
    };
    for range in [5..5, LENGTH - 1..LENGTH + 1, usize::MAX - 1..usize::MAX] {
        assert_eq!(error(&whole, range, Access::REMOTE_READ), VerbsErrorKind::Unusable);
    }
    for range in [RANGE.start - 1..RANGE.end, RANGE.start..RANGE.end + 1] {
        assert_eq!(error(&part, range, Access::REMOTE_READ), VerbsErrorKind::Unusable);
    }
    assert_eq!(error(&whole, RANGE, Access::REMOTE_WRITE), VerbsErrorKind::Unusable);
    let other = b.context.alloc_protection_domain().unwrap();
    let foreign = other.register(Arc::clone(whole.memory()), Access::LOCAL_READ).unwrap();
    assert_eq!(error(&foreign, RANGE, Access::REMOTE_READ), VerbsErrorKind::InvalidArgument);
}

/// Buffers of one slab are granted one by one, on each device. A buffer belongs to its owner again when its
/// right has ended, and a peer that uses the key later ends its connection.
pub fn leases_are_granted_one_by_one(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let (pool, mut slabs) =
        (Pool::for_sending(1 << 20), SlabRegistrations::new(Arc::clone(&b.domain), Budget::new(1 << 22)));
    let leases = [1, 2].map(|seed| {
        let mut buffer = pool.allocate(3000).unwrap();
        buffer.copy_from_slice(&pattern(seed, 3000));
        buffer.into_lease()
    });
    let grants = leases.each_ref().map(|lease| grant(&b, &mut slabs, lease));
    for (seed, grant) in [1, 2].into_iter().zip(&grants) {
        assert_eq!(
            (grant.range().length, read(&a, seed, 3000, grant.range().start)),
            (3000, pattern(seed, 3000))
        );
    }
    let ([first, second], [granted, other]) = (leases, grants);
    let first = first.try_into_buffer().map(drop).expect_err("the grant holds the buffer");
    let stale = granted.range().start;
    let mut revocation = pin!(granted.revoke());
    wait_until("the end of the right", || {
        b.expect_nothing();
        revocation.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    });
    let mut buffer = first.try_into_buffer().expect("the right has ended");
    buffer.fill(7);
    assert_eq!(read(&a, 3, 3000, other.range().start), pattern(2, 3000), "the other right stands");
    assert_eq!(&*second, pattern(2, 3000));
    a.fill(0, &[0; 64]);
    a.read(4, a.segment(0, 64), stale);
    a.expect_refusal(fabric, 4, CompletionStatus::RemoteAccess);
    a.expect_end();
    assert_eq!(a.content(0, 64), [0; 64]);
}
