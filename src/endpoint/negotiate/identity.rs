//! The identity of this process, by which a peer finds out whether both can share memory.

use std::os::unix::fs::MetadataExt;

use crate::endpoint::error::RdmaUnavailable;
use crate::wire::hello::HostIdentity;
use tonic_rdma_verbs::internal;

/// Returns this process's identity, for its hello. A part that can't be read is zero. A boot id of zero equals no other.
pub(super) fn local() -> HostIdentity {
    HostIdentity {
        boot_id: boot_id().unwrap_or_default(),
        network_namespace: std::fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or_default(),
        uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
    }
}

/// The part of the host that this process's software device reaches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    /// The device finds its peers through a directory, which containers can share.
    directory: bool,
    /// The device lets in processes of other users.
    any_user: bool,
}

impl Reach {
    /// Returns the reach that the environment of this process sets.
    pub(super) fn of_this_process() -> Self {
        Self { directory: internal::soft_uses_directory(), any_user: internal::soft_admits_any_user() }
    }
}

/// Checks that two processes can share a software device, as far as the hello shows it. With a directory, only the device finds
/// out whether it reaches the peer: namespaces do not matter, and a user namespace has its own numbers of users.
pub(super) fn check(ours: &HostIdentity, theirs: &HostIdentity, reach: Reach) -> Result<(), RdmaUnavailable> {
    if ours.boot_id != theirs.boot_id || ours.boot_id == [0; 16] {
        return Err(RdmaUnavailable::OtherHost);
    }
    if reach.directory {
        return Ok(());
    }
    if ours.network_namespace != theirs.network_namespace {
        return Err(RdmaUnavailable::OtherNamespace);
    }
    if !reach.any_user && ours.uid != theirs.uid {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const HERE: HostIdentity = HostIdentity { boot_id: [7; 16], network_namespace: 1, uid: 2, pid: 3 };
    const DEFAULT: Reach = Reach { directory: false, any_user: false };

    #[test]
    fn by_default_one_user_in_one_network_namespace() {
        check(&HERE, &HostIdentity { pid: 4, ..HERE }, DEFAULT).unwrap();
        let refused = |theirs| check(&HERE, &theirs, DEFAULT).unwrap_err();
        assert!(matches!(
            refused(HostIdentity { network_namespace: 2, ..HERE }),
            RdmaUnavailable::OtherNamespace
        ));
        assert!(matches!(
            refused(HostIdentity { uid: 9, ..HERE }),
            RdmaUnavailable::OtherUser { ours: 2, theirs: 9 }
        ));
    }

    #[test]
    fn settings_extend_the_reach_within_the_host() {
        let other = HostIdentity { network_namespace: 2, uid: 9, ..HERE };
        for any_user in [false, true] {
            let directory = Reach { directory: true, any_user };
            check(&HERE, &other, directory).unwrap();
            let elsewhere = HostIdentity { boot_id: [8; 16], ..HERE };
            assert!(matches!(check(&HERE, &elsewhere, directory), Err(RdmaUnavailable::OtherHost)));
        }
        let any = Reach { directory: false, any_user: true };
        check(&HERE, &HostIdentity { uid: 9, ..HERE }, any).unwrap();
        assert!(matches!(check(&HERE, &other, any), Err(RdmaUnavailable::OtherNamespace)));
        let unknown = HostIdentity { boot_id: [0; 16], ..HERE };
        assert!(matches!(check(&unknown, &unknown, any), Err(RdmaUnavailable::OtherHost)));
    }
}
