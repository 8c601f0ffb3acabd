//! A process that can't share memory with its peer learns that, and why, when it connects: one of another user, one in
//! another network namespace, one whose peer has gone. A process changes user and namespace as root, and not in every
//! container: where it may not, the test says so and is skipped.
#![allow(clippy::print_stdout, reason = "tests")]

use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;

use tonic_rdma_verbs::{
    Access, PathSettings, QueuePair, QueuePairAddress, QueuePairCapacity, VerbsError, soft,
};

const ROLE: &str = "TONIC_RDMA_ISOLATION_ROLE";
const ADDRESS: &str = "TONIC_RDMA_ISOLATION_ADDRESS";
/// What the other process says begins with one of these.
const REFUSED: &str = "@@refused: ";
const NOT_PERMITTED: &str = "@@not permitted: ";
/// A user as which no test runs.
const OTHER_USER: libc::uid_t = 65533;

fn queue_pair() -> Arc<dyn QueuePair> {
    let context = soft::open().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let capacity = QueuePairCapacity {
        send_requests: 1,
        receive_requests: 1,
        send_segments: 1,
        receive_segments: 1,
        inline: 0,
    };
    let domain = context.alloc_protection_domain().unwrap();
    let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
    pair.to_init(Access::LOCAL_WRITE).unwrap();
    pair
}

/// What the other process changes about itself before it connects.
#[derive(Clone, Copy, Debug)]
enum Role {
    User,
    Network,
}

impl Role {
    const ALL: [Self; 2] = [Self::User, Self::Network];

    fn name(self) -> &'static str {
        match self {
            Self::User => "becoming another user",
            Self::Network => "a new network namespace",
        }
    }

    fn take_up(self) -> io::Result<()> {
        // SAFETY: both calls change this process alone, before it does anything else.
        let changed = unsafe {
            match self {
                Self::User => libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER),
                Self::Network => libc::unshare(libc::CLONE_NEWNET),
            }
        };
        if changed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Runs [`outsider`] in a process of its own and returns why it could not connect to a queue pair of this one. Prints why the
/// test is skipped, and returns nothing, if the system does not permit the role.
fn reason_for(role: Role) -> Option<String> {
    let pair = queue_pair();
    let address: String = pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["isolation::outsider", "--exact", "--nocapture"])
        .env(ROLE, role.name())
        .env(ADDRESS, address)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let line = |mark| Some(said.split_once(mark)?.1.lines().next().unwrap_or_default().to_owned());
    if let Some(error) = line(NOT_PERMITTED) {
        println!("skipped: {} is not permitted here: {error}", role.name());
        return None;
    }
    Some(line(REFUSED).unwrap_or_else(|| panic!("the other process connected, or said nothing: {said}")))
}

/// What the other process does; nothing when it runs as a test.
#[test]
fn outsider() {
    let Ok(name) = std::env::var(ROLE) else { return };
    let role = Role::ALL.into_iter().find(|role| role.name() == name).unwrap();
    if let Err(error) = role.take_up() {
        // Which error it is depends on what denies it: capabilities or a filter of system calls, or that the user is unknown in
        // this user namespace.
        let denied = [libc::EPERM, libc::EACCES, libc::EINVAL, libc::ENOSYS].map(Some);
        assert!(denied.contains(&error.raw_os_error()), "{name}: {error}");
        writeln!(io::stdout(), "\n{NOT_PERMITTED}{error}").unwrap();
        return;
    }
    let hex = std::env::var(ADDRESS).unwrap();
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let address = QueuePairAddress::new(bytes).unwrap();
    let error = queue_pair().to_rtr(&address, &PathSettings::default()).unwrap_err();
    assert!(matches!(error, VerbsError::Unreachable(_)), "{error}");
    writeln!(io::stdout(), "\n{REFUSED}{error}").unwrap();
}

#[test]
fn another_user_learns_why() {
    let ours = rustix::process::geteuid().as_raw();
    if let Some(reason) = reason_for(Role::User) {
        assert!(
            reason.contains(&format!("belongs to user {ours}, this one to user {OTHER_USER}")),
            "{reason}"
        );
    }
}

#[test]
fn another_network_namespace_learns_why() {
    if let Some(reason) = reason_for(Role::Network) {
        assert!(reason.contains("another network namespace"), "{reason}");
    }
}

#[test]
fn a_peer_that_has_gone_is_unreachable() {
    let pair = queue_pair();
    let gone = {
        let mut bytes = pair.local_address().as_bytes().to_vec();
        // Another nonce: as if the process had gone and its number been given to another.
        bytes[8] ^= 1;
        QueuePairAddress::new(bytes).unwrap()
    };
    let error = pair.to_rtr(&gone, &PathSettings::default()).unwrap_err();
    assert!(matches!(error, VerbsError::Unreachable(_)), "{error}");
}
