//! The other process: this binary, started again. It answers or receives messages until its standard input ends.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use tonic_rdma_commands::clap::{self, ValueEnum};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::{Named as _, parse_name, serde_json};

use super::initiator::batch_length;
use super::side::{Name, Opcode, Side, pin, relax, unpin};

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "peer";

/// Variable with the words before the command of the other process, such as `unshare --user --net`. So the other process can run
/// in namespaces of its own; `RDMA_SOFT_DIR` and `RDMA_SOFT_PEERS` then let the two find one another.
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
