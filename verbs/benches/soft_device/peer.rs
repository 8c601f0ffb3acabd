//! The other process: this binary, started again. It answers or receives messages until its standard input ends.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use super::initiator::batch_length;
use super::side::{Name, Opcode, Side, cores, pin, relax, set_cores};

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "peer";

/// Variable with the words before the command of the other process, such as `unshare --user --net`. So the other process can run
/// in namespaces of its own; `RDMA_SOFT_DIR` and `RDMA_SOFT_PEERS` then let the two find one another.
const PREFIX: &str = "SOFT_DEVICE_PEER";

/// The role of the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Answers every message with a message of its opcode.
    Echo,
    /// Receives messages, and acknowledges every batch.
    Sink,
}

impl Role {
    const ALL: [Self; 2] = [Self::Echo, Self::Sink];

    fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Sink => "sink",
        }
    }
}

/// A handle to the other process, which ends on drop.
pub(crate) struct Peer {
    process: Child,
    input: Option<ChildStdin>,
}

impl Peer {
    /// Starts the other process, and connects `side` to it.
    pub(crate) fn start(role: Role, opcode: Opcode, length: usize, side: &mut Side) -> Self {
        let cores: Vec<String> = cores().iter().map(usize::to_string).collect();
        let mut process = command()
            .args([ARGUMENT, role.name(), opcode.name(), &length.to_string(), &cores.join(",")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = process.stdin.take().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut line = || lines.next().expect("the peer has ended").unwrap();
        let name = Name::from_line(&line()).expect("the peer's name");
        writeln!(input, "{}", side.name().to_line()).unwrap();
        side.connect(&name);
        assert_eq!(line(), "connected");
        Self { process, input: Some(input) }
    }
}

/// Returns the command that starts this binary: directly, or by the words of the variable [`PREFIX`].
fn command() -> Command {
    let binary = std::env::current_exe().unwrap();
    let prefix = std::env::var(PREFIX).unwrap_or_default();
    let mut words = prefix.split_whitespace();
    let Some(first) = words.next() else { return Command::new(binary) };
    let mut command = Command::new(first);
    command.args(words).arg(binary);
    command
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

/// Runs the other process.
pub(crate) fn run(arguments: &[String]) {
    let [role, opcode, length, cores] = arguments else {
        panic!("peer ROLE OPCODE LENGTH CORES, not {arguments:?}")
    };
    set_cores(cores.split(',').map(|core| core.parse().expect("a core")).collect());
    let role = Role::ALL.into_iter().find(|known| known.name() == role).expect("a role");
    let (opcode, length) = (Opcode::parse(opcode).expect("an opcode"), length.parse().expect("a length"));
    let mut side = Side::new(length);
    let mut output = std::io::stdout();
    writeln!(output, "{}", side.name().to_line()).unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    side.connect(&Name::from_line(&line).expect("a name"));
    writeln!(output, "connected").unwrap();

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        });
        pin(1);
        let mut answering = Answering { side, opcode, stop: &stop };
        match (role, opcode) {
            (Role::Echo, Opcode::Write) => answering.echo_writes(),
            (Role::Echo, _) => answering.echo(),
            (Role::Sink, _) => answering.sink(batch_length(length)),
        }
    });
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
