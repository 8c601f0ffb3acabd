//! Who can't share memory finds that out when connecting, with the reason: another user, another network namespace,
//! a process that has gone. Needs root, as changing user and namespace does; without, only the last is tested.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tonic_rdma::verbs::{
    Access, PathSettings, QueuePair, QueuePairAddress, QueuePairCapacity, VerbsError, soft,
};

const ROLE: &str = "TONIC_RDMA_ISOLATION_ROLE";
const ADDRESS: &str = "TONIC_RDMA_ISOLATION_ADDRESS";

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

/// Runs [`outsider`] in a process of its own and returns why it could not connect to `pair`.
fn reason_for(role: &str, pair: &dyn QueuePair) -> String {
    let address: String = pair.local_address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["outsider", "--exact", "--nocapture"])
        .env(ROLE, role)
        .env(ADDRESS, address)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said.split_once("@@").unwrap_or_else(|| panic!("{said}")).1.lines().next().unwrap().to_owned()
}

/// Not a test of its own: what the other process does.
#[test]
fn outsider() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: both calls change this process alone, before it does anything else.
    let moved = unsafe {
        match role.as_str() {
            "user" => libc::setresuid(65534, 65534, 65534),
            "network" => libc::unshare(libc::CLONE_NEWNET),
            _ => 0,
        }
    };
    assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
    let hex = std::env::var(ADDRESS).unwrap();
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let address = QueuePairAddress::new(bytes).unwrap();
    let error = queue_pair().to_rtr(&address, &PathSettings::default()).unwrap_err();
    assert!(matches!(error, VerbsError::Unreachable(_)), "{error}");
    writeln!(std::io::stdout(), "\n@@{error}").unwrap();
}

#[test]
fn who_can_not_share_memory_learns_why() {
    let pair = queue_pair();
    if rustix::process::geteuid().is_root() {
        assert!(reason_for("user", &*pair).contains("belongs to user 0, this one to user 65534"));
        assert!(reason_for("network", &*pair).contains("another network namespace"));
    }
    let gone = {
        let mut bytes = pair.local_address().as_bytes().to_vec();
        // Another nonce: as if the process had gone and its number been given to another.
        bytes[8] ^= 1;
        QueuePairAddress::new(bytes).unwrap()
    };
    let error = pair.to_rtr(&gone, &PathSettings::default()).unwrap_err();
    assert!(matches!(error, VerbsError::Unreachable(_)), "{error}");
}
