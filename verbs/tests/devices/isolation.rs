//! A process that can't share memory with its peer gets an error with the reason when it connects: if it
//! belongs to another user, if it is in another network namespace, or if its peer has exited. Changing the
//! user or the namespace needs root and is not permitted in every container. If it is not permitted, the test
//! prints a line and is skipped.
#![allow(clippy::print_stdout, reason = "tests")]

use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;

use tonic_rdma_verbs::{
    Access, PathSettings, QueuePair, QueuePairAddress, QueuePairCapacity, VerbsErrorKind, soft,
};

/// The environment variable with the role of the other process.
const ROLE: &str = "TONIC_RDMA_ISOLATION_ROLE";
/// The environment variable with the address of the queue pair of this process.
const ADDRESS: &str = "TONIC_RDMA_ISOLATION_ADDRESS";
/// Beginning of the line that the other process prints if it was refused.
const REFUSED: &str = "@@refused: ";
/// Beginning of the line that the other process prints if the system does not permit its role.
const NOT_PERMITTED: &str = "@@not permitted: ";
/// A user that does not run tests.
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

/// The property that the other process changes before it connects.
#[derive(Clone, Copy, Debug)]
enum Role {
    User,
    UserThatLetsUsIn,
    Network,
}

impl Role {
    const ALL: [Self; 3] = [Self::User, Self::UserThatLetsUsIn, Self::Network];

    fn name(self) -> &'static str {
        match self {
            Self::User => "becoming another user",
            Self::UserThatLetsUsIn => "becoming another user that lets this one in",
            Self::Network => "a new network namespace",
        }
    }

    /// Changes this process.
    fn apply(self) -> io::Result<()> {
        // SAFETY: both calls change only this process, before it does anything else.
        let changed = unsafe {
            match self {
                Self::User | Self::UserThatLetsUsIn => libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER),
                Self::Network => libc::unshare(libc::CLONE_NEWNET),
            }
        };
        if changed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Runs [`outsider`] in another process, and returns the reason why that process could not connect to a queue
/// pair of this one. If the system does not permit the role, this prints the reason to skip the test and
/// returns `None`.
fn reason_for(role: Role) -> Option<String> {
    let pair = queue_pair();
    let address: String = pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["isolation::outsider", "--exact", "--nocapture"])
        .env(ROLE, role.name())
        .env(ADDRESS, address)
        .env("RDMA_SOFT_PEERS", if let Role::UserThatLetsUsIn = role { "any" } else { "user" })
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    let line = |mark| Some(printed.split_once(mark)?.1.lines().next().unwrap_or_default().to_owned());
    if let Some(error) = line(NOT_PERMITTED) {
        println!("skipped: {} is not permitted here: {error}", role.name());
        return None;
    }
    Some(
        line(REFUSED).unwrap_or_else(|| panic!("the other process connected, or printed nothing: {printed}")),
    )
}

/// Connects to the queue pair of the parent process, and prints the error. Without a role this test does
/// nothing.
#[test]
fn outsider() {
    let Ok(name) = std::env::var(ROLE) else { return };
    let role = Role::ALL.into_iter().find(|role| role.name() == name).unwrap();
    if let Err(error) = role.apply() {
        // The error depends on the cause: capabilities, a filter of system calls, or a user that this user
        // namespace does not know.
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
    let is_network = name == Role::Network.name();
    let kind = if is_network { VerbsErrorKind::Unreachable } else { VerbsErrorKind::NotAdmitted };
    assert_eq!(error.kind(), kind, "{error}");
    writeln!(io::stdout(), "\n{REFUSED}{error}").unwrap();
}

#[test]
fn another_user_gets_the_reason() {
    let ours = rustix::process::geteuid().as_raw();
    if let Some(reason) = reason_for(Role::User) {
        assert!(
            reason.contains(&format!("belongs to user {ours}, this one to user {OTHER_USER}")),
            "{reason}"
        );
    }
}

/// Its own policy admits this process, but the policy of this process does not admit it.
#[test]
fn a_process_that_is_not_let_in_gets_the_reason() {
    if let Some(reason) = reason_for(Role::UserThatLetsUsIn) {
        assert!(reason.contains("RDMA_SOFT_PEERS=any at both ends"), "{reason}");
    }
}

#[test]
fn another_network_namespace_gets_the_reason() {
    if let Some(reason) = reason_for(Role::Network) {
        assert!(reason.contains("another network namespace"), "{reason}");
    }
}

#[test]
fn a_peer_that_has_exited_is_unreachable() {
    let pair = queue_pair();
    let gone = {
        let mut bytes = pair.local_address().as_bytes().to_vec();
        // Another nonce, as if the process had exited and another process had got its number.
        bytes[8] ^= 1;
        QueuePairAddress::new(bytes).unwrap()
    };
    let error = pair.to_rtr(&gone, &PathSettings::default()).unwrap_err();
    assert_eq!(error.kind(), VerbsErrorKind::Unreachable, "{error}");
}
