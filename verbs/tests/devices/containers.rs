//! Two processes in containers of their own (other user, pid, network, ipc and mount namespaces) that share a
//! directory: the case of two pods of one node. Making user namespaces is not permitted everywhere. If it is
//! not permitted, the test prints a line and is skipped. Also two processes in no containers, one of which
//! the other one can't trace.
#![allow(clippy::print_stdout, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::DumpableBehavior;
use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, QueuePairAddress, RemoteSegment, Rkey, VerbsErrorKind, soft,
};

use crate::Soft;
use crate::fabric::{Options, Side, pattern, remote};

/// The environment variable with the number of the container, which makes [`inside`] run.
const NUMBER: &str = "TONIC_RDMA_CONTAINER";
/// The environment variable of a process that other processes of its user can't trace.
const NOT_DUMPABLE: &str = "TONIC_RDMA_NOT_DUMPABLE";
/// The results of a process that maps no memory of its peer, and of one that does.
const THROUGH_THE_RING: &str = "passed through the ring";
const BY_COPY: &str = "passed by copy";
/// The lengths of the messages.
const LENGTHS: [usize; 2] = [64, 4 << 20];
/// Bytes of each area of the memory: the source, the receives, the destination of the peer's writes, and that
/// of reads.
const AREA: usize = 4 << 20;
/// A user that does not run tests.
const OTHER_USER: &str = "65533";

/// A directory that two containers share. Dropping it removes it.
struct SharedFolder(PathBuf);

impl SharedFolder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tonic-rdma-{test}-{}", std::process::id()));
        fs::create_dir_all(path.join("sockets")).unwrap();
        fs::create_dir_all(path.join("mounted")).unwrap();
        let everyone = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(path.join("sockets"), everyone).unwrap();
        Self(path)
    }

    fn sockets(&self) -> PathBuf {
        self.0.join("sockets")
    }
}

impl Drop for SharedFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process that runs [`inside`] in a container.
struct Container {
    process: Child,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Container {
    /// Starts container `number` by `command`, which gets the program and its arguments.
    fn start(command: &[&str], number: u32, variables: &[(&str, &Path)]) -> Self {
        Self::start_program(&std::env::current_exe().unwrap(), command, number, variables)
    }

    /// Starts a container with `program`, a copy of this binary.
    fn start_program(program: &Path, command: &[&str], number: u32, variables: &[(&str, &Path)]) -> Self {
        let mut process = Command::new(command[0])
            .args(&command[1..])
            .arg(program)
            .args(["containers::inside", "--exact", "--nocapture", "--test-threads=1"])
            .env(NUMBER, number.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        Self { stdin: process.stdin.take().unwrap(), lines, process }
    }

    fn write(&mut self, message: &str) {
        writeln!(self.stdin, "{message}").unwrap();
    }

    /// Waits until the process has ended by itself.
    fn wait(mut self) {
        std::io::copy(&mut self.lines, &mut std::io::sink()).unwrap();
        assert!(self.process.wait().unwrap().success());
    }

    /// Returns the next message. Other lines come from the test harness.
    fn read(&mut self) -> String {
        let mut all = String::new();
        loop {
            let start = all.len();
            assert_ne!(self.lines.read_line(&mut all).unwrap(), 0, "the container's process ended: {all}");
            if let Some((_, message)) = all[start..].split_once("@@") {
                return message.trim().to_owned();
            }
        }
    }
}

/// Runs the two processes. Returns their last messages.
fn exchange(mut one: Container, mut two: Container) -> [String; 2] {
    let (first, second) = (one.read(), two.read());
    one.write(&second);
    two.write(&first);
    let results = [one.read(), two.read()];
    // Each process waits for this line, because its end would be the reason at the other end.
    one.write("end");
    two.write("end");
    one.wait();
    two.wait();
    results
}

/// Runs in a container. Without [`NUMBER`] this test does nothing.
#[test]
fn inside() {
    let Ok(number) = std::env::var(NUMBER) else { return };
    if std::env::var_os(NOT_DUMPABLE).is_some() {
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap();
    }
    // The device stays open until the other container has its result, too.
    let device = soft::open().unwrap();
    say(&run(number.parse().unwrap()));
    assert_eq!(hear(), "end");
    drop(device);
}

/// Connects to the peer that the parent names, and exchanges messages. Returns the result.
fn run(own: u64) -> String {
    let options = Options { memory: 4 * AREA, ..Options::default() };
    let side = Side::new(&Soft, &options);
    let address: String =
        side.pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let here = remote(&side.region, 0);
    say(&format!("{address} {} {}", here.address, here.rkey.0));
    let line = hear();
    let words: Vec<&str> = line.split_whitespace().collect();
    let bytes: Vec<u8> = (0..words[0].len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&words[0][at..at + 2], 16).unwrap())
        .collect();
    let address = QueuePairAddress::new(bytes).unwrap();
    let there = RemoteSegment { address: words[1].parse().unwrap(), rkey: Rkey(words[2].parse().unwrap()) };
    match side.pair.to_rtr(&address, &side.settings) {
        Ok(()) => {}
        Err(error) if matches!(error.kind(), VerbsErrorKind::Unreachable | VerbsErrorKind::NotAdmitted) => {
            return error.to_string();
        }
        Err(error) => panic!("{error}"),
    }
    side.pair.to_rts(&side.settings).unwrap();
    for (round, length) in (0..).zip(LENGTHS) {
        messages(&side, there, (own + 10 * round, 3 - own + 10 * round), length);
    }
    if side.pair.local().unwrap().reads_by_copy() { BY_COPY } else { THROUGH_THE_RING }.into()
}

/// Returns the next line of the parent.
fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

fn say(message: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@@{message}").unwrap();
    out.flush().unwrap();
}

/// Sends, writes and reads `length` bytes while the peer does the same. `seeds` are those of our content and
/// of the peer's.
fn messages(side: &Side, there: RemoteSegment, seeds: (u64, u64), length: usize) {
    let (ours, theirs) = (pattern(seeds.0, length), pattern(seeds.1, length));
    let at = |area: usize| RemoteSegment { address: there.address + (area * AREA) as u64, ..there };
    side.fill(0, &ours);
    // A Send in each direction.
    side.post_receive(1, AREA, length);
    side.send(2, 0, length);
    complete(side, &[CompletionOpcode::Send, CompletionOpcode::Receive]);
    assert!(side.content(AREA, length) == theirs, "sent {length}");
    // A Write in each direction. The peer's next message says that its Write is complete.
    side.write(3, side.segment(0, length), at(2));
    complete(side, &[CompletionOpcode::Write]);
    barrier(side);
    assert!(side.content(2 * AREA, length) == theirs, "written {length}");
    // A Read in each direction.
    side.read(4, side.segment(3 * AREA, length), at(0));
    complete(side, &[CompletionOpcode::Read]);
    assert!(side.content(3 * AREA, length) == theirs, "read {length}");
    // The peer still reads our source until its message comes.
    barrier(side);
}

/// Waits until the peer is here, too.
fn barrier(side: &Side) {
    side.post_receive(5, AREA, 8);
    side.send(6, 0, 8);
    complete(side, &[CompletionOpcode::Send, CompletionOpcode::Receive]);
}

/// Waits for completions, in any order.
fn complete(side: &Side, expected: &[CompletionOpcode]) {
    let mut left = expected.to_vec();
    while !left.is_empty() {
        let completion = side.wait();
        assert_eq!(completion.status, CompletionStatus::Success, "{completion:?}");
        left.remove(left.iter().position(|opcode| *opcode == completion.opcode).unwrap());
    }
}

/// Returns the beginning of a command that runs another in a container of its own. `None` if that is not
/// permitted here.
fn container(directory: &SharedFolder) -> Option<Vec<&'static str>> {
    let mut command =
        vec!["unshare", "--user", "--map-root-user", "--net", "--ipc", "--mount", "--pid", "--fork"];
    let works = |command: &[&str]| {
        let run = Command::new(command[0]).args(&command[1..]).arg("true").current_dir(&directory.0).output();
        run.is_ok_and(|output| output.status.success())
    };
    if !works(&command) {
        println!("skipped: a new user namespace is not permitted here");
        return None;
    }
    // Some containers do not permit a new /proc.
    if works(&[&command[..], &["--mount-proc"]].concat()) {
        command.push("--mount-proc");
    }
    Some(command)
}

#[test]
fn two_containers_share_memory() {
    let shared = SharedFolder::new("containers");
    let Some(command) = container(&shared) else { return };
    let sockets = shared.sockets();
    let one = Container::start(&command, 1, &[("RDMA_SOFT_DIR", &sockets)]);
    // The second container has the directory at another path.
    let mounted = shared.0.join("mounted");
    let mount = ["sh", "-c", "mount --bind \"$SOCKETS\" \"$RDMA_SOFT_DIR\" && exec \"$@\"", "sh"];
    let two = Container::start(
        &[&command[..], &mount].concat(),
        2,
        &[("RDMA_SOFT_DIR", &mounted), ("SOCKETS", &sockets)],
    );
    assert_eq!(exchange(one, two), [THROUGH_THE_RING; 2]);
    assert_eq!(fs::read_dir(&sockets).unwrap().count(), 0, "sockets stay behind");
}

/// With their own numbers of users, the two containers belong to two users of the host.
#[test]
fn two_containers_of_two_users_share_memory() {
    let shared = SharedFolder::new("users");
    let Some(command) = container(&shared) else { return };
    let other = ["setpriv", "--reuid", OTHER_USER, "--regid", OTHER_USER, "--clear-groups"];
    let becomes = Command::new(other[0]).args(&other[1..]).arg("true").output();
    if !becomes.is_ok_and(|output| output.status.success()) {
        println!("skipped: becoming another user is not permitted here");
        return;
    }
    // The other user may have no right to run the binary where it is.
    let program = shared.0.join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let everyone = fs::Permissions::from_mode(0o755);
    for path in [&shared.0, &program] {
        fs::set_permissions(path, everyone.clone()).unwrap();
    }
    let sockets = shared.sockets();
    let any = [("RDMA_SOFT_DIR", &*sockets), ("RDMA_SOFT_PEERS", Path::new("any"))];
    let other = [&other[..], &command].concat();
    let start_other = |variables: &[_]| Container::start_program(&program, &other, 2, variables);
    let results = exchange(Container::start(&command, 1, &any), start_other(&any));
    assert_eq!(results, [THROUGH_THE_RING; 2]);
    // By default, a device lets in its own user only.
    let results = exchange(Container::start(&command, 1, &any[..1]), start_other(&any[..1]));
    assert!(results.iter().all(|reason| reason.contains("RDMA_SOFT_PEERS=any at both ends")), "{results:?}");
}

#[test]
fn containers_without_one_directory_get_the_reason() {
    let (one, two) = (SharedFolder::new("here"), SharedFolder::new("there"));
    let Some(command) = container(&one) else { return };
    let (here, there) = (one.sockets(), two.sockets());
    let results = exchange(
        Container::start(&command, 1, &[("RDMA_SOFT_DIR", &here)]),
        Container::start(&command, 2, &[("RDMA_SOFT_DIR", &there)]),
    );
    assert!(results.iter().all(|reason| reason.contains("is another directory")), "{results:?}");
    let results = exchange(
        Container::start(&command, 1, &[("RDMA_SOFT_DIR", &here)]),
        Container::start(&command, 2, &[]),
    );
    assert!(results[0].contains("the peer has no RDMA_SOFT_DIR"), "{results:?}");
    assert!(results[1].contains("this process has no RDMA_SOFT_DIR"), "{results:?}");
}

/// Both processes belong to this user, and are in no containers. The second one is not dumpable, so the first
/// one could not trace it.
#[test]
fn a_process_that_its_user_can_not_trace_shares_no_memory() {
    let start = |number, variables: &[(&str, &str)]| {
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, Path::new(value))).collect();
        Container::start(&["env"], number, &variables)
    };
    let [strict, trusts] = ["user", "trusted-user"].map(|peers| ("RDMA_SOFT_PEERS", peers));
    let hides = (NOT_DUMPABLE, "1");
    let has_yama =
        fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() != "0");
    let expected = if has_yama { THROUGH_THE_RING } else { BY_COPY };
    assert_eq!(exchange(start(1, &[strict]), start(2, &[strict])), [expected; 2]);
    assert_eq!(exchange(start(1, &[strict]), start(2, &[strict, hides])), [THROUGH_THE_RING; 2]);
    // The user says that all its programs may read the memory. Both ends must say so.
    assert_eq!(exchange(start(1, &[trusts]), start(2, &[trusts])), [BY_COPY; 2]);
    assert_eq!(exchange(start(1, &[trusts]), start(2, &[strict, hides])), [THROUGH_THE_RING; 2]);
    // Only root sees the namespaces of a process that is not dumpable.
    if rustix::process::geteuid().is_root() {
        assert_eq!(exchange(start(1, &[trusts]), start(2, &[hides, trusts])), [BY_COPY; 2]);
    }
}
