//! One end of a connection: a queue pair, and memory of which a part is registered for the peer.

use std::io::{ErrorKind, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tonic_rdma_verbs::{
    Access, CompletionQueue, HostMemory, LocalSegment, MemoryRegion, Operation, PathSettings, Payload,
    PostError, ProtectionDomain, QueuePair, QueuePairAddress, QueuePairCapacity, ReceiveRequest,
    RemoteSegment, Rkey, SendRequest, VerbsError, WorkCompletion,
};

/// All access rights.
pub const ALL: Access = Access::from_bits_truncate(7);
/// Number of receives that an end keeps posted.
pub const RECEIVES: usize = 16;
/// Bytes of each receive, which are at the start of the memory.
pub const ROOM: usize = 4096;
/// Offset of messages to send.
pub const MESSAGES: usize = RECEIVES * ROOM;
/// Bytes of a large transfer.
pub const LARGE: usize = 256 << 10;
/// Offset of the bytes that the peer writes and reads.
pub const OPEN: usize = 1 << 20;
/// Offset of the sink of READs.
pub const SINK: usize = 2 << 20;
/// Offset of the source of WRITEs.
pub const SOURCE: usize = (2 << 20) + LARGE;
/// Offset of the part that is not registered. No peer may ever change this part.
pub const GUARD: usize = 3 << 20;
/// Bytes of the memory.
pub const MEMORY: usize = 4 << 20;
/// Time after which a wait fails. Only a hang lasts as long: beside other work, a test may get a small part
/// of the processor.
pub const TIMEOUT: Duration = Duration::from_secs(120);

pub const CAPACITY: QueuePairCapacity = QueuePairCapacity {
    send_requests: 64,
    receive_requests: 64,
    send_segments: 1,
    receive_segments: 1,
    inline: 256,
};

/// A queue pair, and its memory.
#[derive(Debug)]
pub struct LocalEnd {
    pub pair: Arc<dyn QueuePair>,
    pub region: Arc<dyn MemoryRegion>,
    pub memory: Arc<HostMemory>,
    /// More memories, for a peer that uses many.
    pub more: Vec<Arc<dyn MemoryRegion>>,
}

impl LocalEnd {
    pub fn new(domain: &dyn ProtectionDomain, queue: &Arc<dyn CompletionQueue>, more: usize) -> Self {
        let memory = Arc::new(HostMemory::shared(MEMORY, 4096).unwrap());
        let pair = domain.create_queue_pair(queue, queue, &CAPACITY).unwrap();
        pair.to_init(ALL).unwrap();
        memory.copy_in(GUARD, &pattern(u64::MAX, MEMORY - GUARD)).unwrap();
        let region = domain.register_range(Arc::clone(&memory), 0..GUARD, ALL).unwrap();
        Self { pair, region, memory, more: (0..more).map(|_| fresh_region(domain)).collect() }
    }

    /// Describes this end for the peer: the address, and the regions.
    pub fn describe(&self) -> String {
        let address: String =
            self.pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let regions = std::iter::once(&self.region).chain(&self.more);
        regions.fold(address, |line, region| {
            let start = region.memory().address() + region.range().start as u64;
            format!("{line} {start} {}", region.rkey().0)
        })
    }

    /// Posts receives, and connects to the end that `line` describes. Returns the regions of that end.
    pub fn connect(&self, line: &str) -> Result<Vec<RemoteSegment>, VerbsError> {
        let (address, regions) = parse(line);
        let settings = PathSettings::default();
        (0..RECEIVES).for_each(|index| self.post_receive(index as u64));
        // On a busy machine the answer of the peer's device may come too late.
        let late = |result: &Result<(), VerbsError>| {
            let cause = result.as_ref().err().and_then(|error| error.system());
            matches!(cause.map(|cause| cause.kind()), Some(ErrorKind::TimedOut | ErrorKind::WouldBlock))
        };
        let mut connected = self.pair.to_rtr(&address, &settings);
        for _ in 0..4 {
            if late(&connected) {
                connected = self.pair.to_rtr(&address, &settings);
            }
        }
        connected?;
        self.pair.to_rts(&settings)?;
        Ok(regions)
    }

    pub fn post_receive(&self, index: u64) {
        let into = [segment(&self.region, index as usize * ROOM, ROOM)];
        let _ = self.pair.post_receive(&[ReceiveRequest { wr_id: index, into: &into }]);
    }

    pub fn post(&self, wr_id: u64, operation: Operation<'_>) -> Result<(), PostError> {
        self.pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])
    }

    /// Sends `length` bytes from `offset`.
    pub fn send(&self, wr_id: u64, offset: usize, length: usize) -> Result<(), PostError> {
        let data = [segment(&self.region, offset, length)];
        self.post(wr_id, Operation::Send { data: Payload::Registered(&data), immediate: None })
    }

    pub fn send_inline(&self, wr_id: u64, bytes: &[u8]) -> Result<(), PostError> {
        let data = [IoSlice::new(bytes)];
        self.post(wr_id, Operation::Send { data: Payload::Inline(&data), immediate: None })
    }

    pub fn write(&self, wr_id: u64, from: LocalSegment, remote: RemoteSegment) -> Result<(), PostError> {
        self.post(wr_id, Operation::Write { data: Payload::Registered(&[from]), remote, immediate: None })
    }

    pub fn read(&self, wr_id: u64, into: LocalSegment, remote: RemoteSegment) -> Result<(), PostError> {
        self.post(wr_id, Operation::Read { into: &[into], remote })
    }

    /// Returns whether the part that is not registered has its content.
    pub fn guard_is_whole(&self) -> bool {
        content(&self.memory, GUARD, MEMORY - GUARD) == pattern(u64::MAX, MEMORY - GUARD)
    }
}

/// Registers fresh memory for a large transfer.
pub fn fresh_region(domain: &dyn ProtectionDomain) -> Arc<dyn MemoryRegion> {
    domain.register(Arc::new(HostMemory::shared(LARGE, 4096).unwrap()), ALL).unwrap()
}

/// Reads what [`LocalEnd::describe`] wrote.
pub fn parse(line: &str) -> (QueuePairAddress, Vec<RemoteSegment>) {
    let words: Vec<_> = line.split_whitespace().collect();
    let byte = |at: usize| u8::from_str_radix(&words[0][at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..words[0].len()).step_by(2).map(byte).collect();
    let region = |pair: &[&str]| RemoteSegment {
        address: pair[0].parse().unwrap(),
        rkey: Rkey(pair[1].parse().unwrap()),
    };
    (QueuePairAddress::new(bytes).unwrap(), words[1..].chunks(2).map(region).collect())
}

/// Names a part of a region for a local request.
pub fn segment(region: &Arc<dyn MemoryRegion>, offset: usize, length: usize) -> LocalSegment {
    // SAFETY: the tests never make a reference to registered memory; they copy in and out.
    unsafe { LocalSegment::new(&**region, offset..offset + length) }
}

/// Names the part of a peer's region from `offset` on.
pub fn at(region: RemoteSegment, offset: usize) -> RemoteSegment {
    RemoteSegment { address: region.address + offset as u64, ..region }
}

pub fn content(memory: &HostMemory, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.copy_out(offset, &mut bytes).unwrap();
    bytes
}

/// Returns bytes that depend on their position and on `seed`.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let block: Vec<u8> =
        (0..1021u64).map(|at| (at.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37_79b9)) as u8).collect();
    let mut bytes = block.repeat(length / block.len() + 1);
    bytes.truncate(length);
    bytes
}

/// Waits for completions as a program does that sleeps: arms, polls once more, and sleeps on the event
/// descriptor. Returns 0 if no event comes within `timeout` seconds.
pub fn sleep_for(queue: &dyn CompletionQueue, completions: &mut [WorkCompletion], timeout: i64) -> usize {
    loop {
        queue.acknowledge_events();
        queue.arm().unwrap();
        let count = queue.poll(completions);
        if count > 0 {
            return count;
        }
        let timeout = Timespec { tv_sec: timeout, tv_nsec: 0 };
        let fd = queue.event_fd();
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return 0,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Waits until `done` is true. Panics after [`TIMEOUT`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "waited {TIMEOUT:?} for {what}");
        std::thread::yield_now();
    }
}
