//! Anonymous shared memory: memfds of this process, and checks of the memfds that a peer sends.
//!
//! A peer's descriptor can be anything. This process maps it only if an access to the mapping can't end in
//! SIGBUS: if it is a memfd of ordinary pages whose length can't change any more. A page that the peer has
//! not written is made when this process reads it, and is then charged to the cgroup of this process. A check
//! of the whole memory when it is mapped could not prevent that, because the memory of an honest peer has
//! such pages, too; a check before each read would be a system call.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::Resource;

/// Type of the file system that memfds of ordinary pages are on (`TMPFS_MAGIC`).
const TMPFS: u64 = 0x0102_1994;

/// The seals of a segment: its length can't change, and only its maker can write to it, by the mappings that
/// exist when it is sealed.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Creates a memfd of `length` zero bytes. The caller maps it and then [seals](seal) it.
pub(crate) fn create(name: &str, length: usize) -> io::Result<OwnedFd> {
    let length = length as u64;
    // Beyond this limit, `ftruncate` raises the signal SIGXFSZ, which ends a process that does not handle it.
    let limit = rustix::process::getrlimit(Resource::Fsize).current;
    if let Some(limit) = limit.filter(|limit| length > *limit) {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!(
                "shared memory of {length} bytes is larger than this process's limit on the size of files \
                 (RLIMIT_FSIZE, `ulimit -f`), which is {limit} bytes: raise the limit"
            ),
        ));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 does not know the flag.
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        other => other?,
    };
    rustix::fs::ftruncate(&fd, length)?;
    Ok(fd)
}

/// Seals a memfd of [`create`]: its length can't change any more, no process can make a writable mapping of
/// it, and no further seal can be added. Mappings that exist stay writable.
pub(crate) fn seal(fd: &impl AsFd) -> io::Result<()> {
    rustix::fs::fcntl_add_seals(fd, SEALS | SealFlags::SEAL)?;
    Ok(())
}

/// Returns whether a descriptor is a memfd of ordinary pages.
pub(crate) fn is_memfd(fd: &impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
        && rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type as u64 == TMPFS)
}

/// Checks that the first `length` bytes of a peer's descriptor can be mapped, and that only their maker can
/// write to them. Returns `length`. Refuses:
/// - other kinds of files, because reading them may block or fail;
/// - memory of huge pages, because the peer can punch holes into it, and an access is SIGBUS when the pool of
///   huge pages is empty; and
/// - memory whose length the peer can change, because an access beyond its end is SIGBUS.
pub(crate) fn check(fd: &impl AsFd, length: u64) -> io::Result<usize> {
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    let Ok(seals) = rustix::fs::fcntl_get_seals(fd) else {
        return refuse("the peer's descriptor is no memfd".into());
    };
    let kind = rustix::fs::fstatfs(fd)?.f_type as u64;
    if kind != TMPFS {
        return refuse(format!(
            "the peer's segment is not of ordinary pages (type of file system {kind:#x})"
        ));
    }
    let missing = SEALS.difference(seals);
    if !missing.is_empty() {
        return refuse(format!("the peer's segment lacks the seals {missing:?}"));
    }
    let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
    match usize::try_from(length) {
        Ok(wanted) if wanted > 0 && length <= size => Ok(wanted),
        _ => refuse(format!("the peer's segment has {size} of {length} bytes")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::HostMemory;

    /// The environment variable of the other process of [`a_limit_on_files_is_an_error`].
    const LIMITED: &str = "TONIC_RDMA_MEMFD_LIMITED";

    /// Lowers this process's limit on the size of files, and creates shared memory beyond the limit. Does
    /// nothing in the usual run of the tests.
    #[test]
    fn limited() {
        if std::env::var_os(LIMITED).is_none() {
            return;
        }
        let mut limit = rustix::process::getrlimit(Resource::Fsize);
        limit.current = Some(8192);
        rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
        assert!(create("test", 8192).is_ok());
        assert!(HostMemory::shared(8192, 4096).is_ok());
        assert_eq!(create("test", 8193).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        for error in [HostMemory::shared(1 << 20, 4096).unwrap_err(), crate::soft::open().unwrap_err()] {
            assert_eq!(error.system().map(io::Error::kind), Some(io::ErrorKind::FileTooLarge));
            assert!(error.reason().contains("RLIMIT_FSIZE"), "{error}");
        }
    }

    #[test]
    fn a_limit_on_files_is_an_error() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["memfd::tests::limited", "--exact"])
            .env(LIMITED, "1")
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), None, "SIGXFSZ is {}", libc::SIGXFSZ);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    #[test]
    fn memory_is_not_executable_and_its_length_is_sealed() {
        let memory = HostMemory::shared(8192, 4096).unwrap();
        let fd = memory.shared_fd().unwrap();
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL), "{seals:?}");
        // Linux before 6.3 can't seal the mode, and gives the right to execute.
        if seals.contains(SealFlags::EXEC) {
            assert_eq!(rustix::fs::fstat(fd).unwrap().st_mode & 0o111, 0);
        }
    }
}
