//! The sides of a connection. Both post requests and poll for completions ([`Side`]). One measures
//! ([`Initiator`]). The other process is this binary, started again ([`Peer`]): it answers or receives
//! messages until its standard input ends.

use std::io::IoSlice;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tonic_rdma_commands::clap::{self, ValueEnum};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::{Named as _, cores, parse_name, serde_json};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionQueue, CompletionStatus, Context, HostMemory, LocalSegment,
    MemoryRegion, Operation, PathSettings, Payload, QueuePair, QueuePairAddress, QueuePairCapacity,
    ReceiveRequest, RemoteSegment, Rkey, SendRequest, WorkCompletion, soft,
};

/// Number of receives that are posted at any time.
pub(crate) const RECEIVES: u64 = 512;
/// Length of the longest message that is posted inline.
const INLINE: usize = 512;
/// Number of requests from one signalled request to the next.
const SIGNAL_EVERY: u64 = 64;
/// Maximum number of completions of one poll.
const POLL: usize = 16;

/// The opcode to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Opcode {
    Send,
    SendWithImm,
    Write,
    WriteWithImm,
    Read,
}

impl Opcode {
    /// Returns whether the opcode consumes a receive of the peer.
    pub(crate) fn is_received(self) -> bool {
        matches!(self, Self::Send | Self::SendWithImm | Self::WriteWithImm)
    }
}

/// The address of the other side, as a line of JSON: the queue pair, and the memory and its key.
#[derive(Clone, Debug)]
pub(crate) struct Name {
    pair: QueuePairAddress,
    memory: RemoteSegment,
}

/// The form of a [`Name`] in messages.
pub(crate) type NameParts = (Vec<u8>, u64, u32);

impl Name {
    pub(crate) fn to_parts(&self) -> NameParts {
        (self.pair.as_bytes().to_vec(), self.memory.address, self.memory.rkey.0)
    }

    pub(crate) fn from_parts((pair, address, rkey): NameParts) -> Option<Self> {
        Some(Self { pair: QueuePairAddress::new(pair)?, memory: RemoteSegment { address, rkey: Rkey(rkey) } })
    }
}

/// One side. Its memory is an inbox, which the peer writes and reads, and an outbox.
pub(crate) struct Side {
    _context: Arc<dyn Context>,
    pub(crate) queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    peer: RemoteSegment,
    length: usize,
    /// Number of receive buffers in the inbox. Receives of long messages share them.
    slots: usize,
    posted: u64,
    message: Vec<u8>,
    /// Buffer for the completions of a poll.
    completions: [WorkCompletion; POLL],
}

impl Side {
    /// Makes a side with a queue pair in Init and with posted receives.
    pub(crate) fn new(length: usize) -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(4096).unwrap();
        let capacity = QueuePairCapacity {
            send_requests: 1024,
            receive_requests: RECEIVES as u32,
            send_segments: 1,
            receive_segments: 1,
            inline: INLINE as u32,
        };
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        pair.to_init(all).unwrap();
        let slots = ((1 << 20) / length).clamp(1, RECEIVES as usize);
        let inbox = (slots * length).next_multiple_of(4096);
        let memory = Arc::new(HostMemory::shared(inbox + length, 4096).unwrap());
        memory.copy_in(0, &vec![0; inbox]).unwrap();
        memory.copy_in(inbox, &vec![1; length]).unwrap();
        let region = domain.register(memory, all).unwrap();
        let peer = RemoteSegment { address: 0, rkey: Rkey(0) };
        let message = vec![0; length];
        let side = Self {
            _context: context,
            queue,
            pair,
            region,
            peer,
            length,
            slots,
            posted: 0,
            message,
            completions: [WorkCompletion::EMPTY; POLL],
        };
        side.post_receives(0..RECEIVES);
        side
    }

    pub(crate) fn name(&self) -> Name {
        let memory = RemoteSegment { address: self.region.memory().address(), rkey: self.region.rkey() };
        Name { pair: self.pair.local_address(), memory }
    }

    pub(crate) fn connect(&mut self, name: &Name) {
        let settings = PathSettings::default();
        self.pair.to_rtr(&name.pair, &settings).unwrap();
        self.pair.to_rts(&settings).unwrap();
        self.peer = name.memory;
    }

    fn outbox(&self) -> usize {
        self.region.memory().len() - self.length
    }

    fn segment(&self, offset: usize) -> [LocalSegment; 1] {
        // SAFETY: there is no reference to the memory.
        [unsafe { LocalSegment::new(&*self.region, offset..offset + self.length) }]
    }

    fn post_receives(&self, wr_ids: impl IntoIterator<Item = u64>) {
        for wr_id in wr_ids {
            let into = self.segment((wr_id as usize % self.slots) * self.length);
            self.pair.post_receive(&[ReceiveRequest { wr_id, into: &into }]).unwrap();
        }
    }

    /// Posts a message of one word, inline, which says that a batch has arrived.
    pub(crate) fn acknowledge(&mut self) {
        self.posted += 1;
        let signaled = self.posted.is_multiple_of(SIGNAL_EVERY);
        let slices = [IoSlice::new(&[0; 8])];
        let operation = Operation::Send { data: Payload::Inline(&slices), immediate: Some(7) };
        self.pair.post_send(&[SendRequest { wr_id: RECEIVES, operation, signaled }]).unwrap();
    }

    /// Posts one request. Unless `signaled` is set, one of [`SIGNAL_EVERY`] requests is signalled.
    pub(crate) fn post(&mut self, opcode: Opcode, signaled: bool) {
        self.posted += 1;
        let signaled = signaled || self.posted.is_multiple_of(SIGNAL_EVERY);
        let slices = [IoSlice::new(&self.message)];
        let is_inline = self.length <= INLINE && opcode != Opcode::Read;
        let segments = if is_inline { None } else { Some(self.segment(self.outbox())) };
        let segments = segments.as_slice().as_flattened();
        let data = if is_inline { Payload::Inline(&slices) } else { Payload::Registered(segments) };
        let remote = self.peer;
        let operation = match opcode {
            Opcode::Send => Operation::Send { data, immediate: None },
            Opcode::SendWithImm => Operation::Send { data, immediate: Some(7) },
            Opcode::Write => Operation::Write { data, remote, immediate: None },
            Opcode::WriteWithImm => Operation::Write { data, remote, immediate: Some(7) },
            Opcode::Read => Operation::Read { into: segments, remote },
        };
        self.pair.post_send(&[SendRequest { wr_id: RECEIVES, operation, signaled }]).unwrap();
    }

    /// Polls once, posts the completed receives again, and returns the numbers of receives and sends.
    pub(crate) fn poll(&mut self) -> Polled {
        let count = self.queue.poll(&mut self.completions);
        let mut polled = Polled::default();
        for completion in &self.completions[..count] {
            if completion.status != CompletionStatus::Success {
                polled.failed = Some(completion.status);
                continue;
            }
            match completion.opcode {
                CompletionOpcode::Receive | CompletionOpcode::ReceiveWriteWithImmediate => {
                    polled.receives += 1;
                    self.post_receives([completion.wr_id]);
                }
                _ => polled.sends += 1,
            }
        }
        polled
    }

    /// Writes `stamp` to the first and the last word of the next message.
    pub(crate) fn stamp(&mut self, stamp: u64) {
        let (last, bytes) = (self.length - 8, stamp.to_ne_bytes());
        self.message[..8].copy_from_slice(&bytes);
        self.message[last..].copy_from_slice(&bytes);
        if self.length > INLINE {
            self.region.memory().copy_in(self.outbox(), &bytes).unwrap();
            self.region.memory().copy_in(self.outbox() + last, &bytes).unwrap();
        }
    }

    /// Returns whether the message in the inbox has `stamp` in its first and last word. Lets the device carry
    /// out the peer's WRITE.
    pub(crate) fn is_stamped(&self, stamp: u64) -> bool {
        self.pair.local().unwrap().progress();
        // Checks the last word first: if bytes arrive in an order, it is the order of addresses.
        self.inbox_word(self.length - 8) == stamp && self.inbox_word(0) == stamp
    }

    fn inbox_word(&self, offset: usize) -> u64 {
        let at = self.region.memory().as_ptr().as_ptr().wrapping_add(offset).cast::<u64>();
        // SAFETY:
        // - The inbox is page-aligned and at least as long as a message, whose length is a multiple of 8.
        // - There is no reference to the inbox. The peer may write at any time, which atomics allow.
        unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire)
    }
}

/// The completions of a poll.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polled {
    pub(crate) receives: u64,
    pub(crate) sends: u64,
    pub(crate) failed: Option<CompletionStatus>,
}

/// Pauses between two polls of a loop.
pub(crate) fn relax() {
    if CORES.len() == 1 {
        std::thread::yield_now();
    }
    std::hint::spin_loop();
}

/// The cores that this process could use before it was pinned.
static CORES: LazyLock<Vec<usize>> = LazyLock::new(cores::allowed);

/// Pins this thread, and the threads and processes that it starts, to the `index`th of its cores.
pub(crate) fn pin(index: usize) {
    let _ = cores::pin(CORES[index % CORES.len()]);
}

/// Takes back what [`pin`] did, for a process that chooses among the same cores.
pub(crate) fn unpin() {
    let _ = cores::pin_to(&CORES);
}

/// The side that measures, and its peer in another process.
pub(crate) struct Initiator {
    /// Dropped before `side`, so that the peer has ended before its connection ends.
    _peer: Peer,
    side: Side,
    opcode: Opcode,
    batch: u64,
    stamp: u64,
    /// Number of messages that the peer has not acknowledged, or that have no completion yet.
    outstanding: u64,
}

/// Returns the number of messages after which the peer acknowledges.
pub(crate) fn batch_length(length: usize) -> u64 {
    (65_536 / length as u64).clamp(1, 64)
}

impl Initiator {
    /// Makes an initiator for [`round_trip`](Self::round_trip).
    pub(crate) fn for_latency(opcode: Opcode, length: usize) -> Self {
        Self::new(Role::Echo, opcode, length)
    }

    /// Makes an initiator for [`batch`](Self::batch).
    pub(crate) fn for_bandwidth(opcode: Opcode, length: usize) -> Self {
        Self::new(Role::Sink, opcode, length)
    }

    fn new(role: Role, opcode: Opcode, length: usize) -> Self {
        assert!(length >= 8 && length.is_multiple_of(8), "messages have whole words");
        let mut side = Side::new(length);
        let peer = Peer::start(role, opcode, length, &mut side);
        pin(0);
        Self { _peer: peer, side, opcode, batch: batch_length(length), stamp: 0, outstanding: 0 }
    }

    pub(crate) fn side(&self) -> &Side {
        &self.side
    }

    /// Runs one round trip.
    pub(crate) fn round_trip(&mut self) {
        match self.opcode {
            Opcode::Send | Opcode::SendWithImm | Opcode::WriteWithImm => {
                self.side.post(self.opcode, false);
                while self.poll().receives == 0 {
                    relax();
                }
            }
            Opcode::Write => {
                self.stamp += 1;
                self.side.stamp(self.stamp);
                self.side.post(self.opcode, false);
                while !self.side.is_stamped(self.stamp) {
                    relax();
                }
                if self.stamp.is_multiple_of(64) {
                    self.poll();
                }
            }
            Opcode::Read => self.run_one_sided(1),
        }
    }

    /// Returns the number of messages of one batch.
    pub(crate) fn batch_length(&self) -> u64 {
        self.batch
    }

    /// Sends a batch of messages. This function does not wait for the batch: it only waits while the messages
    /// on the way would be too many for the peer's receives, or more than four batches.
    pub(crate) fn batch(&mut self) {
        let is_one_sided = !self.opcode.is_received();
        (1..self.batch).for_each(|_| self.side.post(self.opcode, false));
        self.side.post(self.opcode, is_one_sided);
        self.outstanding += self.batch;
        while self.outstanding + self.batch > RECEIVES.min(4 * self.batch) {
            self.take_acknowledgements();
        }
    }

    /// Waits until the peer has received all messages.
    pub(crate) fn drain(&mut self) {
        while self.outstanding > 0 {
            self.take_acknowledgements();
        }
    }

    /// Takes the peer's acknowledgements of batches. Those of a one-sided opcode are the completions of the
    /// last requests.
    fn take_acknowledgements(&mut self) {
        let polled = self.poll();
        let batches = if self.opcode.is_received() { polled.receives } else { polled.sends };
        self.outstanding -= batches * self.batch;
        relax();
    }

    fn poll(&mut self) -> Polled {
        let polled = self.side.poll();
        assert_eq!(polled.failed, None);
        polled
    }

    fn run_one_sided(&mut self, count: u64) {
        (1..count).for_each(|_| self.side.post(self.opcode, false));
        self.side.post(self.opcode, true);
        // Signalled requests are the last one of this batch, and one of every `SIGNAL_EVERY` requests.
        while self.poll().sends == 0 {
            relax();
        }
    }
}

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "peer";

/// Variable with the words before the command of the other process, such as `unshare --user --net`. So the
/// other process can run in namespaces of its own; `RDMA_SOFT_DIR` and `RDMA_SOFT_PEERS` then let the two
/// find one another.
const PREFIX: &str = "SOFT_DEVICE_PEER";

/// The longest time for the other process to start, or to end.
const LIMIT: Duration = Duration::from_secs(60);

/// The role of the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Answers every message with a message of its opcode.
    Echo,
    /// Receives messages, and acknowledges every batch.
    Sink,
}

/// A handle to the other process, which ends on drop.
pub(crate) struct Peer(Child);

impl Peer {
    /// Starts the other process, and connects `side` to it.
    pub(crate) fn start(role: Role, opcode: Opcode, length: usize, side: &mut Side) -> Self {
        // The other process inherits the cores of this thread, which may be pinned.
        unpin();
        let mut command = command();
        command.args([ARGUMENT, role.name(), opcode.name(), &length.to_string()]);
        let mut process = Child::with_lines("the other process", command).unwrap();
        let name = Name::from_parts(process.report(LIMIT).unwrap()).expect("the peer's name");
        process.send(&side.name().to_parts()).unwrap();
        side.connect(&name);
        assert_eq!(process.line(LIMIT).unwrap(), "connected");
        Self(process)
    }
}

/// Returns the command that starts this binary: directly, or by the words of the variable [`PREFIX`].
fn command() -> Command {
    let again = process::again().unwrap();
    let prefix = std::env::var(PREFIX).unwrap_or_default();
    let mut words = prefix.split_whitespace();
    let Some(first) = words.next() else { return again };
    let mut command = Command::new(first);
    command.args(words).arg(again.get_program());
    command
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.0.end(LIMIT);
    }
}

/// Runs the other process.
pub(crate) fn run(arguments: &[String]) {
    let [role, opcode, length] = arguments else { panic!("peer ROLE OPCODE LENGTH, not {arguments:?}") };
    let (role, opcode) = (parse_name("role", role).unwrap(), parse_name("opcode", opcode).unwrap());
    let length = length.parse().expect("a length");
    let mut side = Side::new(length);
    let (sender, lines) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let closed = move || stopping.store(true, Ordering::Relaxed);
    process::on_stdin(move |line| drop(sender.send(line)), closed).unwrap();
    process::report(&side.name().to_parts()).unwrap();
    let name = serde_json::from_str(&lines.recv().expect("a name")).expect("a name");
    side.connect(&Name::from_parts(name).expect("a name"));
    process::report_line("connected").unwrap();
    pin(1);
    let mut answering = Answering { side, opcode, stop: &stop };
    match (role, opcode) {
        (Role::Echo, Opcode::Write) => answering.echo_writes(),
        (Role::Echo, _) => answering.echo(),
        (Role::Sink, _) => answering.sink(batch_length(length)),
    }
}

struct Answering<'a> {
    side: Side,
    opcode: Opcode,
    stop: &'a AtomicBool,
}

impl Answering<'_> {
    /// Returns the number of received messages, or `None` at the end.
    fn poll(&mut self) -> Option<u64> {
        let polled = self.side.poll();
        let ended = polled.failed.is_some() || self.stop.load(Ordering::Relaxed);
        (!ended).then_some(polled.receives)
    }

    fn echo(&mut self) {
        while let Some(count) = self.poll() {
            (0..count).for_each(|_| self.side.post(self.opcode, false));
            relax();
        }
    }

    fn echo_writes(&mut self) {
        let mut stamp = 1;
        while !self.stop.load(Ordering::Relaxed) {
            if !self.side.is_stamped(stamp) {
                relax();
                continue;
            }
            self.side.stamp(stamp);
            self.side.post(Opcode::Write, false);
            if stamp.is_multiple_of(64) && self.poll().is_none() {
                return;
            }
            stamp += 1;
        }
    }

    fn sink(&mut self, batch: u64) {
        let mut owed = 0;
        while let Some(count) = self.poll() {
            owed += count;
            while owed >= batch {
                self.side.acknowledge();
                owed -= batch;
            }
            relax();
        }
    }
}
