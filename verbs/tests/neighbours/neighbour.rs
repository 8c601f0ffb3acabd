//! The process at the other side: an honest one, or one that does harm in one of the ways of
//! [`hostile`](crate::hostile).

use std::collections::HashSet;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionQueue, CompletionStatus, HostMemory, Operation, Payload, ProtectionDomain,
    QueuePairState, RemoteSegment, WorkCompletion, soft,
};

use crate::end::{
    ALL, GUARD, LARGE, LocalEnd, MEMORY, MESSAGES, OPEN, ROOM, SINK, SOURCE, at, content, parse, pattern,
    segment, sleep_for,
};
use crate::process::{HARM, next_line, report};
use crate::{hostile, system};

/// Number of further memories that a `target` offers.
pub const TARGETS: usize = 8;
/// Number of requests that a busy neighbour has outstanding.
const OUTSTANDING: usize = 8;
/// The identifier of a request of this process that is not a receive.
const SENT: u64 = 100;

/// A connection, as its role sees it.
#[derive(Debug)]
pub struct Connection {
    pub queue: Arc<dyn CompletionQueue>,
    pub domain: Arc<dyn ProtectionDomain>,
    pub end: LocalEnd,
    pub target: RemoteSegment,
}

/// Takes commands until the parent process ends. Each command is a role, for one connection. Reports `ended`
/// after each.
pub fn run() {
    system::die_with_parent();
    while let Some(role) = next_line() {
        // A role may panic, because its process harms itself first.
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| run_role(&role)));
        if let Err(panic) = result {
            let reason = panic.downcast_ref::<String>().map_or("a panic", |reason| reason);
            let _ = writeln!(std::io::stderr(), "neighbour {role}: {reason}");
        }
        report("ended");
    }
}

/// Tells the process under test that this one has done harm.
fn harmed() {
    report(HARM);
}

fn run_role(role: &str) {
    let (role, argument) = role.split_once(' ').unwrap_or((role, ""));
    if let "knock" | "knock-lingering" = role {
        report("ready");
        let counted = |sent, refused| report(&format!("descriptors {sent} {refused}"));
        return hostile::knock(argument, role != "knock", counted);
    }
    let context = soft::open().unwrap();
    let domain = context.alloc_protection_domain().unwrap();
    let queue = context.create_completion_queue(1024).unwrap();
    let end = LocalEnd::new(&*domain, &queue, if role == "target" { TARGETS } else { 0 });
    // The kind of descriptor, and what it takes the place of.
    let (kind, swapped) = argument.split_once(' ').unwrap_or_default();
    match swapped {
        "wake-ups" => hostile::stand_between(kind, harmed),
        "small" => hostile::swap_memory(kind, MEMORY as u64, harmed),
        _ => {}
    }
    report(&end.describe());
    let Some(line) = next_line() else { return };
    let target = end.connect(&line).unwrap()[0];
    let connection = Connection { queue, domain, end, target };
    match role {
        "echo" => echo(&connection, |_| true),
        "forks" => echo(&connection, |count| count % 8 != 0 || fork_and_drop(&connection)),
        "target" => {
            if argument == "deaf" {
                hostile::block_service_thread();
            }
            report("ready");
            poll_until_end(&connection);
        }
        "transfer" => {
            report("ready");
            transfer(&connection, argument);
        }
        "scribble" => {
            let pattern = argument.parse().unwrap();
            std::thread::spawn(move || hostile::scribble(pattern, harmed));
            transfer(&connection, "all");
        }
        "swap" => {
            if kind == "truncated" {
                std::thread::spawn(hostile::truncate_memory);
            }
            if swapped == "large" {
                let (address, kind) = (parse(&line).0, kind.to_owned());
                std::thread::spawn(move || hostile::offer_memory(&kind, address.as_bytes(), harmed));
            }
            transfer(&connection, "all");
        }
        "peek" => {
            // The own memory has no pattern.
            connection.end.memory.copy_in(GUARD, &vec![0; MEMORY - GUARD]).unwrap();
            std::thread::spawn(move || transfer(&connection, "all"));
            let mut most = 0;
            for _ in 0..50 {
                most = most.max(pages_of_others());
                std::thread::sleep(Duration::from_millis(2));
            }
            report(&most.to_string());
            report(&hostile::ask_for_secrets(parse(&line).0.as_bytes()).join(", "));
        }
        "block" => {
            std::thread::spawn(|| hostile::make_everything_blocking(harmed));
            transfer(&connection, "all");
        }
        "flood" => transfer(&connection, "messages"),
        "segments" => send_from_many_segments(&connection, argument.parse().unwrap()),
        "leaves-fork" => {
            report("ready");
            system::leave_a_fork_behind(300);
        }
        other => panic!("no such role: {other}"),
    }
}

/// Sends every message back, if `before`, which gets the number of the message, returns true. Sleeps between
/// messages.
fn echo(connection: &Connection, before: impl Fn(usize) -> bool) {
    let Connection { queue, end, .. } = connection;
    let mut completions = [WorkCompletion::EMPTY; 16];
    let mut messages = 0;
    report("ready");
    loop {
        let count = sleep_for(&**queue, &mut completions, i64::from(i32::MAX));
        for completion in &completions[..count] {
            if completion.status != CompletionStatus::Success {
                return;
            }
            if completion.opcode == CompletionOpcode::Receive {
                messages += 1;
                assert!(before(messages), "a step before the answer failed");
                let (from, to) = (completion.wr_id as usize * ROOM, MESSAGES + messages % 16 * ROOM);
                let message = content(&end.memory, from, completion.byte_len as usize);
                end.memory.copy_in(to, &message).unwrap();
                end.send(99, to, message.len()).unwrap();
                end.post_receive(completion.wr_id);
            }
        }
    }
}

fn poll_until_end(connection: &Connection) {
    let Connection { queue, end, .. } = connection;
    let mut completions = [WorkCompletion::EMPTY; 16];
    while end.pair.state() != QueuePairState::Error {
        // The peer has to wake this process with each request.
        queue.arm().unwrap();
        let count = queue.poll(&mut completions);
        for completion in &completions[..count] {
            if completion.status == CompletionStatus::Success
                && completion.opcode == CompletionOpcode::Receive
            {
                end.post_receive(completion.wr_id);
            }
        }
        std::thread::yield_now();
    }
}

/// Transfers as fast as possible, until the connection ends: large WRITEs, READs or Sends, all of these, or
/// small messages.
fn transfer(connection: &Connection, what: &str) {
    let Connection { queue, end, target, .. } = connection;
    let mut completions = [WorkCompletion::EMPTY; 16];
    let mut outstanding = 0;
    let open = at(*target, OPEN);
    for index in 0usize.. {
        if end.pair.state() == QueuePairState::Error {
            return;
        }
        let kinds = ["writes", "sends", "reads", "messages"];
        let kind = if what == "all" { kinds[index % kinds.len()] } else { what };
        if outstanding < OUTSTANDING {
            let posted = match kind {
                "writes" => end.write(SENT, segment(&end.region, SOURCE, LARGE), open),
                "reads" => end.read(SENT, segment(&end.region, SINK, LARGE), open),
                "sends" => end.send(SENT, MESSAGES, ROOM),
                _ => end.send_inline(SENT, &[7; 64]),
            };
            if posted.is_ok() {
                outstanding += 1;
            }
        }
        // The peer has to wake this process, which never sleeps, as often as possible.
        queue.arm().unwrap();
        let count = queue.poll(&mut completions);
        for completion in &completions[..count] {
            if completion.wr_id == SENT {
                outstanding = outstanding.saturating_sub(1);
            } else if completion.status == CompletionStatus::Success {
                end.post_receive(completion.wr_id);
            }
        }
        if count == 0 && outstanding == OUTSTANDING {
            std::thread::yield_now();
        }
    }
}

/// Looks through all memory that this process shares or has descriptors of. Returns the number of pages that
/// begin with a pattern of the process under test: the part of a memory that it did not offer, or the content
/// of its calls to the honest neighbour.
fn pages_of_others() -> usize {
    let mut pages = HashSet::new();
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains("/memfd:")) {
        let range = line.split(' ').next().unwrap_or_default();
        let Some((start, end)) = range.split_once('-') else { continue };
        let found = patterns_in(&memory, hostile::number(start) as u64, hostile::number(end) as u64);
        pages.extend(found.map(|page| (0, page)));
    }
    for descriptor in hostile::descriptors("/memfd:") {
        let Ok(file) = File::open(format!("/proc/self/fd/{descriptor}")) else { continue };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        pages.extend(patterns_in(&file, 0, length).map(|page| (descriptor, page)));
    }
    pages.len()
}

/// Returns the pages of a file that begin with a pattern of any seed. The pattern of a seed differs from that
/// of seed 0 by one value.
fn patterns_in(file: &File, start: u64, end: u64) -> impl Iterator<Item = u64> + '_ {
    (start..end).step_by(4096).filter(|&page| {
        let mut bytes = [0; 64];
        let known = pattern(0, bytes.len());
        if file.read_at(&mut bytes, page).is_err() {
            return false;
        }
        let first = bytes[0] ^ known[0];
        bytes.iter().zip(&known).all(|(found, known)| found ^ known == first)
    })
}

/// Forks a child that uses its copy of the connection, and runs its destructors. Returns whether the child
/// ended well.
fn fork_and_drop(connection: &Connection) -> bool {
    system::fork_and_run(|| {
        let _ = connection.end.send_inline(5, b"from the forked child");
        connection.queue.poll(&mut [WorkCompletion::EMPTY; 4]);
        connection.end.pair.to_error();
        // SAFETY:
        // - the value is valid, and is read once more in this forked child only, which ends without a use of
        //   it; and
        // - the parent process has a copy of its own.
        drop(unsafe { std::ptr::read(connection) });
    })
}

/// Sends messages from `count` memories. Each message names its own memory, so that the peer can READ it.
fn send_from_many_segments(connection: &Connection, count: usize) {
    let mut kept = Vec::new();
    let mut completions = [WorkCompletion::EMPTY; 16];
    for _ in 0..count {
        let memory = Arc::new(HostMemory::shared(16 << 10, 4096).unwrap());
        let region = connection.domain.register(memory, ALL).unwrap();
        let name = format!("{} {} ", region.memory().address(), region.rkey().0);
        region.memory().copy_in(0, name.as_bytes()).unwrap();
        let data = [segment(&region, 0, ROOM)];
        let operation = Operation::Send { data: Payload::Registered(&data), immediate: None };
        kept.push(region);
        if connection.end.post(SENT, operation).is_err() {
            return;
        }
        let mut sent = false;
        while !sent {
            let count = connection.queue.poll(&mut completions);
            for completion in &completions[..count] {
                if completion.status != CompletionStatus::Success {
                    return;
                }
                if completion.wr_id == SENT {
                    sent = true;
                } else {
                    connection.end.post_receive(completion.wr_id);
                }
            }
            std::thread::yield_now();
        }
    }
    poll_until_end(connection);
}

/// Sleeps for a random time of at most `longest` microseconds.
pub fn nap(longest: u64) {
    let until = Instant::now() + Duration::from_micros(fastrand::u64(..longest));
    while Instant::now() < until {
        std::thread::yield_now();
    }
}
