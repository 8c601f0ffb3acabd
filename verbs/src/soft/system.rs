//! System calls that have no safe wrapper.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Returns the process number and the user at the other end of a unix socket. The process number is 0 if the process has no
/// number in our pid namespace.
pub(super) fn peer_credentials(fd: &impl AsFd) -> io::Result<(i32, u32)> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY:
    // - the option value is writable for `length` bytes, and any bytes make a `ucred`, and
    // - the descriptor is open as long as `fd` is borrowed.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok((credentials.pid, credentials.uid)) } else { Err(io::Error::last_os_error()) }
}

/// Returns a descriptor of the process at the other end of a unix socket, which becomes readable when the process ends. Fails on
/// Linux before 6.5.
pub(super) fn peer_process(fd: &impl AsFd) -> io::Result<OwnedFd> {
    let mut process: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY:
    // - the option value is writable for `length` bytes, and any bytes make an integer, and
    // - the descriptor is open as long as `fd` is borrowed.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if process < 0 {
        return Err(io::Error::other("the kernel gave no descriptor"));
    }
    // SAFETY: the kernel has just made the descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// The direction in which bytes go between this process and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From this process to the peer.
    ToPeer,
    /// From the peer to this process.
    FromPeer,
}

/// Copies `length` bytes between `local` and `remote` in `process`. Returns the number of bytes copied.
///
/// # Safety
/// - `local` must be valid for `length` bytes, for writing if the bytes come from the peer.
pub(super) unsafe fn process_copy(
    process: i32,
    local: *mut u8,
    remote: u64,
    length: usize,
    direction: Direction,
) -> io::Result<usize> {
    let here = libc::iovec { iov_base: local.cast(), iov_len: length };
    let there = libc::iovec { iov_base: remote as *mut libc::c_void, iov_len: length };
    // SAFETY:
    // - `local` is valid by this function's contract, and
    // - only the kernel uses the address `remote`, in the other process.
    let done = unsafe {
        match direction {
            Direction::ToPeer => libc::process_vm_writev(process, &raw const here, 1, &raw const there, 1, 0),
            Direction::FromPeer => {
                libc::process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0)
            }
        }
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as usize) }
}
