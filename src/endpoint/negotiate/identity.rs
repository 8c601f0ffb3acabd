//! Who this process is, as far as a peer on the same host can tell.

use std::os::unix::fs::MetadataExt;

use crate::wire::hello::HostIdentity;

/// This process's identity, for its hello. What can't be read is zero, which equals nobody's.
pub(super) fn local() -> HostIdentity {
    HostIdentity {
        boot_id: boot_id().unwrap_or_default(),
        network_namespace: std::fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or_default(),
        uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
    }
}

/// Why two processes can't share a software device; `None` if nothing speaks against it.
pub(super) fn obstacle(ours: &HostIdentity, theirs: &HostIdentity) -> Option<String> {
    if ours.boot_id != theirs.boot_id || ours.boot_id == [0; 16] {
        return Some("the software device reaches this host only, and the peer is on another".into());
    }
    if ours.network_namespace != theirs.network_namespace {
        return Some("the peer is in another network namespace, out of the software device's reach".into());
    }
    if ours.uid != theirs.uid {
        return Some(format!(
            "the peer runs as another user (uid {} here, {} there), and memory is shared with one's own alone",
            ours.uid, theirs.uid
        ));
    }
    None
}

fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut id = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(id)
}
