//! Two processes that can't share memory, or have no memory left, use TCP and get the reason.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use support::{Child, OpenCopy};

fn succeeds(command: &[&str]) -> bool {
    Command::new(command[0]).args(&command[1..]).output().is_ok_and(|output| output.status.success())
}

/// A pair of network namespaces with a link between them, removed on drop. One test at a time has it.
struct Namespaces {
    _turn: MutexGuard<'static, ()>,
}

impl Namespaces {
    const NAMES: [&str; 2] = ["tonic-rdma-a", "tonic-rdma-b"];

    fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let [a, b] = Self::NAMES;
        let namespaces = Self { _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) };
        namespaces.remove();
        let steps: [&[&str]; 9] = [
            &["ip", "netns", "add", a],
            &["ip", "netns", "add", b],
            &[
                "ip", "link", "add", "trdma-a", "netns", a, "type", "veth", "peer", "name", "trdma-b",
                "netns", b,
            ],
            &["ip", "-n", a, "addr", "add", "10.211.7.1/24", "dev", "trdma-a"],
            &["ip", "-n", b, "addr", "add", "10.211.7.2/24", "dev", "trdma-b"],
            &["ip", "-n", a, "link", "set", "trdma-a", "up"],
            &["ip", "-n", b, "link", "set", "trdma-b", "up"],
            &["ip", "-n", a, "link", "set", "lo", "up"],
            &["ip", "-n", b, "link", "set", "lo", "up"],
        ];
        steps.iter().all(|step| succeeds(step)).then_some(namespaces)
    }

    fn remove(&self) {
        for name in Self::NAMES {
            succeeds(&["ip", "netns", "del", name]);
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.remove();
    }
}

#[test]
fn two_network_namespaces_end_on_tcp() {
    let Some(_namespaces) = Namespaces::new() else {
        println!("skipped: network namespaces need root and iproute2");
        return;
    };
    let [a, b] = Namespaces::NAMES;
    let server = Child::start(&["ip", "netns", "exec", a], "echo-on 10.211.7.1:0");
    let client = Child::start(&["ip", "netns", "exec", b], &format!("dial 10.211.7.1:{}", server.word));
    assert!(client.word.starts_with("tcp:"), "{}", client.word);
    assert!(client.word.contains("network namespace"), "{}", client.word);
    // Peers in one namespace share memory.
    let client = Child::start(&["ip", "netns", "exec", a], &format!("dial 10.211.7.1:{}", server.word));
    assert!(client.word.starts_with("rdma:"), "{}", client.word);
}

/// With one directory at both ends, the namespaces do not matter.
#[test]
fn two_network_namespaces_with_one_directory_use_rdma() {
    let Some(_namespaces) = Namespaces::new() else {
        println!("skipped: network namespaces need root and iproute2");
        return;
    };
    let [a, b] = Namespaces::NAMES;
    let directory = tempfile::tempdir().unwrap();
    let variable = format!("RDMA_SOFT_DIR={}", directory.path().display());
    let server = Child::start(&["ip", "netns", "exec", a, "env", &variable], "echo-on 10.211.7.1:0");
    let dial = format!("dial 10.211.7.1:{}", server.word);
    let client = Child::start(&["ip", "netns", "exec", b, "env", &variable], &dial);
    assert!(client.word.starts_with("rdma:"), "{}", client.word);
    // The reason names the end that has no directory.
    let client = Child::start(&["ip", "netns", "exec", b], &dial);
    assert!(client.word.starts_with("tcp:"), "{}", client.word);
    assert!(client.word.contains("the peer has no RDMA_SOFT_DIR"), "{}", client.word);
}

#[test]
fn two_users_use_rdma_only_if_both_let_in_others() {
    let as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    if !succeeds(&[&as_nobody[..], &["true"]].concat()) {
        println!("skipped: becoming another user needs root and setpriv");
        return;
    }
    // The other user may have no right to run this binary where it is.
    let copy = OpenCopy::new();
    let binary = copy.path();
    let server = Child::start(&[], "echo");
    let client = Child::start_copy(&binary, &as_nobody, &format!("dial 127.0.0.1:{}", server.word));
    assert!(client.word.starts_with("tcp:"), "{}", client.word);
    assert!(client.word.contains("another user"), "{}", client.word);
    // Both ends must let in other users.
    let any = ["env", "RDMA_SOFT_PEERS=any"];
    let server = Child::start(&any, "echo");
    let dial = format!("dial 127.0.0.1:{}", server.word);
    let client = Child::start_copy(&binary, &[&as_nobody[..], &any].concat(), &dial);
    assert!(client.word.starts_with("rdma:"), "{}", client.word);
    assert!(client.word.contains("read only one another's rings"), "{}", client.word);
}

#[test]
fn too_little_memory_ends_on_tcp() {
    let server = Child::start(&[], "echo");
    let client =
        Child::start(&["env", "RDMA_PINNED_LIMIT=1048576"], &format!("dial 127.0.0.1:{}", server.word));
    assert!(client.word.starts_with("tcp:"), "{}", client.word);
    assert!(client.word.contains("RDMA_PINNED_LIMIT"), "{}", client.word);
}
