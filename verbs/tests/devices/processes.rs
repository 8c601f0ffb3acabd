//! Two processes, one of which may be killed in the middle of an operation.
//!
//! The other process is this binary, started again with [`ROLE`] set. It runs the one test `child_process`,
//! which runs the role and does not return. Its messages are lines that begin with `@@`.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, MemoryRegion, Operation, Payload, PostError, PostErrorKind,
    QueuePairAddress, QueuePairState, RemoteSegment, Rkey, VerbsErrorKind, WorkCompletion,
};

use crate::fabric::{Fabric, Options, Side, default_pair, is_end, pattern, remote, segment, wait_until};

/// The environment variable with the `provider:role` of a child process.
pub const ROLE: &str = "TONIC_RDMA_CONFORMANCE_ROLE";

/// Number of receives that both sides keep posted.
const RECEIVES: u64 = 16;
/// Bytes of each receive.
const ROOM: usize = 4096;
/// Bytes of a large transfer.
const LARGE: usize = 1 << 18;
/// Offset of large transfers, beyond the receives.
const LARGE_AT: usize = 1 << 19;

/// The child process, and a side of this process that is connected to it.
struct ProcessPair {
    child: Child,
    lines: BufReader<ChildStdout>,
    side: Side,
    target: RemoteSegment,
    /// All failures, in the order of polling.
    failures: RefCell<Vec<WorkCompletion>>,
}

impl Drop for ProcessPair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ProcessPair {
    /// Starts a child process that runs `role`, and connects it to a side that has receives posted.
    fn start(fabric: &dyn Fabric, role: &str) -> Self {
        Self::start_with(fabric, role, RECEIVES)
    }

    /// On a busy machine the answer of one of two software devices may come too late. Then another process
    /// takes its place.
    fn start_with(fabric: &dyn Fabric, role: &str, receives: u64) -> Self {
        let started = (0..10).find_map(|_| Self::try_to_start(fabric, role, receives));
        started.expect("a child process that connects")
    }

    fn try_to_start(fabric: &dyn Fabric, role: &str, receives: u64) -> Option<Self> {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{}:{role}", fabric.name()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let side = Side::new(fabric, &Options::default());
        let (address, target) = parse(&read_message(&mut lines).unwrap());
        post_receives(&side, receives);
        let mut pair = Self { child, lines, side, target, failures: RefCell::default() };
        let side = &pair.side;
        match side.pair.to_rtr(&address, &side.settings) {
            Err(error) if error.kind() == VerbsErrorKind::System => return None,
            connected => connected.unwrap(),
        }
        side.pair.to_rts(&side.settings).unwrap();
        let ours = describe(side, &side.region);
        writeln!(pair.child.stdin.as_mut().unwrap(), "{ours}").unwrap();
        // The child ends if it can't connect.
        assert_eq!(read_message(&mut pair.lines)?, "ready");
        Some(pair)
    }

    /// Polls once, records a failure, and posts a used receive again. Returns whether there was a completion.
    fn poll(&self) -> bool {
        let mut completions = [WorkCompletion::EMPTY; 1];
        if self.side.queue.poll(&mut completions) == 0 {
            return false;
        }
        let completion = completions[0];
        if completion.status != CompletionStatus::Success {
            self.failures.borrow_mut().push(completion);
        } else if completion.opcode == CompletionOpcode::Receive {
            self.side.post_receive(completion.wr_id, completion.wr_id as usize * ROOM, ROOM);
        }
        true
    }

    fn has_ended(&self) -> bool {
        self.side.pair.state() == QueuePairState::Error
    }

    /// Posts a write that succeeds only if the peer is alive.
    fn post_probe(&self) {
        let nothing =
            Operation::Write { data: Payload::Registered(&[]), remote: self.target, immediate: None };
        wait_until("room for a request", || {
            self.poll();
            match self.side.try_post(998, nothing) {
                Ok(()) => true,
                Err(PostError { kind: PostErrorKind::QueueFull, .. }) => false,
                Err(error) => panic!("{error}"),
            }
        });
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn describe(side: &Side, region: &Arc<dyn MemoryRegion>) -> String {
    let address: String =
        side.pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let remote = remote(region, 0);
    format!("{address} {} {}", remote.address, remote.rkey.0)
}

fn parse(line: &str) -> (QueuePairAddress, RemoteSegment) {
    let words: Vec<_> = line.split_whitespace().collect();
    let bytes: Vec<u8> = (0..words[0].len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&words[0][at..at + 2], 16).unwrap())
        .collect();
    let remote = RemoteSegment { address: words[1].parse().unwrap(), rkey: Rkey(words[2].parse().unwrap()) };
    (QueuePairAddress::new(bytes).unwrap(), remote)
}

/// Reads the next message of the child; `None` if the child has ended. Other lines come from its test
/// harness.
fn read_message(lines: &mut impl BufRead) -> Option<String> {
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        if let Some((_, message)) = line.split_once("@@") {
            return Some(message.trim().to_owned());
        }
    }
}

/// Writes a message to the parent.
fn write_message(what: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@@{what}").unwrap();
    out.flush().unwrap();
}

fn post_receives(side: &Side, count: u64) {
    for wr_id in 0..count {
        side.post_receive(wr_id, wr_id as usize * ROOM, ROOM);
    }
}

/// Runs the role of the child process, until the process is killed or its parent exits.
pub fn run_role(fabric: &dyn Fabric, role: &str) {
    let side = Side::new(fabric, &Options::default());
    let exposed = if role == "private" { side.private_region(1 << 20) } else { side.region.clone() };
    exposed.memory().copy_in(0, &pattern(9, 1 << 20)).unwrap();
    write_message(&describe(&side, &exposed));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    std::thread::spawn(|| {
        // The parent writes nothing more, so this returns when the parent exits.
        let _ = std::io::stdin().read_line(&mut String::new());
        #[expect(clippy::disallowed_methods, reason = "the parent has exited")]
        std::process::exit(0);
    });
    let (address, target) = parse(&line);
    side.pair.to_rtr(&address, &side.settings).unwrap();
    side.pair.to_rts(&side.settings).unwrap();
    if matches!(role, "echo" | "receives") {
        post_receives(&side, RECEIVES);
    }
    // The answer proves that there is a connection to break.
    side.read(0, side.segment(0, 0), target);
    side.expect(0, CompletionOpcode::Read);
    if role == "forks" {
        fork_a_sleeper();
    }
    write_message("ready");
    let large = RemoteSegment { address: target.address + LARGE_AT as u64, ..target };
    for wr_id in 0u64.. {
        match role {
            "sends" => side.send(wr_id, 0, 1000),
            "writes" => side.write(wr_id, side.segment(LARGE_AT, LARGE), large),
            "reads" => side.read(wr_id, side.segment(LARGE_AT, LARGE), large),
            "echo" | "receives" => {
                let received = side.wait();
                if received.opcode == CompletionOpcode::Receive {
                    let at = received.wr_id as usize * ROOM;
                    if role == "echo" {
                        let message = side.content(at, received.byte_len as usize);
                        let slices = [std::io::IoSlice::new(&message)];
                        let data = Payload::Inline(&slices);
                        side.post(0, Operation::Send { data, immediate: received.immediate });
                    }
                    side.post_receive(received.wr_id, at, ROOM);
                }
                continue;
            }
            _ => {
                std::thread::sleep(Duration::from_secs(1));
                continue;
            }
        }
        assert_eq!(side.wait().status, CompletionStatus::Success);
    }
}

/// Forks a child without exec, which outlives this process.
fn fork_a_sleeper() {
    // SAFETY: the child makes only system calls, and ends here.
    unsafe {
        if libc::fork() == 0 {
            // The output of the test must not wait for the child.
            for standard in 0..3 {
                libc::close(standard);
            }
            libc::sleep(60);
            libc::_exit(0);
        }
    }
}

/// A process that has died has left a child, which was forked without exec and lives.
pub fn killed_while_its_child_lives(fabric: &dyn Fabric) {
    let mut pair = ProcessPair::start(fabric, "forks");
    pair.kill();
    wait_until("the Error state", || pair.has_ended());
}

pub fn processes_exchange_messages(fabric: &dyn Fabric) {
    let pair = ProcessPair::start(fabric, "echo");
    let side = &pair.side;
    for round in 0..1000u64 {
        let message = pattern(round, 1 + round as usize % (side.inline(501) - 1));
        let slices = [std::io::IoSlice::new(&message)];
        let data = Payload::Inline(&slices);
        side.post(round, Operation::Send { data, immediate: side.immediate(round as u32) });
        let mut echo = side.wait();
        if echo.opcode == CompletionOpcode::Send {
            echo = side.wait();
        } else {
            side.expect(round, CompletionOpcode::Send);
        }
        assert_eq!((echo.status, echo.immediate), (CompletionStatus::Success, side.immediate(round as u32)));
        let at = echo.wr_id as usize * ROOM;
        assert_eq!(side.content(at, echo.byte_len as usize), message);
        side.post_receive(echo.wr_id, at, ROOM);
    }
}

pub fn one_sided_between_processes(fabric: &dyn Fabric) {
    for role in ["idle", "private"] {
        let pair = ProcessPair::start(fabric, role);
        let side = &pair.side;
        side.read(1, side.segment(0, 1 << 20), pair.target);
        side.expect(1, CompletionOpcode::Read);
        assert_eq!(side.content(0, 1 << 20), pattern(9, 1 << 20));
        side.fill(0, &pattern(10, 100_000));
        let there = RemoteSegment { address: pair.target.address + 77, ..pair.target };
        side.write(2, side.segment(0, 100_000), there);
        side.expect(2, CompletionOpcode::Write);
        side.read(3, side.segment(200_000, 100_000), there);
        side.expect(3, CompletionOpcode::Read);
        assert_eq!(side.content(200_000, 100_000), pattern(10, 100_000));
        // Private memory in this process, too.
        let ours = side.private_region(1 << 20);
        side.read(4, segment(&ours, 0, 1 << 16), pair.target);
        side.expect(4, CompletionOpcode::Read);
        assert_eq!(crate::fabric::content(&ours, 77, 1000), pattern(10, 1000));
    }
}

/// Kills the child after it has run `role` for a while, runs `traffic` in this process meanwhile, and checks
/// the end.
fn kill_during(fabric: &dyn Fabric, role: &str, traffic: impl Fn(&ProcessPair)) {
    let (one, two) = default_pair(fabric);
    for delay in [0, 3, 11] {
        let mut pair = ProcessPair::start(fabric, role);
        let until = Instant::now() + Duration::from_millis(delay);
        while Instant::now() < until {
            traffic(&pair);
        }
        pair.kill();
        if fabric.notices_death_when_idle() {
            wait_until("the Error state", || pair.has_ended());
        } else {
            pair.post_probe();
        }
        wait_until("a failure", || {
            traffic(&pair);
            // Hardware reports the end by completions only.
            if !fabric.notices_death_when_idle() {
                pair.poll();
            }
            pair.has_ended()
        });
        expect_end(fabric, &pair);
        // Other connections still work.
        two.post_receive(1, 0, 8);
        one.send(1, 0, 8);
        one.expect(1, CompletionOpcode::Send);
        two.expect(1, CompletionOpcode::Receive);
    }
}

/// Checks that every outstanding request fails, and that all receives come back.
fn expect_end(fabric: &dyn Fabric, pair: &ProcessPair) {
    // The send queue may be full, because the flush that makes room is not complete yet.
    wait_until("room in the send queue", || {
        while pair.poll() {}
        let data = [pair.side.segment(0, 8)];
        let send = Operation::Send { data: Payload::Registered(&data), immediate: None };
        match pair.side.try_post(999, send) {
            Ok(()) => true,
            Err(PostError { kind: PostErrorKind::QueueFull, .. }) => false,
            Err(error) => panic!("{error}"),
        }
    });
    let of_receives = |completion: &&WorkCompletion| completion.opcode == CompletionOpcode::Receive;
    wait_until("the flush", || {
        while pair.poll() {}
        let failures = pair.failures.borrow();
        let receives = failures.iter().filter(of_receives).count();
        receives == RECEIVES as usize && failures.iter().any(|completion| completion.wr_id == 999)
    });
    assert!(!pair.poll(), "more came back than was posted");
    let failures = pair.failures.borrow();
    let (receives, sends): (Vec<&WorkCompletion>, Vec<&WorkCompletion>) =
        failures.iter().partition(of_receives);
    assert!(receives.iter().all(|completion| completion.status == CompletionStatus::WorkRequestFlushed));
    let first = sends[0].status;
    let gone = if fabric.completes_at_the_peer() {
        // The kernel may take the memory of a killed process before its queue pairs. A Send then finds no
        // memory to land in.
        matches!(first, CompletionStatus::RetryExceeded | CompletionStatus::RemoteOperation)
    } else {
        is_end(first)
    };
    assert!(gone || first == CompletionStatus::WorkRequestFlushed, "{sends:?}");
    assert!(
        sends[1..].iter().all(|completion| completion.status == CompletionStatus::WorkRequestFlushed),
        "{sends:?}"
    );
    assert_eq!(sends.last().unwrap().wr_id, 999);
}

/// Posts `operation` unsignalled and then a signalled write, and waits for a completion.
fn run(pair: &ProcessPair, operation: Operation<'_>) {
    if pair.has_ended() {
        return;
    }
    pair.side.post_unsignaled(1, operation);
    pair.side
        .post(1, Operation::Write { data: Payload::Registered(&[]), remote: pair.target, immediate: None });
    wait_until("room", || pair.poll() || pair.has_ended());
}

pub fn killed_while_idle(fabric: &dyn Fabric) {
    kill_during(fabric, "idle", |_| ());
}

pub fn killed_while_it_sends(fabric: &dyn Fabric) {
    kill_during(fabric, "sends", |pair| {
        pair.poll();
    });
}

pub fn killed_while_it_writes(fabric: &dyn Fabric) {
    kill_during(fabric, "writes", |_| ());
}

pub fn killed_while_it_reads(fabric: &dyn Fabric) {
    kill_during(fabric, "reads", |_| ());
}

pub fn killed_while_we_send(fabric: &dyn Fabric) {
    kill_during(fabric, "receives", |pair| {
        let segments = [pair.side.segment(LARGE_AT, ROOM)];
        let data = Payload::Registered(&segments);
        if !pair.has_ended() {
            // The queue may be full, because the child is slow.
            let _ = pair.side.try_post(1, Operation::Send { data, immediate: None });
        }
        pair.poll();
    });
}

pub fn killed_while_we_write(fabric: &dyn Fabric) {
    for role in ["idle", "private"] {
        kill_during(fabric, role, |pair| {
            let segments = [pair.side.segment(LARGE_AT, LARGE)];
            let data = Payload::Registered(&segments);
            run(pair, Operation::Write { data, remote: pair.target, immediate: None })
        });
    }
}

pub fn killed_while_we_read(fabric: &dyn Fabric) {
    for role in ["idle", "private"] {
        kill_during(fabric, role, |pair| {
            let segments = [pair.side.segment(LARGE_AT, LARGE)];
            run(pair, Operation::Read { into: &segments, remote: pair.target })
        });
    }
}

/// A send that waits for a receive fails when the peer dies, and wakes a sleeping thread. On devices whose
/// sends do not wait, the flush of a receive wakes the thread.
pub fn killed_while_a_send_waits(fabric: &dyn Fabric) {
    let waits = fabric.sends_wait_for_receives();
    let mut pair = ProcessPair::start_with(fabric, "idle", if waits { 0 } else { 2 });
    if waits {
        pair.side.send(0, 0, 8);
        pair.side.send(1, 0, 8);
        pair.side.expect_nothing();
    }
    std::thread::scope(|scope| {
        let queue = pair.side.queue.clone();
        let sleeper = scope.spawn(move || crate::flow::sleep_for(&*queue));
        pair.kill();
        let first = sleeper.join().unwrap();
        let expected =
            if waits { CompletionStatus::RetryExceeded } else { CompletionStatus::WorkRequestFlushed };
        assert_eq!((first.wr_id, first.status), (0, expected));
    });
    pair.side.expect_failure(1, CompletionStatus::WorkRequestFlushed);
}
