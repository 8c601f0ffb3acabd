//! The process that a hostile peer attacks, and its memory.

use super::*;
use crate::soft::domain::Domain;

/// Bytes of each part of the memory: receives, data of READs, and memory that peers may write.
const PART: usize = 4096;
/// Part of the memory for receives.
const RECEIVED: usize = 0;
/// Part of the memory for the data of READs.
const READ: usize = PART;
/// Part of the memory that peers may read and write.
pub(super) const GRANTED: usize = 2 * PART;
/// Content of memory that no peer may write.
const GUARD: u8 = 0xa5;

/// The memory of a process that is attacked. It stays from input to input.
pub(super) struct Victim {
    memory: Arc<HostMemory>,
}

/// A connection of the victim, and the keys of its memory.
pub(super) struct Connected {
    pub(super) side: Side,
    pub(super) hostile: Side,
    domain: Arc<Domain>,
    /// The key of the part that peers may use.
    pub(super) granted: u32,
    /// The region of all memory, which peers may not use.
    pub(super) all: Arc<dyn MemoryRegion>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.domain.remove_region(self.granted, 0);
        // The fuzzer maps the memory by hand, so no withdrawal comes.
        if let Some(segments) = self.side.core.segments() {
            segments.unmap(self.hostile.memory().id());
        }
    }
}

impl Victim {
    pub(super) fn new() -> Self {
        let memory = HostMemory::shared(MEMORY, 4096).unwrap();
        memory.copy_in(0, &[GUARD; MEMORY]).unwrap();
        Self { memory: Arc::new(memory) }
    }

    /// Makes a queue pair that is connected to one of a hostile process.
    pub(super) fn connect(&self) -> Connected {
        let (side, hostile) = Side::connected();
        let domain = Arc::clone(&side.core.domain);
        let rights = all();
        let granted = domain.insert(&self.memory, &(GRANTED..GRANTED + PART), rights, 0).unwrap();
        let all = side.domain.register(Arc::clone(&self.memory), Access::LOCAL_WRITE).unwrap();
        Connected { side, hostile, domain, granted, all }
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Returns a part of the memory, for a local request.
    fn local(connected: &Connected, start: usize, length: usize) -> [LocalSegment; 1] {
        // SAFETY: no reference to the memory exists.
        unsafe { [LocalSegment::new(&*connected.all, start..start + length)] }
    }

    /// Uses the queue pair in a way that the input chooses.
    pub(super) fn act(&self, bytes: &mut Bytes<'_>, connected: &Connected) {
        let side = &connected.side;
        let remote = RemoteSegment {
            address: connected.hostile.memory().address() + bytes.number() % 4096,
            rkey: connected.hostile.region.rkey(),
        };
        let length = bytes.index(PART);
        match bytes.below(12) {
            0..3 => {
                let wr_id = u64::from(bytes.byte()) % RECEIVES;
                let into = Self::local(connected, RECEIVED, length);
                let _ = side.pair.post_receive(&[ReceiveRequest { wr_id, into: &into }]);
            }
            3 => {
                side.send(1, length % 256);
            }
            4 => {
                let data = Self::local(connected, GRANTED, length);
                side.post(Operation::Send { data: Payload::Registered(&data), immediate: Some(1) });
            }
            5 => {
                let data = Self::local(connected, GRANTED, length);
                side.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None });
            }
            // Long enough for the peer to take it from our memory.
            6 => {
                let data = Self::local(connected, 3 * PART, 3 * PART);
                side.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None });
            }
            7 => {
                let into = Self::local(connected, READ, length.max(1));
                side.post(Operation::Read { into: &into, remote });
            }
            8 => {
                side.queue.arm().unwrap();
                side.queue.acknowledge_events();
            }
            9 => {
                side.pair.local().unwrap().progress();
            }
            10 if bytes.byte() < 16 => side.pair.to_error(),
            _ => self.poll(connected),
        }
    }

    pub(super) fn poll(&self, connected: &Connected) {
        for completion in connected.side.drain() {
            let receive = completion.wr_id < RECEIVES;
            assert!(!receive || completion.byte_len <= PART as u64, "{completion:?}");
        }
    }

    /// Checks that no byte has changed that no peer may write.
    pub(super) fn check(&self) {
        let mut bytes = vec![0; MEMORY - 3 * PART];
        self.memory.copy_out(3 * PART, &mut bytes).unwrap();
        let changed = bytes.iter().position(|byte| *byte != GUARD);
        assert_eq!(changed.map(|at| at + 3 * PART), None, "memory that was not granted has changed");
    }
}
