//! System calls that have no safe wrapper.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;

use super::closer::Source;

/// Returns the process number and the user at the other side of a unix socket. The process number is 0 if the
/// process has no number in our pid namespace.
pub(super) fn peer_credentials(fd: &impl AsFd) -> io::Result<(i32, u32)> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: any bytes make a `ucred`.
    unsafe { read_option(fd, libc::SO_PEERCRED, &mut credentials)? };
    Ok((credentials.pid, credentials.uid))
}

/// Reads an option of a socket into `value`.
///
/// # Safety
/// Any bytes must make a `T`.
unsafe fn read_option<T>(fd: &impl AsFd, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY:
    // - the value is writable for `length` bytes, and any bytes make a `T`, as the caller promises; and
    // - the descriptor is open as long as `fd` is borrowed.
    let result = unsafe {
        let (value, length) = ((&raw mut *value).cast(), &raw mut length);
        libc::getsockopt(fd.as_fd().as_raw_fd(), libc::SOL_SOCKET, option, value, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the process at the other side of a unix socket, or the processes with which it shares a bound.
pub(super) fn source(fd: &impl AsFd) -> io::Result<Source> {
    peer_credentials(fd).map(|(process, user)| Source { user, process })
}

/// Returns a descriptor of the process at the other side of a unix socket, which becomes readable when the
/// process ends. Fails on Linux before 6.5.
pub(super) fn peer_process(fd: &impl AsFd) -> io::Result<OwnedFd> {
    let mut process: libc::c_int = -1;
    // SAFETY: any bytes make an integer.
    unsafe { read_option(fd, libc::SO_PEERPIDFD, &mut process)? };
    if process < 0 {
        return Err(io::Error::other("the kernel gave no descriptor"));
    }
    // SAFETY: the kernel has just made the descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// Sets whether the other side of a unix socket can send descriptors. A socket that is accepted begins with
/// the setting of its listener. Returns whether the kernel knows the setting. Linux before 6.16 does not:
/// descriptors always pass.
pub(super) fn pass_descriptors(socket: &impl AsFd, pass: bool) -> bool {
    /// `SO_PASSRIGHTS` of asm-generic, which all 64-bit machines but SPARC and PA-RISC use.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let value = libc::c_int::from(pass);
    // SAFETY:
    // - the option value is readable for the length given, and
    // - the descriptor is open as long as `socket` is borrowed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    result == 0
}

/// Returns the timeout of a system call that waits for `left`, or for an hour if that is longer.
pub(super) fn timespec(left: Duration) -> Timespec {
    const LONGEST: Duration = Duration::from_secs(3600);
    Timespec::try_from(left.min(LONGEST)).unwrap_or_default()
}
