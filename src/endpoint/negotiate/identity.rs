//! The identity of this process, by which a peer finds out whether both can share memory.

use std::os::unix::fs::MetadataExt;

use crate::endpoint::error::RdmaUnavailable;
use crate::wire::hello::HostIdentity;

/// Returns this process's identity, for its hello. A part that can't be read is zero. A boot id of zero equals no other.
pub(super) fn local() -> HostIdentity {
    HostIdentity {
        boot_id: boot_id().unwrap_or_default(),
        network_namespace: std::fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or_default(),
        uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
    }
}

/// Checks that two processes can share a software device.
pub(super) fn check(ours: &HostIdentity, theirs: &HostIdentity) -> Result<(), RdmaUnavailable> {
    if ours.boot_id != theirs.boot_id || ours.boot_id == [0; 16] {
        return Err(RdmaUnavailable::OtherHost);
    }
    if ours.network_namespace != theirs.network_namespace {
        return Err(RdmaUnavailable::OtherNamespace);
    }
    if ours.uid != theirs.uid {
        return Err(RdmaUnavailable::OtherUser { ours: ours.uid, theirs: theirs.uid });
    }
    Ok(())
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
