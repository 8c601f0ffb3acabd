//! The process at the other end: an honest one, or one that does harm in one of the ways of [`hostile`](crate::hostile).

use std::io::Write as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionQueue, CompletionStatus, ProtectionDomain, QueuePairState, RemoteSegment,
    WorkCompletion, soft,
};

use crate::end::{
    End, GUARD, LARGE, MEMORY, MESSAGES, OPEN, ROOM, SINK, SOURCE, at, content, segment, sleep_for,
};
use crate::process::{next_line, report};
use crate::{hostile, system};

/// Number of further memories that a `target` offers.
pub const TARGETS: usize = 8;
/// Number of requests that a busy neighbour has outstanding.
const OUTSTANDING: usize = 8;

/// A connection, as its role sees it.
#[derive(Debug)]
pub struct Connection {
    pub queue: Arc<dyn CompletionQueue>,
    pub domain: Arc<dyn ProtectionDomain>,
    pub end: End,
    pub target: RemoteSegment,
}

/// Takes commands until the parent process ends. Each command is a role, for one connection. Reports `ended` after each.
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

fn run_role(role: &str) {
    let (role, argument) = role.split_once(' ').unwrap_or((role, ""));
    if let "knock" | "knock-lingering" = role {
        return hostile::knock(argument, role != "knock");
    }
    let context = soft::open().unwrap();
    let domain = context.alloc_protection_domain().unwrap();
    let queue = context.create_completion_queue(1024).unwrap();
    let end = End::new(&*domain, &queue, if role == "target" { TARGETS } else { 0 });
    if role == "swap" {
        hostile::swap_descriptors(argument);
    }
    report(&end.describe());
    let Some(line) = next_line() else { return };
    let target = end.connect(&line).unwrap()[0];
    let connection = Connection { queue, domain, end, target };
    match role {
        "echo" => echo(&connection, |_| true),
        "forks" => echo(&connection, |count| count % 8 != 0 || hostile::fork_and_drop(&connection)),
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
            std::thread::spawn(move || hostile::scribble(pattern));
            transfer(&connection, "all");
        }
        "swap" => {
            if argument.starts_with("truncated") {
                std::thread::spawn(hostile::truncate_memory);
            }
            // A process that broke its own descriptors for wake-ups posts nothing, because it would block itself.
            if argument.ends_with("wake-ups") {
                poll_until_end(&connection);
            } else {
                transfer(&connection, "all");
            }
        }
        "peek" => {
            // The own memory has no pattern.
            connection.end.memory.copy_in(GUARD, &vec![0; MEMORY - GUARD]).unwrap();
            std::thread::spawn(move || transfer(&connection, "all"));
            let mut most = 0;
            for _ in 0..50 {
                most = most.max(hostile::pages_of_others());
                std::thread::sleep(Duration::from_millis(2));
            }
            report(&most.to_string());
        }
        "block" => {
            std::thread::spawn(hostile::make_everything_blocking);
            transfer(&connection, "all");
        }
        "flood" => transfer(&connection, "messages"),
        "segments" => hostile::send_from_many_segments(&connection, argument.parse().unwrap()),
        "leaves-fork" => {
            report("ready");
            system::leave_a_fork_behind(300);
        }
        other => panic!("no such role: {other}"),
    }
}

/// Sends every message back, if `before`, which gets the number of the message, returns true. Sleeps between messages.
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

pub fn poll_until_end(connection: &Connection) {
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

/// Transfers as fast as possible, until the connection ends: large WRITEs, READs or Sends, all of these, or small messages.
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
                "writes" => end.write(100, segment(&end.region, SOURCE, LARGE), open),
                "reads" => end.read(100, segment(&end.region, SINK, LARGE), open),
                "sends" => end.send(100, MESSAGES, ROOM),
                _ => end.send_inline(100, &[7; 64]),
            };
            if posted.is_ok() {
                outstanding += 1;
            }
        }
        // The peer has to wake this process, which never sleeps, as often as possible.
        queue.arm().unwrap();
        let count = queue.poll(&mut completions);
        for completion in &completions[..count] {
            if completion.wr_id == 100 {
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

/// Sleeps for a random time of at most `longest` microseconds.
pub fn nap(longest: u64) {
    let until = Instant::now() + Duration::from_micros(fastrand::u64(..longest));
    while Instant::now() < until {
        std::thread::yield_now();
    }
}
